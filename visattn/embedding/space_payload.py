"""Content of the page of a space: plain values as JSON, and one stream of bytes for all arrays."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from visattn._support.tables import Row
from visattn.core.drawing.colormaps import table
from visattn.embedding.space import LayerStates, Projection, Space, Tokens
from visattn.viewer import Packed, check_size

if TYPE_CHECKING:
    from numpy.typing import NDArray

NOWHERE = 65535  # code of a point without a place
_LAST = NOWHERE - 1
_DECIMALS = 2  # of pixels, to which grids on a photo are compared
_COLORMAPS = "viridis", "inferno"


class Part(NamedTuple):
    """A space and what was computed of it.

    Attributes:
        space: Queries and keys.
        points: Points of the drawn tokens of each layer.
        numbers: Rows of `head_numbers`, or nothing.
        images: `(images, 2)` points of the images, or `(0, 2)`.
    """

    space: Space
    points: Sequence[Projection]
    numbers: Sequence[Row]
    images: Tensor


class SpacePayload:
    """JSON and bytes of the page of a space.

    Attributes:
        facts: Everything but the arrays.
        data: The arrays, one after another, compressed and in base64; `facts["chunks"]` has kind and length of each.
    """

    def __init__(self, parts: Sequence[Part], about: str, max_mb: float) -> None:
        """Encode spaces of the same images.

        Args:
            parts: One space, or two that are shown beside each other.
            about: What the points are, and which tokens are drawn.
            max_mb: Largest size of the page in MB.

        Raises:
            OptionError: If the page grows too large.
        """
        self._arrays, self._most = Packed(), max_mb
        self._tables: list[dict[str, Any]] = []
        self._known: dict[tuple[Any, ...], int] = {}
        self._places: dict[
            tuple[Any, ...], int
        ] = {}  # grids on the photos: in those with one number, a place means the same pixels
        first = parts[0].space
        layers = [
            self._layer(block, states, part.space.windows, one)
            for block, part in enumerate(parts)
            for states, one in zip(part.space.layers, part.points, strict=True)
        ]
        blocks = [_block(part) | {"model": name} for part, name in zip(parts, _names(parts), strict=True)]
        self.data = self._arrays.text()
        self.facts: dict[str, Any] = {
            "title": f"{' | '.join(block['model'] for block in blocks)}: {len(first.images)} images",
            "about": about,
            "dimensions": parts[0].points[0].queries.shape[2],
            "images": [{"name": name, "label": first.labels[i] if first.labels else ""} for i, name in enumerate(first.images)],
            "blocks": blocks,
            "tables": self._tables,
            "layers": layers,
            "colormaps": {name: base64.b64encode(table(name).tobytes()).decode() for name in _COLORMAPS},
            "warnings": list(dict.fromkeys(text for part in parts for text in part.space.provenance.warnings)),
            "notes": list(dict.fromkeys(text for part in parts for text in part.space.provenance.notes)),
            "chunks": self._arrays.chunks,
        }

    def _layer(self, block: int, states: LayerStates, windows: Tensor, one: Projection) -> dict[str, Any]:
        heads = one.heads
        clouds = torch.cat([one.queries, one.keys], 1)  # (heads, 2 S, dimensions)
        middle, half = _frames(clouds)
        rows = states.rows[list(heads)].float()
        most = rows.amax(-1).clamp_min(torch.finfo(torch.float32).tiny)
        codes = (rows / most[..., None] * 255).round().to(torch.uint8)
        norms = [each[list(heads)][:, states.some].float().norm(dim=2).numpy() for each in (states.queries, states.keys)]
        facts = {
            "name": states.layer,
            "number": states.number,
            "heads": list(heads),
            "notes": list(states.notes),
            "block": block,
            "table": self._table(block, states.tokens, states.some, windows),
            "queries": self._arrays.add(_codes(one.queries, middle, half)),
            "keys": self._arrays.add(_codes(one.keys, middle, half)),
            "queryNorms": self._arrays.add(norms[0]),
            "keyNorms": self._arrays.add(norms[1]),
            "rows": self._arrays.add(codes.numpy()),
            "rowScale": self._arrays.add((most / 255).numpy()),
            "shares": [[_finite(value) for value in row] for row in one.shares.tolist()],
        }
        check_size(self._arrays.characters, self._most, f"layer {states.layer}")
        return facts

    def _table(self, block: int, tokens: Tokens, some: Tensor, windows: Tensor) -> int:
        """Return the number of the table of the drawn tokens; layers of a model with the same tokens share one."""
        places = tokens.grid, tokens.words, tokens.boxes.round(decimals=_DECIMALS).numpy().tobytes()
        key = block, places, tokens.names, some.numpy().tobytes()
        if key in self._known:
            return self._known[key]
        color, covered = tokens.color[some], tokens.object[some]
        place = (tokens.image[some], tokens.row[some], tokens.column[some])
        self._tables.append(
            {
                "grid": list(tokens.grid),
                "names": list(tokens.names),
                "frame": _frame(tokens.boxes[0], windows[0]),
                "words": [list(text) for text in tokens.words],
                "places": self._places.setdefault(places, len(self._places)),
                "token": self._arrays.add((some % tokens.per_image).numpy().astype(np.uint16)),
                "cellRow": self._arrays.add(tokens.row[: tokens.per_image].numpy().astype(np.int32)),
                "cellColumn": self._arrays.add(tokens.column[: tokens.per_image].numpy().astype(np.int32)),
                "image": self._arrays.add(place[0].numpy().astype(np.uint16)),
                "row": self._arrays.add(place[1].numpy().astype(np.int32)),
                "column": self._arrays.add(place[2].numpy().astype(np.int32)),
                "sink": self._arrays.add(tokens.sink[some].numpy().astype(np.uint8)),
                "color": self._arrays.add((color.nan_to_num(0) * 255).round().to(torch.uint8).numpy()),
                "object": None if bool(covered.isnan().all()) else self._arrays.add(covered.nan_to_num(0).half().numpy()),
            }
        )
        self._known[key] = len(self._tables) - 1
        return self._known[key]


def _names(parts: Sequence[Part]) -> list[str]:
    """Name the models; those of one name by their weights, or else by number."""
    names = [part.space.provenance.but(image=None).title for part in parts]
    if len(set(names)) < len(names):
        names = [f"{name}, {part.space.provenance.weights}" for name, part in zip(names, parts, strict=True)]
    if len(set(names)) < len(names):
        names = [f"{name} ({number})" for number, name in enumerate(names, start=1)]
    return names


def _block(part: Part) -> dict[str, Any]:
    points = part.images
    if len(points):
        low, high = points.amin(0), points.amax(0)
        half = float(((high - low) / 2).max()) or 1.0
        points = ((points - (low + high) / 2) / half + 1) / 2
    return {
        "photos": [_uri(picture) for picture in part.space.pictures],
        "codes": points.tolist(),
        "numbers": [_plain(row) for row in part.numbers],
        "scores": {scores.name: [_plain(row) for row in scores.rows()] for scores in part.space.scores},
    }


def _frame(box: Tensor, window: Tensor) -> list[float]:
    """Return a rectangle as shares of the height and width of another."""
    corner, size = window[:2].repeat(2), (window[2:] - window[:2]).repeat(2)
    found: list[float] = ((box - corner) / size).tolist()
    return found


def _frames(clouds: Tensor) -> tuple[Tensor, Tensor]:
    """Return the middle `(heads, 1, dimensions)` of each head's points, and half the longest side `(heads, 1, 1)`."""
    low = clouds.nan_to_num(math.inf).amin(1, keepdim=True)
    high = clouds.nan_to_num(-math.inf).amax(1, keepdim=True)
    half = ((high - low) / 2).amax(2, keepdim=True)
    return (high + low) / 2, torch.where(half > 0, half, 1)


def _codes(points: Tensor, middle: Tensor, half: Tensor) -> NDArray[np.uint16]:
    """Encode points in 16 bits, on one scale for all dimensions of a head."""
    share = ((points - middle) / half + 1) / 2 * _LAST
    return torch.where(share.isnan(), NOWHERE, share.round()).numpy().astype(np.uint16)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _plain(row: Row) -> dict[str, Any]:
    return {key: _finite(value) if isinstance(value, float) else value for key, value in row.items()}


def _uri(picture: bytes) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(picture).decode()
