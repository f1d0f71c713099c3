"""Space of many images from what each of them gives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from visattn.core.provenance import Provenance
from visattn.core.records import TokenLayout
from visattn.core.records.layouts import WORDS
from visattn.embedding.one_image import OneImage
from visattn.embedding.space import LayerStates, Space, Tokens
from visattn.evaluation import HeadScores

_NAMED = 3  # layers that a note names


def joined_images(every: Sequence[OneImage], groups: tuple[int, ...], labels: tuple[str, ...], made: Provenance) -> Space:
    """Put the images after one another. What each holds of a layer is let go, as all of it is copied.

    Args:
        every: The images, which have the same layers and tokens.
        groups: Photo of each image.
        labels: Class of each image, or nothing.
        made: Provenance of the first image.

    Returns:
        The space.
    """
    states = tuple(_stacked(name, every) for name in tuple(every[0].layers))
    names, digests = tuple(one.name for one in every), tuple(one.sha256 for one in every)
    pictures, codes = tuple(one.picture for one in every), torch.stack([one.code for one in every])
    windows = torch.tensor([one.window for one in every], dtype=torch.float64)
    shown = names[0] if len(names) == 1 else f"{len(names)} images"
    made = made.but(image=shown, method="embedding", notes=_note(every[0].left_out))
    return Space(states, names, digests, pictures, windows, codes, labels, groups, _scores(every, groups, made), made)


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
