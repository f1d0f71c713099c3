"""Principal components of many tokens of many heads, from sums that are gathered image by image."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from visattn._support.modes import in_own_modes
from visattn.errors import OptionError, ShapeError


@dataclass
class Moments:
    """Number, mean and covariance of the tokens of each head, gathered in parts.

    Attributes:
        count: Number of tokens.
        mean: `(heads, D)`.
        scatter: `(heads, D, D)` sum of outer products of deviations from the mean.
    """

    count: int
    mean: Tensor
    scatter: Tensor

    @classmethod
    def empty(cls, heads: int, width: int) -> Moments:
        """Return moments of no tokens."""
        return cls(0, torch.zeros(heads, width, dtype=torch.float64), torch.zeros(heads, width, width, dtype=torch.float64))

    def add(self, tokens: Tensor) -> None:
        """Add tokens `(heads, N, D)`.

        Raises:
            ShapeError: If heads or width differ.

        Reference:
            Chan, Golub & LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
        """
        if tokens.ndim != 3 or (tokens.shape[0], tokens.shape[2]) != tuple(self.mean.shape):
            raise ShapeError(
                f"tokens must be (heads, N, D) with {tuple(self.mean.shape)} heads and D, got {tuple(tokens.shape)}."
            )
        if not tokens.shape[1]:
            return
        tokens = tokens.detach().double().cpu()
        mean, number = tokens.mean(1), tokens.shape[1]
        apart, moved = tokens - mean[:, None], mean - self.mean
        total = self.count + number
        self.scatter += apart.mT @ apart + moved[:, :, None] * moved[:, None] * (self.count * number / total)
        self.mean += moved * (number / total)
        self.count = total


@in_own_modes
def joint_axes(queries: Moments, keys: Moments, factors: Tensor, count: int = 2) -> tuple[Tensor, Tensor]:
    """Return the principal axes of each head's queries and keys in their joint space.

    In that space both have the same mean, so their joint covariance follows from the two separate ones: no token is read twice.

    Args:
        queries: Moments of the queries.
        keys: Moments of the keys.
        factors: `(heads,)` scale of each head's queries, see `joined`.
        count: Number of axes.

    Returns:
        The axes `(heads, count, D)`, with the largest entry of each positive, and the share of the variance along each `(heads, count)`.

    Raises:
        OptionError: If there are fewer than two tokens, or fewer dimensions than axes.
    """
    total, width = queries.count + keys.count, queries.mean.shape[1]
    if total < 2 or not 1 <= count <= width:
        raise OptionError(f"{count} axes need two or more tokens of at least as many dimensions, got {total} of {width}.")
    by = factors.double()[:, None, None]
    spread, axes = torch.linalg.eigh((queries.scatter * by.square() + keys.scatter / by.square()) / (total - 1))
    spread, axes = spread.flip(1), axes.flip(2).mT[:, :count]
    signs = axes.gather(2, axes.abs().argmax(2, keepdim=True)).sign()
    shares = spread[:, :count] / spread.clamp(min=0).sum(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return axes * signs, shares
