"""How a model wants its pixels; a family fills it in, `prepare` reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Source = Literal["model", "given", "assumed"]  # stated by the model, by the caller, by nobody
STATED = ("size", "mean", "std")
LARGEST = 2**14  # side of an input in pixels
_MOST = 1e6  # a mean or a deviation


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
        sources: Where `size`, `mean` and `std` come from.
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
    sources: Mapping[str, Source] = field(default_factory=lambda: dict.fromkeys(STATED, "model"))

    def checked(self) -> InputSpec:
        """Return the spec itself.

        Raises:
            ValueError: If a size is not that of an image, or means and deviations are not numbers to divide by.
        """
        if len(self.size) != 2 or not all(type(side) is int and 1 <= side <= LARGEST for side in self.size):
            raise ValueError(f"its size must be two whole numbers from 1 to {LARGEST}, got {self.size}")
        if not all(abs(value) < _MOST for value in self.mean) or not all(1 / _MOST < value < _MOST for value in self.std):
            raise ValueError(f"its mean and std must be numbers, std above 0, got {self.mean} and {self.std}")
        return self

    def stated(self) -> dict[str, dict[str, Any]]:
        """Return each of `STATED` as plain values: what it is, and where it comes from."""
        return {name: {"value": list(getattr(self, name)), "source": self.sources[name]} for name in STATED}

    def assumed(self) -> list[str]:
        """Return the names of those that nobody stated."""
        return [name for name in STATED if self.sources[name] == "assumed"]


def sources(known: Mapping[str, Any], size: Source, channels: int) -> dict[str, Source]:
    """Return where a spec comes from: what a configuration holds for its channels is the model's own, what it lacks is assumed."""
    own: dict[str, Source] = {}
    for name in ("mean", "std"):
        values = known.get(name)
        own[name] = "model" if values is not None and (channels == 1 or len(values) == channels) else "assumed"
    return {"size": size, **own}


def per_channel(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """One value for each channel; their mean where the values are for another number of channels."""
    return tuple(values) if len(values) == channels else (sum(values) / len(values),) * channels
