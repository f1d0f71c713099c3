"""Metrics that compare the values of a map with what the score loses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from visattn._support.checks import at_least, between
from visattn._support.reprs import brief
from visattn.errors import MapError, OptionError
from visattn.evaluation.choices import By
from visattn.evaluation.given import MapLike
from visattn.evaluation.scores import Baseline, Score, background, in_batches, one_input, scores_of
from visattn.evaluation.units import Units, units_of

Array = NDArray[np.float64]
SIZES = tuple(step / 10 for step in range(1, 9))
_ROUNDING, _TINY = 1e-12, np.finfo(np.float64).tiny  # of sums, relative to the largest


def saco(
    score: Score,
    pixels: Tensor,
    shown: MapLike,
    *,
    groups: int = 10,
    baseline: Baseline = "image mean",
    by: By = "pixels",
    batch_size: int = 32,
    seed: int = 0,
) -> float:
    """Check whether a group of pixels that has larger values also matters more: salience-guided faithfulness coefficient.

    Pixels are cut into groups of equal size by the order of the map; the score loses `d_i` when group `i` is replaced. For each two groups
    `i` before `j`, the difference of their mean values is a weight `w >= 0`; it counts as `+w` if `d_i >= d_j`, else as `-w`. The result
    is the sum over the sum of all weights.

    Args:
        score: See `deletion`.
        pixels: See `deletion`.
        shown: See `deletion`.
        groups: Number of groups, at least 2 and at most the number of units. Sizes differ by one at most.
        baseline: What replaces a group, see `deletion`.
        by: See `deletion`.
        batch_size: See `deletion`.
        seed: See `deletion`.

    Returns:
        A number from -1 to 1. It is not defined, NaN, for a constant map, and where all groups lose the same.

    Raises:
        OptionError: If a number is out of range, or a word unknown.
        ShapeError: See `deletion`.
        MapError: See `deletion`; or the map has fewer units than groups.

    Reference:
        Wu et al., "On the Faithfulness of Vision Transformer Explanations", CVPR 2024, arXiv:2404.01415, algorithm 1. Differs: means
        instead of sums, which are the same number for groups of equal size; equal values come in random order; the paper gives 1 to every
        map where all groups lose the same.
    """
    pixels = one_input(pixels)
    units = units_of(shown, (pixels.shape[-2], pixels.shape[-1]), by, seed)
    if len(units) < at_least("groups", groups, 2):
        raise MapError(f"the map has {len(units)} units, fewer than {groups} groups.")
    parts = np.array_split(units.order, groups)
    chosen = np.zeros((groups, len(units)), bool)
    for group, part in enumerate(parts):
        chosen[group, part] = True
    losses = _losses(score, pixels, units, chosen, background(pixels, baseline), batch_size)
    if np.ptp(units.values) == 0 or np.ptp(losses) == 0:
        return float("nan")
    means = np.array([units.values[part].mean() for part in parts])
    first, second = np.triu_indices(groups, 1)
    weights = np.where(losses[first] >= losses[second], 1, -1) * (means[first] - means[second])
    return float(weights.sum() / np.abs(weights).sum())


@dataclass(frozen=True, eq=False)
class SensitivityN:
    """Correlation of sums of values with losses of the score, for random sets of units.

    Attributes:
        fractions: `(sizes,)` share of the units in a set.
        correlations: `(sizes,)` Pearson correlation over the sets of a size; NaN if all sums or all losses are equal.
    """

    fractions: Array
    correlations: Array

    __repr__ = brief

    @property
    def mean(self) -> float:
        """Mean of the correlations that are defined; NaN if none is."""
        defined = self.correlations[~np.isnan(self.correlations)]
        return float(defined.mean()) if len(defined) else float("nan")


def sensitivity_n(
    score: Score,
    pixels: Tensor,
    shown: MapLike,
    *,
    fractions: Sequence[float] = SIZES,
    subsets: int = 100,
    baseline: Baseline = 0.0,
    by: By = "cells",
    batch_size: int = 32,
    seed: int = 0,
) -> SensitivityN:
    """Correlate the sum of values over random sets of `n` units with what the score loses when these are replaced.

    A map whose values add up to every loss has the correlation 1 for every `n`.

    Args:
        score: See `deletion`.
        pixels: See `deletion`.
        shown: See `deletion`. Values are summed with their sign.
        fractions: Shares of the units in a set, above 0 and below 1.
        subsets: Number of random sets of each size, at least 2.
        baseline: What replaces a unit, see `deletion`.
        by: See `deletion`.
        batch_size: See `deletion`.
        seed: Seed of the sets.

    Returns:
        The correlations.

    Raises:
        OptionError: If a number is out of range, or a word unknown.
        ShapeError: See `deletion`.
        MapError: See `deletion`.

    Reference:
        Ancona et al., "Towards better understanding of gradient-based attribution methods for Deep Neural Networks", ICLR 2018,
        arXiv:1711.06104, section 4, with its 100 sets and sizes up to 80 %. Differs: sets of cells, as a map has few values of its own.
    """
    pixels = one_input(pixels)
    units = units_of(shown, (pixels.shape[-2], pixels.shape[-1]), by)
    return random_sets(score, pixels, units, fractions, subsets, baseline, batch_size, seed).correlations(units.values)


@dataclass(frozen=True, eq=False)
class RandomSets:
    """Random sets of an input's units, and what the score loses when each is replaced. All maps with these units share them.

    Attributes:
        chosen: `(sizes, subsets, units)` which units a set holds.
        losses: `(sizes, subsets)` what the score loses.
    """

    chosen: NDArray[np.bool_]
    losses: Array

    def correlations(self, values: Array) -> SensitivityN:
        """Return the correlations of sums of values, `(units,)`, with the losses."""
        sums = self.chosen @ values
        found = pearson(sums[..., None], self.losses[..., None])[:, 0]
        return SensitivityN(self.chosen[:, 0].mean(-1), found)

    def resampled(self, values: Array, resamples: int, seed: int) -> Array:
        """Return the mean correlation of several maps, `(units, maps)`, then those of resampled sets: `(1 + resamples, maps)`.

        Sizes whose correlation is not defined do not count; NaN where none is.
        """
        sums, random, count = self.chosen @ values, np.random.default_rng(seed), self.chosen.shape[1]
        drawn = [np.arange(count), *random.integers(count, size=(resamples, count))]
        found = np.empty((len(drawn), values.shape[1]))
        for number, sets in enumerate(drawn):
            of_sizes = pearson(sums[:, sets], self.losses[:, sets, None])
            defined = ~np.isnan(of_sizes)
            found[number] = np.where(defined, of_sizes, 0).sum(0) / np.where(defined.any(0), defined.sum(0), np.nan)
        return found


def random_sets(
    score: Score,
    pixels: Tensor,
    units: Units,
    fractions: Sequence[float] = SIZES,
    subsets: int = 100,
    baseline: Baseline = 0.0,
    batch_size: int = 32,
    seed: int = 0,
) -> RandomSets:
    """Draw the sets of `sensitivity_n`, whose arguments and errors these are, and measure their losses."""
    at_least("subsets", subsets, 2)
    at_least("seed", seed, 0)
    shares = [between(fraction, 0, 1, "a fraction") for fraction in fractions]
    if not shares or min(shares) <= 0 or max(shares) >= 1:
        raise OptionError(f"fractions must lie above 0 and below 1, got {list(fractions)}.")
    random, count = np.random.default_rng(seed), len(units)
    sizes = [max(1, min(round(share * count), count - 1)) for share in shares]
    chosen = np.stack([random.random((subsets, count)).argsort(1) < size for size in sizes])
    losses = _losses(score, pixels, units, chosen.reshape(-1, count), background(pixels, baseline), batch_size)
    return RandomSets(chosen, losses.reshape(len(sizes), subsets))


def _losses(score: Score, pixels: Tensor, units: Units, chosen: NDArray[np.bool_], other: Tensor, batch_size: int) -> Array:
    """Return what the score loses when each set of units, `(sets, units)`, is replaced."""

    def replaced(some: Sequence[int]) -> Tensor:
        return torch.where(units.among(chosen[list(some)], pixels.device), other, pixels)

    scores = scores_of(score, chain([pixels], map(replaced, in_batches(range(len(chosen)), batch_size))))
    losses: Array = scores[0] - scores[1:]
    return losses


def pearson(one: Array, two: Array) -> Array:
    """Return the correlations along the second axis; NaN where the numbers of one side are equal but for rounding."""
    found: Array = (_standardized(one) * _standardized(two)).sum(1)
    return found


def _standardized(numbers: Array) -> Array:
    """Return numbers minus their mean along the second axis, over their length; NaN where they are equal but for rounding."""
    scale = np.abs(numbers).max(1, keepdims=True)
    scaled = np.divide(numbers, scale, out=np.zeros(numbers.shape), where=scale >= _TINY)
    centered = scaled - scaled.mean(1, keepdims=True)
    lengths = np.sqrt((centered**2).sum(1, keepdims=True))
    found: Array = np.divide(
        centered, lengths, out=np.full(numbers.shape, np.nan), where=lengths > _ROUNDING * np.sqrt(numbers.shape[1])
    )
    return found
