"""Mean ranks of maps over photos, and the difference between two that chance does not explain."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from visattn._support.checks import between
from visattn._support.extras import need
from visattn._support.reprs import brief
from visattn.errors import OptionError
from visattn.evaluation.map_numbers import Evaluation
from visattn.evaluation.metric_table import is_higher_better

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class MeanRanks:
    """Mean ranks of maps by one metric; 1 is the best.

    Attributes:
        metric: Name of the metric.
        maps: Names of the maps, the best first.
        ranks: `(maps,)` mean ranks over photos; equal numbers share their mean rank.
        photos: Number of photos for which the metric is defined for every map.
        critical: Two mean ranks differ by more than this only if the maps differ, at the level that was asked for (Nemenyi).
    """

    metric: str
    maps: tuple[str, ...]
    ranks: Array
    photos: int
    critical: float

    __repr__ = brief

    def alike(self) -> list[tuple[str, ...]]:
        """Return the largest groups of maps whose mean ranks differ by no more than the critical difference."""
        groups = list[tuple[str, ...]]()
        for first, rank in enumerate(self.ranks):
            last = int(np.flatnonzero(self.ranks <= rank + self.critical)[-1])
            if last > first and not (groups and self.maps[last] in groups[-1]):
                groups.append(self.maps[first : last + 1])
        return groups


def mean_ranks(evaluation: Evaluation, metric: str, *, level: float = 0.05) -> MeanRanks:
    """Rank the maps of each photo, and return the mean ranks with their critical difference.

    Args:
        evaluation: Numbers of at least two maps.
        metric: Name of one of its metrics.
        level: Probability that maps which do not differ are told apart somewhere.

    Returns:
        The ranks, over photos for which every map has a number. A map without a number on half of the photos or more is not ranked.

    Raises:
        MissingExtra: If scipy is not installed.
        OptionError: If the metric was not measured, or no photo has numbers of two maps or more.

    Reference:
        Demsar, "Statistical Comparisons of Classifiers over Multiple Data Sets", JMLR 2006, section 3.2.2.
    """
    need("scipy", "flow", "mean_ranks")
    from scipy.stats import rankdata, studentized_range

    between(level, 0, 1, "level")
    if metric not in evaluation.metrics:
        raise OptionError(f"metric must be one of {', '.join(evaluation.metrics)}, got {metric}.")
    photos = list(dict.fromkeys(one.place for one in evaluation.numbers))
    numbers = {(one.place, one.map): one.own.get(metric, math.nan) for one in evaluation.numbers}
    maps = evaluation.maps
    table = np.array([[numbers.get((photo, name), math.nan) for name in maps] for photo in photos]).reshape(
        len(photos), len(maps)
    )
    kept = np.isnan(table).mean(0) < 0.5
    maps, table = [name for name, keeps in zip(maps, kept, strict=True) if keeps], table[:, kept]
    table = table[~np.isnan(table).any(1)]
    if len(maps) < 2 or not len(table):
        raise OptionError(f"{metric}: no photo has numbers of two maps or more, so nothing is ranked.")
    ranks = rankdata(-table if is_higher_better(metric) else table, axis=1).mean(0)
    order = np.argsort(ranks, kind="stable")
    count = len(maps)
    quantile = studentized_range.ppf(1 - level, count, math.inf) / math.sqrt(2)
    critical = float(quantile * math.sqrt(count * (count + 1) / (6 * len(table))))
    return MeanRanks(metric, tuple(maps[place] for place in order), ranks[order], len(table), critical)
