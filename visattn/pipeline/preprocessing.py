"""How a photo is read and brought to a model: one record that functions take by keywords and commands make their options from."""

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
    """How a photo is read and brought to a model.

    Attributes:
        resize: `model`: the model's own evaluation transform; `fit`: the whole photo; `auto`: `model` for a classifier, else `fit`. See
            `visattn.prepare`.
        img_size: Side in pixels for a model that takes any, rounded to whole patches; None: the model's own.
        color_profile: `convert` a file's colors to sRGB, or `ignore` its profile; says nothing of a picture or an array.
        max_pixels: Largest width x height of a file, checked before it is decoded.
        rgb: Channels of an array that are drawn as red, green and blue, where a model takes more than three; by default the first.

    Raises:
        OptionError: If one is unknown or of another type.
    """

    resize: Resize = option("auto", "fit: the whole photo; model: the model's own evaluation crop.")
    img_size: int | None = option(None, "Side in pixels that the model works at.", least=1)
    color_profile: ColorProfile = option("convert", "convert: the file's ICC profile to sRGB; ignore: its numbers as they are.")
    max_pixels: int = option(MAX_PIXELS, "Largest photo that is decoded.", least=1)
    rgb: Sequence[int] | None = None  # files have none to choose from

    def __post_init__(self) -> None:
        """Check types and names; ranges are checked where they are used.

        Raises:
            OptionError: If one is unknown or of another type.
        """
        check_types(type(self), vars(self))
        one_of(self.resize, get_args(Resize), "resize")
