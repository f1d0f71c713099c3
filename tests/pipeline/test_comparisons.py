"""Figures of several maps on one scale: each color is that of its value, in all panels."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import visattn
from tests.cli.test_commands import Run, run
from tests.maps.making import make_map
from visattn.core.drawing import colormaps
from visattn.core.geometry import Box
from visattn.core.maps import MapFacts, mean_map
from visattn.core.provenance import Provenance
from visattn.errors import MapError, OptionError

__all__ = ["run"]

LEFT, STEP, PANEL = 18, 208, 200  # pixels of a figure


def level(color: Any, colormap: str = "inferno") -> int:
    """Return the level of a color in a color map."""
    distances = np.abs(colormaps.table(colormap).astype(int) - color).max(1)
    assert distances.min() == 0
    return int(distances.argmin())


def drawn(*maps: visattn.AttentionMap, **options: Any) -> tuple[Any, list[float]]:
    """Return the pixels of a figure of maps of 2 x 2 cells, and its range."""
    figure = visattn.comparison_page([*maps], [str(i) for i in range(len(maps))], panel=PANEL, **options)
    assert figure.provenance.value_range is not None
    return np.asarray(figure), [*figure.provenance.value_range]


def levels_of(pixels: Any, count: int, colormap: str = "inferno") -> list[list[int]]:
    top = next(y for y in range(len(pixels)) if (pixels[y, LEFT : LEFT + PANEL] != 255).any(-1).all())
    places = [(y, x) for y in (50, 150) for x in (50, 150)]
    return [[level(pixels[top + y, LEFT + STEP * panel + x], colormap) for y, x in places] for panel in range(count)]


def expected(maps: list[list[float]], low: float, high: float) -> list[list[int]]:
    return [[round((value - low) / (high - low) * 255) for value in one] for one in maps]


@pytest.mark.parametrize("scale", ["relative", "raw"])
def test_colors_are_those_of_one_scale_for_all_panels(scale: Any) -> None:
    one, other = [1.0, 2, 3, 4], [10.0, 30, 50, 30]
    pixels, ends = drawn(*(make_map(np.reshape(values, (2, 2))) for values in (one, other)), scale=scale, normalize="minmax")
    shown = [[value / (sum(values) / 4 if scale == "relative" else 1) for value in values] for values in (one, other)]
    low, high = min(map(min, shown)), max(map(max, shown))
    assert ends == pytest.approx([low, high])
    found = levels_of(pixels, 2)
    assert np.abs(np.subtract(found, expected(shown, low, high))).max() <= 1


def test_one_signed_map_centers_the_scale_of_all_on_zero() -> None:
    one, other = [-1.0, 1, -1, 1], [1.0, 2, 3, 4]
    pixels, ends = drawn(*(make_map(np.reshape(values, (2, 2))) for values in (one, other)), scale="raw")
    assert ends == pytest.approx([-4, 4])
    found = levels_of(pixels, 2, "blue-white-red")
    assert np.abs(np.subtract(found, expected([one, other], -4, 4))).max() <= 2


def test_maps_of_other_grids_share_a_scale_on_which_an_even_map_is_one() -> None:
    fine, coarse = make_map(torch.rand(8, 8)), make_map(torch.rand(2, 2))
    for one in (fine, replace(fine, values=fine.values * 7)):
        _, ends = drawn(one, coarse, normalize="minmax")
        both = [each.values / each.values.mean() for each in (fine, coarse)]
        assert ends == pytest.approx([min(float(v.min()) for v in both), max(float(v.max()) for v in both)])


def test_means_are_drawn_as_they_are_although_signs_cancel_in_one() -> None:
    agree = make_map([[-1.0, 1], [-1, 1]])
    cancel = [agree, replace(agree, values=-0.5 * agree.values + torch.tensor([[0.0, 0.2], [0, 0]]))]
    means = [mean_map([agree, agree]), mean_map(cancel)]
    pixels, ends = drawn(*means)
    bound = max(float(one.values.abs().max()) for one in means)
    assert ends == pytest.approx([-bound, bound])
    values = [one.values.flatten().tolist() for one in means]
    assert max(map(abs, values[1])) < 0.3
    assert np.abs(np.subtract(levels_of(pixels, 2, "blue-white-red"), expected(values, -bound, bound))).max() <= 2


def test_padding_counts_in_no_scale() -> None:
    place = visattn.Geometry((32, 16), (32, 32), Box(0, 0, 32, 32))  # the right half lies beside the photo
    padded = make_map([[1.0, 100], [3, 100]], provenance=Provenance(geometry=place, versions={}))
    one = visattn.Explanation(Image.new("RGB", (16, 32)), place, padded)
    figure = visattn.comparison_page([one], ["a"], normalize="minmax")
    assert figure.provenance.value_range == pytest.approx((0.5, 50))


def test_figures_that_would_compare_what_has_no_common_scale_are_refused() -> None:
    one = make_map(torch.rand(2, 2))
    with pytest.raises(MapError, match="attention, rollout"):
        visattn.comparison_page([one, replace(one, meaning="rollout")], scale="raw")
    with pytest.raises(MapError, match="zero has no meaning"):
        visattn.comparison_page([replace(one, facts=MapFacts(interval=True))])
    with pytest.raises(MapError, match="component"):
        visattn.comparison_page([make_map(torch.rand(3, 2, 2), ("component",))])
    with pytest.raises(OptionError, match="0 maps"):
        visattn.comparison_page([])
    with pytest.raises(OptionError, match="1 maps and 2 labels"):
        visattn.comparison_page([one], ["a", "b"])
    with pytest.raises(OptionError, match="transparent"):
        visattn.comparison_page([one], transparent=True)


def test_warnings_and_random_weights_of_any_panel_are_told() -> None:
    one = make_map(torch.rand(2, 2), provenance=Provenance(model="a", versions={}))
    random = make_map(
        torch.rand(2, 2), provenance=Provenance(model="b", weights="random", random=True, warnings=("odd",), versions={})
    )
    made = visattn.comparison_page([one, random]).provenance
    assert (made.model, made.random, made.warnings) == ("a and b", True, ("odd",))
    assert visattn.comparison_page([one, random]).height > visattn.comparison_page([one, one]).height


def test_command_draws_two_models_on_one_scale(tmp_path: Path, run: Run) -> None:
    code, out, err = run("overlay", "scene:7", "--model", "scenes_vit", "--compare", "scenes_cnn", "--method", "gradcam")
    assert code == 0, err
    assert out.strip() == "scene7.scenes_vit.compare_scenes_cnn.gradcam.png"
    with Image.open(out.strip()) as picture:
        made = json.loads(picture.info["visattn"])
    maps = [visattn.explain(model, "scene:7", method="gradcam").map.values for model in ("scenes_vit", "scenes_cnn")]
    both = [one / one.abs().mean() for one in maps]
    assert made["drawing"]["labels"] == ["scenes_vit", "scenes_cnn"]
    assert made["value_range"] == pytest.approx([min(float(v.min()) for v in both), max(float(v.max()) for v in both)], rel=1e-5)


@pytest.mark.parametrize(
    "given", [("--box", "mass:0.5"), ("--legend",), ("--save-map", "m.npz"), ("--layer", "all"), ("--transparent",)]
)
def test_options_of_one_picture_are_refused_beside_compare(given: tuple[str, ...], run: Run) -> None:
    code, _, err = run("overlay", "scene:7", "--model", "scenes_cnn", "--compare", "scenes_vit", "--method", "gradcam", *given)
    assert code == 2
    assert given[0] in err
    assert "--compare" in err or "--layer" in err
