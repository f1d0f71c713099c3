"""How far a mean over photos can be trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from visattn.errors import ShapeError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]


def mean_interval(values: NDArray[Any], *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0) -> tuple[Array, Array]:
    """Percentile bootstrap interval of a mean over photos.

    Photos are what is drawn again, with replacement, each as a whole: the interval is that of another sample of photos, not of
    other queries or heads. Where all photos are of one kind, it speaks of that kind.

    Args:
        values: `(photos, ...)`, at least two photos; NaN stays NaN.
        confidence: Share of resampled means inside, from 0 to 1.
        resamples: How many samples are drawn.
        seed: Of the draw; the same seed and number of photos draw the same photos.

    Returns:
        Lower and upper end, each `(...)`. From few photos they are too narrow: of normal values, ends at 95 % hold the true mean in
        84 of 100 cases for 5 photos, 90 for 10, 94 for 30.

    Raises:
        ShapeError: If there are fewer than two photos.

    Reference:
        Efron & Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13.
    """
    count = len(values)
    if count < 2:
        raise ShapeError(f"values must be (photos, ...) of at least two photos, got {values.shape}. One photo has no interval.")
    flat = values.reshape(count, -1).astype(np.float64)
    random = np.random.default_rng(seed)
    drawn = (np.bincount(random.integers(count, size=count), minlength=count) for _ in range(resamples))
    means = np.stack([times @ flat for times in drawn]) / count
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    return low.reshape(values.shape[1:]), high.reshape(values.shape[1:])
