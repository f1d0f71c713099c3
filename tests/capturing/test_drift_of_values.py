"""Distances of points from the cells of their tokens, and the drift of values that were read there."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from visattn.core.capturing.tokens.points import HALF, UNKNOWN, Cells, Drift, Points, widest


def cells(padding: int | None = None) -> Cells:
    """Return one row of two cells, 10 high and 20 wide, on a map of `(x, y)` from 0 to 40 and 0 to 10."""
    center = torch.tensor([[[[10.0, 5.0], [30.0, 5.0]]]])
    parts = center, torch.tensor([20.0, 10.0]), torch.tensor([20.0, 5.0]), torch.tensor([20.0, 5.0])
    return Cells(*parts) if padding is None else Cells(*parts, padding)


def points(*pairs: tuple[float, float]) -> Tensor:
    """Return one row of points."""
    return torch.tensor([[pairs]])


@pytest.mark.parametrize(
    ("pair", "distance"),
    [
        (((-0.5, 0), (0.5, 0)), 0),
        (((-0.5, 0), (0, 0)), 0.5),  # half a cell to the left
        (((-0.5, 0.5), (0.5, 0)), 0.25),  # a quarter of a cell down
        (((-0.5, -0.8), (0.25, 0.4)), 0.4),
        (((1, 0), (0.5, 0)), 1.5),
        (((-0.5, 0), (3, 0)), 2.5),  # outside the map
        (((-0.5, 3), (0.5, 0)), 1.5),
    ],
)
def test_distances_are_counted_in_cells_along_an_axis(pair: tuple[tuple[float, float], ...], distance: float) -> None:
    assert cells().farthest(points(*pair)) == pytest.approx(distance, abs=1e-6)


@pytest.mark.parametrize(
    ("x", "zeros", "border", "reflected"),
    [
        (0.5, 0, 0, 0),
        (1, 0.5, 0.5, 0.5),
        (1.5, 1, 0.5, 0),
        (2.5, 2, 0.5, 1),
        (3, 2.5, 0.5, 1.5),
        (4, 3.5, 0.5, 0.5),
        (5, 4.5, 0.5, 0.5),
        (-1, 1.5, 1.5, 1.5),
        (-2, 2.5, 1.5, 0.5),
        (-3.5, 4, 1.5, 0),
    ],
)
def test_points_outside_a_map_lie_where_the_values_are_read(x: float, zeros: float, border: float, reflected: float) -> None:
    pair = points((-0.5, 0), (x, 0))
    assert cells().padding == 0
    assert [cells(padding).farthest(pair) for padding in (0, 1, 2)] == pytest.approx([zeros, border, reflected], abs=1e-6)
    below = points((-0.5, 0), (0.5, x - 0.5))
    assert cells(1).farthest(below) == pytest.approx(min(abs(x - 0.5), 1) / 2, abs=1e-6)


def test_points_that_are_no_numbers_are_infinitely_far() -> None:
    assert cells().farthest(points((-0.5, math.nan), (0.5, 0))) == math.inf
    assert cells().farthest(torch.empty(0, 1, 2, 2)) == 0
    assert Cells(torch.zeros(2), torch.ones(2), torch.zeros(2), torch.ones(2)).farthest(torch.ones(1, 2).requires_grad_()) == 1


def at(distance: float) -> Tensor:
    """Return a point at a distance of some cells from the first one."""
    return points((distance - 0.5, 0), (0.5, 0)).double()


@pytest.mark.parametrize(
    ("distance", "drift"),
    [
        (0, 0),
        (0.0009, 0),
        (0.0011, 0.25),
        (0.2, 0.25),
        (0.2509, 0.25),
        (0.2511, 0.5),
        (0.5009, 0.5),
        (0.5011, math.inf),
        (7, math.inf),
        (math.nan, math.inf),
    ],
)
def test_drift_is_rounded_up_to_quarters_of_a_cell(distance: float, drift: float) -> None:
    measured = Points(at(distance))
    assert measured.distance is None
    assert measured.drift(cells()) == drift
    assert measured.distance == pytest.approx(math.inf if math.isnan(distance) else distance, abs=1e-6)
    assert measured.drift(None) == drift  # measured once
    assert measured.fits(at(distance))


def test_points_fit_if_they_lead_to_the_same_drift() -> None:
    measured = Points(at(0.2))
    assert measured.drift(cells()) == 0.25
    assert measured.fits(at(0.1))
    assert measured.distance == pytest.approx(0.1)
    assert not measured.fits(at(0.3))
    assert measured.distance == pytest.approx(0.3)
    assert not measured.fits(at(0))
    assert not measured.fits(at(9))


def test_points_that_were_not_measured_fit_if_they_are_equal() -> None:
    measured = Points(at(0.4))
    assert measured.fits(at(0.4))
    assert not measured.fits(at(0.3))
    assert not measured.fits(at(0.4)[:, :, :1])
    assert measured.distance is None


def test_drift_without_cells_is_unknown() -> None:
    measured = Points(at(0))
    assert measured.drift(None) == math.inf
    assert measured.distance is None
    assert measured.drift(cells()) == math.inf
    assert measured.fits(at(9))


def measured(distance: float | None) -> Points:
    read = Points(torch.zeros(1))
    read.distance = distance
    return read


def test_values_within_half_a_cell_are_not_away() -> None:
    assert HALF == 0.5
    assert [Drift(cells).away for cells in (0, 0.5, 0.51, 0.75, math.inf)] == [False, False, True, True, True]
    assert Drift() == Drift(0.0, frozenset(), False)
    assert (UNKNOWN.cells, UNKNOWN.points, UNKNOWN.of_sets, UNKNOWN.told) == (math.inf, frozenset(), True, "")


@pytest.mark.parametrize(
    ("cells", "distances", "told"),
    [
        (math.inf, (0.6,), ", up to 0.6 cells away"),
        (math.inf, (0.6, 3, 1), ", up to 3.0 cells away"),
        (math.inf, (None, 3), ", up to 3.0 cells away"),
        (math.inf, (None,), ""),
        (math.inf, (0.5009,), ""),
        (math.inf, (0.5011,), ", up to 0.5 cells away"),
        (0.75, (0.5009, 0.2), ", up to 0.5 cells away several times"),
        (0.75, (0.3,), ", up to 0.3 cells away several times"),
        (math.inf, (0.3,), ""),
        (0.75, (), ""),
    ],
)
def test_the_farthest_point_is_told(cells: float, distances: tuple[float | None, ...], told: str) -> None:
    assert Drift(cells, frozenset(map(measured, distances))).told == told


def test_values_that_are_read_again_drift_further() -> None:
    first, second = measured(0.2), measured(0.3)
    drift = Drift(0.25, frozenset({first}))
    assert drift.further(0.5, second, by_sets=False) == Drift(0.75, frozenset({first, second}), False)
    assert drift.further(0.25, second, by_sets=True) == Drift(0.5, frozenset({first, second}), True)
    of_sets = drift._replace(of_sets=True)
    assert of_sets.further(0.25, second, by_sets=False).of_sets
    assert drift.further(0, second, by_sets=True) is drift


def test_the_widest_drift_has_the_points_of_all() -> None:
    first, second, third = measured(0.2), measured(0.3), measured(0.4)
    small, large, none = Drift(0.25, frozenset({first})), Drift(0.5, frozenset({second})), Drift(0, frozenset({third}), True)
    assert widest() == Drift()
    assert widest(none, none) == Drift()
    assert widest(none, small, none) is small
    assert widest(small, none, large) == Drift(0.5, frozenset({first, second}))
    assert widest(large, small._replace(of_sets=True)) == Drift(0.5, frozenset({first, second}), True)
    assert not widest(large, small).of_sets
