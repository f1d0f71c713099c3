"""Contours, rings and outlines on overlays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

import visattn
from tests import tiny
from tests.drawing.overlaying import GRID, HEIGHT, WIDTH, heatmap, noise
from visattn.core.drawing.marks import outline, ring, spotlight
from visattn.core.drawing.overlays import overlay
from visattn.core.geometry import Box, Geometry
from visattn.core.provenance import Sink
from visattn.errors import ShapeError


def far_from_border(mask: NDArray[np.bool_], distance: int) -> NDArray[np.bool_]:
    """Return the pixels whose neighborhood is completely inside or completely outside."""
    far = np.zeros(mask.shape, bool)
    for y, x in np.ndindex(*mask.shape):
        around = mask[max(0, y - distance) : y + distance + 1, max(0, x - distance) : x + distance + 1]
        far[y, x] = around.all() or not around.any()
    return far


@pytest.fixture(scope="module")
def blob() -> NDArray[np.bool_]:
    """Build a mask of two regions, one with a hole."""
    y, x = np.mgrid[:60, :90]
    ring_like = (np.hypot(y - 30, x - 28) < 22) & (np.hypot(y - 30, x - 28) > 9)
    shape: NDArray[np.bool_] = ring_like | ((y > 20) & (y < 40) & (x > 65) & (x < 80))
    return shape


def test_outline_draws_near_the_border_only(blob: NDArray[np.bool_]) -> None:
    photo = noise(60, 90)
    changed = (np.asarray(outline(photo, blob)) != np.asarray(photo)).any(axis=2)
    assert not (changed & far_from_border(blob, 4)).any()
    assert changed[~far_from_border(blob, 1)].mean() > 0.9


def test_outline_shows_on_white_and_on_black(blob: NDArray[np.bool_]) -> None:
    on_white = np.asarray(outline(Image.new("RGB", (90, 60), (255, 255, 255)), blob))
    on_black = np.asarray(outline(Image.new("RGB", (90, 60)), blob))
    assert on_white.min() < 30
    assert on_black.max() > 225


@pytest.mark.parametrize("value", [False, True], ids=["empty", "full"])
def test_outline_of_a_mask_without_border_leaves_the_middle(value: bool) -> None:
    photo = noise(60, 90)
    got = np.asarray(outline(photo, np.full((60, 90), value)))
    assert np.array_equal(got[4:-4, 4:-4], np.asarray(photo)[4:-4, 4:-4])


def test_outline_of_a_heatmap_is_where_it_reaches_one_half() -> None:
    photo, heat = noise(), heatmap([[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    assert outline(photo, heat).tobytes() == outline(photo, heat.values >= 0.5).tobytes()


@pytest.mark.parametrize("draw", [outline, spotlight])
def test_mask_of_another_size_is_refused(draw: Callable[[Image.Image, Any], Image.Image]) -> None:
    with pytest.raises(ShapeError, match=r"a mask must be \(height, width\) = \(24, 36\) like the picture, got \(36, 24\)"):
        draw(noise(), np.ones((WIDTH, HEIGHT), bool))


def test_outline_does_not_modify_picture_or_mask(blob: NDArray[np.bool_]) -> None:
    photo, before = noise(60, 90), blob.copy()
    outline(photo, blob)
    assert photo.tobytes() == noise(60, 90).tobytes()
    assert np.array_equal(blob, before)


def test_spotlight_keeps_the_photo_inside_and_darkens_the_rest(blob: NDArray[np.bool_]) -> None:
    photo = noise(60, 90)
    got, before = np.asarray(spotlight(photo, blob)).astype(int), np.asarray(photo).astype(int)
    far = far_from_border(blob, 4)
    assert np.array_equal(got[far & blob], before[far & blob])
    outside = got[far & ~blob]
    assert np.ptp(outside, axis=1).max() == 0  # gray
    assert outside.max() <= 0.3 * 255


@pytest.mark.parametrize("opacity", [0.0, 0.5, 1.0])
def test_contours_draw_near_their_level_only(opacity: float) -> None:
    y, x = np.mgrid[:60, :90]
    values = np.exp(-((y - 30.0) ** 2 + (x - 40.0) ** 2) / 300)
    photo = noise(60, 90)
    without = np.asarray(overlay(photo, values, opacity=opacity))
    drawn = (np.asarray(overlay(photo, values, opacity=opacity, contours=(0.5,))) != without).any(axis=2)
    inside = values >= values.min() + 0.5 * (values.max() - values.min())
    assert not (drawn & far_from_border(inside, 4)).any()
    assert drawn[~far_from_border(inside, 1)].mean() > 0.9


def test_outline_of_a_heatmap_leaves_out_regions_and_gaps_of_one_or_two_patches() -> None:
    grid = np.zeros((6, 9), np.float32)
    grid[1:5, 1:6] = 1
    whole = grid.copy()
    grid[3, 3], grid[0, 8], grid[4:6, 8] = 0, 1, 1  # a gap of one patch, regions of one and of two
    photo = noise()
    drawn, plain = outline(photo, heatmap(grid)), outline(photo, heatmap(whole))
    assert drawn.tobytes() == plain.tobytes()
    assert outline(photo, heatmap(grid), smallest=1).tobytes() != plain.tobytes()
    grid[3, 8] = 1  # now it has three
    assert outline(photo, heatmap(grid)).tobytes() != plain.tobytes()


def test_outline_of_small_regions_alone_draws_them() -> None:
    grid = np.zeros((6, 9), np.float32)
    grid[2, 2] = grid[4, 7] = 1
    assert outline(noise(), heatmap(grid)).tobytes() == outline(noise(), heatmap(grid), smallest=1).tobytes()


SINK = (Sink(0, 2, 20.0, "blocks.1"),)


def test_sinks_are_ringed_and_the_ring_is_around_their_patch() -> None:
    place = Geometry((120, 180), (32, 48), Box(0, 0, 120, 180))
    heat, photo = heatmap(GRID, place, sinks=SINK), noise(120, 180)
    plain, marked = overlay(photo, heat, marks=False), overlay(photo, heat)
    rows, columns = np.nonzero((np.asarray(plain) != np.asarray(marked)).any(axis=2))
    assert (rows.mean(), columns.mean()) == pytest.approx((30, 150), abs=1)  # patch 0,2 is y 0 to 60, x 120 to 180
    assert max(np.ptp(rows), np.ptp(columns)) < 20


@pytest.mark.parametrize("opacity", [0.0, 1.0])
def test_opacity_0_and_1_draw_no_rings(opacity: float) -> None:
    heat, photo = heatmap(GRID, sinks=SINK), noise()
    assert heat.marks
    assert overlay(photo, heat, opacity=opacity).tobytes() == overlay(photo, heat, opacity=opacity, marks=False).tobytes()


def test_ring_changes_only_pixels_on_its_circle() -> None:
    photo = noise(300, 600)
    changed = (np.asarray(ring(photo, [(40, 60)])) != np.asarray(photo)).any(axis=2)
    y, x = np.mgrid[:300, :600]
    distance = np.hypot(y - 40, x - 60)
    assert changed.any()
    assert not changed[distance > 15].any()
    assert not changed[distance < 4].any()


@pytest.mark.parametrize(("method", "options"), [("attention", {"layer": 0}), ("similarity", {}), ("rollout", {})])
def test_query_is_ringed_in_white_at_its_patch(method: str, options: dict[str, Any]) -> None:
    photo = Image.new("RGB", (96 * 16, 64 * 16), (40, 90, 60))
    found = visattn.explain(tiny.vit(), photo, method=method, query="patch:1,2", **options)
    assert found.map.facts.query_at == ((24.0, 40.0),)  # patches of 16 pixels
    heat = found.heatmap()
    assert heat.query == (found.geometry.to_photo(24.0, 40.0),)
    plain, marked = found.overlay(marks=False), found.overlay()
    changed = (np.asarray(plain) != np.asarray(marked)).any(axis=2)
    rows, columns = np.nonzero(changed)
    assert (rows.mean(), columns.mean()) == pytest.approx(heat.query[0], abs=1)
    assert (np.asarray(marked)[changed] == 255).all(axis=-1).any()


def test_query_of_another_grid_than_the_keys_is_ringed_where_it_lies() -> None:
    """Check that a query is placed by the grid of the queries; those of PVT have fewer keys."""
    model = visattn.load_model("pvt_v2_b0", weights="none")
    found = visattn.explain(model, Image.new("RGB", (224, 224)), method="attention", layer=0, head=0, query="patch:30,50")
    assert found.map.layout.grid == (7, 7)
    assert found.map.facts.query_at == ((122.0, 202.0),)  # queries are 4 pixels apart


def test_rings_fit_the_short_side_of_a_panorama() -> None:
    for width, radius in ((300, 5), (450, 8), (1200, 8), (3000, 8)):
        before = Image.new("RGB", (width, 300))
        marked = np.asarray(ring(before, [(150, width / 2)])).any(-1)
        across = np.flatnonzero(marked.any(0))
        assert across[-1] - across[0] + 1 <= 2 * radius + 6
