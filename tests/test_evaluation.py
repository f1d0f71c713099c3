from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests import tiny
from visattn import evaluation
from visattn.errors import MapError, ShapeError
from visattn.geometry import Box, Geometry
from visattn.maps import AttentionMap

PHOTO = 40, 60
WHOLE = Geometry(PHOTO, tiny.INPUT, Box(0, 0, *PHOTO), "whole")


def drawn(values: Any) -> AttentionMap:
    return AttentionMap(torch.as_tensor(values, dtype=torch.float64), (), tiny.layout(), {}, "attention")


def mask_of(top: int, left: int, bottom: int, right: int) -> Any:
    mask = np.zeros(PHOTO, bool)
    mask[top:bottom, left:right] = True
    return mask


def test_even_map_has_a_lift_of_one() -> None:
    assert float(evaluation.lift(drawn(np.ones(tiny.GRID)), mask_of(3, 7, 31, 22), WHOLE)) == pytest.approx(1)


def test_map_on_the_object_alone_has_the_highest_lift_there_is() -> None:
    values = np.zeros(tiny.GRID)
    values[0, 1] = 5  # the patch from 0,20 to 20,40
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


def test_mask_of_another_size_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"the mask must be of the photo's size \(40, 60\), got \(10, 10\)"):
        evaluation.lift(drawn(np.ones(tiny.GRID)), np.ones((10, 10), bool), WHOLE)


def test_centre_prior_is_symmetric_and_falls_from_the_middle() -> None:
    like = AttentionMap(torch.ones(5, 7), (), tiny.layout(grid=(5, 7)), {}, "attention")
    prior = evaluation.centre_prior(like).values
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
