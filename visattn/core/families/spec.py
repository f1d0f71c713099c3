"""Input size and preprocessing of a model: written by its family, read by `prepare`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import nn

from visattn._support.checks import shown
from visattn._support.reprs import brief
from visattn.errors import OptionError

Source = Literal["model", "given", "assumed"]  # declared by the model, given by the caller, a default
STATED = ("size", "mean", "std")
LARGEST = 2**14  # largest side of an input in pixels
_MOST = 1e6  # largest mean or standard deviation


@dataclass(frozen=True)
class InputSpec:
    """Input size and preprocessing of a model.

    Attributes:
        size: `(height, width)` the model was built for.
        dynamic: Whether the model takes any size whose sides are multiples of `stride`.
        stride: Input pixels per token, `(vertical, horizontal)`.
        mean: Mean of each channel, for pixels in [0, 1].
        std: Standard deviation of each channel, for pixels in [0, 1].
        interpolation: Name of the resampling filter.
        classifier: Whether the model has a classification head.
        channels: Number of input channels.
        transform: Steps of the model's own evaluation transform.
        sources: Source of each of `size`, `mean` and `std`.
        processor: Function from an RGB image to the model's input, if the model comes with one; used in place of `transform`.
        keyword: Name of the parameter that takes the pixels, if it is not the model's first.
        why: Why values are assumed, if some are; empty if that needs no warning.
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
    processor: Callable[..., Any] | None = None
    keyword: str = ""
    why: str = "the model does not state its preprocessing"

    __repr__ = brief

    def checked(self) -> InputSpec:
        """Validate the values and return the spec itself.

        Raises:
            ValueError: If the size is not a valid image size, or a mean or standard deviation is out of range.
        """
        if len(self.size) != 2 or not all(type(side) is int and 1 <= side <= LARGEST for side in self.size):
            raise ValueError(f"its size must be two whole numbers from 1 to {LARGEST}, got {self.size}")
        if not all(abs(value) < _MOST for value in self.mean) or not all(1 / _MOST < value < _MOST for value in self.std):
            raise ValueError(f"its mean and std must be numbers, std above 0, got {self.mean} and {self.std}")
        return self

    def stated(self) -> dict[str, dict[str, Any]]:
        """Return value and source of each field in `STATED`, as plain values."""
        return {name: {"value": list(getattr(self, name)), "source": self.sources[name]} for name in STATED}

    def assumed(self) -> list[str]:
        """Return the names of the fields in `STATED` that are assumed defaults."""
        return [name for name in STATED if self.sources[name] == "assumed"]


def declared_preprocessing(model: nn.Module) -> dict[str, Any]:
    """Return the preprocessing that a model of any library declares by `preprocess_cfg`, as open_clip does, under timm's names."""
    for part in (model, getattr(model, "visual", None)):
        if isinstance(declared := getattr(part, "preprocess_cfg", None), Mapping):
            stated = {key: declared[key] for key in ("mean", "std", "interpolation") if declared.get(key) is not None}
            mode = _CROPS.get(str(declared.get("resize_mode")))
            return stated | ({"crop_mode": mode} if mode else {})
    return {}


_CROPS = {"shortest": "center", "squash": "squash", "longest": "border"}  # modes of open_clip, and the same of timm


def normalized(spec: InputSpec, mean: Sequence[float] | None, std: Sequence[float] | None) -> InputSpec:
    """Return a spec with a given mean and standard deviation; None keeps the spec's own.

    Raises:
        OptionError: If the number of values is neither 1 nor that of the channels.
    """
    given = {name: values for name, values in (("mean", mean), ("std", std)) if values is not None}
    for name, values in given.items():
        if len(values) not in (1, spec.channels):
            raise OptionError(f"{name} must have 1 value or {spec.channels} (one per channel), got {len(values)}.")
    known = {"mean": spec.mean, "std": spec.std} | {name: per_channel(values, spec.channels) for name, values in given.items()}
    sources: dict[str, Source] = {**spec.sources, **dict.fromkeys(given, "given")}
    return replace(spec, mean=known["mean"], std=known["std"], sources=sources)


def sides(img_size: int | Sequence[int] | None) -> tuple[int, int] | None:
    """Return `(height, width)` for a side or a pair.

    Raises:
        OptionError: If it is not one or two whole numbers from 1 to `LARGEST`.
    """
    if img_size is None:
        return None
    pair = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
    if len(pair) != 2 or not all(isinstance(side, int) and 1 <= side <= LARGEST for side in pair):
        raise OptionError(f"img_size must be a side or (height, width) in pixels, from 1 to {LARGEST}, got {shown(img_size)}.")
    return pair[0], pair[1]


def sources(known: Mapping[str, Any], size: Source, channels: int) -> dict[str, Source]:
    """Return the sources of a spec: `model` for values in the configuration that fit the channels, `assumed` for missing ones."""
    own: dict[str, Source] = {}
    for name in ("mean", "std"):
        values = known.get(name)
        own[name] = "model" if values is not None and (channels == 1 or len(values) == channels) else "assumed"
    return {"size": size, **own}


def per_channel(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """Return one value per channel; if the number of values differs, repeat their mean."""
    return tuple(values) if len(values) == channels else (sum(values) / len(values),) * channels
