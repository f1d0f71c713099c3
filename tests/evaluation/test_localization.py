from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter
from sklearn.metrics import average_precision_score, roc_auc_score

from tests import tiny
from visattn import evaluation
from visattn.core.geometry import Box, Geometry
from visattn.core.maps import AttentionMap
from visattn.errors import MapError, OptionError, ShapeError

PHOTO = 40, 60
WHOLE = Geometry(PHOTO, tiny.INPUT, Box(0, 0, *PHOTO), "whole")


CROP = Geometry(PHOTO, tiny.INPUT, Box(4, 6, 36, 54), "a crop")
PADDED = Geometry(PHOTO, tiny.INPUT, Box(-12, -9, 52, 69), "padding around")
METRICS: dict[str, Callable[..., NDArray[np.float64]]] = {
    "lift": evaluation.lift,
    "energy_inside": evaluation.energy_inside,
    "pointing_game": evaluation.pointing_game,
    "auroc": evaluation.auroc,
    "average_precision": evaluation.average_precision,
}


def drawn(values: Any) -> AttentionMap:
    values = torch.as_tensor(values, dtype=torch.float64)
    place = tiny.layout(grid=tuple(values.shape[-2:]))
    axes = ("layer", "head")[: values.ndim - 2]
    return AttentionMap(values, axes, replace(place, box=Box(0, 0, *tiny.INPUT)), {}, "attention")


def under_pixels(values: NDArray[np.float64], geometry: Geometry) -> dict[tuple[int, int], float]:
    """Return the value of each photo pixel that the model received, by its center."""
    found = {}
    window, (rows, columns) = geometry.window, values.shape
    for y in range(PHOTO[0]):
        for x in range(PHOTO[1]):
            row = int(np.floor((y + 0.5 - window.top) / window.height * rows))
            column = int(np.floor((x + 0.5 - window.left) / window.width * columns))
            if 0 <= row < rows and 0 <= column < columns:
                found[y, x] = float(values[row, column])
    return found


def mask_of(top: int, left: int, bottom: int, right: int) -> Any:
    mask = np.zeros(PHOTO, bool)
    mask[top:bottom, left:right] = True
    return mask


def test_uniform_map_has_a_lift_of_one() -> None:
    assert float(evaluation.lift(drawn(np.ones(tiny.GRID)), mask_of(3, 7, 31, 22), WHOLE)) == pytest.approx(1)


def test_map_on_the_object_only_has_the_highest_lift() -> None:
    values = np.zeros(tiny.GRID)
    values[0, 1] = 5  # patch from 0,20 to 20,40
    assert float(evaluation.lift(drawn(values), mask_of(0, 20, 20, 40), WHOLE)) == pytest.approx(6)
    assert float(evaluation.lift(drawn(values), mask_of(20, 20, 40, 40), WHOLE)) == 0


def test_cell_that_the_outline_cuts_counts_by_its_pixels() -> None:
    values = np.array([[1.0, 3.0, 0.0], [0.0, 0.0, 0.0]])
    mask = mask_of(0, 10, 10, 40)  # a quarter of the first patch, half of the second
    share = (1 * 0.25 + 3 * 0.5) / 4
    assert float(evaluation.lift(drawn(values), mask, WHOLE)) == pytest.approx(share / (300 / 2400))


def test_lift_equals_a_loop_over_pixels_of_a_crop() -> None:
    geometry = Geometry(PHOTO, tiny.INPUT, Box(4, 6, 36, 54), "a crop")
    mask = np.random.default_rng(0).random(PHOTO) < 0.3
    values = np.random.default_rng(1).random(tiny.GRID)
    inside = total = covered = seen = 0.0
    for y in range(4, 36):
        for x in range(6, 54):
            value = values[int((y - 4) / 16), int((x - 6) / 16)] / 256  # each patch covers 16 x 16 pixels of the photo
            inside, total = inside + value * mask[y, x], total + value
            covered, seen = covered + mask[y, x], seen + 1
    assert float(evaluation.lift(drawn(values), mask, geometry)) == pytest.approx(inside / total / (covered / seen))


def test_lift_of_each_head() -> None:
    values = torch.rand(2, *tiny.GRID)
    whole = AttentionMap(values, ("head",), tiny.layout(), {}, "attention")
    mask = mask_of(0, 0, 25, 25)
    expected = [float(evaluation.lift(whole.at(head=i), mask, WHOLE)) for i in range(2)]
    assert evaluation.lift(whole, mask, WHOLE).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("values", "mask", "message"),
    [
        (np.full(tiny.GRID, -1.0), mask_of(0, 0, 9, 9), "non-negative values"),
        (np.zeros(tiny.GRID), mask_of(0, 0, 9, 9), "positive sum"),
        (np.ones(tiny.GRID), mask_of(0, 0, 0, 0), "it covers 0%"),
        (np.ones(tiny.GRID), mask_of(0, 0, 40, 60), "it covers 100%"),
    ],
)
def test_lift_refuses(values: Any, mask: Any, message: str) -> None:
    with pytest.raises(MapError, match=message):
        evaluation.lift(drawn(values), mask, WHOLE)


@pytest.mark.parametrize("metric", METRICS)
def test_each_metric_of_several_entries_equals_that_of_single_entries(metric: str) -> None:
    values = np.random.default_rng(4).integers(0, 4, (2, 3, *tiny.GRID)) + 0.25
    mask = mask_of(5, 3, 33, 41)
    found = METRICS[metric](drawn(values), mask, WHOLE)
    assert found.dtype == np.float64
    assert found.shape == (2, 3)
    for layer in range(2):
        for head in range(3):
            assert found[layer, head] == pytest.approx(float(METRICS[metric](drawn(values[layer, head]), mask, WHOLE)), abs=1e-14)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (np.ones((10, 10), bool), r"boolean and of the photo's size \(40, 60\), got bool \(10, 10\)"),
        (np.full(PHOTO, 7, np.uint8), r"boolean, or hold 0 and 1, or 0 and 255; got uint8 \(40, 60\) with 7"),
    ],
    ids=["size", "kind"],
)
def test_mask_of_another_size_or_kind_is_refused(metric: str, mask: Any, said: str) -> None:
    with pytest.raises(ShapeError, match=said):
        METRICS[metric](drawn(np.ones(tiny.GRID)), mask, WHOLE)


@pytest.mark.parametrize("metric", METRICS)
def test_map_of_a_batch_is_refused(metric: str) -> None:
    batch = AttentionMap(torch.ones(1, *tiny.GRID), ("batch",), tiny.layout(), {}, "attention")
    with pytest.raises(MapError, match=r"a mask belongs to one photo, but the map has a batch axis\. Choose one image"):
        METRICS[metric](batch, mask_of(0, 0, 9, 9), WHOLE)


@pytest.mark.parametrize("metric", [name for name in METRICS if name != "energy_inside"])
@pytest.mark.parametrize("covered", [0, 100])
def test_masks_without_object_or_without_background_are_refused(metric: str, covered: int) -> None:
    mask = mask_of(0, 0, 40, 60) if covered else mask_of(0, 0, 4, 60)  # the crop starts below the mask's four rows
    with pytest.raises(MapError, match=f"must cover a part of what the model received, but it covers {covered}%"):
        METRICS[metric](drawn(np.arange(6.0).reshape(2, 3)), mask, CROP)


@pytest.mark.parametrize(
    ("values", "lack"),
    [(np.array([[1, 2, 3], [4, 5, -1e-9]]), "negative values"), (np.zeros(tiny.GRID), "a sum that is not positive")],
    ids=["negative", "zero"],
)
def test_share_of_a_sum_needs_a_positive_sum(values: Any, lack: str) -> None:
    with pytest.raises(MapError, match=f"a share of the sum needs non-negative values with a positive sum; attention has {lack}"):
        evaluation.energy_inside(drawn(values), mask_of(0, 0, 9, 9), WHOLE)


@pytest.mark.parametrize("geometry", [WHOLE, CROP, PADDED], ids=lambda geometry: geometry.rule)
@pytest.mark.parametrize("grid", [(2, 3), (7, 4), (64, 96)], ids=str)
def test_energy_inside_equals_a_loop_over_cells_and_their_pixels(geometry: Geometry, grid: tuple[int, int]) -> None:
    random = np.random.default_rng(5)
    values, mask = random.random(grid), random.random(PHOTO) < 0.2
    on, window = 0.0, geometry.window
    for row, column in np.ndindex(*grid):
        top, bottom = (window.top + window.height * (row + end) / grid[0] for end in (0, 1))
        left, right = (window.left + window.width * (column + end) / grid[1] for end in (0, 1))
        below = [y for y in range(40) if top <= y + 0.5 < bottom] or [int(np.floor((top + bottom) / 2))]
        behind = [x for x in range(60) if left <= x + 0.5 < right] or [int(np.floor((left + right) / 2))]
        pixels = [mask[y, x] if 0 <= y < 40 and 0 <= x < 60 else False for y in below for x in behind]
        on += values[row, column] * sum(pixels) / len(pixels)
    assert float(evaluation.energy_inside(drawn(values), mask, geometry)) == pytest.approx(on / values.sum(), abs=1e-12)


def test_energy_inside_is_0_for_an_empty_mask_and_1_for_a_full_mask() -> None:
    values = np.arange(6.0).reshape(tiny.GRID)
    assert float(evaluation.energy_inside(drawn(values), mask_of(0, 0, 0, 0), CROP)) == 0
    assert float(evaluation.energy_inside(drawn(values), mask_of(0, 0, 40, 60), CROP)) == pytest.approx(1)


@pytest.mark.parametrize("geometry", [WHOLE, CROP, PADDED], ids=lambda geometry: geometry.rule)
@pytest.mark.parametrize("grid", [(2, 3), (7, 4), (16, 24), (64, 96)], ids=str)
@pytest.mark.parametrize("ties", [False, True], ids=["no ties", "ties"])
def test_ranking_equals_scikit_learn_on_pixels(geometry: Geometry, grid: tuple[int, int], ties: bool) -> None:
    random = np.random.default_rng(6)
    values = random.integers(-2, 3, grid).astype(float) if ties else random.standard_normal(grid)
    mask = random.random(PHOTO) < np.linspace(0.1, 0.6, PHOTO[1])
    seen = under_pixels(values, geometry)
    truth, scores = [bool(mask[place]) for place in seen], list(seen.values())
    shown = drawn(values)
    assert float(evaluation.auroc(shown, mask, geometry)) == pytest.approx(roc_auc_score(truth, scores), abs=1e-12)
    expected = average_precision_score(truth, scores)
    assert float(evaluation.average_precision(shown, mask, geometry)) == pytest.approx(expected, abs=1e-12)


def test_auroc_equals_a_loop_over_pairs_of_pixels() -> None:
    values = np.array([[0.3, -1.0, 0.3], [2.0, 0.3, -0.5]])
    mask = mask_of(15, 11, 31, 33)
    pixels = under_pixels(values, CROP)
    wins = pairs = 0.0
    for place, value in pixels.items():
        if mask[place]:
            for other, less in pixels.items():
                if not mask[other]:
                    wins += 1 if value > less else 0.5 if value == less else 0
                    pairs += 1
    assert float(evaluation.auroc(drawn(values), mask, CROP)) == pytest.approx(wins / pairs, abs=1e-12)


def test_uniform_map_has_the_ranking_scores_of_chance() -> None:
    mask = mask_of(3, 7, 31, 22)
    even = drawn(np.full(tiny.GRID, -3.0))
    assert float(evaluation.auroc(even, mask, WHOLE)) == 0.5
    assert float(evaluation.average_precision(even, mask, WHOLE)) == pytest.approx(mask.mean())


def test_ranking_is_invariant_to_increasing_functions_of_the_values() -> None:
    values, mask = np.random.default_rng(7).random((7, 4)), mask_of(9, 13, 26, 30)
    for metric in (evaluation.auroc, evaluation.average_precision):
        assert metric(drawn(values), mask, WHOLE) == metric(drawn(np.exp(9 * values) - 50), mask, WHOLE)


def test_map_on_the_object_only_is_ranked_best_and_its_negative_worst() -> None:
    values, mask = np.zeros(tiny.GRID), mask_of(20, 20, 40, 40)  # the object is one cell
    values[1, 1] = 1
    assert (
        float(evaluation.auroc(drawn(values), mask, WHOLE))
        == float(evaluation.average_precision(drawn(values), mask, WHOLE))
        == 1
    )
    assert float(evaluation.auroc(drawn(-values), mask, WHOLE)) == 0


@pytest.mark.parametrize("geometry", [WHOLE, CROP, PADDED], ids=lambda geometry: geometry.rule)
@pytest.mark.parametrize("tolerance", [0, 1, 3.5, 15], ids=str)
def test_pointing_game_equals_a_loop(geometry: Geometry, tolerance: float) -> None:
    random, found, expected = np.random.default_rng(8), [], []
    mask = random.random(PHOTO) < 0.5 / (1 + 3 * tolerance**2)  # about every second cell hits
    for _ in range(12):
        values = random.integers(-9, 0, (5, 4)).astype(float)  # all negative, and often tied
        hits = []
        for row, column in np.argwhere(values == values.max()):
            y = int(np.floor(geometry.window.top + (row + 0.5) / 5 * geometry.window.height))
            x = int(np.floor(geometry.window.left + (column + 0.5) / 4 * geometry.window.width))
            near = any((y - other) ** 2 + (x - beside) ** 2 <= tolerance**2 for other, beside in np.argwhere(mask))
            hits.append(near and 0 <= y < 40 and 0 <= x < 60)
        expected.append(sum(hits) / len(hits))
        found.append(float(evaluation.pointing_game(drawn(values), mask, geometry, tolerance=tolerance)))
    assert found == pytest.approx(expected)
    assert 0 < sum(found) < len(found)


def test_pointing_game_points_at_the_center_pixel_of_a_cell() -> None:
    values = np.zeros(tiny.GRID)
    values[1, 2] = 1  # cell from 20,40 to 40,60, whose center lies between four pixels
    for y, x, hit in ((30, 50, 1), (29, 50, 0), (30, 49, 0), (30, 51, 0)):
        assert float(evaluation.pointing_game(drawn(values), mask_of(y, x, y + 1, x + 1), WHOLE)) == hit
    assert float(evaluation.pointing_game(drawn(values), mask_of(29, 49, 30, 50), WHOLE, tolerance=1.5)) == 1
    assert float(evaluation.pointing_game(drawn(values), mask_of(29, 49, 30, 50), WHOLE, tolerance=1.4)) == 0


def test_point_outside_the_photo_is_a_miss_even_within_the_tolerance() -> None:
    values = np.zeros((5, 4))
    values[0] = 1  # the centers of the top cells lie 6 pixels above the photo
    assert float(evaluation.pointing_game(drawn(values), mask_of(0, 0, 20, 60), PADDED, tolerance=15)) == 0


def test_uniform_map_has_the_pointing_score_of_chance() -> None:
    assert float(evaluation.pointing_game(drawn(np.ones((4, 6))), mask_of(0, 0, 20, 20), WHOLE)) == 4 / 24


@pytest.mark.parametrize("tolerance", [-1, float("nan")])
def test_tolerance_out_of_range_is_refused(tolerance: float) -> None:
    with pytest.raises(OptionError, match="tolerance must be a number from 0"):
        evaluation.pointing_game(drawn(np.ones(tiny.GRID)), mask_of(0, 0, 9, 9), WHOLE, tolerance=tolerance)


def test_smooth_random_is_white_noise_through_a_gaussian() -> None:
    like = drawn(np.ones((16, 24)))
    made = evaluation.smooth_random(like, count=3, seed=5, spread=0.1)
    noise = np.random.default_rng(5).standard_normal((3, 16, 24))
    for copy, field in zip(made.values.numpy(), noise, strict=True):
        expected = gaussian_filter(field, (1.6, 2.4), mode="wrap", truncate=8)
        expected -= expected.min()
        assert copy == pytest.approx(expected / expected.sum(), abs=2e-5)
    assert made.axes == ("copy",)
    assert made.values.amin((-1, -2)).tolist() == [0, 0, 0]
    assert made.values.sum((-1, -2)).tolist() == pytest.approx([1, 1, 1])
    assert made.meaning == "smooth noise"
    assert torch.equal(made.values, evaluation.smooth_random(like, count=3, seed=5).values)
    assert not torch.equal(made.values, evaluation.smooth_random(like, count=3, seed=6).values)


def test_smooth_random_maps_reach_chance_and_prefer_no_cell() -> None:
    made = evaluation.smooth_random(drawn(np.ones((4, 6))), count=4000)
    mask = mask_of(0, 0, 20, 20)  # four cells in a corner
    assert float(evaluation.lift(made, mask, WHOLE).mean()) == pytest.approx(1, abs=0.03)
    assert float(evaluation.auroc(made, mask, WHOLE).mean()) == pytest.approx(0.5, abs=0.02)
    places = np.bincount(made.values.flatten(1).argmax(1).numpy(), minlength=24)
    assert abs(places - 4000 / 24).max() < 5 * (4000 / 24) ** 0.5


@pytest.mark.parametrize(("options", "message"), [({"count": 0}, "count must be"), ({"spread": -0.1}, "spread must be")])
def test_smooth_random_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        evaluation.smooth_random(drawn(np.ones(tiny.GRID)), **options)


@pytest.mark.parametrize("baseline", [evaluation.smooth_random, evaluation.shifted_copies])
def test_baselines_refuse_a_grid_of_one_cell(baseline: Callable[[AttentionMap], AttentionMap]) -> None:
    with pytest.raises(MapError, match=r"at least two cells, got the grid \(1, 1\)"):
        baseline(drawn(np.ones((1, 1))))


def test_center_prior_is_symmetric_and_decreases_from_the_center() -> None:
    like = AttentionMap(torch.ones(5, 7), (), tiny.layout(grid=(5, 7)), {}, "attention")
    prior = evaluation.center_prior(like).values
    assert torch.allclose(prior, prior.flip(0))
    assert torch.allclose(prior, prior.flip(1))
    assert float(prior.sum()) == pytest.approx(1)
    assert int(prior.argmax()) == 2 * 7 + 3
    assert float(prior[2, 4] / prior[2, 3]) == pytest.approx(np.exp(-0.5 * (1 / 7 / 0.25) ** 2))


def test_shifted_copies_hold_the_same_values_elsewhere() -> None:
    made = drawn(torch.arange(6.0).view(tiny.GRID))
    copies = evaluation.shifted_copies(made, count=5, seed=3)
    assert copies.axes == ("copy",)
    for copy in copies.values:
        assert sorted(copy.flatten().tolist()) == [0, 1, 2, 3, 4, 5]
        assert not torch.equal(copy, made.values)
    assert len({tuple(copy.flatten().tolist()) for copy in copies.values}) == 5
    assert torch.equal(copies.values, evaluation.shifted_copies(made, count=5, seed=3).values)
