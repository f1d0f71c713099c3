"""Format of `.attn` files: their version, the shape of their JSON, and checks of sizes before anything is built from it."""

from __future__ import annotations

import math
from typing import Any, get_args

from visattn._support.shapes import SIDE, Maybe, check_shape
from visattn._support.types import MAX_PIXELS, Kind, Role
from visattn.maps.schema import FACTS, GEOMETRY, LAYOUT, MOST_VALUES, PROVENANCE, check_places

FORMAT, VERSION = "attn", 1
MOST_TEXT = 2**24  # bytes of the JSON
MOST_VIEWS = 1000
MOST_PIXELS = 4 * MAX_PIXELS  # of all photos of a file
_LEAST = 1e-3  # pixels: shortest side of a box

_OPERATOR = {
    "kind": str,
    "scale?": float,
    "keys?": int,
    "query?": str,
    "key?": str,
    "bias?": str,
    "weights?": str,
    "cells?": str,
    "shares?": str,
    "query_index?": str,
    "key_index?": str,
}
_RECORD = {
    "layer": str,
    "call?": int,
    "kind": str,
    "queries": int,
    "keys": int,
    "operator": _OPERATOR,
    "value?": str,
    "output_weight?": str,
    "residual?": str,
    "follows?": Maybe((str, int)),
    "reason?": Maybe(str),
}
_FEATURE = {"layer": str, "role": str, "value": str, "layout?": Maybe(int)}
_VIEW = {
    "photo": str,
    "geometry": GEOMETRY,
    "provenance": PROVENANCE,
    "layouts": [LAYOUT],
    "records": [_RECORD],
    "readout?": str,
    "captured?": str,
    "features?": [_FEATURE],
    "unseen?": [(str, str)],
    "maps?": {str: FACTS | {"values": str}},
    "classes?": [{"class": int, "name?": Maybe(str), "probability": float}],
    "texts?": {str: str},
    "importance?": Maybe({"target": str, "heads": [[float]]}),
    "name?": str,
}
_STUDY = {"views": [_VIEW]}


def checked(facts: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """Return the JSON of a study after checking it.

    Raises:
        ValueError: If it has another shape, or a number is out of range.
    """
    check_shape(facts, _STUDY, "the study")
    if not 1 <= len(facts["views"]) <= MOST_VIEWS:
        raise ValueError(f"a study must have 1 to {MOST_VIEWS} views, got {len(facts['views'])}")
    for view in facts["views"]:
        _check_geometry(view["geometry"])
        for layout in view["layouts"]:
            _check_layout(layout)
        for record in view["records"]:
            _check_choice(record["kind"], get_args(Kind), "kind")
            _check_layouts(view, record["queries"], record["keys"])
        for feature in view.get("features", ()):
            _check_choice(feature["role"], get_args(Role), "role")
            _check_layouts(view, *(() if feature.get("layout") is None else (feature["layout"],)))
        for shown in view.get("maps", {}).values():
            check_places(shown)
        importance = view.get("importance")
        if importance and len(importance["heads"]) != len(view["records"]):
            raise ValueError(f"importance must be given for {len(view['records'])} records, got {len(importance['heads'])}")
        if not all(0 <= one["probability"] <= 1 for one in view.get("classes", ())):
            raise ValueError("probabilities must lie in [0, 1]")
    return dict(facts)


def _check_choice(value: str, choices: tuple[str, ...], name: str) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _check_layouts(view: dict[str, Any], *numbers: int) -> None:
    for number in numbers:
        if not 0 <= number < len(view["layouts"]):
            raise ValueError(f"a layout must be one of {len(view['layouts'])}, got {number}")


def _check_geometry(geometry: dict[str, Any]) -> None:
    top, left, bottom, right = geometry["window"]
    sides = (*geometry["photo"], *geometry["input"], bottom - top, right - left)
    if not all(_LEAST <= side <= SIDE for side in sides):
        raise ValueError(f"sides of photo, input and window must lie in [{_LEAST:g}, {SIDE:,}] pixels")


def _check_layout(layout: dict[str, Any]) -> None:
    grid, holes, (top, left, bottom, right) = layout["grid"], layout.get("holes", []), layout["box"]
    if len(grid) not in (0, 2, 3) or any(side < 1 for side in grid) or math.prod(grid) > MOST_VALUES:
        raise ValueError(f"a grid must be empty, (rows, columns) or (frames, rows, columns), of at most {MOST_VALUES:,} cells")
    if grid and not (_LEAST <= bottom - top <= SIDE and _LEAST <= right - left <= SIDE):
        raise ValueError(f"the box of a grid must have sides of {_LEAST:g} to {SIDE:,} pixels")
    if holes != sorted(set(holes)) or not all(0 <= hole < math.prod(grid) for hole in holes):
        raise ValueError("holes must be cells of the grid, in ascending order")
