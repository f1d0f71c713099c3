"""Paired differences over seeds: mean, confidence interval and verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from visattn.errors import OptionError


class Estimate(NamedTuple):
    """Mean with the ends of its 95 % interval, which are None for a single value."""

    mean: float
    low: float | None
    high: float | None


def estimate(values: Sequence[float]) -> Estimate:
    """Compute the mean of independent values and Student's 95 % interval `mean -+ t s / sqrt(n)`.

    Args:
        values: One or more numbers. For a single one there is no interval.

    Returns:
        Mean and interval. If the values are normally distributed, the interval covers the true mean in 95 % of cases.

    Raises:
        OptionError: If there are no values, or one is not finite.
    """
    if not values or not all(math.isfinite(value) for value in values):
        raise OptionError(f"a mean needs one or more finite numbers, got {list(values)}. Leave out runs that failed.")
    mean = fmean(values)
    if len(values) == 1:
        return Estimate(mean, None, None)
    half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


def paired(plain: Mapping[int, float], other: Mapping[int, float]) -> Estimate:
    """Compute the mean difference between a network and the plain one, paired by seed.

    Both networks of a pair receive the same images in the same order.

    Args:
        plain: Metric of the plain network, by seed.
        other: Metric of another network, by seed. Only seeds that both have are used.

    Returns:
        Mean of the differences, other minus plain, and its interval over seeds.
    """
    return estimate([other[seed] - plain[seed] for seed in sorted(plain.keys() & other.keys())])


def verdict(difference: Estimate) -> str:
    """Return the verdict of an interval: `gain`, `loss`, `no difference shown`, or `one seed, no interval`."""
    if difference.low is None or difference.high is None:
        return "one seed, no interval"
    if difference.low > 0:
        return "gain"
    return "loss" if difference.high < 0 else "no difference shown"


def t_quantile(degrees: int, confidence: float = 0.95) -> float:
    """Compute the two-sided quantile of Student's t: the number `q` with `P(|t| < q) = confidence`.

    With `t = sqrt(degrees) tan(angle)`, the probability is a finite sum over powers of `cos(angle)`. It is inverted by bisection.

    Args:
        degrees: Degrees of freedom, 1 or more.
        confidence: Probability, between 0 and 1.

    Returns:
        The quantile, exact up to rounding. For 95 % it is 12.706 with 1 degree, and tends to 1.960.

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
    while low < (middle := (low + high) / 2) < high:  # until the ends are adjacent floats
        low, high = (middle, high) if inside(middle) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan(high)
