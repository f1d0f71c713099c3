"""Joint space of a head's queries and keys: a translation of the keys and a scale, which change no attention."""

from __future__ import annotations

import math
from typing import NamedTuple, get_args

from torch import Tensor

from visattn._support.checks import one_of
from visattn._support.modes import in_own_modes
from visattn._support.types import Criterion
from visattn.embedding.correlations import pairs_of, states
from visattn.errors import OptionError

FACTORS = (0.2, 0.4, 0.8, 1.0, 1.25, 2.5, 5.0)  # those of the authors
_DEGENERATE = (
    "as the factor grows, the scaled keys draw together, and distances follow products whatever their closeness: for centered queries the "
    "correlation tends to -1"
)


class NoFactor(OptionError):
    """The criterion finds no scale for a head."""


class Joint(NamedTuple):
    """Queries and keys in one space.

    Attributes:
        queries: `(N, D)` queries times `factor`.
        keys: `(M, D)` keys divided by `factor`, then translated so that their mean is that of the queries.
        factor: Scale of the queries.
        shift: `(D,)` translation of the keys.
    """

    queries: Tensor
    keys: Tensor
    factor: float
    shift: Tensor


@in_own_modes
def joined(queries: Tensor, keys: Tensor, factor: float | None = None) -> Joint:
    """Put the queries and keys of a head into one space.

    A translation of all keys adds the same number to all scores of a query, and the scale cancels in each score. So the softmax is
    unchanged. Queries must not be translated: that would add another number for each key.

    Args:
        queries: `(N, D)` queries of one head, of any number of images.
        keys: `(M, D)` keys of the same head.
        factor: Scale of the queries; keys are divided by it. By default both then have the same median norm, see `factor_of`.

    Returns:
        Both in float64.

    Raises:
        ShapeError: If the shapes differ.
        NoFactor: If the factor is not given, and most queries or keys are zero.
        OptionError: If the factor is not a finite number above 0.

    Reference:
        Yeh et al., "AttentionViz", 2023, arXiv:2305.03210. The order is that of the paper: scale, then translate.
    """
    queries, keys = states(queries, keys)
    chosen = factor_of(queries, keys) if factor is None else float(factor)
    if not 0 < chosen < math.inf:
        raise OptionError(f"factor must be a finite number above 0, got {factor}.")
    scaled, divided = queries * chosen, keys / chosen
    shift = scaled.mean(0) - divided.mean(0)
    return Joint(scaled, divided + shift, chosen, shift)


@in_own_modes
def factor_of(queries: Tensor, keys: Tensor, criterion: Criterion = "norms") -> float:
    """Choose the scale of a head's queries.

    Args:
        queries: `(N, D)` queries of one head.
        keys: `(M, D)` keys of the same head.
        criterion: `norms`: the factor that gives queries and keys the same median norm, in closed form. `weighted`: of `FACTORS`, the one
            whose `weighted_correlation` is closest to -1, as the authors choose it. `shared`: the same, where the pairs are those
            that are close at factor 1, and the correlation is divided by the share of pairs that are still that close.

    Returns:
        The factor.

    Raises:
        NoFactor: If most queries or keys are zero, or the criterion finds no close pairs whose products and distances vary.
        OptionError: If the criterion is unknown. The correlation within rows is refused as a
            criterion: for centered queries it tends to -1 as the factor grows, whatever the data.
        ShapeError: If the shapes differ.
    """
    if str(criterion) in ("row_pearson", "row_spearman"):
        raise OptionError(f"criterion '{criterion}' says nothing about a head: {_DEGENERATE}. Choose norms or weighted.")
    one_of(criterion, get_args(Criterion), "criterion")
    queries, keys = states(queries, keys)
    if criterion == "norms":
        sizes = [float(each.norm(dim=1).median()) for each in (queries, keys)]
        if not all(sizes):
            raise NoFactor(
                "the median norm of the queries or of the keys is zero, so they have no common scale. Pass joined a factor."
            )
        return math.sqrt(sizes[1] / sizes[0])
    limit = pairs_of(*joined(queries, keys, 1.0)[:2]).limit() if criterion == "shared" else None
    known = {}
    for factor in FACTORS:
        pairs = pairs_of(*joined(queries, keys, factor)[:2])
        value = pairs.correlation(pairs.limit() if limit is None else limit)
        if limit is not None:
            value /= max(float((pairs.apart < limit).double().mean()), 1 / len(pairs.apart))
        if not math.isnan(value):
            known[factor] = value
    if not known:
        raise NoFactor("no factor leaves close pairs of queries and keys to compare. Choose norms, or pass more tokens.")
    return min(known, key=lambda factor: abs(known[factor] + 1))
