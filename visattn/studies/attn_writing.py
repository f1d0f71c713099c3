"""Content of `.attn` files: safetensors with a description in JSON; see `docs/studies.md`."""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from visattn._support.types import MAX_PIXELS
from visattn.core.maps.map_files import layout_facts, map_facts
from visattn.core.records import AttentionRecord, FeatureRecord, Readout, TokenLayout
from visattn.errors import OptionError
from visattn.studies.attn_schema import FORMAT, MOST_PIXELS, MOST_TEXT, MOST_VIEWS, VERSION
from visattn.studies.operands import operands_of

if TYPE_CHECKING:
    from visattn.studies.views import Contributions, View

_COMPRESSION = 3  # of the photo's PNG: twice as fast as the default, and 3 % larger
_VECTORS = "value", "output_weight", "residual"


def attn_content(views: Sequence[View]) -> bytes:
    """Return the content of an `.attn` file.

    Raises:
        OptionError: If a recording has several images or forward passes, or the file would be too large to be read.
    """
    tensors: dict[str, Tensor] = {}
    photos: dict[bytes, tuple[str, int]] = {}
    facts = {"views": [_View(f"views.{number}", tensors, photos).facts(view) for number, view in enumerate(views)]}
    said = {"format": FORMAT, "version": str(VERSION), "study": json.dumps(facts, allow_nan=False, default=_plain)}
    _check_size(views, [pixels for _, pixels in photos.values()], said["study"])
    made: bytes = safetensors.torch.save({name: _alone(tensor) for name, tensor in tensors.items()}, said)
    return made


def _check_size(views: Sequence[View], pixels: Collection[int], text: str) -> None:
    """Check the limits that a reader sets.

    Raises:
        OptionError: If one is exceeded.
    """
    if max(pixels, default=0) > MAX_PIXELS or sum(pixels) > MOST_PIXELS:
        raise OptionError(
            f"a study holds photos of at most {MAX_PIXELS / 1e6:g} million pixels, {MOST_PIXELS / 1e6:g} million in all; the largest of "
            f"these has {max(pixels) / 1e6:.1f}, all have {sum(pixels) / 1e6:.1f}. Scale them down, or save several studies."
        )
    if len(views) > MOST_VIEWS or len(text) > MOST_TEXT:
        raise OptionError(
            f"a study holds at most {MOST_VIEWS:,} views and {MOST_TEXT:,} characters of description, got {len(views):,} and "
            f"{len(text):,}. Save several studies."
        )


def _plain(value: Any) -> Any:  # noqa: ANN401
    """Return a tensor among the parameters of a method as a list."""
    return value.tolist() if isinstance(value, Tensor) else str(value)


def _alone(tensor: Tensor) -> Tensor:
    """Return a tensor that shares no memory with others, as safetensors requires."""
    whole = tensor.detach().cpu().contiguous()
    return whole if whole.untyped_storage().nbytes() == whole.nbytes else whole.clone()


class _View:
    """Description of one view; its tensors are collected under names that begin alike."""

    def __init__(self, name: str, tensors: dict[str, Tensor], photos: dict[bytes, tuple[str, int]]) -> None:
        self._name, self._tensors, self._photos = name, tensors, photos
        self._layouts: dict[TokenLayout, int] = {}

    def facts(self, view: View) -> dict[str, Any]:
        """Describe a view."""
        recording = view.recording
        if len(recording.forwards) > 1 or any(record.operator.shape[0] != 1 for record in recording):
            raise OptionError("a view must be one forward pass over one image. Choose them: recording.select(forward=0).")
        stream = io.BytesIO()
        view.photo.save(stream, "PNG", compress_level=_COMPRESSION)
        png = stream.getvalue()
        if png not in self._photos:  # views of several models share a photo
            name = self._stored("photo", torch.from_numpy(np.frombuffer(png, np.uint8).copy()))
            self._photos[png] = name, view.photo.width * view.photo.height
        records = [self._record(f"records.{number}", record) for number, record in enumerate(recording)]
        features = [self._feature(f"features.{number}", feature) for number, feature in enumerate(recording.features)]
        maps = {
            name: map_facts(shown, view.geometry) | {"values": self._stored(f"maps.{number}", shown.values.float())}
            for number, (name, shown) in enumerate(view.maps.items())
        }
        return {
            "photo": self._photos[png][0],
            "geometry": asdict(view.geometry),
            "provenance": recording.provenance.to_dict(),
            "readout": recording.reads,
            **self._read(recording.reading),
            "captured": recording.captured,
            "records": records,
            "features": features,
            "unseen": [(one.layer, one.reason) for one in recording.unseen],
            "maps": maps,
            "classes": [{"class": one.index, "name": one.name, "probability": one.probability} for one in view.classes],
            "texts": dict(view.texts),
            "importance": None if view.importance is None else view.importance._asdict(),
            "contributions": None if view.contributions is None else self._contributions(view.contributions),
            "name": view.name,
            "layouts": [layout_facts(layout) for layout in self._layouts],
        }

    def _read(self, reading: Readout) -> dict[str, Any]:
        """Describe shares of tokens that have no name."""
        if reading.query != "read" or reading.layout is None or reading.shares is None:
            return {}
        return {"shares": {"layout": self._number(reading.layout), "values": self._stored("shares", reading.shares[0].float())}}

    def _contributions(self, found: Contributions) -> dict[str, Any]:
        """Describe the terms of a score."""
        layers = [
            {
                "layer": one.layer,
                "layout": self._number(one.layout),
                "values": self._stored(f"contributions.{number}", one.values.float()),
                "bias": one.bias,
            }
            for number, one in enumerate(found.layers)
        ]
        return {"target": found.target, "score": found.score, "layers": layers, "rest": found.rest}

    def _record(self, name: str, record: AttentionRecord) -> dict[str, Any]:
        operator, operands = operands_of(record.operator)
        operator |= {operand: self._stored(f"{name}.{operand}", tensor) for operand, tensor in operands.items()}
        vectors = {
            vector: self._stored(f"{name}.{vector}", found if vector == "output_weight" else found[0])
            for vector in _VECTORS
            if (found := getattr(record, vector)) is not None
        }
        return {
            "layer": record.layer,
            "call": record.call,
            "kind": record.kind,
            "queries": self._number(record.queries),
            "keys": self._number(record.keys),
            "operator": operator,
            "follows": record.follows,
            "reason": record.reason,
            **vectors,
        }

    def _feature(self, name: str, feature: FeatureRecord) -> dict[str, Any]:
        return {
            "layer": feature.layer,
            "role": feature.role,
            "value": self._stored(f"{name}.value", feature.value[0]),
            "layout": None if feature.layout is None else self._number(feature.layout),
        }

    def _number(self, layout: TokenLayout) -> int:
        return self._layouts.setdefault(layout, len(self._layouts))

    def _stored(self, name: str, tensor: Tensor) -> str:
        """Keep a tensor, such as the order of windows that several layers share, once; return its name."""
        known = next((other for other, kept in self._tensors.items() if _same(kept, tensor)), None)
        if known is None:
            known = f"{self._name}.{name}"
            self._tensors[known] = tensor
        return known


def _same(one: Tensor, other: Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )
