"""How a picture was made: the one payload of `--json`, of the PNG's text chunk and of the saved map."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from typing import Any, NamedTuple

from visattn.geometry import Geometry

__all__ = ["Provenance", "Sink", "sink_warning", "versions"]


class Sink(NamedTuple):
    """A token that draws far more attention than its share from all queries alike.

    Attributes:
        row: Row of the patch on the grid.
        column: Column of the patch on the grid.
        score: Attention it draws, as a multiple of the uniform share (1 = what every token would draw), in `layer`.
        layer: The layer where its score is highest.
    """

    row: int
    column: int
    score: float
    layer: str


def versions() -> dict[str, str]:
    """Installed versions of the libraries that decide the numbers."""
    return dict(_installed())


@cache
def _installed() -> dict[str, str]:
    """Return the versions, asked once: it takes longer than a small picture."""
    names = ("visattn", "torch", "timm", "opencv-python", "opencv-python-headless", "pillow", "numpy")
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True)
class Provenance:
    """What made a map or a picture; every field is a fact, filled in as it becomes known.

    Attributes:
        model: Name of the model.
        weights: Where its weights came from.
        weights_sha256: Digest of the weights file, where there is one.
        random: Whether the weights are random.
        image: Name of the photo, and notes of its reading.
        image_sha256: Digest of the photo's file.
        geometry: The part of the photo that the model saw.
        preprocessing: Size, mean and standard deviation of the model's input, each with its `value` and its `source`: `model`,
            `given` or `assumed`.
        method: Name of the method.
        parameters: Its parameters, after every automatic choice.
        target: What a class-specific method explains, an entry for each image of the batch.
        normalization: How values became colors.
        value_range: The raw values at both ends of the color map.
        drawing: How values became a picture: opacity, blend, color map and what else was asked for.
        sinks: Tokens that draw most of the attention, an entry for each image of the batch.
        notes: Facts about choices made on the way.
        warnings: Reasons why the picture may mislead.
        versions: Versions of the libraries.
    """

    model: str = ""
    weights: str = ""
    weights_sha256: str | None = None
    random: bool = False
    image: str | None = None
    image_sha256: str | None = None
    geometry: Geometry | None = None
    preprocessing: dict[str, Any] = field(default_factory=dict)
    method: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    target: tuple[str, ...] = ()
    normalization: str | None = None
    value_range: tuple[float, float] | None = None
    drawing: dict[str, Any] = field(default_factory=dict)
    sinks: tuple[tuple[Sink, ...], ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=versions)

    def but(self, *, notes: tuple[str, ...] = (), warnings: tuple[str, ...] = (), **facts: Any) -> Provenance:  # noqa: ANN401
        """A copy with these facts set and these notes and warnings added, none twice."""
        facts["notes"] = tuple(dict.fromkeys(self.notes + notes))
        facts["warnings"] = tuple(dict.fromkeys(self.warnings + warnings))
        return dataclasses.replace(self, **facts)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Provenance:
        """The inverse of `to_dict`, after a trip through JSON."""
        data = dict(data)
        if data.get("geometry"):
            data["geometry"] = Geometry.from_dict(data["geometry"])
        data["sinks"] = tuple(tuple(Sink(*sink) for sink in sinks) for sinks in data.get("sinks", ()))
        for name in ("target", "notes", "warnings"):
            data[name] = tuple(data.get(name) or ())
        if data.get("value_range"):
            data["value_range"] = tuple(data["value_range"])
        return cls(**data)


def sink_warning(found: tuple[Sink, ...]) -> tuple[str, ...]:
    """One sentence about the sinks of an image, or nothing."""
    if not found:
        return ()
    places = ", ".join(f"patch {sink.row},{sink.column} ({sink.score:.0f} x)" for sink in found)
    return (
        f"{len(found)} sink{'s' * (len(found) > 1)}: {places} the uniform share of attention, drawn from all queries alike; "
        "a bright spot there need not mean an object",
    )
