"""Addressing by content and location (neural Turing machine)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visattn._support.checks import at_least
from visattn.errors import OptionError, ShapeError
from visattn.nn.shape_checks import check_tokens, is_traced, shape_text


class Addressed(NamedTuple):
    """Weights of each step of the addressing, `(B, T, N)`; the rows of all sum to 1.

    Attributes:
        content: By content alone: `softmax(beta cos(k, keys))`.
        interpolated: Content mixed with the previous weights, by the gate.
        shifted: Moved along the axes of the grid.
        weights: Sharpened: the result.
    """

    content: Tensor
    interpolated: Tensor
    shifted: Tensor
    weights: Tensor


class ContentLocationAddressing(nn.Module):
    """Addressing of a neural Turing machine: where to attend follows from content and from where the last step attended.

    From the query it computes a key `k`, its strength `beta = softplus(.)`, a gate `g = sigmoid(.)`, a distribution `s` over shifts, and a
    sharpness `gamma = 1 + softplus(.)`. Then `w_c = softmax(beta cos(k, keys))`, `w_g = g w_c + (1 - g) w_previous`,
    `w_s(i) = sum_j w_g(j) s(i - j)` with circular indices, and `w(i) = w_s(i)^gamma / sum_j w_s(j)^gamma`.

    The result is `gamma log w_s`, scores like those of the other score modules: `attend(scores, values)` reads the memory with the weights
    `w`.

    Args:
        query_dim: Width of a query (the state of the controller), dq.
        key_dim: Width of a key (a row of the memory), dk.
        reach: Largest shift along an axis, in positions.
        axes: Number of axes along which weights are shifted: 1 for a sequence, as in the paper, 2 for a grid.

    Shape:
        Queries `(B, T, dq)`, keys `(B, N, dk)`, the previous weights `(B, T, N)` and a grid `(N,)` or `(rows, columns)` of N positions in
        row-major order, to scores `(B, T, N)`. Without previous weights they are uniform. `steps` returns the weights behind each step.

    Raises:
        OptionError: If a number is below 1, or `axes` is not 1 or 2.
        ShapeError: In the forward pass, if a shape is wrong or the grid does not have N positions.

    Reference:
        Graves et al., "Neural Turing Machines", 2014, arXiv:1410.5401, section 3.3. The extension to 2-d grids is ours: shifts are along
        both axes, and each axis is circular.
    """

    def __init__(self, query_dim: int, key_dim: int, *, reach: int = 1, axes: int = 1) -> None:
        """Build with PyTorch's default initialization."""
        super().__init__()
        if axes not in {1, 2}:
            raise OptionError(f"axes must be 1 or 2, got {axes}. A sequence has 1, an image 2.")
        self.query_dim, self.key_dim = at_least("query_dim", query_dim), at_least("key_dim", key_dim)
        self.reach, self.axes = at_least("reach", reach), axes
        every = itertools.product(range(-reach, reach + 1), repeat=axes)
        self.shifts = sorted(every, key=lambda shift: -max(map(abs, shift)))  # the last is none, so that a capture knows the keys
        self.key = nn.Linear(query_dim, key_dim)
        self.strength, self.gate, self.sharpness = (nn.Linear(query_dim, 1) for _ in range(3))
        self.shift = nn.Linear(query_dim, len(self.shifts))

    def forward(self, query: Tensor, keys: Tensor, grid: Sequence[int], previous: Tensor | None = None) -> Tensor:
        """Score each pair of query and key."""
        return self._scores(query, self.located(query, keys, grid, previous)[2])

    def steps(self, query: Tensor, keys: Tensor, grid: Sequence[int], previous: Tensor | None = None) -> Addressed:
        """Compute the weights behind each step."""
        found = self.located(query, keys, grid, previous)
        return Addressed(*found, self._scores(query, found[2]).softmax(-1))

    def located(
        self, query: Tensor, keys: Tensor, grid: Sequence[int], previous: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the weights by content, interpolated and shifted, `(B, T, N)` each."""
        self._check(query, keys, grid, previous)
        strength = F.softplus(self.strength(query))  # (B, T, 1)
        alike = F.normalize(self.key(query), dim=-1) @ F.normalize(keys, dim=-1).mT  # (B, T, N)
        powers = (strength * (alike - 1)).to(torch.promote_types(alike.dtype, torch.float32)).exp()  # at most 1
        content = powers / powers.sum(-1, keepdim=True)
        gate = self.gate(query).sigmoid()
        before = 1 / content.shape[-1] if previous is None else previous
        interpolated = gate * content + (1 - gate) * before
        on_grid = torch.unflatten(interpolated, 2, tuple(grid))
        axes, shares = tuple(range(2, 2 + self.axes)), self.shift(query).softmax(-1).split(1, -1)  # (B, T, 1) each
        shifted = torch.zeros_like(interpolated)
        for shift, share in zip(self.shifts, shares, strict=True):
            shifted = shifted + torch.roll(on_grid, shift, axes).flatten(2) * share
        return content, interpolated, shifted

    def _scores(self, query: Tensor, shifted: Tensor) -> Tensor:
        """Sharpen: return scores whose softmax is proportional to a power of the weights."""
        least = torch.finfo(shifted.dtype).tiny  # weights that are 0 have no logarithm
        return (1 + F.softplus(self.sharpness(query))) * shifted.clamp_min(least).log()

    def _check(self, query: Tensor, keys: Tensor, grid: Sequence[int], previous: Tensor | None) -> None:
        check_tokens(self, query, self.query_dim)
        check_tokens(self, keys, self.key_dim)
        if len(grid) != self.axes:
            raise ShapeError(f"the grid must have {self.axes} axes, got {tuple(grid)}. Build the module with axes={len(grid)}.")
        if is_traced(keys):
            return
        count = 1
        for side in grid:
            count *= side
        if count != keys.shape[1]:
            raise ShapeError(f"the grid must have the {keys.shape[1]} positions of the keys, got {tuple(grid)}.")
        wanted = (*query.shape[:2], keys.shape[1])
        if previous is not None and tuple(previous.shape) != wanted:
            raise ShapeError(f"the previous weights must be {wanted}, got {shape_text(previous)}. Pass those of the last step.")
