"""What is known of a map beside its values: what looked, and the places that its picture marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from visattn.geometry import Box
from visattn.provenance import Sink

Glimpse = tuple[Box, ...]  # its patches in input pixels, the finest first
_DIGITS = 3  # of a glimpse in JSON, in pixels


@dataclass(frozen=True)
class MapFacts:
    """What is known of a map beside its values.

    Attributes:
        layer: Name of the layer that it was read from; empty where it is of several.
        query: The token that looked, such as `cls` or `patch:3,7`; empty where there is none.
        sinks: Tokens that draw most of the attention, an entry for each image.
        sinks_kept: Whether they draw it in the values too; else the method has taken it from them.
        glimpses: The glimpses of each image, in order.
        pixelwise: Whether each value is that of a single pixel, of which a few stand out from all others.
    """

    layer: str = ""
    query: str = ""
    sinks: tuple[tuple[Sink, ...], ...] = ()
    sinks_kept: bool = True
    glimpses: tuple[tuple[Glimpse, ...], ...] = ()
    pixelwise: bool = False

    def of_image(self, image: int) -> MapFacts:
        """Return what is known of one image of the batch."""
        return replace(
            self,
            sinks=(self.sinks[image],) if self.sinks else (),
            glimpses=(self.glimpses[image],) if self.glimpses else (),
        )

    def path(self) -> dict[str, Any]:
        """Return the glimpses as plain values: centers `(x, y)` in input pixels, and height and width of the patches of each.

        Of one image a list of centers, of several a list for each.
        """
        if not self.glimpses:
            return {}
        paths = [[_rounded(((b.left + b.right) / 2, (b.top + b.bottom) / 2)) for b, *_ in seen] for seen in self.glimpses]
        sizes = [_rounded((box.height, box.width)) for box in self.glimpses[0][0]]
        return {"path": paths[0] if len(paths) == 1 else paths, "patches": sizes}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {name: getattr(self, name) for name in ("layer", "query", "sinks", "sinks_kept", "glimpses", "pixelwise")}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> MapFacts:
        """The inverse of `to_dict`, after a trip through JSON."""
        sinks = tuple(tuple(Sink(*sink) for sink in found) for found in data["sinks"])
        glimpses = tuple(tuple(tuple(Box(*box) for box in boxes) for boxes in seen) for seen in data["glimpses"])
        return cls(**data | {"sinks": sinks, "glimpses": glimpses})


def _rounded(numbers: Sequence[float]) -> list[float]:
    return [round(number, _DIGITS) for number in numbers]
