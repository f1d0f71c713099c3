"""How far one map can be trusted: a perturbation test among nulls, another family of methods, sinks, and robustness."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from visattn._support.checks import at_least, between
from visattn._support.reprs import brief
from visattn.core.maps import AttentionMap
from visattn.core.methods import METHODS, ScoredImages, name_of
from visattn.core.methods.method_table import MODULES
from visattn.core.pipeline.again import scoring
from visattn.core.pipeline.answering import with_target
from visattn.core.pipeline.explanation import Explanation
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.question import ask
from visattn.core.pipeline.running import explained
from visattn.core.pipeline.targets import Target
from visattn.errors import NoAttentionCaptured, OptionError, VisattnError
from visattn.evaluation.agreement import RandomSets, random_sets
from visattn.evaluation.baselines import shifted_copies
from visattn.evaluation.explaining import Explainer
from visattn.evaluation.nulls import nulls_of
from visattn.evaluation.object_masks import refuse_holes
from visattn.evaluation.randomization import spearman
from visattn.evaluation.robustness_of_maps import Robustness, robustness
from visattn.evaluation.units import Units, units_of

Array = NDArray[np.float64]
Interval = tuple[float, float, float]  # a number, and the ends of its 95 % interval

MOST_CELLS = 16  # along a side; maps of more cells are pooled
SHARES = 0.1, 0.3, 0.5  # of the cells that a set holds
MOST_SETS, AT_ONCE = 1536, 48
RESAMPLES, COPIES, SAMPLES = 300, 100, 3
_ROUNDING = 1e-5  # of a score in float32, relative to it
_EQUAL, _ALIKE = 1e-12, 1e-3  # differences of values of a map, and of two runs of a method, relative to the largest value
OTHERS = {  # methods of another family, the first that applies
    "from_attention": ("gradcam", "captum.saliency"),
    "from_features": ("gradcam", "captum.saliency"),
    "from_gradients": ("rollout", "attention", "eigencam"),
    "by_perturbation": ("gradcam", "captum.saliency"),
}


@dataclass(frozen=True, eq=False)
class Check:
    """What tests say of one map. They give numbers and no verdict: a map that passes all of them can still be wrong.

    Attributes:
        score: What the perturbation test follows.
        sets: Random sets of cells that were replaced by the mean color.
        correlation: Correlation of the map's sums over these sets with what the score lost, with the 95 % interval over sets.
        rank: Place of the map among `nulls` maps that know nothing, by that correlation, 1 is the best; with its interval.
        nulls: Number of these maps: shifted and flipped copies, smooth noise, a center prior and edges; constant ones do not count.
        other: Method of another family that the map was compared with.
        agreement: Spearman correlation with its map.
        chance: The 95 % range of the correlation with shifted copies of that map.
        sinks: Number of attention sinks in the map; None if they were not looked for.
        share_of_sinks: Share of the map's sum on them.
        robustness: Correlations with the maps of changed inputs, see `robustness`.
        left_out: Why a test was left out, by its name.
        maps: Number of maps that were computed besides.
        seconds: Time that all tests took.
    """

    score: str = ""
    sets: int = 0
    correlation: Interval | None = None
    rank: Interval | None = None
    nulls: int = 0
    other: str = ""
    agreement: float | None = None
    chance: tuple[float, float] | None = None
    sinks: int | None = None
    share_of_sinks: float | None = None
    robustness: Robustness | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    maps: int = 0
    seconds: float = 0.0

    __repr__ = brief

    def lines(self) -> list[str]:
        """Return the numbers in words, one line for each test."""
        told = list[str]()
        if self.correlation is not None and self.rank is not None:
            told.append(
                f"perturbation: rank {_told(self.rank, '.0f')} of {self.nulls + 1}, where the others know nothing; correlation with the "
                f"loss of {self.score}: {_told(self.correlation)} over {self.sets:,} random sets of cells"
            )
        if self.agreement is not None and self.chance is not None:
            told.append(
                f"another family: {self.other} has the rank correlation {self.agreement:.2f}; its shifted copies have "
                f"{self.chance[0]:.2f} to {self.chance[1]:.2f}"
            )
        if self.sinks is not None:
            share = "" if self.share_of_sinks is None else f", which hold {self.share_of_sinks:.0%} of the map"
            told.append(f"sinks: {self.sinks}{share if self.sinks else ''}")
        if self.robustness is not None:
            parts = vars(self.robustness)
            told.append("the same map under " + ", ".join(f"{name} {_range(values)}" for name, values in parts.items()))
        told += [f"{name}: left out, {reason}" for name, reason in self.left_out.items()]
        return [*told, f"{self.maps} more maps; {self.seconds:.1f} s in all"]

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as JSON."""
        values = {name: value for name, value in vars(self).items() if name != "robustness"}
        stable = None if self.robustness is None else {name: np.asarray(x).tolist() for name, x in vars(self.robustness).items()}
        return {**values, "left_out": dict(self.left_out), "robustness": stable}


def check(explanation: Explanation, *, seconds: float = 20.0, sets: int | None = None, nulls: int = 25, seed: int = 0) -> Check:
    """Test how far a map can be trusted, with the model that made it.

    The perturbation test replaces random sets of cells, a tenth, three tenths and half of them, and correlates sums of the map over these
    sets with what the score loses. All maps share the sets, so the map's rank among maps that know nothing costs no further passes. Maps of
    more than 16 x 16 cells are pooled first.

    Args:
        explanation: What `visattn.explain` returned, with all its heads and layers.
        seconds: Time for the tests. Random sets are drawn until half of it is over, at least 48 and at most 1,536. A test that would
            take longer than what is left is left out, and says so.
        sets: Number of random sets instead, rounded up to a multiple of 48, so that a result does not depend on the machine.
        nulls: Number of shifted copies, and of maps of smooth noise. With 3 flipped copies, a center prior and edges, 25 make 55 nulls.
        seed: Seed of sets, nulls and changes of the input.

    Returns:
        Numbers with intervals.

    Raises:
        OptionError: If the model that made the map is not known or is gone, or gives another map now; if the map has components; or if a
            number is out of range.
    """
    between(seconds, 0, float("inf"), "seconds")
    at_least("nulls", nulls, 25)
    at_least("seed", seed, 0)
    if sets is not None:
        at_least("sets", sets)
    began = time.perf_counter()
    asked = _Asked.of(explanation, seed)
    one = _same_map(asked)
    tests: dict[str, Callable[[float], tuple[dict[str, Any], int]]] = {
        "perturbation": lambda end: _perturbation(asked, sets, nulls, end),
        "another family": lambda _end: _another_family(asked),
        "sinks": lambda _end: (_sinks(explanation), 0),
        "robustness": lambda end: _robustness(asked, one, end if sets is None else float("inf")),
    }
    ends = {"perturbation": began + seconds / 2}
    facts, left_out, maps = dict[str, Any](), dict[str, str](), 1
    for name, test in tests.items():
        try:
            found, count = test(ends.get(name, began + seconds))
        except VisattnError as error:
            left_out[name] = str(error)
            continue
        facts |= found
        maps += count
    return Check(**facts, left_out=left_out, maps=maps, seconds=time.perf_counter() - began)


@dataclass(frozen=True)
class _Asked:
    """What the tests of a map share.

    Attributes:
        explain: The method as a function of pixels.
        shown: The map, its mean over heads and layers.
        model: The model.
        prepared: Its input.
        target: What the perturbation test follows.
        seed: Seed of the tests.
    """

    explain: Explainer
    shown: AttentionMap
    model: nn.Module
    prepared: Prepared
    target: Target
    seed: int

    @classmethod
    def of(cls, explanation: Explanation, seed: int) -> _Asked:
        """Return it for an explanation.

        Raises:
            OptionError: If the model that made it is not known.
        """
        reference, prepared, question = vars(explanation).get("made_by", (None, None, None))
        model = reference and reference()
        if model is None:
            raise OptionError(
                "the model that made this map is not known: it is gone, or the map is part of an explanation, or one of several that have "
                "a target each. Check what visattn.explain returned, while the model lives."
            )
        if explanation.panel.axes:
            raise OptionError("a map of several components cannot be checked. Use another method.")
        explain = Explainer.of_explanation(model, prepared, question, prepared.seed, explanation)
        return cls(explain, explanation.panel, model, prepared, _class_of(question.target, explanation), seed)


def _same_map(asked: _Asked) -> float:
    """Return how long a map takes, of the model as it is now.

    Raises:
        OptionError: If it is not the map that is checked.
    """
    began = time.perf_counter()
    again, shown = (one.values.detach().double().cpu() for one in (asked.explain(asked.explain.pixels), asked.shown))
    if again.shape != shown.shape or float((again - shown).abs().max()) > _ALIKE * float(shown.abs().max()):
        raise OptionError(
            "the model gives another map of this photo now, so its weights or its mode have changed. Explain again."
        )
    return time.perf_counter() - began


def _perturbation(asked: _Asked, sets: int | None, nulls: int, end: float) -> tuple[dict[str, Any], int]:
    """Return the rank of the map by random sets of cells."""
    prepared, target = with_target(asked.model, asked.prepared, asked.target)
    pooled = _pooled(asked.shown)
    with scoring(asked.model, prepared, target) as (recording, images):
        blind = [null for several in nulls_of(pooled, images.pixels, count=nulls, seed=asked.seed).values() for null in several]
        units = units_of(pooled, (images.pixels.shape[-2], images.pixels.shape[-1]), "cells")
        drawn = _random_sets(images, units, sets, end, asked.seed)
        before = images.score(images.pixels).detach()
    values = np.stack([units_of(shown, units.index.shape, "cells").values for shown in (pooled, *blind)], 1)
    if np.ptp(drawn.losses) <= _ROUNDING * max(abs(float(before)), 1e-30):
        raise OptionError("the score does not change when cells are replaced")
    if np.ptp(values[:, 0]) <= _EQUAL * np.abs(values[:, 0]).max():
        raise OptionError("the map is constant")
    found = drawn.resampled(values, RESAMPLES, asked.seed)  # (1 + resamples, maps)
    is_known = ~np.isnan(found[0])  # the edges of an even photo have no correlation
    usable = ~np.isnan(found[:, is_known]).any(1)  # in some draws of the sets no score changes
    if not is_known[0] or usable.sum() <= RESAMPLES / 2:
        raise OptionError("too few of the replaced cells change the score")
    found = found[usable][:, is_known]
    own, others = found[:, :1], found[:, 1:]
    ranks = 1 + (others > own).sum(1) + (others == own).sum(1) / 2
    score = ", ".join(text.partition(" = ")[0] for text in recording.provenance.target or ()) or "the score"
    told = {"score": score, "sets": drawn.losses.size, "nulls": others.shape[1]}
    return {**told, "correlation": _interval(found[:, 0]), "rank": _interval(ranks)}, 0


def _random_sets(images: ScoredImages, units: Units, sets: int | None, end: float, seed: int) -> RandomSets:
    """Draw random sets of cells until the time is over, or as many as asked for."""
    parts = list[RandomSets]()
    while len(parts) * AT_ONCE < (sets or MOST_SETS) and (sets or not parts or time.perf_counter() < end):
        part = random_sets(images.score, images.pixels, units, SHARES, AT_ONCE // len(SHARES), seed=seed + len(parts))
        parts.append(part)
    return RandomSets(np.concatenate([part.chosen for part in parts], 1), np.concatenate([part.losses for part in parts], 1))


def _another_family(asked: _Asked) -> tuple[dict[str, Any], int]:
    """Return the agreement with a method of another family."""
    family = MODULES[name_of(str(asked.shown.provenance.method))].partition(".")[0]
    for name in OTHERS.get(family, OTHERS["from_features"]):
        target = asked.target if METHODS[name].targeted else Target()
        try:
            found = explained(asked.model, [asked.prepared], ask(name, {}, target), seed=asked.seed)[0].panel
        except (OptionError, NoAttentionCaptured):
            continue
        grid = [min(sides) for sides in zip(asked.shown.layout.grid, found.layout.grid, strict=True)]
        own, other = _cells(asked.shown, grid), _cells(found, grid)
        agreement = spearman(own, other)
        if np.isnan(agreement):
            raise OptionError(f"the map, or that of {name}, is constant")
        copies = shifted_copies(other, COPIES, asked.seed).values.numpy()
        low, high = np.quantile([spearman(own, copy) for copy in copies], [0.025, 0.975])
        return {"other": name, "agreement": agreement, "chance": (float(low), float(high))}, 1
    raise OptionError("no method of another family applies to this model")


def _sinks(explanation: Explanation) -> dict[str, Any]:
    """Return the number of sinks of a map, and their share of it."""
    sinks = explanation.map.facts.sinks
    if not METHODS[name_of(str(explanation.provenance.method))].sinks:
        return {}
    values = explanation.panel.values.double()
    at = [(sink.row, sink.column) for several in sinks for sink in several]
    whole = float(values.sum())
    share = sum(float(values[place]) for place in at) / whole if whole > 0 and not bool((values < 0).any()) else None
    return {"sinks": len(at), "share_of_sinks": share}


def _robustness(asked: _Asked, one: float, end: float) -> tuple[dict[str, Any], int]:
    """Return the robustness of the map; `one` is how long a map takes.

    Raises:
        OptionError: If the time does not suffice.
    """
    count = 2 * SAMPLES + 8
    needed = one * count
    if time.perf_counter() + needed > end:
        raise OptionError(f"{count} more maps take about {needed:.0f} s, which is more than is left; pass more seconds")
    found = robustness(asked.explain, asked.explain.pixels, samples=SAMPLES, seed=asked.seed)
    return {"robustness": found}, count


def _class_of(target: Target, explanation: Explanation) -> Target:
    """Return the target of a map; without one, the class that the map is of, or else the one that the model predicts."""
    classes = [score["class"] for score in explanation.provenance.scores]
    return replace(target, of=classes[0]) if not target.given and len(classes) == 1 else target


def _pooled(shown: AttentionMap) -> AttentionMap:
    """Return a map of at most 16 x 16 cells."""
    grid = [min(side, MOST_CELLS) for side in shown.layout.grid]
    if grid == list(shown.layout.grid):
        return shown
    values = torch.from_numpy(_cells(shown, grid))
    return replace(shown, values=values, layout=replace(shown.layout, grid=(grid[0], grid[1])))


def _cells(shown: AttentionMap, grid: Sequence[int]) -> Array:
    """Return the values of a map on a grid of as many cells or fewer: means of its cells."""
    refuse_holes(shown)
    means: Array = F.adaptive_avg_pool2d(shown.values.detach().double().cpu()[None], (grid[0], grid[1]))[0].numpy()
    return means


def _interval(numbers: Array) -> Interval:
    """Return the first number, and the 95 % interval of the others."""
    low, high = np.nanquantile(numbers[1:], [0.025, 0.975])
    return float(numbers[0]), float(low), float(high)


def _told(interval: Interval, form: str = ".2f") -> str:
    return f"{interval[0]:{form}} ({interval[1]:{form}} to {interval[2]:{form}})"


def _range(values: Any) -> str:  # noqa: ANN401 - one number or several
    several = np.atleast_1d(values)
    several = several[~np.isnan(several)]
    if not len(several):
        return "undefined"
    return f"{several.mean():.2f}" if len(several) == 1 else f"{several.mean():.2f} (worst {several.min():.2f})"
