"""Signed maps: every method declares whether its values have both signs, so that pictures use a diverging scale."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import visattn
from tests import tiny
from tests.methods.test_glimpses import Given, at
from visattn.core.drawing import colormaps
from visattn.core.geometry import Box, Geometry
from visattn.core.maps import AttentionMap, load_map, save_map
from visattn.core.methods import METHODS
from visattn.core.records import TokenLayout
from visattn.errors import OptionError
from visattn.nn import CBAM

# only with these parameters do values include evidence against the target
SIGNED: dict[str, dict[str, Any]] = {
    "pca": {},
    "cam": {},
    "attention_gradient": {"signed": True},
    "contributions": {},
    "patching": {"donor": "photo:coffee", "layer": 0, "resize": "fit"},
    "captum.saliency": {"signed": True},
    "captum.input_x_gradient": {},
    "captum.integrated_gradients": {"steps": 3},
    "captum.smoothgrad": {"samples": 3},
    "captum.occlusion": {},
    "captum.kernel_shap": {"grid_size": (2, 3), "samples": 20},
    "captum.lime": {"grid_size": (2, 3), "samples": 20},
}
OTHERS: dict[str, dict[str, Any]] = {
    "transition_attention": {"start_layer": 0, "steps": 2},
    "similarity": {"query": "patch:0,1"},
}


class Averaged(nn.Sequential):
    """A CNN with gates, whose features have both signs."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4)
            super().__init__(nn.Conv2d(3, 4, 8, 8), CBAM(4), *head)


def glimpsing() -> nn.Module:
    model = Given(at((5, 5), (12, 7), height=224, width=224).float())
    model.scale = nn.Parameter(torch.ones(()))
    return model


MODELS = tiny.vit, Averaged, glimpsing


def explained(name: str, **options: Any) -> visattn.Explanation:
    """Explain with the first model that the method applies to."""
    photo = Image.fromarray(np.random.default_rng(1).integers(0, 256, (32, 48, 3), np.uint8))
    refused = []
    for make in MODELS:
        try:
            return visattn.explain(make(), photo, method=name, **options)
        except OptionError as error:
            refused.append(str(error))
    raise AssertionError(refused)


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Require that maps with negative values are declared signed, by disabling the rule that marks them automatically."""
    checked = AttentionMap.__post_init__

    def strictly(made: AttentionMap) -> None:
        declared = made.signed or made.facts.interval or not bool((made.values < 0).any())
        assert declared, f"{made.meaning} has values below zero and says nothing of it"
        checked(made)

    monkeypatch.setattr(AttentionMap, "__post_init__", strictly)


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("name", METHODS)
def test_every_method_declares_whether_its_map_is_signed(name: str) -> None:
    found = explained(name, **SIGNED.get(name, OTHERS.get(name, {})))
    assert found.map.signed == (name in SIGNED)
    if name in SIGNED:
        assert float(found.map.values.min()) < 0  # otherwise the test is void
        if "component" not in found.map.axes:
            assert found.overlay().provenance.drawing["colormap"] == "blue-white-red"


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("name", ["attention_gradient", "captum.saliency"])
def test_map_with_signed_false_is_not_signed(name: str) -> None:
    found = explained(name, signed=False)
    assert not found.map.signed
    assert found.overlay().provenance.drawing["colormap"] == "inferno"


def of_ones_own(values: Any, *, signed: bool = False) -> tuple[AttentionMap, Geometry]:
    """Build a map of an unknown method."""
    tensor: Tensor = torch.as_tensor(values)
    rows, columns = tensor.shape
    layout = TokenLayout("tokens", (), (rows, columns), Box(0, 0, 16 * rows, 16 * columns))
    place = Geometry((rows, columns), (16 * rows, 16 * columns), Box(0, 0, rows, columns))
    return AttentionMap(tensor, (), layout, {}, "votes", signed=signed), place


@pytest.mark.parametrize("declared", [False, True])
def test_zero_of_a_map_with_both_signs_is_white_for_any_meaning(declared: bool) -> None:
    made, place = of_ones_own([[-1.0, 0.0, 3.0]], signed=declared)
    drawn = visattn.overlay(Image.new("RGB", (3, 1)), made.to_heatmap(place, "nearest"), opacity=1)
    table = colormaps.table("blue-white-red")
    middle = np.asarray(drawn)[0, 1].tolist()
    assert middle in [table[level].tolist() for level in (127, 128)]
    assert min(middle) > 240
    explanation = visattn.Explanation(Image.new("RGB", (3, 1)), place, made)
    assert np.asarray(explanation.overlay(opacity=1, interpolation="nearest"))[0, 1].tolist() == middle
    assert explanation.overlay().provenance.value_range == (-3, 3)


def test_one_panel_without_negative_values_has_the_colors_of_the_others() -> None:
    values = torch.tensor([[[-1.0, 0.0, 1.0]], [[0.0, 1.0, 2.0]]])
    layout = TokenLayout("tokens", (), (1, 3), Box(0, 0, 16, 48))
    made = AttentionMap(values, ("head",), layout, {}, "votes")
    assert made.at(head=1).signed


def test_a_map_without_negative_values_is_signed_if_its_method_is() -> None:
    made, place = of_ones_own([[0.0, 1.0, 3.0]], signed=True)
    assert visattn.overlay(Image.new("RGB", (3, 1)), made.to_heatmap(place), opacity=1).provenance.value_range == (-3, 3)
    made, place = of_ones_own([[0.0, 1.0, 3.0]])
    assert visattn.overlay(Image.new("RGB", (3, 1)), made.to_heatmap(place), opacity=1).provenance.value_range == (0, 3)


def test_a_mask_of_mass_is_not_signed() -> None:
    made, _ = of_ones_own([[0.0, 1.0, 3.0]], signed=True)
    assert not made.mass(0.5).signed


def test_similarity_is_drawn_on_its_own_range_even_below_zero() -> None:
    found = explained("similarity", query="patch:0,1")
    values = found.map.values
    assert float(values.min()) < 0
    made = found.overlay().provenance
    assert made.value_range == pytest.approx((float(values.min()), float(values.max())))
    assert made.drawing["colormap"] == "inferno"


@pytest.mark.parametrize("signed", [False, True])
def test_the_sign_is_saved_with_a_map(signed: bool, tmp_path: Path) -> None:
    made, place = of_ones_own([[0.0, 1.0, 3.0]], signed=signed)
    (tmp_path / "map.npz").write_bytes(save_map(made, place))
    found = load_map(tmp_path / "map.npz")
    assert isinstance(found, tuple)
    assert found[0].signed == signed


@pytest.mark.parametrize(("lowest", "signed"), [(-1.0, True), (0.0, False)])
def test_files_of_older_versions_are_signed_where_values_are_below_zero(lowest: float, signed: bool, tmp_path: Path) -> None:
    content = np.load(io.BytesIO(save_map(*of_ones_own([[lowest, 1.0, 3.0]]))))
    facts = json.loads(str(content["facts"]))
    assert facts.pop("signed") == signed
    with (tmp_path / "map.npz").open("wb") as file:
        np.savez(file, values=content["values"], facts=np.array(json.dumps(facts)))
    found = load_map(tmp_path / "map.npz")
    assert isinstance(found, tuple)
    assert found[0].signed == signed
