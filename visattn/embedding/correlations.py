"""Correlation of dot product and distance of queries and keys: how well closeness in the joint space stands for attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from visattn._support.modes import in_own_modes
from visattn.errors import ShapeError

CLOSE = 0.005  # share of the pairs that count as close, as the authors choose it
_ROWS = 256  # queries at a time
_ROUNDED = 1e-12  # of the largest value: what a sum in double precision may be off
_PAIRS = 2_000  # queries and keys whose pairs are compared


def states(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys of one head in float64.

    Raises:
        ShapeError: If they are not `(N, D)` and `(M, D)`, with two or more of each.
    """
    if queries.ndim != 2 or keys.ndim != 2 or queries.shape[1] != keys.shape[1] or min(len(queries), len(keys)) < 2:
        raise ShapeError(
            f"queries and keys of one head must be (N, D) and (M, D), two or more of each, got {tuple(queries.shape)} and "
            f"{tuple(keys.shape)}."
        )
    return queries.detach().double(), keys.detach().double()


def distances(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the Euclidean distances `(N, M)`."""
    return torch.cdist(queries, keys, compute_mode="donot_use_mm_for_euclid_dist")  # exact for close pairs


@in_own_modes
def row_pearson(queries: Tensor, keys: Tensor, of_images: tuple[Tensor, Tensor] | None = None) -> float:
    """Correlate dot products with distances in each query's row, and average over queries, as AttentionViz reports it.

    The value says how well a query's nearest keys are those that it attends to. It depends on the scale of the queries, and for centered
    queries tends to -1 as that grows, whatever the data. So compare heads at the same criterion for the scale.

    Args:
        queries: `(N, D)` queries of one head in the joint space.
        keys: `(M, D)` keys of the same head in the joint space.
        of_images: The images `(N,)` and `(M,)` that they come from. If given, each query is compared with the keys of its own image only,
            as attention does.

    Returns:
        The mean over queries, from -1 to 1; -1 is best. NaN if no row varies.

    Raises:
        ShapeError: If the shapes differ.
    """
    return _mean_of_rows(queries, keys, of_images, ranked=False)


@in_own_modes
def row_spearman(queries: Tensor, keys: Tensor, of_images: tuple[Tensor, Tensor] | None = None) -> float:
    """Correlate the ranks of dot products and distances in each query's row, and average over queries; see `row_pearson`.

    Ties get their mean rank. Outliers, such as attention sinks, count no more than other keys.
    """
    return _mean_of_rows(queries, keys, of_images, ranked=True)


class Pairs(NamedTuple):
    """Distance and dot product of each pair of a query and a key."""

    apart: Tensor
    products: Tensor

    def limit(self, share: float = CLOSE) -> float:
        """Return the distance below which this share of the pairs lies."""
        place = share * (len(self.apart) - 1)
        low, high = (self.apart.kthvalue(min(int(place) + one, len(self.apart))).values for one in (1, 2))
        return float(low + (high - low) * (place - int(place)))

    def correlation(self, limit: float) -> float:
        """Correlate both over the pairs that are closer than a limit, with the weights `(limit - distance)^2`; NaN if nothing varies."""
        close = self.apart < limit
        weights = (limit - self.apart[close]).square()
        if int(close.sum()) < 2 or not float(weights.sum()):
            return float("nan")
        return float(row_correlation(self.products[close][None], self.apart[close][None], weights[None] / weights.sum())[0])


def pairs_of(queries: Tensor, keys: Tensor, seed: int = 0) -> Pairs:
    """Return all pairs of queries `(N, D)` and keys `(M, D)`; of more than 2,000 of either, those of a random 2,000.

    Raises:
        ShapeError: If the shapes differ.
    """
    queries, keys = states(queries, keys)
    generator = torch.Generator().manual_seed(seed)
    some, seen = (
        each[torch.randperm(len(each), generator=generator)[:_PAIRS].sort().values.to(each.device)] for each in (queries, keys)
    )
    return Pairs(distances(some, seen).flatten(), (some @ seen.T).flatten())


@in_own_modes
def weighted_correlation(queries: Tensor, keys: Tensor, *, seed: int = 0) -> float:
    """Correlate dot products with distances over all close pairs, with weights that fall with the distance.

    Args:
        queries: `(N, D)` queries of one head in the joint space. Of more than 2,000, a random 2,000 are compared; so with keys.
        keys: `(M, D)` keys of the same head in the joint space.
        seed: Seed of the draw.

    Returns:
        The weighted Pearson correlation over the closest 0.5 % of the pairs, from -1 to 1. With `limit` the largest distance among them,
        the weight of a pair is `(limit - distance)^2`. NaN if products or distances do not vary.

    Raises:
        ShapeError: If the shapes differ.
    """
    found = pairs_of(queries, keys, seed)
    return found.correlation(found.limit())


def _mean_of_rows(queries: Tensor, keys: Tensor, of_images: tuple[Tensor, Tensor] | None, *, ranked: bool) -> float:
    queries, keys = states(queries, keys)
    rows = [
        row_correlation(*(ranks(each) if ranked else each for each in (some @ seen.T, distances(some, seen))))
        for some, seen in _groups(queries, keys, of_images)
    ]
    return float(torch.cat(rows).nanmean())


def _groups(queries: Tensor, keys: Tensor, of_images: tuple[Tensor, Tensor] | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield some queries with the keys that they are compared with."""
    if of_images is None:
        yield from ((some, keys) for some in torch.split(queries, _ROWS))
        return
    theirs, of_keys = of_images
    if len(theirs) != len(queries) or len(of_keys) != len(keys):
        raise ShapeError(f"of_images must name {len(queries)} and {len(keys)} images, got {len(theirs)} and {len(of_keys)}.")
    for image in torch.unique(theirs):
        yield from ((some, keys[of_keys == image]) for some in torch.split(queries[theirs == image], _ROWS))


def row_correlation(one: Tensor, other: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the Pearson correlation of each row; NaN where a row does not vary by more than double precision rounds."""
    weights = torch.full_like(one, 1 / one.shape[1]) if weights is None else weights
    most = [each.abs().amax(1) for each in (one, other)]
    one, other = (each - (weights * each).sum(1, keepdim=True) for each in (one, other))
    spreads = [(weights * each.square()).sum(1).sqrt() for each in (one, other)]
    varies = (spreads[0] > _ROUNDED * most[0]) & (spreads[1] > _ROUNDED * most[1])
    found: Tensor = (weights * one * other).sum(1) / torch.where(varies, spreads[0] * spreads[1], torch.nan)
    return found


def ranks(values: Tensor) -> Tensor:
    """Return the ranks in each row; ties get their mean."""
    ordered = values.sort(1).values.contiguous()
    below, upto = (torch.searchsorted(ordered, values.contiguous(), side=side) for side in ("left", "right"))
    return (below + upto + 1).double() / 2
