"""Provenance of a map or picture, stored in `--json` output, in the PNG's text chunk and in saved maps."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from visattn._support.faces import Later
from visattn._support.reprs import brief
from visattn.core.geometry import Geometry

if TYPE_CHECKING:
    from visattn._support import names
else:
    names = Later("visattn._support.names")

__all__ = ["Provenance", "Sink", "processor", "sink_warning", "versions"]


class Sink(NamedTuple):
    """An attention sink: a patch that receives far more than its share of attention, averaged over queries.

    Attributes:
        row: Row of the patch on the grid.
        column: Column of the patch on the grid.
        score: Attention that the patch receives in `layer`, as a multiple of the uniform share (1 under uniform attention).
        layer: Layer in which the score is highest.
    """

    row: int
    column: int
    score: float
    layer: str


def versions() -> dict[str, str]:
    """Return the installed versions of the libraries that affect the results."""
    return dict(_installed())


@cache
def _installed() -> dict[str, str]:
    """Read the versions once, as this takes longer than a small picture."""
    names = ("visattn", "torch", "timm", "opencv-python", "opencv-python-headless", "pillow", "numpy")
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache
def processor() -> str:
    """Return the name of this machine's processor, or of its architecture where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


@dataclass(frozen=True)
class Provenance:
    """Provenance of a map or picture. Each step of the pipeline fills in its own fields.

    Attributes:
        model: Name of the model.
        weights: Origin of its weights.
        weights_sha256: SHA-256 digest of the weights file, if there is one.
        random: Whether the weights are random.
        image: Name of the photo, with notes on how it was read.
        image_sha256: SHA-256 digest of the photo's file.
        geometry: Part of the photo that the model received.
        preprocessing: Size, mean and standard deviation of the model's input. Each has a `value` and a `source`, which is `model`,
            `given` or `assumed`.
        method: Name of the method.
        parameters: Parameters of the method, with all automatic choices resolved.
        target: Target that a class-specific method explains, one entry per image of the batch.
        scores: The same as values, for classes: `class`, its `name` (None: unknown), `versus`, `target_space`, `score`, `probability`,
            and the predicted class with its probability, `predicted` and `predicted_probability`.
        normalization: Scaling from raw values to colors.
        value_range: Raw values at both ends of the color map.
        drawing: Settings of the picture, such as opacity, blend mode and color map.
        sinks: Attention sinks, one entry per image of the batch.
        notes: Choices made while computing the map.
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
    scores: tuple[dict[str, Any], ...] = ()
    normalization: str | None = None
    value_range: tuple[float, float] | None = None
    drawing: dict[str, Any] = field(default_factory=dict)
    sinks: tuple[tuple[Sink, ...], ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=versions)

    __repr__ = brief

    @property
    def title(self) -> str:
        """Model and image for the title of a picture, for example `DINOv2 ViT-S/14 on coffee.png`; random weights are named."""
        model = f"{names.model_title(self.model)} ({self.weights})" if self.random else names.model_title(self.model)
        return f"{model} on {self.image}" if self.image else model

    def but(self, *, notes: tuple[str, ...] = (), warnings: tuple[str, ...] = (), **facts: Any) -> Provenance:  # noqa: ANN401
        """Return a copy with these fields replaced, and with notes and warnings appended without duplicates."""
        facts["notes"] = tuple(dict.fromkeys(self.notes + notes))
        facts["warnings"] = tuple(dict.fromkeys(self.warnings + warnings))
        return dataclasses.replace(self, **facts)

    def with_parameters(self, parameters: Mapping[str, Any]) -> Provenance:
        """Return a copy with more parameters, before those that it has."""
        return self.but(parameters={**parameters, **self.parameters})

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Provenance:
        """Build a provenance from the result of `to_dict`, which may have been stored as JSON."""
        data = dict(data)
        if data.get("geometry"):
            data["geometry"] = Geometry.from_dict(data["geometry"])
        data["sinks"] = tuple(tuple(Sink(*sink) for sink in sinks) for sinks in data.get("sinks", ()))
        for name in ("target", "scores", "notes", "warnings"):
            data[name] = tuple(data.get(name) or ())
        if data.get("value_range"):
            data["value_range"] = tuple(data["value_range"])
        return cls(**data)


def sink_warning(found: tuple[Sink, ...]) -> tuple[str, ...]:
    """Return a warning about the sinks of an image, or an empty tuple if there are none."""
    if not found:
        return ()
    places = ", ".join(f"patch {sink.row},{sink.column} ({sink.score:.0f} x in {sink.layer})" for sink in found)
    receive = "sinks receive" if len(found) > 1 else "sink receives"
    return (
        f"{len(found)} {receive} many times the uniform share of attention, averaged over queries: {places}; a bright spot there need not "
        "be an object",
    )
