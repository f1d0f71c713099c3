"""Gathering of queries and keys: every image runs once under a capture."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from visattn._support.progress import progress
from visattn._support.spellings import spelled
from visattn._support.typed import typed
from visattn.embedding.space import LayerStates, Space, Tokens
from visattn.errors import OptionError
from visattn.families.wrappers import unwrapped
from visattn.images import image_facts
from visattn.loading import load_model
from visattn.methods.selection import chain_refusal
from visattn.methods.sinks import find_sinks
from visattn.operators import MatrixOperator, Operator, SoftmaxOperator
from visattn.pipeline.inputs import prepare_with, read
from visattn.pipeline.preprocessing import Preprocessing, PreprocessingOptions
from visattn.pipeline.run import look
from visattn.provenance import Provenance, Sink
from visattn.records import AttentionRecord, Recording, TokenLayout

_LARGEST = 65504.0  # float16
_ROWS, _VISIBLE, _ROUNDED = 16, 1e-5, 0.02  # rows that are checked; weights that count; error of a logarithm of half precision


@spelled(PreprocessingOptions)
@typed(but=("weights",))
def gather(
    model: nn.Module | str,
    images: Sequence[Any],
    *,
    layers: str = "*",
    weights: str | os.PathLike[str] = "auto",
    seed: int = 0,
    device: str | torch.device = "cpu",
    **options: Unpack[PreprocessingOptions],
) -> Space:
    """Gather queries and keys of every head for many images.

    They are the operands of the product before the softmax, so rotary position embeddings are included. States are kept in float16:
    200 images of 257 tokens take 13 MB a head of 64 dimensions.

    Args:
        model: Name of a timm model, or a model.
        images: Images, see `visattn.explain`. All need the same size for the model.
        layers: Glob of the names of layers.
        weights: See `visattn.load_model`; only if `model` is a name.
        seed: Seed of random weights; only if `model` is a name.
        device: Device of a model that is given by name.
        options: See `visattn.Preprocessing`.

    Returns:
        The states of every layer with self-attention over patches.

    Raises:
        OptionError: If there are no images, no layer fits, or an image gives other layers or tokens than the first one.
        VisattnError: Any error of `visattn.explain`.
    """
    if not images:
        raise OptionError("no images were given. Pass a list of them.")
    how = Preprocessing(**options)
    if isinstance(model, str):
        model = load_model(model, weights=weights, seed=seed, img_size=how.img_size, device=device)
    model = unwrapped(model)
    kept: dict[str, list[tuple[Tensor, Tensor]]] = {}
    places: dict[str, tuple[TokenLayout, TokenLayout]] = {}
    notes: dict[str, tuple[str, ...]] = {}
    names, sinks = [], []
    made = Provenance()
    with progress("images", "image") as bar:
        for image in images:
            prepared = prepare_with([read(image, how)], model, how)
            recording = look(model, prepared, values=True, features="none")
            found = {_name(record): record for record in _records(recording, layers)}
            names.append(image_facts(prepared.photo).name)
            if kept and {name: (one.queries, one.keys) for name, one in found.items()} != places:
                raise OptionError(
                    f"{names[-1]}: has other layers or tokens than {names[0]}. Pass img_size, so that all are alike."
                )
            for name, record in found.items():
                kept.setdefault(name, []).append((_small(record.operator.queries()[0]), _small(record.operator.keys()[0])))
                places[name], notes[name] = (record.queries, record.keys), _left_out(record)
            sinks.append(find_sinks(recording)[0] if chain_refusal(recording) is None else ())
            made = prepared.noted(recording.provenance)
            bar.update()
    if not kept:
        raise OptionError(f"no layer that fits '{layers}' has self-attention over patches.")
    states = []
    for name, parts in kept.items():
        queries, keys = (torch.cat(each, 1) for each in zip(*parts, strict=True))
        of_queries, of_keys = (_tokens(place, sinks) for place in places[name])
        states.append(LayerStates(name, queries, keys, of_queries, of_keys, notes[name]))
    return Space(tuple(states), tuple(names), made)


def _records(recording: Recording, layers: str) -> Iterable[AttentionRecord]:
    for record in recording:
        on_grid = len(record.queries.grid) == 2 and len(record.keys.grid) == 2
        if record.kind == "self" and on_grid and fnmatchcase(record.layer, layers):
            yield record


def _name(record: AttentionRecord) -> str:
    return record.layer + (f", call {record.call}" if record.call else "")


def _small(states: Tensor) -> Tensor:
    """Return states in float16, or in float32 if they are too large for it."""
    states = states.detach().cpu()
    return states.half() if float(states.abs().max()) < _LARGEST else states.float()


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


def _tokens(layout: TokenLayout, sinks: Sequence[tuple[Sink, ...]]) -> Tokens:
    """Describe the tokens of all images, whose layout is the same."""
    prefix, across = len(layout.prefix), layout.grid[-1]
    cells = torch.tensor(layout.present)
    row = torch.cat([torch.full((prefix,), -1), cells // across])
    column = torch.cat([torch.full((prefix,), -1), cells % across])
    marked = torch.zeros(len(sinks), len(layout), dtype=torch.bool)
    for number, found in enumerate(sinks):
        at = {(sink.row, sink.column) for sink in found}
        marked[number] = torch.tensor([(int(r), int(c)) in at for r, c in zip(row, column, strict=True)])
    count = len(sinks)
    image = torch.arange(count).repeat_interleave(len(layout))
    return Tokens(image, row.repeat(count), column.repeat(count), marked.flatten(), layout.prefix)
