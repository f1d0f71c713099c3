"""Sample of a map: a few of its values, by which a later run sees whether the model still computes the same."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from visattn.core.pipeline.explanation import Explanation

TOLERANCE = (
    1e-3  # of the largest value: processors and versions of libraries differ in the last bits, and large scores amplify them
)
SAME = 1e-5  # of the largest value, on one machine: a batch differs from one image in the last bits
_COUNT = 16
_DIGITS = 7

Sample = tuple[float | None, ...]


def sample_of(explanation: Explanation) -> Sample:
    """Return the largest magnitude and the mean of a map, and values at even distances; None for NaN."""
    values = explanation.map.values.detach().double().flatten().cpu()
    known = values[values.isfinite()]
    places = torch.linspace(0, max(len(values) - 1, 0), min(_COUNT, len(values))).round().long()
    facts = [float(known.abs().max()), float(known.mean())] if len(known) else []
    return tuple(_rounded(value) for value in (*facts, *values[places].tolist()))


def distance(before: Sequence[float | None], now: Sequence[float | None]) -> float:
    """Return the largest difference of two samples as a share of the largest value; infinity if they have other places."""
    if [value is None for value in before] != [value is None for value in now]:
        return math.inf
    pairs = [(one, other) for one, other in zip(before, now, strict=True) if one is not None and other is not None]
    largest = max((abs(value) for pair in pairs for value in pair), default=0.0)
    return max((abs(one - other) for one, other in pairs), default=0.0) / largest if largest else 0.0


def _rounded(value: float) -> float | None:
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
