"""Points at which a model reads maps of values: how far they lie from the tokens that computed them, in each forward pass.

Points are values, so they are no part of a tape. A tape keeps what follows from them: by how much of a cell the values that are read may
lie away from their tokens. Each forward pass on a known tape is measured again.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

POINTS = "grid"  # name of the points among the arguments of PyTorch's own operation
HALF = 0.5  # a point at most half a cell away from the center of a token's cell lies in this cell
_STEP, _ROUNDING = 0.25, 1e-3  # distances are rounded up, so that most forward passes agree; both in cells
_REFLECTED = 2  # number of `padding_mode` in PyTorch's own operation


class Cells(NamedTuple):
    """Cells of the tokens that compute points, and the map that is read; `(x, y)`, in pixels of the model's input.

    Attributes:
        center: `(N, rows, columns, 2)` center of each token's cell; sizes may be 1.
        size: Size of each token's cell, in the same form.
        middle: Center of the map.
        reach: Distance from there to the points 1 and -1.
        padding: `padding_mode` by number: zeros, border, reflection.
    """

    center: Tensor
    size: Tensor
    middle: Tensor
    reach: Tensor
    padding: int = 0

    def farthest(self, points: Tensor) -> float:
        """Return the largest distance of a point from the center of its token's cell, in sizes of that cell, along an axis.

        Points outside the map lie where the values are read: at the border, or reflected. With zeros as padding they lie outside.
        """
        points = points.detach().double()
        if self.padding == _REFLECTED:
            points = 1 - ((points + 1) % 4 - 2).abs()
        elif self.padding:
            points = points.clamp(-1, 1)
        distances = ((points * self.reach + self.middle - self.center) / self.size).abs()
        farthest = float(distances.amax()) if distances.numel() else 0.0
        return math.inf if math.isnan(farthest) else farthest


class Points:
    """Points of one call.

    Attributes:
        distance: Largest distance of a point from its token in the latest forward pass, in cells; None if it is unknown.
    """

    def __init__(self, points: Tensor) -> None:
        """Keep the points until they are measured."""
        self.distance: float | None = None
        self._points: Tensor | None = points
        self._cells: Cells | None = None
        self._drift = math.inf

    def drift(self, cells: Cells | None) -> float:
        """Return how far the points lie from their tokens in the forward pass that recorded them, in cells; see `Drift.cells`.

        `cells` are those of the tokens; None if tokens lie on no grid.
        """
        if self._points is not None:
            self._cells = cells
            self._drift = self._measured(self._points)
            self._points = None
        return self._drift

    def fits(self, points: Tensor) -> bool:
        """Check whether the points of another forward pass lead to the same places."""
        if self._points is not None:
            return self._points.shape == points.shape and torch.equal(self._points, points)
        return self._measured(points) == self._drift

    def _measured(self, points: Tensor) -> float:
        """Return the largest distance of a point from its token, in cells, rounded up; infinite if it is more than half a cell."""
        if self._cells is None:
            return math.inf
        self.distance = self._cells.farthest(points)
        if not math.isfinite(self.distance):
            return math.inf
        rounded = math.ceil((self.distance - _ROUNDING) / _STEP) * _STEP
        return max(rounded, 0.0) if rounded <= HALF else math.inf


class Drift(NamedTuple):
    """Distance of values from their tokens, because they were read at points that the model computes.

    Attributes:
        cells: The distance, in cells of the grids of these tokens; infinite if it is more than half a cell, or unknown.
        points: The points that led there.
        of_sets: Whether some of the tokens may be members of a set, which have no cells.
    """

    cells: float = 0.0
    points: frozenset[Points] = frozenset()
    of_sets: bool = False

    @property
    def away(self) -> bool:
        """True if the values may lie outside the cells of their tokens."""
        return self.cells > HALF

    @property
    def told(self) -> str:
        """Words that say how far the points lie from their tokens in the latest forward pass; empty if this is unknown."""
        distances = [points.distance for points in self.points if points.distance is not None]
        if not distances:
            return ""
        farthest = max(distances)
        if farthest > HALF + _ROUNDING:
            return f", up to {farthest:.1f} cells away"
        return f", up to {farthest:.1f} cells away several times" if math.isfinite(self.cells) else ""

    def further(self, cells: float, points: Points, *, by_sets: bool) -> Drift:
        """Return the drift of values that were read again, up to `cells` away, at `points`.

        `by_sets` tells whether the tokens that read them may be members of a set, such as object queries, which have no cells.
        """
        return Drift(self.cells + cells, self.points | {points}, self.of_sets or by_sets) if cells else self


UNKNOWN = Drift(math.inf, of_sets=True)


def widest(*drifts: Drift) -> Drift:
    """Return the drift (distance of values from their tokens) of a tensor that was computed from tensors with these drifts."""
    moved = [drift for drift in drifts if drift.cells]
    if len(moved) < 2:
        return moved[0] if moved else Drift()
    points = frozenset[Points]().union(*(drift.points for drift in moved))
    return Drift(max(drift.cells for drift in moved), points, any(drift.of_sets for drift in moved))
