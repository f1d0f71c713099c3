"""Facts about a map besides its values: its layer and query, and the sinks, glimpses, windows and detections that pictures mark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from visattn._support.reprs import brief
from visattn.core.geometry import Box
from visattn.core.provenance import Sink


class Detection(NamedTuple):
    """A box that the model outputs, in input pixels, and the name of its class."""

    label: str
    box: Box


Glimpse = tuple[Box, ...]  # patches of one glimpse in input pixels, finest scale first
_DIGITS = 3  # decimal places of glimpse coordinates in JSON


@dataclass(frozen=True)
class MapFacts:
    """Facts about a map besides its values.

    Attributes:
        layer: Name of the layer that the map was read from; empty for several layers.
        query: Query token, such as `cls` or `patch:3,7`; empty if there is none.
        query_at: Centers `(y, x)` of the patches that the query names, in pixels of the model's input.
        sinks: Attention sinks, one entry per image.
        sinks_kept: Whether the values include the attention of the sinks; False if the method removed it.
        glimpses: Glimpses of each image, in order.
        detections: Boxes that the model outputs for the query, for maps of one image.
        pixelwise: Whether each value belongs to a single pixel or sampled point, so that a few outliers may dominate the color scale.
        interval: Whether zero has no meaning of its own, so that the color scale is the map's own range even with values below zero.
        input_size: Height and width of the model's input; None if unknown.
        windows: For each image, the windows outside which the queries cannot attend, in input pixels; local attention has them.
        numbers: Names and values that belong to the map but to no cell, such as the other terms of a score, for maps of one image.
    """

    layer: str = ""
    query: str = ""
    query_at: tuple[tuple[float, float], ...] = ()
    sinks: tuple[tuple[Sink, ...], ...] = ()
    sinks_kept: bool = True
    glimpses: tuple[tuple[Glimpse, ...], ...] = ()
    detections: tuple[Detection, ...] = ()
    pixelwise: bool = False
    interval: bool = False
    input_size: tuple[int, int] | None = None
    windows: tuple[tuple[Box, ...], ...] = ()
    numbers: tuple[tuple[str, float], ...] = ()

    __repr__ = brief

    def of_image(self, image: int) -> MapFacts:
        """Return the facts about one image of the batch."""
        return replace(
            self,
            sinks=(self.sinks[image],) if self.sinks else (),
            glimpses=(self.glimpses[image],) if self.glimpses else (),
            windows=(self.windows[image],) if self.windows else (),
        )

    def path(self) -> dict[str, Any]:
        """Return the glimpses as plain values for JSON.

        `path` is the list of glimpse centers `(x, y)` in input pixels; for several images, it is a list of such lists. `patches`
        gives height and width of the patch at each scale.
        """
        if not self.glimpses:
            return {}
        paths = [[_rounded(((b.left + b.right) / 2, (b.top + b.bottom) / 2)) for b, *_ in seen] for seen in self.glimpses]
        sizes = [_rounded((box.height, box.width)) for box in self.glimpses[0][0]]
        return {"path": paths[0] if len(paths) == 1 else paths, "patches": sizes}

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as plain values for JSON."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> MapFacts:
        """Build the facts from the result of `to_dict`, which may have been stored as JSON."""
        sinks = tuple(tuple(Sink(*sink) for sink in found) for found in data["sinks"])
        glimpses = tuple(tuple(tuple(Box(*box) for box in boxes) for boxes in seen) for seen in data["glimpses"])
        windows = tuple(tuple(Box(*box) for box in boxes) for boxes in data.get("windows", ()))
        detections = tuple(Detection(label, Box(*box)) for label, box in data.get("detections", ()))
        at = tuple((float(y), float(x)) for y, x in data.get("query_at", ()))
        size = data.get("input_size")
        known = None if size is None else (int(size[0]), int(size[1]))
        numbers = tuple((str(name), float(value)) for name, value in data.get("numbers", ()))
        read = {"numbers": numbers, "sinks": sinks, "glimpses": glimpses, "windows": windows, "detections": detections}
        return cls(**data | read | {"query_at": at, "input_size": known})


def _rounded(numbers: Sequence[float]) -> list[float]:
    return [round(number, _DIGITS) for number in numbers]
