"""Options of photo loading and preprocessing. Functions take them as keyword arguments, commands as command-line options."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypedDict, get_args

from visattn._support.checks import one_of
from visattn._support.options import option
from visattn._support.reprs import brief
from visattn._support.typed import check_types
from visattn._support.types import MAX_BYTES, MAX_PIXELS, ColorProfile, Resize
from visattn.errors import OptionError

__all__ = ["Preprocessing", "PreprocessingOptions"]


class ReadingOptions(TypedDict):
    """Options of `visattn.load_image`."""

    max_pixels: int
    max_bytes: int
    color_profile: ColorProfile


class PreprocessingOptions(TypedDict, total=False):
    """Options of `Preprocessing`."""

    resize: Resize
    img_size: int | tuple[int, int] | None
    mean: Sequence[float] | None
    std: Sequence[float] | None
    transform: Callable[..., Any] | None
    color_profile: ColorProfile
    max_pixels: int
    max_bytes: int
    rgb: Sequence[int] | None


@dataclass(frozen=True)
class Preprocessing:
    """Options of photo loading and preprocessing.

    Attributes:
        resize: `model`: the model's own evaluation transform; `fit`: the whole photo; `auto`: `model` for a classifier, else `fit`. See
            `visattn.prepare`.
        img_size: Side of the input in pixels, or `(height, width)`, for a model that takes any size; rounded to whole patches. If the whole
            photo is used, a side stands for an area in the photo's shape, and `(height, width)` is taken as it is. None: the model's own.
        mean: Mean of each channel, for pixels in [0, 1]; one value for all is enough. None: the model's own.
        std: Standard deviation of each channel, likewise.
        transform: The transform to use in place of the model's own: a function from a PIL image to a tensor `(C, H, W)`, an image
            processor of Hugging Face, or the weights of a torchvision model. It must crop, resize and normalize, and nothing else.
        color_profile: `convert` a file's colors to sRGB, or `ignore` its profile; has no effect on PIL images and arrays.
        max_pixels: Largest allowed width x height of a file; checked before the file is decoded.
        max_bytes: Largest allowed size of a file in bytes; no more is read.
        rgb: Channels of an array to draw as red, green and blue, if the model takes more than three; by default the first three.

    Raises:
        OptionError: If an option is unknown or has the wrong type, or `transform` is given with another option that it sets.
    """

    resize: Resize = option(
        "auto", "model: the model's own evaluation transform; fit: the whole photo; auto: model for classifiers, else fit."
    )
    img_size: int | tuple[int, int] | None = option(
        None, "Size of the model's input in pixels: a side, or height x width as HxW."
    )
    mean: Sequence[float] | None = option(None, "Mean of each channel, for pixels from 0 to 1, for example 0.5,0.5,0.5.")
    std: Sequence[float] | None = option(None, "Standard deviation of each channel, likewise.")
    transform: Callable[..., Any] | None = None
    color_profile: ColorProfile = option("convert", "Treatment of the photo's ICC profile: convert (to sRGB) or ignore.")
    max_pixels: int = option(MAX_PIXELS, "Refuse photos with more pixels than this.", least=1, decides=False)
    max_bytes: int = option(MAX_BYTES, "Refuse files and members of archives with more bytes than this.", least=1, decides=False)
    rgb: Sequence[int] | None = None  # no command-line option: files have only three channels

    __repr__ = brief

    @property
    def reading(self) -> ReadingOptions:
        """Options of `visattn.load_image`."""
        return {"max_pixels": self.max_pixels, "max_bytes": self.max_bytes, "color_profile": self.color_profile}

    def __post_init__(self) -> None:
        """Check types and names; ranges are checked where the values are used.

        Raises:
            OptionError: If an option is unknown or has the wrong type, or options exclude each other.
        """
        object.__setattr__(self, "img_size", _size_of(self.img_size))
        for name in ("mean", "std"):
            value: Any = getattr(self, name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                object.__setattr__(self, name, (value,))
        check_types(type(self), vars(self))
        for name in ("mean", "std"):
            if not all(map(math.isfinite, getattr(self, name) or ())):
                raise OptionError(f"{name} must be finite, got {', '.join(f'{value:g}' for value in getattr(self, name))}.")
        if self.mean is not None and any(value > _LARGEST_MEAN for value in self.mean):
            values = ", ".join(f"{value:g}" for value in self.mean)
            raise OptionError(f"mean and std are those of pixels in [0, 1], got mean {values}. Divide both by 255.")
        one_of(self.resize, get_args(Resize), "resize")
        if self.transform is not None and (self.mean, self.std, self.img_size, self.resize) != (None, None, None, "auto"):
            raise OptionError("transform sets size, mean, std and resize itself. Pass either it or them.")


_LARGEST_MEAN = 2


def _size_of(size: Any) -> Any:  # noqa: ANN401
    """Return an input size as a side or `(height, width)`; anything else is returned as it is."""
    if isinstance(size, (list, tuple)) and len(size) in (2, 3) and all(isinstance(side, Integral) for side in size):
        return tuple(size[-2:])
    return size
