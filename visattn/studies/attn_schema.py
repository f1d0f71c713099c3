"""Format of `.attn` files: their version, the types of their JSON, and checks of sizes before anything is built from it."""

from __future__ import annotations

import math
from typing import Annotated, NotRequired, TypedDict

from msgspec import Meta

from visattn._support.json_files import SIDE, Number, Share, Whole, decoded
from visattn._support.types import MAX_PIXELS, Kind, Role
from visattn.core.maps.map_schema import MOST_VALUES, Facts, GeometryFacts, LayoutFacts, ProvenanceFacts, check_places

FORMAT, VERSION = "attn", 1
MOST_TEXT = 2**24  # characters of the JSON
MOST_VIEWS = 1000
MOST_PIXELS = 4 * MAX_PIXELS  # of all photos of a file
_LEAST = 1e-3  # pixels: shortest side of a box


class _Operator(TypedDict):
    kind: str
    scale: NotRequired[Number]
    keys: NotRequired[Whole]
    query: NotRequired[str]
    key: NotRequired[str]
    bias: NotRequired[str]
    weights: NotRequired[str]
    cells: NotRequired[str]
    shares: NotRequired[str]
    query_index: NotRequired[str]
    key_index: NotRequired[str]


class RecordFacts(TypedDict):
    """An attention call."""

    layer: str
    call: NotRequired[Whole]
    kind: Kind
    queries: Whole
    keys: Whole
    operator: _Operator
    value: NotRequired[str]
    output_weight: NotRequired[str]
    residual: NotRequired[str]
    follows: NotRequired[tuple[str, Whole] | None]
    reason: NotRequired[str | None]


class FeatureFacts(TypedDict):
    """An activation."""

    layer: str
    role: Role
    value: str
    layout: NotRequired[Whole | None]


class _Stored(Facts):
    values: str


_Class = TypedDict("_Class", {"class": Whole, "name": NotRequired[str | None], "probability": Share})


class ImportanceFacts(TypedDict):
    """The importance of heads for a score."""

    target: str
    heads: list[list[Number]]


class LayerFacts(TypedDict):
    """What the attention of a layer adds directly to a score."""

    layer: str
    layout: Whole
    values: str
    bias: Number


class ContributionsFacts(TypedDict):
    """Terms of a score."""

    target: str
    score: Number
    layers: list[LayerFacts]
    rest: list[tuple[str, Number]]


class SharesFacts(TypedDict):
    """Shares of the tokens from which the output is computed."""

    layout: int
    values: str


class ViewFacts(TypedDict):
    """A view."""

    photo: str
    geometry: GeometryFacts
    provenance: ProvenanceFacts
    layouts: list[LayoutFacts]
    records: list[RecordFacts]
    readout: NotRequired[str]
    shares: NotRequired[SharesFacts]
    captured: NotRequired[str]
    features: NotRequired[list[FeatureFacts]]
    unseen: NotRequired[list[tuple[str, str]]]
    maps: NotRequired[dict[str, _Stored]]
    classes: NotRequired[list[_Class]]
    texts: NotRequired[dict[str, str]]
    importance: NotRequired[ImportanceFacts | None]
    contributions: NotRequired[ContributionsFacts | None]
    name: NotRequired[str]


class StudyFacts(TypedDict):
    """A study."""

    views: Annotated[list[ViewFacts], Meta(min_length=1, max_length=MOST_VIEWS)]


def study_of(text: str) -> StudyFacts:
    """Decode the JSON of a study.

    Raises:
        ValueError: If it is too long or has another shape, or a number is out of range.
    """
    facts = decoded(text, StudyFacts, "the study", most=MOST_TEXT, lax=True)
    for view in facts["views"]:
        _check_geometry(view["geometry"])
        for layout in view["layouts"]:
            _check_layout(layout)
        for record in view["records"]:
            _check_layouts(view, record["queries"], record["keys"])
        for feature in view.get("features", ()):
            if (number := feature.get("layout")) is not None:
                _check_layouts(view, number)
        for shown in view.get("maps", {}).values():
            check_places(shown)
        if "shares" in view:
            _check_layouts(view, view["shares"]["layout"])
        for layer in (view.get("contributions") or {"layers": []})["layers"]:
            _check_layouts(view, layer["layout"])
        importance = view.get("importance")
        if importance and len(importance["heads"]) != len(view["records"]):
            raise ValueError(f"importance must be given for {len(view['records'])} records, got {len(importance['heads'])}")
    return facts


def _check_layouts(view: ViewFacts, *numbers: int) -> None:
    for number in numbers:
        if not 0 <= number < len(view["layouts"]):
            raise ValueError(f"a layout must be one of {len(view['layouts'])}, got {number}")


def _check_geometry(geometry: GeometryFacts) -> None:
    top, left, bottom, right = geometry["window"]
    sides = (*geometry["photo"], *geometry["input"], bottom - top, right - left)
    if not all(_LEAST <= side <= SIDE for side in sides):
        raise ValueError(f"sides of photo, input and window must lie in [{_LEAST:g}, {SIDE:,}] pixels")


def _check_layout(layout: LayoutFacts) -> None:
    grid, holes, (top, left, bottom, right) = layout["grid"], layout.get("holes", []), layout["box"]
    if len(grid) not in (0, 2, 3) or any(side < 1 for side in grid) or math.prod(grid) > MOST_VALUES:
        raise ValueError(f"a grid must be empty, (rows, columns) or (frames, rows, columns), of at most {MOST_VALUES:,} cells")
    if grid and not (_LEAST <= bottom - top <= SIDE and _LEAST <= right - left <= SIDE):
        raise ValueError(f"the box of a grid must have sides of {_LEAST:g} to {SIDE:,} pixels")
    if holes != sorted(set(holes)) or not all(0 <= hole < math.prod(grid) for hole in holes):
        raise ValueError("holes must be cells of the grid, in ascending order")
