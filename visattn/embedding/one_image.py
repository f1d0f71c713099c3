"""Contribution of one image to a space: queries, keys, some rows of attention, and the properties of its patches."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save
from torch import Tensor

from visattn._support.files import write_whole
from visattn._support.reprs import brief
from visattn._support.types import Property
from visattn.evaluation.patches import patches_of
from visattn.evaluation.specialization import Scores, over_patches, scores_of
from visattn.geometry import Box, Geometry
from visattn.images import image_facts
from visattn.methods.selection import chain_refusal
from visattn.methods.sinks import find_sinks
from visattn.operators import MatrixOperator, Operator, SoftmaxOperator
from visattn.pipeline.inputs import Prepared
from visattn.records import AttentionRecord, Recording, TokenLayout

_LARGEST = 65504.0  # float16
_ROWS, _VISIBLE, _ROUNDED = 16, 1e-5, 0.02  # rows that are checked; weights that count; error of a logarithm of half precision
_SIDE, _QUALITY = 224, 88  # largest side of a small picture of the model's input, and of its JPEG


@dataclass(frozen=True, eq=False)
class OneLayer:
    """States of one attention layer for one image.

    Attributes:
        queries: `(heads, N, D)` in float16, or float32 where they are too large for it.
        keys: `(heads, M, D)`, likewise.
        of_queries: Layout of the queries.
        of_keys: Layout of the keys.
        some: `(S,)` queries, of which attention is kept.
        rows: `(heads, S, M)` their attention.
        color: `(N, 3)` mean color of the patch of each query; NaN for a token without a place.
        object: `(N,)` share of the patch that an object covers; NaN for a token without a place, or without a mask.
        notes: What the dot product of a query and a key leaves out of the attention.
    """

    queries: Tensor
    keys: Tensor
    of_queries: TokenLayout
    of_keys: TokenLayout
    some: Tensor
    rows: Tensor
    color: Tensor
    object: Tensor
    notes: tuple[str, ...]

    __repr__ = brief


@dataclass(frozen=True, eq=False)
class OneImage:
    """Contribution of one image to a space.

    Attributes:
        name: Name of the image.
        sha256: Digest of its file or pixels.
        picture: JPEG of what the model received of it.
        code: `(D,)` class token after the last layer, or the mean of its patches; empty if its tokens are not known.
        sinks: `(row, column)` of its attention sinks.
        layers: States by layer.
        scores: Scores of `heads` by property, with draws of their nulls; see `find_heads`.
        heads: Layer and number of each head that was scored.
    """

    name: str
    sha256: str
    picture: bytes
    code: Tensor
    sinks: tuple[tuple[int, int], ...]
    layers: dict[str, OneLayer]
    scores: Scores
    heads: tuple[tuple[str, int], ...]

    __repr__ = brief

    def save(self, path: Path) -> None:
        """Write a file that is complete or absent."""
        tensors, layers = {"picture": torch.from_numpy(np.frombuffer(self.picture, np.uint8).copy()), "code": self.code}, []
        for number, (name, one) in enumerate(self.layers.items()):
            kept = {key: value for key, value in vars(one).items() if isinstance(value, Tensor)}
            tensors |= {f"{number}.{key}": value.contiguous() for key, value in kept.items()}
            places = [asdict(place) for place in (one.of_queries, one.of_keys)]
            layers.append({"name": name, "places": places, "notes": one.notes})
        for title, (value, null) in self.scores.items():
            tensors |= {f"score.{title}": value.contiguous(), f"null.{title}": null.contiguous()}
        facts = {"name": self.name, "sha256": self.sha256, "sinks": self.sinks, "layers": layers, "scores": list(self.scores)}
        facts["heads"] = self.heads
        write_whole(path, save(tensors, {"visattn": json.dumps(facts)}))

    @classmethod
    def load(cls, path: Path) -> OneImage:
        """Read a file that `save` wrote."""
        with safetensors.safe_open(path, "pt") as file:
            facts = json.loads(file.metadata()["visattn"])
            tensors: dict[str, Tensor] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
        layers = {}
        for number, told in enumerate(facts["layers"]):
            kept = {key.partition(".")[2]: value for key, value in tensors.items() if key.startswith(f"{number}.")}
            places = [_layout(place) for place in told["places"]]
            layers[told["name"]] = OneLayer(**kept, of_queries=places[0], of_keys=places[1], notes=tuple(told["notes"]))
        scores: Scores = {title: (tensors[f"score.{title}"], tensors[f"null.{title}"]) for title in facts["scores"]}
        picture = tensors["picture"].numpy().tobytes()
        sinks = tuple((row, column) for row, column in facts["sinks"])
        heads = tuple((layer, head) for layer, head in facts["heads"])
        return cls(facts["name"], facts["sha256"], picture, tensors["code"], sinks, layers, scores, heads)


def image_states(
    recording: Recording, prepared: Prepared, layers: str, some: int, mask: NDArray[np.bool_] | None, draws: int, seed: int
) -> OneImage:
    """Gather what one image gives.

    Args:
        recording: Attention with the states of the image.
        prepared: The image.
        layers: Glob of the names of layers.
        some: Number of patches whose attention is kept, besides that of the tokens without a place.
        mask: Mask of an object on the photo.
        draws: Number of draws of each null.
        seed: Seed of the draws, and of the choice of patches.

    Returns:
        The states, and scores of those heads that attend among patches.
    """
    facts = image_facts(prepared.photo)
    found, scored = {}, list(over_patches(recording))
    every: list[Scores] = []
    heads: list[tuple[str, int]] = []
    for record in _records(recording, layers):
        patches = patches_of(prepared.photo, prepared.geometry, record.queries, mask)
        found[_name(record)] = _one_layer(record, patches.color, patches.object, some, seed)
        if any(record is one for one in scored):
            every.append(scores_of(record, patches, draws=draws, seed=seed))
            heads += [(_name(record), head) for head in range(record.operator.shape[1])]
    sinks = find_sinks(recording)[0] if chain_refusal(recording) is None else ()
    picture = _picture(prepared.photo, prepared.geometry)
    places = tuple((sink.row, sink.column) for sink in sinks)
    return OneImage(facts.name, facts.sha256, picture, _code(recording), places, found, _joined(every), tuple(heads))


def _code(recording: Recording) -> Tensor:
    """Return the class token after the last layer, or the mean of the patches."""
    found = next((one for one in reversed(recording.features) if one.role == "tokens" and one.layout is not None), None)
    if found is None or found.layout is None:
        return torch.empty(0)
    tokens = found.value[0].detach().float().cpu()
    return tokens[0].clone() if found.layout.prefix[:1] == ("cls",) else tokens[len(found.layout.prefix) :].mean(0)


def _joined(every: list[Scores]) -> Scores:
    """Put the scores of all layers after one another."""
    titles: list[Property] = list(every[0]) if every else []
    return {
        title: (torch.cat([one[title][0] for one in every]), torch.cat([one[title][1] for one in every], 1)) for title in titles
    }


def _one_layer(
    record: AttentionRecord, color: NDArray[np.float64], covered: NDArray[np.float64] | None, some: int, seed: int
) -> OneLayer:
    place, prefix = record.queries, len(record.queries.prefix)
    at = np.array(place.present)
    random = np.random.default_rng([seed, *place.grid])  # the same patches in all layers with this grid
    chosen = np.sort(random.permutation(len(at))[:some]) + prefix
    kept = torch.from_numpy(np.concatenate([np.arange(prefix), chosen]))
    colors, shares = torch.full((len(place), 3), torch.nan), torch.full((len(place),), torch.nan)
    colors[prefix:] = torch.from_numpy(color.reshape(-1, 3)[at]).float()
    if covered is not None:
        shares[prefix:] = torch.from_numpy(covered.reshape(-1)[at]).float()
    operator = record.operator
    rows = operator.rows(kept.to(operator.device))[0].float().cpu()
    states = (_small(operator.queries()[0]), _small(operator.keys()[0]))
    return OneLayer(*states, place, record.keys, kept, rows, colors, shares, _left_out(record))


def _records(recording: Recording, layers: str) -> Iterator[AttentionRecord]:
    for record in recording:
        on_grid = len(record.queries.grid) == 2 and len(record.keys.grid) == 2
        if record.kind == "self" and on_grid and fnmatchcase(record.layer, layers):
            yield record


def _name(record: AttentionRecord) -> str:
    return record.layer + (f" #{record.call}" if record.call else "")


def _small(states: Tensor) -> Tensor:
    """Return states in float16, or in float32 if they are too large for it."""
    states = states.detach().cpu()
    return states.half() if float(states.abs().max()) < _LARGEST else states.float()


def _picture(photo: Image.Image, geometry: Geometry) -> bytes:
    """Return what the model receives of a photo as a small JPEG."""
    top, left, bottom, right = geometry.window
    scale = min(1.0, _SIDE / max(geometry.input))
    size = [max(1, round(side * scale)) for side in geometry.input]
    shown = photo.convert("RGB").transform(
        (size[1], size[0]), Image.Transform.EXTENT, (left, top, right, bottom), Image.Resampling.BICUBIC
    )
    stream = io.BytesIO()
    shown.save(stream, "JPEG", quality=_QUALITY)
    return stream.getvalue()


def _layout(told: Mapping[str, Any]) -> TokenLayout:
    """Build a layout from the dictionary of `asdict`, which was stored as JSON."""
    return TokenLayout(told["space"], tuple(told["prefix"]), tuple(told["grid"]), Box(*told["box"]), tuple(told["holes"]))


def _left_out(record: AttentionRecord) -> tuple[str, ...]:
    """Return what the attention of a layer has besides the products of its queries and keys."""
    operator = record.operator
    blocks = operator.key_index is not None and operator.key_index.shape[0] > 1
    told = {
        "the products are not all: a bias or a mask, such as that of relative positions, is added to them": not _by_products(
            operator
        ),
        "a query attends within its window only": blocks,
    }
    return tuple(text for text, holds in told.items() if holds)


def _by_products(operator: Operator) -> bool:
    """Check on a few rows whether the logarithm of the weights is the product of query and key, up to a factor and the row's sum."""
    if isinstance(operator, SoftmaxOperator):
        return operator.bias is None
    if not isinstance(operator, MatrixOperator) or operator.query is None or operator.key is None:
        return False
    rows = slice(None, None, max(1, operator.query.shape[3] // _ROWS))
    products = (operator.query[0, :, 0, rows].double() @ operator.key[0, :, 0].double().mT).flatten(0, 1)
    weights = operator.weights[0, :, 0, rows].double().flatten(0, 1)
    for product, weight in zip(products, weights, strict=True):
        seen = weight > _VISIBLE
        if int(seen.sum()) > 2:
            x, y = (each[seen] - each[seen].mean() for each in (product, weight.log()))
            if float((y - x * (x @ y) / (x @ x)).abs().max()) > _ROUNDED:
                return False
    return True
