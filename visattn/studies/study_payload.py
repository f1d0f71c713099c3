"""Content of a page: plain values of a study as JSON, and one stream of bytes for all arrays."""

from __future__ import annotations

import base64
import fnmatch
import io
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
from PIL import Image
from torch import Tensor

from visattn._support.checks import printable, shown
from visattn._support.language import worded
from visattn._support.names import model_title
from visattn._support.types import Blend, Ground
from visattn.core.drawing.colormaps import NAMES, table
from visattn.core.drawing.style import COMPONENTS, Style
from visattn.core.maps import AttentionMap
from visattn.core.methods.selection import chain, chain_refusal
from visattn.core.methods.sinks import find_sinks
from visattn.core.pipeline.outputs import noun_of
from visattn.core.records import AttentionRecord, Recording, TokenLayout
from visattn.errors import OptionError
from visattn.evaluation import statistics
from visattn.studies.views import Contributions, View
from visattn.viewer import Packed, check_size, encoded

VERSION = 1
_LARGEST = 1600  # pixels of the longer side of a photo in the page
_QUALITY = 92  # of its JPEG


class StudyPayload:
    """JSON and bytes of a page.

    Attributes:
        facts: Everything but the arrays.
        data: The arrays, one after another, compressed and in base64; `facts["chunks"]` has kind and length of each.
    """

    def __init__(self, study: Sequence[View], *, layers: str, heads: Sequence[int] | None, max_mb: float) -> None:
        """Encode a study.

        Args:
            study: Views of a study.
            layers: Glob of the names of the layers whose attention is encoded.
            heads: Numbers of the heads that are encoded; None: all.
            max_mb: Largest size of the page in MB.

        Raises:
            OptionError: If no view has attention or maps, no layer has such a name or such heads, or the page grows too large.
        """
        _check_wanted(study, layers, heads)
        self._layers, self._heads, self._most = layers, heads, max_mb
        self._arrays = Packed()
        self._layouts: dict[TokenLayout, int] = {}
        views = [self._view(view, title) for view, title in zip(study, _titles(study), strict=True)]
        if not any(view["records"] or view["maps"] for view in views):
            raise OptionError(
                "the study has neither attention nor maps to show. Make it with methods: "
                + worded("visattn.study(..., methods=[...]).", "visattn view IMAGE --methods NAME.")
            )
        self.data = self._arrays.text()
        self.facts: dict[str, Any] = {
            "version": VERSION,
            "views": views,
            "layouts": [_layout(layout) for layout in self._layouts],
            "colormaps": {name: base64.b64encode(table(name).tobytes()).decode() for name in NAMES},
            "look": _look(),
            "chunks": self._arrays.chunks,
        }

    def _view(self, view: View, title: str) -> dict[str, Any]:
        made = view.provenance
        wanted = [(i, one) for i, one in enumerate(view.recording) if fnmatch.fnmatchcase(one.layer, self._layers)]
        placed = [(i, one) for i, one in wanted if one.reason is None and _chosen(one, self._heads)]
        numbers = _statistics([record for _, record in placed], view.recording.input_size)
        for i, record in placed:
            if view.importance:
                numbers.setdefault((record.layer, record.call), {})["importance"] = list(view.importance.heads[i])
        small = view.photo.copy()
        small.thumbnail((_LARGEST, _LARGEST), Image.Resampling.LANCZOS)
        stream = io.BytesIO()
        small.save(stream, "JPEG", quality=_QUALITY)
        return {
            "title": title,
            "model": model_title(made.model) + (f" ({made.weights})" if made.random else ""),
            "image": made.image or "photo",
            "photo": "data:image/jpeg;base64," + base64.b64encode(stream.getvalue()).decode(),
            "size": [view.photo.height, view.photo.width],
            "input": view.geometry.input,
            "window": view.geometry.window,
            "records": [self._record(record, numbers.get((record.layer, record.call), {})) for _, record in placed],
            "refused": [[record.layer, record.reason] for _, record in wanted if record.reason is not None]
            + [[one.layer, f"not recorded: {one.reason}"] for one in view.recording.unseen],
            "maps": [self._map(name, shown) for name, shown in view.maps.items()],
            "features": self._features(view.recording),
            "classes": [[one.name or f"class {one.index}", one.index, one.probability] for one in view.classes],
            "texts": dict(view.texts),
            "importance": view.importance.target if view.importance else None,
            "contributions": None if view.contributions is None else self._contributions(view.contributions),
            "sinks": self._sinks(view.recording),
            "warnings": list(made.warnings),
            "notes": list(made.notes),
        }

    def _record(self, record: AttentionRecord, numbers: dict[str, list[float | None]]) -> dict[str, Any]:
        found, heads = encoded(record.operator), _chosen(record, self._heads)
        kept = found.only(heads)
        facts = {
            "layer": record.name,
            "kind": record.kind,
            "heads": len(heads),
            "numbers": heads,
            "all": record.operator.shape[1],
            "queries": self._number(record.queries),
            "keys": self._number(record.keys),
            "how": found.how,
            "error": found.error,
            "arrays": {name: self._arrays.add(array) for name, array in kept.items()},
            **found.facts,
            "statistics": {name: [values[head] for head in heads] for name, values in numbers.items()},
        }
        check_size(self._arrays.characters, self._most, f"layer {printable(record.layer)}")
        return facts

    def _map(self, name: str, shown: AttentionMap) -> dict[str, Any]:
        colored = shown.axes == ("component",) and shown.values.shape[0] == 3
        one = shown if colored else _panel(shown)
        values = one.values.detach().float().cpu().numpy()
        classes = [
            score["name"] or f"{noun_of(score.get('outputs', 'logits'))} {score['class']}" for score in shown.provenance.scores
        ]
        averaged = [] if colored or not shown.axes else [f"mean over {', '.join(shown.axes)}"]
        return {
            "name": name,
            "meaning": shown.meaning,
            "about": ", ".join([*classes, *([f"layer {shown.facts.layer}"] if shown.facts.layer else []), *averaged]),
            "signed": one.signed,
            "pixelwise": shown.facts.pixelwise,
            "colored": colored,
            "layout": self._number(shown.layout),
            "values": self._arrays.add(np.ascontiguousarray(values)),
        }

    def _contributions(self, found: Contributions) -> dict[str, Any]:
        """Store what each head adds to a score, token by token."""
        layers = [
            {
                "layer": one.layer,
                "layout": self._number(one.layout),
                "heads": len(one.values),
                "values": self._arrays.add(one.values.cpu().numpy()),
                "bias": one.bias,
            }
            for one in found.layers
        ]
        return {"target": found.target, "score": found.score, "layers": layers, "rest": found.rest}

    def _features(self, recording: Recording) -> dict[str, Any] | None:
        """Store the tokens of the last layer, each of length 1, for similarities."""
        found = next((one for one in reversed(recording.features) if one.role == "tokens" and one.layout is not None), None)
        if found is None or found.layout is None or len(found.layout.grid) != 2:
            return None
        tokens = found.value[0].float()
        unit = (tokens / tokens.norm(dim=-1, keepdim=True).clamp_min(1e-12)).half()
        return {"layer": found.layer, "layout": self._number(found.layout), "values": self._arrays.add(unit.cpu().numpy())}

    def _sinks(self, recording: Recording) -> dict[str, Any]:
        """Return the cells of the sinks and their layout; no cells where attention does not form a chain."""
        if chain_refusal(recording) is not None:
            return {"layout": -1, "cells": []}
        found = find_sinks(recording)[0]
        return {"layout": self._number(chain(recording)[0].keys), "cells": [[sink.row, sink.column] for sink in found]}

    def _number(self, layout: TokenLayout) -> int:
        return self._layouts.setdefault(layout, len(self._layouts))


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


def _look() -> dict[str, Any]:
    """Return what static overlays do by themselves: their opacity, and whether colors lie on the gray photo, by ground and blending."""
    return {
        "opacity": Style().opacity,
        "gray": {
            ground: {blend: Style(ground=ground, blend=blend).is_gray for blend in get_args(Blend)} for ground in get_args(Ground)
        },
        "components": {"opacity": COMPONENTS.opacity, "gray": COMPONENTS.is_gray},
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


def _check_wanted(study: Sequence[View], layers: str, heads: Sequence[int] | None) -> None:
    """Check that a layer has the name and the heads; a study without attention takes any."""
    if heads is not None and not all(type(head) is int for head in heads):
        raise OptionError(
            f"heads must be a list of whole numbers, got {shown(heads)}. Pass {worded('heads=[0, 3]', '--heads 0,3')}."
        )
    every = [record for view in study for record in view.recording]
    known = list(dict.fromkeys(record.layer for record in every))
    named = [record for record in every if fnmatch.fnmatchcase(record.layer, layers)]
    if known and not named:
        raise OptionError(f"layers must be a glob of {known[0]} ... {known[-1]}, got '{printable(layers)}'.")
    if named and not any(_chosen(record, heads) for record in named):
        most = max(record.operator.shape[1] for record in named)
        raise OptionError(f"heads must be numbers from 0 to {most - 1}, got {list(heads or ())}.")


def _chosen(record: AttentionRecord, heads: Sequence[int] | None) -> list[int]:
    """Return the numbers of those heads of a layer that were asked for."""
    return [head for head in range(record.operator.shape[1]) if heads is None or head in heads]


def _titles(study: Sequence[View]) -> list[str]:
    """Return a title for each view; views with equal titles are numbered."""
    count, used = Counter(view.title for view in study), Counter[str]()
    titles = []
    for view in study:
        used[view.title] += 1
        titles.append(f"{view.title} ({used[view.title]})" if count[view.title] > 1 else view.title)
    return titles
