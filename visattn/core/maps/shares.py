"""What decides which pixels are in a mask of a map: a share of its sum, or a quantile of its pixels."""

from __future__ import annotations

from typing import NamedTuple

from visattn._support.checks import between, told
from visattn.errors import OptionError

__all__ = ["Share"]

_KINDS = "mass", "quantile"


class Share(NamedTuple):
    """What decides which pixels are in a mask.

    Attributes:
        kind: `mass`, the pixels with the largest values that hold this share of the sum; or `quantile`, the pixels at or above it.
        value: The share or the quantile, above 0 and at most 1.
    """

    kind: str
    value: float

    def __str__(self) -> str:
        """Return the share as `read` takes it, such as `mass:0.5`."""
        return f"{self.kind}:{self.value:g}"

    @classmethod
    def of(cls, mass: float | None, quantile: float | None) -> Share:
        """Return the one of the two that was given.

        Raises:
            OptionError: If none or both were given, or the number is not above 0 and at most 1.
        """
        given = [(kind, value) for kind, value in zip(_KINDS, (mass, quantile), strict=True) if value is not None]
        if len(given) != 1:
            raise OptionError(f"a mask needs either mass or quantile, such as mass=0.5, got {'both' if given else 'neither'}.")
        return cls._checked(*given[0])

    @classmethod
    def read(cls, text: str) -> Share:
        """Read `mass:0.5` or `quantile:0.9`, as the option `box` takes it.

        Raises:
            OptionError: If the text is something else, or the number is not above 0 and at most 1.
        """
        kind, _, number = str(text).partition(":")
        try:
            value = float(number)
        except ValueError:
            kind, value = "", 0.0
        if kind not in _KINDS:
            raise OptionError(f"box must be mass:SHARE or quantile:SHARE, such as mass:0.5 or quantile:0.9, got '{told(text)}'.")
        return cls._checked(kind, value)

    @classmethod
    def _checked(cls, kind: str, value: float) -> Share:
        if between(value, 0, 1, kind) == 0:
            raise OptionError(f"{kind} must be above 0 and at most 1, got 0, of which {_OF_ZERO[kind]}.")
        return cls(kind, float(value))


_OF_ZERO = {"mass": "the mask would be empty", "quantile": "the mask would be all that the model received"}
