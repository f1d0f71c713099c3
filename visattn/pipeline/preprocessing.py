"""Options of photo loading and preprocessing. Functions take them as keyword arguments, commands as command-line options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict, get_args

from visattn._support.checks import one_of
from visattn._support.options import option
from visattn._support.typed import check_types
from visattn._support.types import MAX_PIXELS, ColorProfile, Resize


class PreprocessingOptions(TypedDict, total=False):
    """Options of `Preprocessing`."""

    resize: Resize
    img_size: int | None
    color_profile: ColorProfile
    max_pixels: int
    rgb: Sequence[int] | None


@dataclass(frozen=True)
class Preprocessing:
    """Options of photo loading and preprocessing.

    Attributes:
        resize: `model`: the model's own evaluation transform; `fit`: the whole photo; `auto`: `model` for a classifier, else `fit`. See
            `visattn.prepare`.
        img_size: Side of the input in pixels, for a model that takes any size; rounded to whole patches. None: the model's own.
        color_profile: `convert` a file's colors to sRGB, or `ignore` its profile; has no effect on PIL images and arrays.
        max_pixels: Largest allowed width x height of a file; checked before the file is decoded.
        rgb: Channels of an array to draw as red, green and blue, if the model takes more than three; by default the first three.

    Raises:
        OptionError: If an option is unknown or has the wrong type.
    """

    resize: Resize = option(
        "auto", "model: the model's own evaluation transform; fit: the whole photo; auto: model for classifiers, else fit."
    )
    img_size: int | None = option(None, "Side of the model's input in pixels, for models that take any size.", least=1)
    color_profile: ColorProfile = option("convert", "Treatment of the photo's ICC profile: convert (to sRGB) or ignore.")
    max_pixels: int = option(MAX_PIXELS, "Refuse photos with more pixels than this.", least=1)
    rgb: Sequence[int] | None = None  # no command-line option: files have only three channels

    def __post_init__(self) -> None:
        """Check types and names; ranges are checked where the values are used.

        Raises:
            OptionError: If an option is unknown or has the wrong type.
        """
        check_types(type(self), vars(self))
        one_of(self.resize, get_args(Resize), "resize")
