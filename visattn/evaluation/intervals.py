"""Confidence intervals for means over images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from visattn.errors import ShapeError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]


def mean_interval(values: NDArray[Any], *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0) -> tuple[Array, Array]:
    """Compute the percentile bootstrap interval of a mean over images.

    Whole images are resampled with replacement. The interval thus covers variation between images, not between queries or heads. If
    all images are of one kind, it holds only for that kind.

    Args:
        values: `(images, ...)` values of at least two images; NaN stays NaN.
        confidence: Share of the resampled means inside the interval, from 0 to 1.
        resamples: Number of bootstrap samples.
        seed: Seed of the resampling. The same seed and number of images draw the same samples.

    Returns:
        Lower and upper bound, each `(...)`. Intervals from few images are too narrow: for normally distributed values, a 95 % interval
        contains the true mean in 84 % of cases with 5 images, 90 % with 10 and 94 % with 30.

    Raises:
        ShapeError: If there are fewer than two images.

    Reference:
        Efron & Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13.
    """
    count = len(values)
    if count < 2:
        raise ShapeError(f"values must be (images, ...) with at least two images, got {values.shape}. One image has no interval.")
    flat = values.reshape(count, -1).astype(np.float64)
    random = np.random.default_rng(seed)
    drawn = (np.bincount(random.integers(count, size=count), minlength=count) for _ in range(resamples))
    means = np.stack([times @ flat for times in drawn]) / count
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    return low.reshape(values.shape[1:]), high.reshape(values.shape[1:])
