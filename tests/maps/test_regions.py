"""Masks of a map in the photo's pixels and their boxes, against loops over pixels, through to the pixels of a PNG."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

import visattn
from tests import tiny
from tests.cli.test_commands import TINY, Run, photo, run
from tests.maps.making import WINDOWS, make_map, random_map
from tests.oracles import regions as oracle
from tests.oracles.heatmaps import mix_bilinear, mix_nearest, slow_heat
from visattn.core.geometry import Box, Geometry
from visattn.core.maps import AttentionMap, MapFacts
from visattn.core.provenance import Provenance
from visattn.core.records import TokenLayout
from visattn.errors import MapError, OptionError

__all__ = ["photo", "run"]

MIX = {"bilinear": mix_bilinear, "nearest": mix_nearest}
Interpolations = Literal["bilinear", "nearest"]
WHOLE = Geometry((4, 6), (32, 48), Box(0, 0, 4, 6))  # two pixels along each side of a cell
windows = pytest.mark.parametrize("geometry", WINDOWS.values(), ids=WINDOWS.keys())
shares = pytest.mark.parametrize(
    ("kind", "value"), [("mass", 0.05), ("mass", 0.5), ("mass", 0.97), ("mass", 1.0), ("quantile", 0.4), ("quantile", 0.9)]
)


def pixels_of(mask: NDArray[np.bool_]) -> oracle.Pixels:
    return {(int(y), int(x)) for y, x in zip(*np.nonzero(mask), strict=True)}


def slow_values(grid: NDArray[np.float64], geometry: Geometry, how: Interpolations) -> dict[tuple[int, int], float]:
    heat = slow_heat(grid, geometry, 16, MIX[how])
    seen = slow_heat(np.ones_like(grid), geometry, 16, mix_nearest) > 0
    return oracle.known(heat, seen)


@cache
def of_random_map(geometry: Geometry, how: Interpolations) -> dict[tuple[int, int], float]:
    return slow_values(random_map().values.double().numpy(), geometry, how)


def chosen(values: dict[tuple[int, int], float], kind: str, value: float) -> oracle.Pixels:
    return (oracle.by_mass if kind == "mass" else oracle.by_quantile)(values, value)


@windows
@shares
@pytest.mark.parametrize("how", MIX)
def test_mask_is_that_of_a_loop_over_pixels(how: Interpolations, kind: str, value: float, geometry: Geometry) -> None:
    one = random_map()
    expected = chosen(of_random_map(geometry, how), kind, value)
    given: dict[str, Any] = {kind: value, "geometry": geometry, "interpolation": how}
    everything = int(geometry.seen().height * geometry.seen().width)
    if kind == "quantile" and len(expected) == everything:
        with pytest.raises(MapError, match="lowest value"):
            one.mask(**given)
        return
    mask = one.mask(**given)
    assert mask.shape == geometry.photo
    assert mask.dtype == np.bool_
    assert pixels_of(mask) == expected
    if expected:
        first, *others = oracle.parts(expected)
        if others and len(others[0]) == len(first):
            with pytest.raises(MapError, match="none is the largest"):
                one.box(**given)
        else:
            assert one.box(**given) == Box(*oracle.box_around(first))


@pytest.mark.parametrize("seed", range(4))
@shares
def test_signed_maps_count_by_their_positive_part(seed: int, kind: str, value: float) -> None:
    values = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    one = make_map(values)
    geometry = Geometry((33, 41), (48, 64), Box(0, -3, 30, 41))
    assert one.signed
    given: dict[str, Any] = {kind: value, "geometry": geometry}
    assert pixels_of(one.mask(**given)) == chosen(slow_values(values.double().numpy(), geometry, "bilinear"), kind, value)


def test_equal_pixels_are_in_the_mask_together() -> None:
    one = make_map([[2.0, 2, 0], [0, 0, 1.0]])
    at = {"geometry": WHOLE, "interpolation": "nearest"}
    tenth = one.mask(mass=0.1, **at)  # type: ignore[arg-type] # 0.1 is less than one cell of the plateau
    assert pixels_of(tenth) == {(y, x) for y in (0, 1) for x in range(4)}
    assert np.array_equal(one.mask(mass=0.8, **at), tenth)  # type: ignore[arg-type] # exactly what the plateau holds
    assert one.mask(mass=0.81, **at).sum() == 12  # type: ignore[arg-type]
    assert np.array_equal(one.mask(mass=1, **at), one.mask(mass=0.81, **at))  # type: ignore[arg-type] # zeros hold nothing


def test_zeros_hold_nothing_although_the_least_value_is_close_to_them() -> None:
    one = make_map([[1.0, 1e-8, 0], [0, 0, 0]])
    assert pixels_of(one.mask(mass=1, geometry=WHOLE, interpolation="nearest")) == {(y, x) for y in (0, 1) for x in range(4)}


def test_plateaus_stay_whole_although_interpolation_rounds() -> None:
    values = torch.full((6, 6), 0.1)
    values[2:4, 2:4] = 0.3
    one = make_map(values)
    geometry = Geometry((97, 89), (96, 96), Box(0, 0, 97, 89))
    mask = one.mask(quantile=0.95, geometry=geometry)
    assert np.array_equal(mask, mask[::-1])
    assert np.array_equal(mask, mask[:, ::-1])


def test_one_pixel_and_the_whole() -> None:
    one = make_map(torch.rand(4, 6, generator=torch.Generator().manual_seed(1)) + 0.1)
    geometry = Geometry((4, 6), (64, 96), Box(0, 0, 4, 6))  # a pixel for each cell
    y, x = divmod(int(one.values.argmax()), 6)
    assert pixels_of(one.mask(quantile=1, geometry=geometry)) == {(y, x)}
    assert pixels_of(one.mask(mass=1e-6, geometry=geometry)) == {(y, x)}
    assert one.box(quantile=1, geometry=geometry) == Box(y, x, y + 1, x + 1)
    assert one.mask(mass=1, geometry=geometry).all()
    assert one.box(mass=1, geometry=geometry) == Box(0, 0, 4, 6)


def test_parts_that_touch_at_a_corner_are_two() -> None:
    one = make_map([[3.0, 3, 0], [0, 0, 2.0]])
    at: dict[str, Any] = {"geometry": WHOLE, "interpolation": "nearest"}
    assert one.box(mass=1, **at) == Box(0, 0, 2, 4)
    two = make_map([[3.0, 0, 0], [0, 2.0, 0]])
    with pytest.raises(MapError, match="2 parts of mass:1 have 4 pixels each"):
        two.box(mass=1, **at)


def test_pixels_of_dropped_tokens_and_of_the_rest_of_the_photo_are_never_in_it() -> None:
    layout = TokenLayout("tokens", ("cls",), (2, 3), Box(0, 0, 32, 48), (1, 5))
    one = AttentionMap(torch.tensor([[1.0, 9, 2], [3, 0.5, 9]]), (), layout, {}, "attention")
    geometry = Geometry((60, 70), (32, 48), Box(10, 20, 42, 68))
    mask = one.mask(mass=1, geometry=geometry)
    inside = np.zeros((60, 70), bool)
    inside[10:42, 20:68] = True
    inside[10:26, 36:52] = inside[26:42, 52:68] = False
    assert np.array_equal(mask, inside)
    assert not one.mask(quantile=0.2, geometry=geometry)[~inside].any()


def test_several_heads_have_a_mask_each_and_no_box() -> None:
    heads = random_map(2, 3, 4, axes=("head",))
    mask = heads.mask(mass=0.5, geometry=WHOLE)
    assert mask.shape == (4, *WHOLE.photo)
    for head in range(4):
        assert np.array_equal(mask[head], heads.at(head=head).mask(mass=0.5, geometry=WHOLE))
    with pytest.raises(MapError, match=r"axes head\. Choose one entry with at\(\)"):
        heads.box(mass=0.5, geometry=WHOLE)
    with pytest.raises(MapError, match=r"at\(batch=0\)"):
        random_map(2, 3, 4, axes=("batch",)).mask(mass=0.5, geometry=WHOLE)


@pytest.mark.parametrize("shares", [{}, {"mass": 0.5, "quantile": 0.5}], ids=["neither", "both"])
def test_exactly_one_share_is_given(shares: dict[str, Any], request: pytest.FixtureRequest) -> None:
    with pytest.raises(OptionError, match=request.node.callspec.id):
        random_map().mask(geometry=WHOLE, **shares)


@pytest.mark.parametrize("value", [0, -0.1, 1.01, float("nan"), "much"])
@pytest.mark.parametrize("kind", ["mass", "quantile"])
def test_shares_out_of_range_are_refused(kind: str, value: Any) -> None:
    for ask in (random_map().mask, random_map().box):
        with pytest.raises(OptionError, match=kind):
            ask(geometry=WHOLE, **{kind: value})


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        (torch.zeros(2, 3), r"nearly even \(0"),
        (torch.full((2, 3), 0.7), r"nearly even \(0\.7"),
        (torch.tensor([[1.0, 1.01, 1.02], [1.03, 1.02, 1.0]]), r"nearly even \(1 to 1\.03\)"),
        (-torch.tensor([[1.0, 2, 3], [3, 2, 1]]), "positive"),
    ],
    ids=["zero", "constant", "nearly even", "negative"],
)
def test_maps_that_have_no_mask_say_why(values: torch.Tensor, cause: str) -> None:
    with pytest.raises(MapError, match=cause):
        make_map(values).mask(mass=0.5, geometry=WHOLE)


def test_a_quantile_that_most_pixels_have_is_no_mask_of_everything() -> None:
    one = make_map([[5.0, 0, 0], [0, 0, 0]])
    with pytest.raises(MapError, match=r"83% of the pixels .* quantile 0\.5.*use mass"):
        one.mask(quantile=0.5, geometry=WHOLE, interpolation="nearest")
    assert one.mask(quantile=0.9, geometry=WHOLE, interpolation="nearest").sum() == 4


def test_similarity_has_no_mass_but_quantiles() -> None:
    one = replace(random_map(), facts=MapFacts(interval=True), meaning="cosine similarity")
    with pytest.raises(MapError, match=r"cosine similarity.*Use quantile"):
        one.mask(mass=0.5, geometry=WHOLE)
    assert one.mask(quantile=0.9, geometry=WHOLE).any()


def test_geometry_is_that_of_the_provenance_unless_given() -> None:
    one = random_map()
    with pytest.raises(MapError, match="geometry"):
        one.mask(mass=0.5)
    placed = replace(one, provenance=Provenance(geometry=WHOLE, versions={}))
    assert np.array_equal(placed.mask(mass=0.5), one.mask(mass=0.5, geometry=WHOLE))
    assert placed.box(mass=0.5) == one.box(mass=0.5, geometry=WHOLE)


def test_half_precision_gives_the_mask_of_its_values() -> None:
    one = random_map()
    half = replace(one, values=one.values.half())
    full = replace(one, values=one.values.half().float())
    assert np.array_equal(half.mask(mass=0.5, geometry=WHOLE), full.mask(mass=0.5, geometry=WHOLE))


# pictures


def frame(box: tuple[float, ...], size: tuple[int, int]) -> NDArray[np.bool_]:
    """Return the outermost pixels inside a box."""
    top, left, bottom, right = (int(side) for side in box)
    lines = np.zeros(size, bool)
    for y in range(top, bottom):
        for x in range(left, right):
            lines[y, x] = y in (top, bottom - 1) or x in (left, right - 1)
    return lines


def test_drawn_box_is_that_of_a_loop_over_the_pixels_of_a_turned_photo(tmp_path: Path, run: Run) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # stored lying, upright after a quarter turn: 60 x 90 pixels become 90 x 60
    Image.new("RGB", (90, 60), (90, 90, 90)).save(tmp_path / "turned.png", exif=exif)
    values = torch.rand(4, 5, generator=torch.Generator().manual_seed(3)) ** 4
    geometry = Geometry((90, 60), (64, 80), Box(5, 0, 85, 60))
    (tmp_path / "map.npz").write_bytes(visattn.save_map(make_map(values), geometry))
    first, *others = oracle.parts(chosen(slow_values(values.double().numpy(), geometry, "bilinear"), "mass", 0.5))
    expected = oracle.box_around(first)
    given = ("overlay", tmp_path / "turned.png", "--map", tmp_path / "map.npz", "--opacity", "0")
    code, _, err = run(*given, "--box", "mass:0.5", "-o", "out.png")
    assert code == 0, err
    drawn = np.asarray(visattn.load_image("out.png"))
    assert drawn.shape == (90, 60, 3)
    lower = np.zeros((90, 60), bool)
    lower[(expected[0] + expected[2]) // 2 + 8 :] = True  # below the text
    white = (drawn == 255).all(-1)
    assert np.array_equal(white & lower, frame(expected, (90, 60)) & lower)
    assert (white & frame(expected, (90, 60))).sum() > 20
    changed = pixels_of((drawn != 90).any(-1) & lower)
    assert all(expected[0] - 2 <= y < expected[2] + 2 and expected[1] - 2 <= x < expected[3] + 2 for y, x in changed)
    top, left, bottom, right = expected
    assert f"x {left} to {right}, y {top} to {bottom}" in err
    assert (f"the largest of {len(others) + 1} parts" in err) == bool(others)


def test_box_is_printed_captioned_and_stored(photo: Path, run: Run) -> None:
    code, _, err = run("overlay", photo, *TINY, "--method", "attention", "--box", "quantile:0.8", "--caption", "-o", "box.png")
    assert code == 0, err
    one = visattn.explain(tiny.vit(), photo, method="attention")
    drawn = one.overlay(box="quantile:0.8", caption=True)
    stored = drawn.provenance.drawing["box"]
    box = one.panel.box(quantile=0.8)
    assert {**box._asdict(), "of": "quantile:0.8"}.items() <= stored.items()
    with Image.open("box.png") as picture:
        assert '"of": "quantile:0.8"' in picture.info["visattn"]
    assert drawn.height > one.overlay(caption=True).height  # a line more
    assert one.overlay().provenance.drawing["box"] is None


@pytest.mark.parametrize("text", ["0.5", "mass", "mass:", "mass:x", "area:0.5", "mass:0", "mass:2", "quantile:nan", ""])
def test_boxes_that_are_not_shares_are_refused_before_a_model_is_loaded(text: str, photo: Path, run: Run) -> None:
    code, _, err = run("overlay", photo, "--model", "no_such_model", "--box", text)
    assert code == 2
    assert "no_such_model" not in err
    with pytest.raises(OptionError):
        visattn.explain(tiny.vit(), photo, method="attention").overlay(box=text)


def test_components_take_no_box(photo: Path, run: Run) -> None:
    code, _, err = run("overlay", photo, *TINY, "--method", "pca", "--box", "mass:0.5")
    assert (code, "axes component" in err) == (4, True), err


def test_transparent_layer_holds_the_box() -> None:
    one = visattn.explain(tiny.vit(), Image.new("RGB", (90, 60), (90, 90, 90)), method="attention")
    box = one.panel.box(mass=0.5)
    layer = np.asarray(one.overlay(box="mass:0.5", transparent=True, opacity=0))
    lines = frame(box, layer.shape[:2])
    assert (layer[lines][:, 3] == 255).mean() > 0.9
