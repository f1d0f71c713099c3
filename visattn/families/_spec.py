"""How a model wants its pixels; a family fills it in, `prepare` reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class InputSpec:
    """Facts about a model's input.

    Attributes:
        size: `(height, width)` the model was built for.
        dynamic: Whether it takes any size whose sides are multiples of `stride`.
        stride: Input pixels per token, `(vertical, horizontal)`.
        mean: Mean of each of its channels, of pixels in [0, 1].
        std: Standard deviation of each of its channels.
        interpolation: Name of the resampling filter.
        classifier: Whether it has a classification head.
        channels: Number of input channels.
        transform: The steps of its own evaluation transform.
    """

    size: tuple[int, int]
    dynamic: bool
    stride: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    classifier: bool
    channels: int
    transform: Sequence[Any]


def per_channel(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """One value for each channel; their mean where the values are for another number of channels."""
    return tuple(values) if len(values) == channels else (sum(values) / len(values),) * channels
