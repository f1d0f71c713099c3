"""Explanations by each stage of a CNN, and their figure."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import visattn
from tests import tiny
from tests.cli.test_commands import Run, run
from visattn.errors import OptionError

__all__ = ["run"]

PHOTO = Image.fromarray(np.random.default_rng(3).integers(0, 256, (64, 96, 3), dtype=np.uint8))


class TwoStages(nn.Module):
    """A CNN whose class is the brightness of one corner, which its last layer moves across the image."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 1, 4, stride=4)
        self.second = nn.Conv2d(1, 1, 25, stride=2, padding=12, bias=False)  # moves by twelve cells to either side
        self.head = nn.Linear(1, 2, bias=False)
        with torch.no_grad():
            self.first.weight.fill_(1 / 48)
            self.first.bias.zero_()  # type: ignore[union-attr]
            self.second.weight.zero_()
            self.second.weight[0, 0, [0, 24], [0, 24]] = 1  # to both sides: a kernel that leans to one side has no places
            self.second.weight[0, 0, 12, 12] = 1e-3
            self.head.weight.copy_(torch.tensor([[1.0], [-1.0]]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)).mean((2, 3)))  # type: ignore[no-any-return]


def corner() -> Image.Image:
    pixels = np.zeros((64, 64, 3), dtype=np.uint8)
    pixels[:8, :8] = 255
    return Image.fromarray(pixels)


def test_an_early_stage_shows_the_corner_that_the_last_stage_has_moved() -> None:
    model = TwoStages().eval()
    found = visattn.explain_stages(model, corner(), target=0, img_size=64, mean=(0.0,) * 3, std=(1.0,) * 3)
    assert [one.map.facts.layer for one in found] == ["first", "second"]
    early, last = (one.map.values for one in found)
    assert early.shape[-2:] == (16, 16)
    assert last.shape[-2:] == (8, 8)
    assert divmod(int(early.argmax()), 16) < (2, 0)
    assert int(early[2:].count_nonzero()) == 0
    assert divmod(int(last.argmax()), 8) == (6, 6)
    assert [divmod(cell, 8) for cell in last.flatten().nonzero().flatten().tolist()] == [(0, 0), (6, 6)]
    assert float(last[0, 0]) < 0.01 * float(last[6, 6])


@pytest.mark.parametrize("method", ["gradcam", "eigencam", "layercam"])
def test_each_map_is_that_of_its_layer(method: str) -> None:
    model = TwoStages().eval()
    found = visattn.explain_stages(model, PHOTO, method=method, img_size=64)
    alone = [visattn.explain(model, PHOTO, method=method, layer=one.map.facts.layer, img_size=64) for one in found]
    for one, other in zip(found, alone, strict=True):
        assert torch.equal(one.map.values, other.map.values)


def test_named_layers_in_their_order() -> None:
    found = visattn.explain_stages(TwoStages().eval(), PHOTO, layers=["second", "first"], img_size=64)
    assert [one.map.facts.layer for one in found] == ["second", "first"]


def test_the_figure_has_a_panel_for_each_stage_and_its_layers_in_the_provenance() -> None:
    found = visattn.explain_stages(TwoStages().eval(), corner(), target=0, img_size=64)
    page = visattn.stage_page(found, panel=240)
    assert page.provenance.parameters["layer"] == ["first", "second"]
    one = visattn.stage_page(found[:1], panel=240)
    assert page.width > one.width
    with pytest.raises(OptionError, match="at least one explanation"):
        visattn.stage_page([])


def test_what_has_no_stages_is_refused() -> None:
    with pytest.raises(OptionError, match=r"does not read the feature maps of a layer. Methods that do: .*gradcam"):
        visattn.explain_stages(TwoStages().eval(), PHOTO, method="captum.saliency", img_size=64)
    with pytest.raises(OptionError, match=r"stages of a CNN were not found. Name layers"):
        visattn.explain_stages(tiny.vit(), PHOTO)
    with pytest.raises(OptionError, match=r"several layers are named by layers="):
        visattn.explain_stages(TwoStages().eval(), PHOTO, layer="first")
    with pytest.raises(OptionError, match=r"several explanations. Use visattn.explain_stages"):
        visattn.explain(TwoStages().eval(), PHOTO, method="gradcam", layer="all", img_size=64)


def test_the_command_draws_one_figure(run: Run) -> None:
    asked = ["overlay", "scene:7", "--model", "scenes_cnn", "--method", "gradcam", "--layer", "all"]
    code, out, _ = run(*asked)
    assert code == 0
    assert out.strip() == "scene7.scenes_cnn.gradcam.layer_all.png"
    with Image.open(out.strip()) as page:
        assert json.loads(page.info["visattn"])["parameters"]["layer"][-2:] == ["layer2", "layer3"]
    code, _, err = run(*asked, "--mass", "0.5", "-o", "other.png")
    assert code == 2
    assert "--mass has no effect with --layer all" in err
    code, _, err = run("overlay", "scene:7", "--model", "scenes_cnn", "--layer", "all")
    assert code != 0
    assert "--method gradcam --layer all" in err
