"""Metrics by name, as `evaluate` computes them for a map of one photo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

from torch import Tensor

from visattn._support.checks import at_least, one_of
from visattn.core.maps import AttentionMap
from visattn.core.methods import ScoredImages
from visattn.evaluation.agreement import RandomSets, random_sets, saco
from visattn.evaluation.choices import By, Replacement
from visattn.evaluation.curves import Curve, Sign, deletion, insertion, perturbation
from visattn.evaluation.given import MapLike, MaskLike
from visattn.evaluation.imputation import road
from visattn.evaluation.localization import auroc, average_precision, energy_inside, lift, pointing_game
from visattn.evaluation.scores import Score
from visattn.evaluation.through_captum import infidelity
from visattn.evaluation.units import units_of


@dataclass(frozen=True)
class Protocol:
    """How metrics are computed.

    Attributes:
        steps: Steps of deletion and insertion. RISE takes 224 for 224 pixels.
        by: `pixels`, or whole `cells` of the map.
        batch_size: Number of inputs in a batch.
        seed: Seed of the order of equal values, of random sets, of noise and of nulls.
        nulls: Number of shifted copies of each map, and of maps of smooth noise, see `nulls_of`; 0: no nulls of any kind.
        baseline: What replaces pixels: `black`, the `mean` color of the normalization, the `image mean` or a `blur`. None: that of each
            metric. `road` fills pixels from their neighbors in any case.
    """

    steps: int = 32
    by: By = "pixels"
    batch_size: int = 32
    seed: int = 0
    nulls: int = 5
    baseline: Replacement | None = None

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            OptionError: If one is out of range.
        """
        at_least("steps", self.steps)
        at_least("batch_size", self.batch_size)
        at_least("nulls", self.nulls, 0)
        at_least("seed", self.seed, 0)
        one_of(self.by, get_args(By), "unit")
        if self.baseline is not None:
            one_of(self.baseline, get_args(Replacement), "baseline")

    @property
    def common(self) -> dict[str, Any]:
        """Arguments of metrics of either unit."""
        return {"by": self.by, **self.of_cells}

    @property
    def of_cells(self) -> dict[str, Any]:
        """Arguments of metrics that sum the values of cells."""
        return {"batch_size": self.batch_size, "seed": self.seed}


@dataclass(frozen=True, eq=False)
class ScoredPhoto:
    """An input with its score, and what the maps of this input share.

    Attributes:
        images: The input and the score.
        sets: Random sets of the units of each layout, with their losses.
    """

    images: ScoredImages
    sets: dict[bytes, RandomSets] = field(default_factory=dict)

    @property
    def pixels(self) -> Tensor:
        """The input, `(1, C, H, W)`."""
        return self.images.pixels

    @property
    def score(self) -> Score:
        """Function from inputs to scores."""
        return self.images.score

    def replaced(self, how: Protocol, own: Replacement | None = None) -> dict[str, Any]:
        """Return the argument `baseline` of a metric; nothing where the metric has its own."""
        chosen = how.baseline or own
        if chosen is None:
            return {}
        named = chosen in ("image mean", "blur")  # which metrics know by name
        return {"baseline": chosen if named else self.images.baseline(chosen)}  # type: ignore[arg-type]

    def sensitivity(self, shown: MapLike, how: Protocol) -> float:
        """Return `sensitivity_n` of a map; only the first map of a layout runs the model."""
        units = units_of(shown, (self.pixels.shape[-2], self.pixels.shape[-1]), "cells")
        layout = units.index.tobytes()
        if layout not in self.sets:
            self.sets[layout] = random_sets(self.score, self.pixels, units, **self.replaced(how), **how.of_cells)
        return self.sets[layout].correlations(units.values).mean


class Metric(NamedTuple):
    """A metric.

    Attributes:
        compute: Function from a photo with its score, a map and a protocol to a number, or to a curve whose area is the number.
        higher: Whether a higher number is better.
        text: What the number is.
    """

    compute: Callable[[ScoredPhoto, MapLike, Protocol], float | Curve]
    higher: bool
    text: str


class Located(NamedTuple):
    """A metric of how well a map finds a mask.

    Attributes:
        compute: Function from a map with its geometry and a mask to a number.
        higher: Whether a higher number is better.
        text: What the number is.
    """

    compute: Callable[[AttentionMap, MaskLike], Any]
    higher: bool
    text: str


LOCATED: dict[str, Located] = {
    "auroc": Located(auroc, higher=True, text="probability that a pixel of the object has a larger value than another"),
    "average_precision": Located(average_precision, higher=True, text="area under precision and recall of the object's pixels"),
    "pointing_game": Located(pointing_game, higher=True, text="whether the largest value lies on the object"),
    "energy_inside": Located(energy_inside, higher=True, text="share of the map's sum on the object"),
    "lift": Located(lift, higher=True, text="that share over the object's share of the area"),
}

METRICS: dict[str, Metric] = {
    "deletion": Metric(
        lambda photo, shown, how: deletion(
            photo.score, photo.pixels, shown, steps=how.steps, **photo.replaced(how), **how.common
        ),
        higher=False,
        text="area under the score while the first pixels are replaced",
    ),
    "insertion": Metric(
        lambda photo, shown, how: insertion(
            photo.score, photo.pixels, shown, steps=how.steps, **photo.replaced(how), **how.common
        ),
        higher=True,
        text="area under the score while the first pixels come into the baseline",
    ),
    "positive": Metric(
        lambda photo, shown, how: _blackened(photo, shown, how, "positive"),
        higher=False,
        text="area from 0 to 0.9 under the score while the first pixels are replaced",
    ),
    "negative": Metric(
        lambda photo, shown, how: _blackened(photo, shown, how, "negative"),
        higher=True,
        text="area from 0 to 0.9 under the score while the last pixels are replaced",
    ),
    "saco": Metric(
        lambda photo, shown, how: saco(photo.score, photo.pixels, shown, **photo.replaced(how), **how.common),
        higher=True,
        text="salience-guided faithfulness coefficient of ten groups",
    ),
    "sensitivity_n": Metric(
        lambda photo, shown, how: photo.sensitivity(shown, how),
        higher=True,
        text="mean correlation of sums of cells with losses of the score",
    ),
    "road": Metric(
        lambda photo, shown, how: road(photo.score, photo.pixels, shown, **how.common).combined,
        higher=True,
        text="half the difference of scores without the last and without the first pixels, filled from their neighbors",
    ),
    "infidelity": Metric(
        lambda photo, shown, how: infidelity(photo.score, photo.pixels, shown, **photo.replaced(how), **how.of_cells),
        higher=False,
        text="mean squared difference of sums of cells and losses of the score",
    ),
}


def _blackened(photo: ScoredPhoto, shown: MapLike, how: Protocol, sign: Sign) -> Curve:
    """Return the curve of a perturbation, with black pixels as in the paper."""
    return perturbation(photo.score, photo.pixels, shown, sign=sign, **photo.replaced(how, "black"), **how.common)


def is_higher_better(metric: str) -> bool:
    """Check whether a higher number is better, of a metric of either table."""
    return METRICS[metric].higher if metric in METRICS else LOCATED[metric].higher
