"""Maps as segmentations, beside loops over pixels and scikit-learn."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score

import visattn
from visattn.errors import MapError, OptionError, ShapeError
from visattn.evaluation import Segmentation, best_head_jaccard

SIDE = 24


def photo(seed: int, *, void: bool = False) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    random = np.random.default_rng(seed)
    labels = np.zeros((SIDE, SIDE), np.int64)
    top, left = random.integers(2, 10, 2)
    labels[top : top + 9, left : left + 11] = seed + 1
    if void:
        labels[top - 1, left : left + 11] = -1
    values = random.random((SIDE, SIDE)).round(1) + (labels > 0)
    return values, labels


@pytest.mark.parametrize("void", [False, True])
def test_scores_equal_loops_over_pixels(void: bool) -> None:
    found, photos = Segmentation(), [photo(seed, void=void) for seed in range(4)]
    right = pixels = 0
    inside, union, precisions = [0, 0], [0, 0], list[float]()
    for values, labels in photos:
        found.add(values, labels)
        known = [(y, x) for y, x in itertools.product(range(SIDE), repeat=2) if labels[y, x] != -1]
        low, high = min(values[place] for place in known), max(values[place] for place in known)
        scaled = {place: (values[place] - low) / (high - low) for place in known}
        mean = sum(scaled.values()) / len(known)
        entries = list[tuple[float, bool]]()
        for place in known:
            says, is_object = scaled[place] > mean, labels[place] > 0
            right, pixels = right + int(says == is_object), pixels + 1
            for side in (0, 1):
                inside[side] += int(says == side and is_object == side)
                union[side] += int(says == side or is_object == side)
            entries += [(1 - scaled[place], not is_object), (scaled[place], bool(is_object))]
        precisions.append(float(average_precision_score([truth for _, truth in entries], [value for value, _ in entries])))
    scores = found.scores
    assert scores.pixel_accuracy == pytest.approx(right / pixels)
    assert scores.mean_iou == pytest.approx((inside[0] / union[0] + inside[1] / union[1]) / 2)
    assert scores.mean_ap == pytest.approx(np.mean(precisions))
    assert scores.photos == 4


def test_a_map_of_cells_is_interpolated() -> None:
    cells = np.random.default_rng(0).random((6, 6))
    one, two = Segmentation(), Segmentation()
    _, labels = photo(0)
    one.add(cells, labels)
    whole = torch.nn.functional.interpolate(torch.from_numpy(cells)[None, None], (SIDE, SIDE), mode="bilinear")[0, 0].numpy()
    two.add(whole, labels)
    assert one.scores.mean_ap == pytest.approx(two.scores.mean_ap, abs=2e-3)
    assert one.scores.pixel_accuracy == pytest.approx(two.scores.pixel_accuracy, abs=0.01)


def test_the_truth_has_one_and_its_negative_zero() -> None:
    _, labels = photo(3)
    best, worst = Segmentation(), Segmentation()
    best.add((labels > 0).astype(float), labels)
    worst.add((labels == 0).astype(float), labels)
    assert (best.scores.pixel_accuracy, best.scores.mean_iou, best.scores.mean_ap) == (1, 1, 1)
    assert (worst.scores.pixel_accuracy, worst.scores.mean_iou) == (0, 0)


def test_the_best_head_of_each_object() -> None:
    random = np.random.default_rng(0)
    heads, objects = random.random((3, 6, 8)) ** 4, np.zeros((2, 24, 32), bool)
    objects[0, 2:11, 5:20] = objects[1, 12:22, 20:31] = True
    void = np.zeros((24, 32), bool)
    void[11, 5:20] = True
    ratios = list[float]()
    for mask in objects:
        by_head = list[float]()
        for head in heads:
            cells = sorted(np.ndindex(6, 8), key=lambda cell, head=head: -head[cell])  # type: ignore[misc]
            kept, total = set[tuple[int, ...]](), 0.0
            for cell in cells:  # the fewest whose sum reaches the share
                kept.add(cell)
                total += head[cell]
                if total >= 0.6 * head.sum():
                    break
            both = either = 0
            for y, x in itertools.product(range(24), range(32)):
                if not void[y, x]:
                    says, is_object = (y // 4, x // 4) in kept, bool(mask[y, x])
                    both, either = both + int(says and is_object), either + int(says or is_object)
            by_head.append(both / either)
        ratios.append(max(by_head))
    assert best_head_jaccard(heads, objects, void=void) == pytest.approx(np.mean(ratios))
    assert np.isnan(best_head_jaccard(heads, objects[:0]))


def test_heads_of_a_model_are_taken_as_they_are() -> None:
    explanation = visattn.explain(visattn.load_model("scenes_vit"), "scene:7", method="attention")
    size = explanation.geometry.input
    objects = np.zeros((1, *size), bool)
    objects[0, : size[0] // 2] = True
    found = best_head_jaccard(explanation.map, objects)
    assert found == best_head_jaccard(explanation.map.numpy(), objects)
    assert 0 < found < 1


@pytest.mark.parametrize(
    ("shown", "labels", "error", "text"),
    [
        (np.ones((4, 4)), np.eye(8, dtype=int), MapError, "constant"),
        (np.full((4, 4), np.nan), np.eye(8, dtype=int), MapError, "NaN or infinite"),
        (np.eye(4), np.eye(8), ShapeError, "integers or booleans"),
        (np.eye(4), np.ones((2, 8, 8), int), ShapeError, "integers or booleans"),
    ],
)
def test_wrong_input_is_named(shown: Any, labels: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Segmentation().add(shown, labels)


def test_wrong_heads_are_named() -> None:
    objects = np.ones((1, 8, 8), bool)
    with pytest.raises(MapError, match="negative"):
        best_head_jaccard(-np.ones((2, 4, 4)), objects)
    with pytest.raises(ShapeError, match="objects"):
        best_head_jaccard(np.ones((2, 4, 4)), objects[0])
    with pytest.raises(OptionError, match="mass"):
        best_head_jaccard(np.ones((2, 4, 4)), objects, mass=2)
    with pytest.raises(OptionError, match="no photo"):
        _ = Segmentation().scores
