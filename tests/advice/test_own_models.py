"""Advice of messages about own models, their maps and what is measured of them: followed literally, it works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module

import visattn
from tests import tiny
from tests.families.test_custom import Own
from tests.test_holes import holed
from visattn import evaluation
from visattn.core.drawing.filmstrips import entropies
from visattn.core.geometry import Box, Geometry
from visattn.core.maps import AttentionMap
from visattn.core.records import TokenLayout
from visattn.errors import LayoutError, MapError, UnsupportedModel
from visattn.evaluation.survey import Survey

PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8))
WHOLE = Geometry((40, 60), tiny.INPUT, Box(0, 0, 40, 60), "whole")


def of(values: Any, axes: tuple[str, ...] = (), meaning: str = "attention") -> AttentionMap:
    tensor = torch.as_tensor(values, dtype=torch.float32)
    grid = tuple(tensor.shape[len(axes) :])
    return AttentionMap(tensor, axes, TokenLayout("tokens", (), grid, Box(0, 0, *tiny.INPUT)), {}, meaning)


def test_entropies_are_those_of_attention_weights() -> None:
    scores = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(0))
    with pytest.raises(MapError, match=r"but the map \(scores\) has others\. Use attention weights"):
        entropies(of(scores, ("word",), "scores"))
    weights = scores.flatten(1).softmax(1).view(2, 2, 3)
    assert all(0 < value <= np.log(6) for value in entropies(of(weights, ("word",))))


def test_measures_take_one_image_and_no_holes() -> None:
    mask = np.zeros((40, 60), bool)
    mask[:10, :20] = True
    batch = of(torch.rand(2, *tiny.GRID), ("batch",))
    with pytest.raises(MapError, match=r"the map has a batch axis\. Choose one image: map\.at\(batch=0\)"):
        evaluation.lift(batch, mask, WHOLE)
    assert float(evaluation.lift(batch.at(batch=0), mask, WHOLE)) == float(evaluation.lift(of(batch.values[0]), mask, WHOLE))
    with pytest.raises(MapError, match=r"6 of the map's cells are holes, .*\. Measure a map without holes"):
        evaluation.smooth_random(holed(), count=2)
    assert evaluation.smooth_random(of(torch.ones(4, 6)), count=2).values.shape == (2, 4, 6)


class Channels(nn.Module):
    """Model in which channels attend to channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.attention, self.head, self.img_size = nn.Conv2d(3, 16, 8, 8), Crossed(), nn.Linear(16, 3), (32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(self.stem(x).flatten(2).mT).mean(1))  # type: ignore[no-any-return]


class Crossed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return ((q.mT @ k).softmax(-1) @ v.mT).mT  # type: ignore[no-any-return]


class Inline(Channels):
    """Model of the same kind, without a module for the attention."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attention.qkv(self.stem(x).flatten(2).mT).chunk(3, -1)
        return self.head(((q.mT @ k).softmax(-1) @ v.mT).mT.mean(1))  # type: ignore[no-any-return]


def test_statistics_need_a_model_whose_tokens_attend() -> None:
    with pytest.raises(
        UnsupportedModel, match=r"nothing to measure: .*channels attend to channels in attention\)\. Use another model"
    ):
        Survey(Channels().eval()).add(PHOTO, "x")
    survey = Survey(tiny.vit())
    survey.add(PHOTO, "x")
    assert len(survey.heads()) == tiny.LAYERS * tiny.HEADS


# --- layouts and wrappers


def test_grids_are_corrected_left_out_or_traced() -> None:
    def seen(model: nn.Module, **options: Any) -> list[tuple[int, ...]]:
        with torch.no_grad(), visattn.capture(model, **options) as recording:
            model(torch.randn(1, 3, 24, 40))
        return [record.keys.grid for record in recording]

    model = Own().eval()
    with pytest.raises(
        LayoutError,
        match=r"5 rows and 3 columns over an input of 40 x 24 pixels gives patches that are not square\. Pass grid=\(3, 5\) if rows",
    ):
        seen(model, grid=(5, 3), prefix=3)
    with pytest.raises(
        LayoutError, match=r"give 3 \+ 3 x 6\. Pass the grid= and prefix= of this layer, leave it out with layers="
    ):
        seen(model, grid=(3, 6), prefix=3)
    assert seen(model, grid=(3, 5), prefix=3) == seen(model) == [(3, 5), (3, 5)]


def test_a_layer_of_another_grid_is_left_out() -> None:
    class Coarse(nn.Module):
        """Model whose second layer attends over pooled tokens."""

        def __init__(self) -> None:
            super().__init__()
            self.stem, self.pool, self.head = nn.Conv2d(3, 16, 8, 8), nn.AvgPool2d(2), nn.Linear(16, 3)
            self.fine, self.coarse = (nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            maps = self.stem(x)
            one, two = (part.flatten(2).mT for part in (maps, self.pool(maps)))
            return self.head(self.fine(one, one, one)[0].mean(1) + self.coarse(two, two, two)[0].mean(1))  # type: ignore[no-any-return]

    model = Coarse().eval()
    with (
        pytest.raises(
            LayoutError, match=r"attends to 8 tokens, but prefix and grid give 0 \+ 4 x 8\. .*leave it out with layers="
        ),
        visattn.capture(model, grid=(4, 8)),
    ):
        model(torch.randn(1, 3, 32, 64))
    for options, grids in (({"grid": (4, 8), "layers": "fine"}, [(4, 8)]), ({}, [(4, 8), (2, 4)])):
        with torch.no_grad(), visattn.capture(model, **options) as recording:  # type: ignore[arg-type]
            model(torch.randn(1, 3, 32, 64))
        assert [record.keys.grid for record in recording] == grids


def test_a_sharded_model_is_drawn_from_its_checkpoint(tmp_path: Path) -> None:
    class FullyShardedDataParallel(nn.Sequential):
        """Class with the name that PyTorch uses: it stands for one whose parameters are sharded."""

    inner = timm.create_model("test_vit", num_classes=3)
    with pytest.raises(UnsupportedModel, match=r"its parameters are sharded, .*\. Draw from a checkpoint, with visattn\.explain"):
        visattn.explain(FullyShardedDataParallel(inner), PHOTO, method="rollout")
    torch.save(inner.state_dict(), tmp_path / "own.pth")
    found = visattn.explain("test_vit", PHOTO, weights=tmp_path / "own.pth", method="rollout")
    assert torch.equal(found.map.values, visattn.explain(inner.eval(), PHOTO, method="rollout").map.values)


def test_attention_in_the_model_itself_has_a_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"channels attend to channels in the model itself\)"):
        Survey(Inline().eval()).add(PHOTO, "x")


class Wide(nn.Module):
    """Model with patches of 8 x 32 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.attention = nn.Conv2d(3, 16, (8, 32), (8, 32)), nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.stem(x).flatten(2).mT
        return self.attention(tokens, tokens, tokens)[0].mean(1)  # type: ignore[no-any-return]


def test_the_grid_of_patches_that_are_not_square_is_left_out() -> None:
    model, pixels = Wide().eval(), torch.randn(1, 3, 32, 64)
    with (
        pytest.raises(
            LayoutError,
            match=r"4 rows and 2 columns .* gives patches that are not square\. .* or leave grid out to trace the tokens",
        ),
        visattn.capture(model, grid=(4, 2)),
    ):
        model(pixels)
    with torch.no_grad(), visattn.capture(model) as recording:
        model(pixels)
    assert recording[0].keys.grid == (4, 2)


def test_parameters_that_are_replicated_are_not_called_sharded(tmp_path: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        model = distribute_module(tiny.vit(), init_device_mesh("cpu", (1,)))
        with pytest.raises(UnsupportedModel, match=r"its parameters are DTensors, so the main process cannot draw alone\."):
            visattn.explain(model, PHOTO, method="rollout")
    finally:
        distributed.destroy_process_group()
