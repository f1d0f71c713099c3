"""Metrics that remove or insert pixels in the order of a map, and follow the score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from visattn._support.checks import at_least, one_of
from visattn._support.reprs import brief
from visattn.errors import OptionError
from visattn.evaluation.choices import By
from visattn.evaluation.given import MapLike
from visattn.evaluation.scores import Baseline, Score, background, in_batches, one_input, scores_of
from visattn.evaluation.units import units_of

Array = NDArray[np.float64]
Sign = Literal["positive", "negative"]
TENTHS = tuple(tenth / 10 for tenth in range(10))


@dataclass(frozen=True, eq=False)
class Curve:
    """Score of an input while its parts are removed or inserted.

    Attributes:
        metric: Name of the metric.
        fractions: `(points,)` share of the units that are removed or inserted, ascending.
        scores: `(points,)` scores.
    """

    metric: str
    fractions: Array
    scores: Array

    __repr__ = brief

    @property
    def area(self) -> float:
        """Area under the curve by trapezoids. From fraction 0 to 1 it is a mean score."""
        return float((np.diff(self.fractions) * (self.scores[1:] + self.scores[:-1]) / 2).sum())


def deletion(
    score: Score,
    pixels: Tensor,
    shown: MapLike,
    *,
    steps: int = 224,
    baseline: Baseline = 0.0,
    by: By = "pixels",
    batch_size: int = 32,
    seed: int = 0,
) -> Curve:
    """Remove pixels, those with the largest values first, and follow the score: a small area means that the map found what it needs.

    Point `i` of `steps + 1` has the first `round(i / steps * n)` of `n` units removed: the first point is the input itself, the last one
    the baseline. The area is that of trapezoids. Where the map does not cover the input, pixels stay what they are.

    Args:
        score: Function from inputs `(B, C, H, W)` to one number for each, `(B,)`, such as the probability of a class. It runs without
            gradients.
        pixels: One preprocessed input, `(C, H, W)` or `(1, C, H, W)`.
        shown: Map of this input, `(rows, columns)`; an array covers the whole input. Signed values are ranked with their sign.
        steps: Number of steps.
        baseline: What replaces a pixel, after preprocessing: a number, a tensor that can be broadcast to `pixels`, `image mean` (of each
            channel over the input) or `blur` (Gaussian of 5 pixels, cut at 11 x 11). 0 is the mean color of the training data for most
            preprocessings, not black.
        by: `pixels`, with values interpolated between the centers of cells, or whole `cells`.
        batch_size: Number of inputs in a batch.
        seed: Seed of the order of equal values.

    Returns:
        The curve.

    Raises:
        OptionError: If a number is out of range, or a word unknown.
        ShapeError: If the input, an array, the baseline or a score has another shape.
        MapError: If the map has further axes or holes, or was made for another input.

    Reference:
        Petsiuk et al., "RISE: Randomized Input Sampling for Explanation of Black-box Models", BMVC 2018, arXiv:1806.07421, section 4.2,
        with the steps of the authors' code for 224 x 224 pixels. Differs: equal values come in random order, and a blurred pixel near an
        edge is a mean of pixels of the input only.
    """
    counts = _even(steps)
    return _curve("deletion", score, pixels, shown, counts, baseline, by, batch_size, seed)


def insertion(
    score: Score,
    pixels: Tensor,
    shown: MapLike,
    *,
    steps: int = 224,
    baseline: Baseline = "blur",
    by: By = "pixels",
    batch_size: int = 32,
    seed: int = 0,
) -> Curve:
    """Insert pixels into the baseline, those with the largest values first: a large area means that the map found what suffices.

    The first point is the baseline where the map covers the input, the last one the input itself. Arguments, result, errors and source are
    those of `deletion`; the default baseline is the authors' blurred input.
    """
    counts = _even(steps)
    return _curve("insertion", score, pixels, shown, counts, baseline, by, batch_size, seed, inserts=True)


def perturbation(
    score: Score,
    pixels: Tensor,
    shown: MapLike,
    *,
    sign: Sign = "positive",
    baseline: Baseline = 0.0,
    fractions: Sequence[float] = TENTHS,
    by: By = "pixels",
    batch_size: int = 32,
    seed: int = 0,
) -> Curve:
    """Remove the pixels with the largest values (positive), or with the smallest (negative), at nine levels.

    The paper's score is 1 where the model still predicts the class, else 0, and its baseline is black before preprocessing. The area is
    the authors': trapezoids from fraction 0, the input itself, to 0.9; so its largest value for such a score is 0.9, or 90 in percent.
    The mean over the nine levels from 0.1 is another number: 55.2 instead of 53.1 for rollout, as issue 31 of the authors' code has it.

    Args:
        score: See `deletion`.
        pixels: See `deletion`.
        shown: See `deletion`.
        sign: `positive`: a small area is good; `negative`: a large one.
        baseline: See `deletion`.
        fractions: Ascending shares of the units that are removed, from 0 to 1.
        by: See `deletion`.
        batch_size: See `deletion`.
        seed: See `deletion`.

    Returns:
        The curve.

    Raises:
        OptionError: If fractions do not ascend from 0 to 1, or see `deletion`.
        ShapeError: See `deletion`.
        MapError: See `deletion`.

    Reference:
        Chefer et al., "Transformer Interpretability Beyond Attention Visualization", CVPR 2021, arXiv:2012.09838, section 4.
    """
    one_of(sign, get_args(Sign), "sign")
    try:
        shares = np.array(fractions, np.float64)
    except (TypeError, ValueError):
        shares = np.zeros(0)
    if shares.ndim != 1 or len(shares) < 2 or not (np.diff(shares) > 0).all() or shares[0] < 0 or shares[-1] > 1:
        raise OptionError(f"fractions must be at least two ascending numbers from 0 to 1, got {list(fractions)}.")
    last = sign == "negative"
    return _curve(f"{sign} perturbation", score, pixels, shown, shares, baseline, by, batch_size, seed, last=last)


def _even(steps: int) -> Array:
    return np.arange(at_least("steps", steps) + 1) / steps


def _curve(
    metric: str,
    score: Score,
    pixels: Tensor,
    shown: MapLike,
    fractions: Array,
    baseline: Baseline,
    by: By,
    batch_size: int,
    seed: int,
    *,
    inserts: bool = False,
    last: bool = False,
) -> Curve:
    pixels = one_input(pixels)
    units = units_of(shown, (pixels.shape[-2], pixels.shape[-1]), by, seed)
    units = units.reversed() if last else units
    counts = np.round(fractions * len(units)).astype(int).tolist()
    ranks = units.ranks(pixels.device)
    other = torch.where(ranks < len(units), background(pixels, baseline), pixels)
    first, rest = (pixels, other) if inserts else (other, pixels)

    def changed(some: Sequence[int]) -> Tensor:
        limits = torch.tensor(some, device=pixels.device)[:, None, None, None]
        return torch.where(ranks < limits, first, rest)

    scores = scores_of(score, map(changed, in_batches(counts, batch_size)))
    return Curve(metric, np.array(counts) / len(units), scores)
