"""Numbers that metrics give maps and their nulls, and tables of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from visattn._support.reprs import brief
from visattn.evaluation.intervals import mean_interval
from visattn.evaluation.metric_table import is_higher_better
from visattn.evaluation.nulls import NULLS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from visattn._support.tables import Row

    Array = NDArray[np.float64]


LEAST = 10  # photos from which a kind of null is called beaten


class Curves(NamedTuple):
    """Curve of a map by one metric, and the mean curve of its nulls.

    Attributes:
        fractions: Shares of the units that are removed or inserted.
        scores: Scores.
        nulls: Mean scores of the nulls; empty without nulls.
    """

    fractions: list[float]
    scores: list[float]
    nulls: list[float]


@dataclass(frozen=True, eq=False)
class MapNumbers:
    """Numbers of one map of one photo.

    Attributes:
        place: Number of the photo among the photos.
        photo: Name of the photo; `photo 3` if it has none.
        target: What the score is of.
        map: Name of the method, or of the map.
        own: Number of the map itself, by metric; NaN where it is not defined.
        nulls: Numbers of maps that know nothing, by metric and kind, see `nulls_of`.
        curves: Curves by metric, for those metrics that have one.
        seconds: Time that the map took, and its metrics with those of its nulls.
        left_out: Why there are no numbers; empty if there are.
    """

    place: int
    photo: str
    target: str
    map: str
    own: Mapping[str, float]
    nulls: Mapping[str, Mapping[str, Sequence[float]]]
    curves: Mapping[str, Curves] = field(default_factory=dict)
    seconds: tuple[float, float] = (0.0, 0.0)
    left_out: str = ""

    __repr__ = brief

    def beaten(self, metric: str) -> float:
        """Return the share of all nulls that the map beats by a metric, ties by one half; NaN where the metric is not defined."""
        own, sign = self.own[metric], 1 if is_higher_better(metric) else -1
        others = np.array([value for several in self.nulls[metric].values() for value in several], float)
        others = others[~np.isnan(others)]
        if math.isnan(own) or not len(others):
            return float("nan")
        return float((np.sign(sign * (own - others)) + 1).mean() / 2)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Numbers of all maps of all photos.

    Attributes:
        numbers: Numbers of each map of each photo.
        metrics: Names of the metrics.
    """

    numbers: Sequence[MapNumbers]
    metrics: Sequence[str]

    __repr__ = brief

    @property
    def maps(self) -> list[str]:
        """Names of the maps, in order."""
        return list(dict.fromkeys(one.map for one in self.numbers))

    def rows(self) -> list[Row]:
        """Return a row for each map and metric: means over photos, with 95 % intervals where there are two photos or more.

        `beaten` is the mean share of the photo's own nulls that the map beats; one half is chance. For each kind of null there is the mean
        number, and whether the map is better on the same photos: `yes` if the interval of the difference lies on the better side of 0,
        `worse` if it lies on the other, else `no`; None for fewer than ten photos, whose intervals are too narrow.
        """
        return [self._row(name, metric) for metric in self.metrics for name in self.maps]

    def _row(self, name: str, metric: str) -> Row:
        chosen = [one for one in self.numbers if one.map == name and not one.left_out and not math.isnan(one.own[metric])]
        own, sign = np.array([one.own[metric] for one in chosen]), 1 if is_higher_better(metric) else -1
        beaten = np.array([one.beaten(metric) for one in chosen])
        row: dict[str, float | str | None] = {
            "metric": metric,
            "better": "higher" if is_higher_better(metric) else "lower",
            "map": name,
            "photos": len(chosen),
            **_described("value", own),
            **_described("beaten", beaten[~np.isnan(beaten)]),
        }
        for kind in NULLS:
            null = np.array([np.mean(one.nulls[metric].get(kind, math.nan)) for one in chosen])
            defined = ~np.isnan(null)
            row[kind] = float(null[defined].mean()) if defined.any() else None
            row[f"above {kind}"] = _verdict(sign * (own - null)[defined])
        return row


def _described(name: str, values: Array) -> Row:
    """Return the mean of numbers, and its interval."""
    if not len(values):
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    low, high = mean_interval(values) if len(values) > 1 else (None, None)
    return {
        name: float(values.mean()),
        f"{name}_low": None if low is None else float(low),
        f"{name}_high": None if high is None else float(high),
    }


def _verdict(better: Array) -> str | None:
    """Return whether a mean difference is above 0, by its interval; None for few photos."""
    if len(better) < LEAST:
        return None
    low, high = mean_interval(better)
    return "yes" if low > 0 else "worse" if high < 0 else "no"
