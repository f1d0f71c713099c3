"""Paired differences over seeds: their mean, an interval of it, and what the interval says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from visattn.errors import OptionError


class Estimate(NamedTuple):
    """A mean with both ends of its 95 % interval; None of a single value."""

    mean: float
    low: float | None
    high: float | None


def estimate(values: Sequence[float]) -> Estimate:
    """Mean of independent values, with Student's interval `mean -+ t s / sqrt(n)`.

    Args:
        values: One or more; of one there is no interval.

    Returns:
        The interval holds the true mean in 95 of 100 cases where the values are normal.

    Raises:
        OptionError: If there are none, or one is no finite number.
    """
    if not values or not all(math.isfinite(value) for value in values):
        raise OptionError(f"a mean must be of one or more finite numbers, got {list(values)}. Leave out runs that failed.")
    mean = fmean(values)
    if len(values) == 1:
        return Estimate(mean, None, None)
    half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


def paired(plain: Mapping[int, float], other: Mapping[int, float]) -> Estimate:
    """How much larger a metric is than the plain network's of the same seed, which has the same order of pictures.

    Args:
        plain: Of the plain network, by seed.
        other: Of another one, by seed; only seeds of both count.

    Returns:
        Mean of the differences and its interval over seeds.
    """
    return estimate([other[seed] - plain[seed] for seed in sorted(plain.keys() & other.keys())])


def verdict(difference: Estimate) -> str:
    """What the interval of a difference says, and nothing else: `gain`, `loss`, `no difference shown`, or that there is none."""
    if difference.low is None or difference.high is None:
        return "one seed, no interval"
    if difference.low > 0:
        return "gain"
    return "loss" if difference.high < 0 else "no difference shown"


def t_quantile(degrees: int, confidence: float = 0.95) -> float:
    """The number that Student's t stays within, to either side, with a probability.

    With `t = sqrt(degrees) tan(angle)` the probability is a finite sum over powers of `cos(angle)`, which is bisected.

    Args:
        degrees: Of freedom, 1 or more.
        confidence: The probability, between 0 and 1.

    Returns:
        Exact to rounding: 12.706 for 1 degree, 1.960 for infinitely many.

    Raises:
        OptionError: If an argument is out of range.

    Reference:
        Abramowitz & Stegun, "Handbook of Mathematical Functions", 1964, 26.7.3 and 26.7.4.
    """
    if degrees < 1 or not 0 < confidence < 1:
        raise OptionError(f"t needs 1 or more degrees of freedom and a probability between 0 and 1, got {degrees}, {confidence}.")
    odd = degrees % 2

    def inside(angle: float) -> float:
        term, total = math.cos(angle) if odd else 1.0, 0.0
        for number in range(1, degrees // 2 + 1):
            total += term
            term *= math.cos(angle) ** 2 * (2 * number - 1 + odd) / (2 * number + odd)
        total *= math.sin(angle)
        return 2 / math.pi * (angle + total) if odd else total

    low, high = 0.0, math.pi / 2
    while low < (middle := (low + high) / 2) < high:  # until no number lies between
        low, high = (middle, high) if inside(middle) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan(high)
