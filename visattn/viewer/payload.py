"""Content of a page: plain values of a study as JSON, and one stream of bytes for all arrays."""

from __future__ import annotations

import base64
import fnmatch
import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from torch import Tensor

from visattn._support.checks import printable
from visattn._support.names import model_title
from visattn.drawing.colormaps import NAMES, table
from visattn.errors import OptionError
from visattn.evaluation.heads import statistics
from visattn.maps import AttentionMap
from visattn.methods.selection import chain, chain_refusal
from visattn.methods.sinks import find_sinks
from visattn.records import AttentionRecord, Recording, TokenLayout
from visattn.viewer.encoding import encoded

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from visattn.studies import Study, View

VERSION = 1
_LARGEST = 1600  # pixels of the longer side of a photo in the page
_QUALITY = 92  # of its JPEG
_KINDS = {"uint8": "u8", "uint16": "u16", "uint32": "u32", "int32": "i32", "float16": "f16", "float32": "f32"}


class Payload:
    """JSON and bytes of a page.

    Attributes:
        facts: Everything but the arrays.
        data: The arrays, one after another; `facts["chunks"]` has kind and length of each.
    """

    def __init__(self, study: Study, layers: str = "*") -> None:
        """Encode a study.

        Args:
            study: The study.
            layers: Glob of the names of the layers whose attention is encoded.

        Raises:
            OptionError: If no view has attention or maps, or no layer has such a name.
        """
        known = list(dict.fromkeys(record.layer for view in study for record in view.recording))
        if known and not fnmatch.filter(known, layers):
            raise OptionError(f"layers must be a glob of {known[0]} ... {known[-1]}, got '{printable(layers)}'.")
        self._wanted = layers
        self._arrays: list[NDArray[Any]] = []
        self._layouts: dict[TokenLayout, int] = {}
        views = [self._view(view) for view in study]
        if not any(view["records"] or view["maps"] for view in views):
            raise OptionError(
                "the study has neither attention nor maps to show. Make it with methods: visattn.study(..., methods=[...])."
            )
        self.facts: dict[str, Any] = {
            "version": VERSION,
            "views": views,
            "layouts": [_layout(layout) for layout in self._layouts],
            "colormaps": {name: base64.b64encode(table(name).tobytes()).decode() for name in NAMES},
            "chunks": [[_KINDS[str(array.dtype)], int(array.size)] for array in self._arrays],
        }

    @property
    def data(self) -> bytes:
        """The arrays as little-endian bytes, each beginning at a multiple of four."""
        parts = []
        for array in self._arrays:
            raw = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
            parts.append(raw + bytes(-len(raw) % 4))
        return b"".join(parts)

    def _view(self, view: View) -> dict[str, Any]:
        made, wanted = view.provenance, [one for one in view.recording if fnmatch.fnmatchcase(one.layer, self._wanted)]
        placed = [record for record in wanted if record.reason is None]
        numbers = _statistics(placed, view.recording.input_size)
        small = view.photo.copy()
        small.thumbnail((_LARGEST, _LARGEST), Image.Resampling.LANCZOS)
        stream = io.BytesIO()
        small.save(stream, "JPEG", quality=_QUALITY)
        return {
            "title": made.title,
            "model": model_title(made.model) + (f" ({made.weights})" if made.random else ""),
            "image": made.image or "photo",
            "photo": "data:image/jpeg;base64," + base64.b64encode(stream.getvalue()).decode(),
            "size": [view.photo.height, view.photo.width],
            "input": view.geometry.input,
            "window": view.geometry.window,
            "records": [self._record(record, numbers.get((record.layer, record.call))) for record in placed],
            "refused": [[record.layer, record.reason] for record in wanted if record.reason is not None]
            + [[one.layer, f"not recorded: {one.reason}"] for one in view.recording.unseen],
            "maps": [self._map(name, shown) for name, shown in view.maps.items()],
            "features": self._features(view.recording),
            "classes": [[one.name or f"class {one.index}", one.index, one.probability] for one in view.classes],
            "texts": dict(view.texts),
            "sinks": self._sinks(view.recording),
            "warnings": list(made.warnings),
        }

    def _record(self, record: AttentionRecord, numbers: dict[str, list[float | None]] | None) -> dict[str, Any]:
        found = encoded(record.operator)
        return {
            "layer": record.layer + (f" #{record.call}" if record.call else ""),
            "kind": record.kind,
            "heads": record.operator.shape[1],
            "queries": self._number(record.queries),
            "keys": self._number(record.keys),
            "how": found.how,
            "error": found.error,
            "arrays": {name: self._stored(array) for name, array in found.arrays.items()},
            **found.facts,
            "statistics": numbers or {},
        }

    def _map(self, name: str, shown: AttentionMap) -> dict[str, Any]:
        colored = shown.axes == ("component",) and shown.values.shape[0] == 3
        one = shown if colored else _panel(shown)
        values = one.values.detach().float().cpu().numpy()
        classes = [score["name"] or f"class {score['class']}" for score in shown.provenance.scores]
        averaged = [] if colored or not shown.axes else [f"mean over {', '.join(shown.axes)}"]
        return {
            "name": name,
            "meaning": shown.meaning,
            "about": ", ".join([*classes, *([shown.facts.layer] if shown.facts.layer else []), *averaged]),
            "signed": one.signed,
            "colored": colored,
            "layout": self._number(shown.layout),
            "values": self._stored(np.ascontiguousarray(values)),
        }

    def _features(self, recording: Recording) -> dict[str, Any] | None:
        """Store the tokens of the last layer, each of length 1, for similarities."""
        found = next((one for one in reversed(recording.features) if one.role == "tokens" and one.layout is not None), None)
        if found is None or found.layout is None or len(found.layout.grid) != 2:
            return None
        tokens = found.value[0].float()
        unit = (tokens / tokens.norm(dim=-1, keepdim=True).clamp_min(1e-12)).half()
        return {"layer": found.layer, "layout": self._number(found.layout), "values": self._stored(unit.cpu().numpy())}

    def _sinks(self, recording: Recording) -> dict[str, Any]:
        """Return the cells of the sinks and their layout; no cells where attention does not form a chain."""
        if chain_refusal(recording) is not None:
            return {"layout": -1, "cells": []}
        found = find_sinks(recording)[0]
        return {"layout": self._number(chain(recording)[0].keys), "cells": [[sink.row, sink.column] for sink in found]}

    def _number(self, layout: TokenLayout) -> int:
        return self._layouts.setdefault(layout, len(self._layouts))

    def _stored(self, array: NDArray[Any]) -> int:
        self._arrays.append(array)
        return len(self._arrays) - 1


def _panel(shown: AttentionMap) -> AttentionMap:
    for name in shown.axes:
        shown = shown.mean(name)
    return shown


def _layout(layout: TokenLayout) -> dict[str, Any]:
    return {
        "space": layout.space,
        "prefix": layout.prefix,
        "grid": layout.grid,
        "box": layout.box,
        "holes": layout.holes,
    }


def _finite(values: Tensor) -> list[float | None]:
    """Return numbers for JSON; None where a head has none, such as the distance of one that attends to no patch."""
    return [number if math.isfinite(number) else None for number in values.tolist()]


def _statistics(
    records: Sequence[AttentionRecord], size: tuple[int, int]
) -> dict[tuple[str, int], dict[str, list[float | None]]]:
    """Return entropy and distance of each head by layer and call, where rows are distributions."""
    found: dict[tuple[str, int], dict[str, list[float | None]]] = {}
    for record in records:
        if record.probability:
            (one,) = statistics(Recording([record], input_size=size))
            numbers = {"entropy": one.entropy, "distance": one.distance}
            found[record.layer, record.call] = {name: _finite(value[0]) for name, value in numbers.items() if value is not None}
    return found


def names_of(views: Sequence[View]) -> str:
    """Return the title of a page: model and photo of each view."""
    return " | ".join(dict.fromkeys(view.provenance.title for view in views))
