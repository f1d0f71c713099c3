"""Gathering of queries and keys: every image runs once under a capture."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from visattn._support.checks import as_list, one_each
from visattn._support.progress import progress
from visattn._support.spellings import spelled
from visattn._support.typed import typed
from visattn.embedding.keeping import Kept, alike
from visattn.embedding.one_image import OneImage, image_states
from visattn.embedding.space import LayerStates, Space, Tokens
from visattn.errors import OptionError
from visattn.evaluation.given import MaskLike, as_mask
from visattn.evaluation.specialization import DRAWS, HeadScores
from visattn.families.wrappers import unwrapped
from visattn.images import image_facts
from visattn.loading import load_model
from visattn.loading.weights import state_digest
from visattn.pipeline.inputs import prepare_with, read
from visattn.pipeline.preprocessing import Preprocessing, PreprocessingOptions
from visattn.pipeline.prompts import tokenized
from visattn.pipeline.run import look
from visattn.provenance import Provenance, versions
from visattn.records import TokenLayout
from visattn.records.layouts import WORDS

POINTS = 1_000
_NAMED = 3  # layers that a note names


@spelled(PreprocessingOptions)
@typed(but=("weights",))
def gather(
    model: nn.Module | str,
    images: Sequence[Any],
    *,
    layers: str = "*",
    points: int = POINTS,
    texts: Sequence[str] | None = None,
    masks: Sequence[MaskLike] | None = None,
    labels: Sequence[str] | None = None,
    groups: Sequence[int] | None = None,
    keep: str | os.PathLike[str] | None = None,
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
        images: Images, see `visattn.explain`. All need the same size for the model, so `resize="auto"` is `"model"` here.
        layers: Glob of the names of layers.
        points: Number of patches, over all images, whose attention is kept; they are drawn evenly from the images.
        texts: A text for each image, such as its caption, for a model with a text tower: layers over words are then gathered too.
        masks: A mask of an object for each image, of the photo's size.
        labels: A class of each image, for colors.
        groups: Photo of each image, if several are crops of one. Intervals are over photos.
        keep: Folder for what each image gives, from which a run that was interrupted goes on. What comes from another image, mask, model
            or setting is computed anew.
        weights: See `visattn.load_model`; only if `model` is a name.
        seed: Seed of random weights, of the choice of patches, and of the nulls.
        device: Device of a model that is given by name.
        options: See `visattn.Preprocessing`.

    Returns:
        The states of every layer with self-attention over two or more patches. A note of the provenance names other layers with attention.

    Raises:
        OptionError: If there are no images, no layer fits, masks, labels or groups do not fit, or an image gives other layers or tokens
            than the first one.
        OutputError: If `keep` cannot be written.
        VisattnError: Any error of `visattn.explain`.
    """
    images = as_list(images)
    if not images:
        raise OptionError("no images were given. Pass a list of them.")
    one_each(len(images), texts=texts, masks=masks, labels=labels, groups=groups)
    if points < 1:
        raise OptionError(f"points must be 1 or more, got {points}.")
    if options.get("transform") is None and options.get("resize", "auto") == "auto":
        options["resize"] = "model"
    how = Preprocessing(**options)
    if isinstance(model, str):
        model = load_model(model, weights=weights, seed=seed, img_size=how.img_size, device=device)
    model, some = unwrapped(model), math.ceil(points / len(images))
    read_texts = None if texts is None else tokenized(model, texts)
    kept = None
    if keep is not None:
        settings = {"version": versions()["visattn"], "model": state_digest(model), "draws": DRAWS, "seed": seed}
        kept = Kept(Path(keep), **settings, layers=layers, points=some)
    every: list[OneImage] = []
    made = Provenance()
    trusted: bool | None = None  # whether what was kept comes from this model, once an image has shown it
    with progress("images", "image") as bar:
        for number, image in enumerate(images):
            prepared = prepare_with([read(image, how)], model, how)
            mask = None if masks is None else as_mask(masks[number])
            words: tuple[str, ...] = ()
            if read_texts is not None:
                device_ = prepared.pixels.device
                given = {name: value.to(device_) for name, value in read_texts.inputs_of(number).items()}
                prepared, words = replace(prepared, inputs={**prepared.inputs, **given}), read_texts.words[number]
            key = kept.key(prepared, mask) if kept else ""
            before = kept.read(number, key) if kept and trusted is not False else None
            if before is not None and trusted:
                found = replace(before, name=image_facts(prepared.photo).name)
            else:
                recording = look(model, prepared, values=True)
                found = image_states(recording, prepared, layers, some, DRAWS, seed + number, mask=mask, words=words)
                if before is not None:
                    trusted = alike(before, found)
                if kept:
                    kept.write(number, key, found)
                if not every:
                    made = prepared.noted(recording.provenance)
            every.append(found)
            _check(every, layers)
            bar.update()
    of = tuple(range(len(every)) if groups is None else map(int, groups))
    states = tuple(_stacked(name, every) for name in tuple(every[0].layers))
    pictures, codes = tuple(one.picture for one in every), torch.stack([one.code for one in every])
    windows = torch.tensor([one.window for one in every], dtype=torch.float64)
    names, digests = tuple(one.name for one in every), tuple(one.sha256 for one in every)
    made = made.but(
        image=names[0] if len(names) == 1 else f"{len(names)} images",
        method="embedding",
        parameters={"layers": layers, "points": points, "seed": seed},
        notes=_note(every[0].left_out),
    )
    scores = _scores(every, of, made)
    return Space(
        states, names, digests, pictures, windows, codes, () if labels is None else tuple(map(str, labels)), of, scores, made
    )


def _check(every: Sequence[OneImage], layers: str) -> None:
    """Check that the last image has layers, and those of the first one."""
    first, last = every[0], every[-1]
    if not last.layers:
        raise OptionError(f"no layer that fits '{layers}' has self-attention over patches.")
    if {name: one.layout for name, one in last.layers.items()} != {name: one.layout for name, one in first.layers.items()}:
        raise OptionError(f"{last.name}: has other layers or tokens than {first.name}. Pass img_size, so that all are alike.")


def _note(left_out: tuple[str, ...]) -> tuple[str, ...]:
    if not left_out:
        return ()
    more = f" and {len(left_out) - _NAMED} more" if len(left_out) > _NAMED else ""
    names = ", ".join(left_out[:_NAMED]) + more
    return (f"layers left out, without self-attention over several patches, or without known queries and keys: {names}",)


def _stacked(name: str, every: Sequence[OneImage]) -> LayerStates:
    """Put the images of one layer after one another, and let go of their parts."""
    parts = [one.layers.pop(name) for one in every]
    first = parts[0]
    queries, keys = (torch.cat([getattr(part, side) for part in parts], 1) for side in ("queries", "keys"))
    some = torch.cat([part.some + number * len(first.layout) for number, part in enumerate(parts)])
    rows = torch.cat([part.rows for part in parts], 1)
    color, covered = (torch.cat([getattr(part, side) for part in parts]) for side in ("color", "object"))
    boxes = torch.tensor([part.box for part in parts], dtype=torch.float64)
    if first.layout.space == WORDS:
        tokens = _words(len(first.layout), boxes, [one.words for one in every], color, covered)
    else:
        tokens = _tokens(first.layout, boxes, [one.sinks for one in every], color, covered)
    return LayerStates(name, first.number, queries, keys, tokens, some, rows, first.notes)


def _scores(every: Sequence[OneImage], of: tuple[int, ...], made: Provenance) -> tuple[HeadScores, ...]:
    titles = every[0].scores
    heads = every[0].heads
    return tuple(
        HeadScores(
            title,
            heads,
            torch.stack([one.scores[title][0] for one in every]),
            torch.stack([one.scores[title][1] for one in every], 1),
            of,
            made,
        )
        for title in titles
    )


def _tokens(
    layout: TokenLayout, boxes: Tensor, sinks: Sequence[tuple[tuple[int, int], ...]], color: Tensor, covered: Tensor
) -> Tokens:
    """Describe the tokens of all images, whose layout is the same."""
    prefix, across = len(layout.prefix), layout.grid[-1]
    cells = torch.tensor(layout.present)
    row = torch.cat([torch.full((prefix,), -1), cells // across])
    column = torch.cat([torch.full((prefix,), -1), cells % across])
    marked = torch.zeros(len(sinks), len(layout), dtype=torch.bool)
    for number, at in enumerate(sinks):
        marked[number] = torch.tensor([(int(r), int(c)) in at for r, c in zip(row, column, strict=True)])
    count, grid = len(sinks), (layout.grid[0], across)
    image = torch.arange(count).repeat_interleave(len(layout))
    return Tokens(image, row.repeat(count), column.repeat(count), marked.flatten(), color, covered, layout.prefix, grid, boxes)


def _words(length: int, boxes: Tensor, words: Sequence[tuple[str, ...]], color: Tensor, covered: Tensor) -> Tokens:
    """Describe the words of all texts as cells of one row. Padding, and a first token with which all texts begin, have no place."""
    count, names = len(words), tuple(f"word{number}" for number in range(length))
    place = torch.arange(length).expand(count, -1)
    first = int(count > 1 and len({text[0] for text in words}) == 1)
    real = (place >= first) & (place < torch.tensor([len(text) for text in words])[:, None])
    row, column = torch.where(real, 0, -1), torch.where(real, place, -1)
    image = torch.arange(count).repeat_interleave(length)
    none = torch.zeros(count * length, dtype=torch.bool)
    return Tokens(image, row.flatten(), column.flatten(), none, color, covered, names, (1, length), boxes, tuple(words))
