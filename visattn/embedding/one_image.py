"""Contribution of one image to a space: queries, keys, some rows of attention, and the properties of its patches."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import safetensors
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save
from torch import Tensor

from visattn._support.json_files import Whole, decoded
from visattn._support.reprs import brief
from visattn._support.types import Property
from visattn._support.whole_files import write_whole
from visattn.core.geometry import Box, Geometry
from visattn.core.images import image_facts
from visattn.core.maps.map_files import layout_of
from visattn.core.maps.map_schema import BoxFacts, LayoutFacts
from visattn.core.methods.selection import chain_refusal
from visattn.core.methods.sinks import find_sinks
from visattn.core.operators import MatrixOperator, Operator, SoftmaxOperator
from visattn.core.pipeline.inputs import Prepared
from visattn.core.records import AttentionRecord, Recording, TokenLayout
from visattn.core.records.layouts import WORDS
from visattn.errors import OptionError
from visattn.evaluation import Patches, PropertyScores, over_patches, patches_by_layout, score_heads

_LARGEST = 65504.0  # float16
_ROWS, _VISIBLE, _ROUNDED = 16, 1e-5, 0.02  # rows that are checked; weights that count; error of a logarithm of half precision
_SIDE, _QUALITY = 224, 88  # largest side of a small picture of the model's input, and of its JPEG


class _Layer(TypedDict):
    name: str
    number: Whole
    layout: LayoutFacts
    box: BoxFacts
    notes: tuple[str, ...]


class _Facts(TypedDict):
    name: str
    sha256: str
    window: BoxFacts
    words: tuple[str, ...]
    sinks: tuple[tuple[Whole, Whole], ...]
    left_out: tuple[str, ...]
    heads: tuple[tuple[str, Whole], ...]
    layers: list[_Layer]
    scores: list[Property]
    key: str


@dataclass(frozen=True, eq=False)
class OneLayer:
    """States of one attention layer for one image.

    Attributes:
        number: Number of the layer among those with attention.
        layout: Layout of the tokens, which are queries and keys.
        box: Rectangle of the photo that the grid of the layout covers.
        queries: `(heads, N, D)` in float16, or float32 where they are too large for it.
        keys: `(heads, N, D)`, likewise.
        some: `(S,)` tokens that are drawn, and whose attention as queries is kept.
        rows: `(heads, S, N)` their attention.
        color: `(N, 3)` mean color of the patch of each token; NaN for a token without a place.
        object: `(N,)` share of the patch that an object covers; NaN for a token without a place, or without a mask.
        notes: What the dot product of a query and a key leaves out of the attention.
    """

    number: int
    layout: TokenLayout
    box: Box
    queries: Tensor
    keys: Tensor
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
        window: Rectangle of the photo that the picture shows.
        words: Words of its text, without padding; they are the first tokens of layers over words.
        code: `(D,)` class token after the last layer, or the mean of its patches; empty if its tokens are not known.
        sinks: `(row, column)` of its attention sinks.
        layers: States by layer.
        left_out: Names of the other layers with attention.
        scores: Scores of `heads` by property, with draws of their nulls; see `find_heads`.
        heads: Layer and number of each head that was scored.
    """

    name: str
    sha256: str
    picture: bytes
    window: Box
    words: tuple[str, ...]
    code: Tensor
    sinks: tuple[tuple[int, int], ...]
    layers: dict[str, OneLayer]
    left_out: tuple[str, ...]
    scores: PropertyScores
    heads: tuple[tuple[str, int], ...]

    __repr__ = brief

    def save(self, path: Path, key: str) -> None:
        """Write a file that is complete or absent, and carries a key."""
        tensors, layers = {"picture": torch.from_numpy(np.frombuffer(self.picture, np.uint8).copy()), "code": self.code}, []
        for number, (name, one) in enumerate(self.layers.items()):
            kept = {key: value for key, value in vars(one).items() if isinstance(value, Tensor)}
            tensors |= {f"{number}.{key}": value.contiguous() for key, value in kept.items()}
            told = {"number": one.number, "layout": asdict(one.layout), "box": one.box, "notes": one.notes}
            layers.append({"name": name, **told})
        for title, (value, null) in self.scores.items():
            tensors |= {f"score.{title}": value.contiguous(), f"null.{title}": null.contiguous()}
        facts = {name: getattr(self, name) for name in ("name", "sha256", "window", "words", "sinks", "left_out", "heads")}
        facts |= {"layers": layers, "scores": list(self.scores), "key": key}
        write_whole(path, save(tensors, {"visattn": json.dumps(facts)}))

    @classmethod
    def load(cls, path: Path, key: str) -> OneImage | None:
        """Read a file that `save` wrote; return None if it carries another key.

        Raises:
            Exception: If it is no such file.
        """
        with safetensors.safe_open(path, "pt") as file:
            facts = decoded(file.metadata()["visattn"], _Facts, lax=True)
            if facts["key"] != key:
                return None
            tensors: dict[str, Tensor] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
        layers = {}
        for number, told in enumerate(facts["layers"]):
            kept: Any = {key.partition(".")[2]: value for key, value in tensors.items() if key.startswith(f"{number}.")}
            place: Any = {"number": told["number"], "layout": layout_of(told["layout"]), "box": Box(*told["box"])}
            layers[told["name"]] = OneLayer(**place, **kept, notes=told["notes"])
        scores: PropertyScores = {title: (tensors[f"score.{title}"], tensors[f"null.{title}"]) for title in facts["scores"]}
        picture = tensors["picture"].numpy().tobytes()
        known = facts["name"], facts["sha256"], picture, Box(*facts["window"]), facts["words"], tensors["code"]
        return cls(*known, facts["sinks"], layers, facts["left_out"], scores, facts["heads"])


def image_states(
    recording: Recording,
    prepared: Prepared,
    layers: str,
    some: int,
    draws: int,
    seed: int,
    *,
    mask: NDArray[np.bool_] | None = None,
    words: tuple[str, ...] = (),
) -> OneImage:
    """Gather what one image gives.

    Args:
        recording: Attention with the states of the image.
        prepared: The image.
        layers: Glob of the names of layers.
        some: Number of patches whose attention is kept, besides that of the tokens without a place.
        draws: Number of draws of each null.
        seed: Seed of the draws, and of the choice of patches.
        mask: Mask of an object on the photo.
        words: Words of the text that the model received beside the photo.

    Returns:
        The states, and scores of those heads that attend among patches.
    """
    facts, geometry = image_facts(prepared.photo), prepared.geometry
    found: dict[str, OneLayer] = {}
    left_out: list[str] = []
    scored = list(over_patches(recording))
    every: list[PropertyScores] = []
    heads: list[tuple[str, int]] = []
    patches_on = patches_by_layout(prepared.photo, geometry, mask)
    unknown: OptionError | None = None
    for number, record in enumerate(recording):
        if not fnmatchcase(record.layer, layers):
            continue
        over_words = bool(words) and record.queries.space == WORDS
        if record.kind != "self" or not (over_words or _over_patches(record.queries)):
            left_out.append(record.name)
            continue
        patches = None if over_words else patches_on(record.queries)
        try:
            box = geometry.box_to_photo(record.queries.box)
            found[record.name] = _one_layer(number, record, box, patches, some if patches else len(words), seed)
        except OptionError as error:  # its queries and keys were not recorded
            unknown = error
            left_out.append(record.name)
            continue
        if patches and any(record is one for one in scored):
            every.append(score_heads(record, patches, draws=draws, seed=seed))
            heads += [(record.name, head) for head in range(record.operator.shape[1])]
    if unknown is not None and not found:
        raise unknown
    sinks = find_sinks(recording)[0] if chain_refusal(recording) is None else ()
    picture = _picture(prepared.photo, prepared.geometry)
    places = tuple((sink.row, sink.column) for sink in sinks)
    code, scores = _code(recording), _joined(every)
    known = facts.name, facts.sha256, picture, geometry.window, words, code
    return OneImage(*known, places, found, tuple(left_out), scores, tuple(heads))


def _code(recording: Recording) -> Tensor:
    """Return the class token after the last layer, or the mean of the patches."""
    found = next((one for one in reversed(recording.features) if one.role == "tokens" and one.layout is not None), None)
    if found is None or found.layout is None:
        return torch.empty(0)
    tokens = found.value[0].detach().float().cpu()
    return tokens[0].clone() if found.layout.prefix[:1] == ("cls",) else tokens[len(found.layout.prefix) :].mean(0)


def _joined(every: list[PropertyScores]) -> PropertyScores:
    """Put the scores of all layers after one another."""
    titles: list[Property] = list(every[0]) if every else []
    return {
        title: (torch.cat([one[title][0] for one in every]), torch.cat([one[title][1] for one in every], 1)) for title in titles
    }


def _over_patches(layout: TokenLayout) -> bool:
    return len(layout.grid) == 2 and layout.cells > 1


def _one_layer(number: int, record: AttentionRecord, box: Box, patches: Patches | None, some: int, seed: int) -> OneLayer:
    """Gather a layer over patches, of which some are drawn; or over words, of which the first ones are no padding and are all drawn."""
    place, prefix = record.queries, len(record.queries.prefix)
    colors, shares = torch.full((len(place), 3), torch.nan), torch.full((len(place),), torch.nan)
    if patches is None:
        kept = torch.arange(some)
    else:
        at = np.array(place.present)
        random = np.random.default_rng([seed, *place.grid])  # the same patches in all layers with this grid
        kept = torch.from_numpy(np.concatenate([np.arange(prefix), np.sort(random.permutation(len(at))[:some]) + prefix]))
        colors[prefix:] = torch.from_numpy(patches.color.reshape(-1, 3)[at]).float()
        if patches.object is not None:
            shares[prefix:] = torch.from_numpy(patches.object.reshape(-1)[at]).float()
    operator = record.operator
    states = _small(operator.queries()[0]), _small(operator.keys()[0])
    rows = operator.rows(kept.to(operator.device))[0].float().cpu()
    return OneLayer(number, place, box, *states, kept, rows, colors, shares, _besides(record))


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


def _besides(record: AttentionRecord) -> tuple[str, ...]:
    """Return what the attention of a layer has besides the products of its queries and keys."""
    operator = record.operator
    blocks = operator.key_index is not None and operator.key_index.shape[0] > 1
    told = {
        "a bias or a mask is added to the products, such as that of relative positions": not _by_products(operator),
        "a query attends only to its own window": blocks,
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
