"""Check of tokens that lie nowhere in the image, which shares no code with the tracing: a word or a learned query is changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from libraries.lit import captured, key_changes
from visattn.core.records import Recording, TokenLayout

_IDS = "input_ids", "decoder_input_ids", "text"
_FIRST, _LAST = 7, 90  # ids of plain words
_WORD, _QUERY = "word", "query"
_TABLES = 4  # parameters that are tried as the table of a set of queries

Found = tuple[list[str], int, int]


def lit_members(model: nn.Module, inputs: dict[str, Any], before: Recording) -> Found:
    """Change one word, and one row of each table of learned queries, and compare which tokens change with their recorded names.

    Every attention is switched off, as in `lit_cells`; `before` is what `captured` gives for these inputs.

    Returns:
        Tokens that were found elsewhere, the number found, and the number that changed nothing.
    """
    wrong: list[str] = []
    right = undecided = 0
    for note, layer, named, found in (*_words(model, inputs, before), *_queries(model, inputs, before)):
        if found is None:
            undecided += 1
        elif found == named:
            right += 1
        else:
            wrong.append(f"{layer}: {note} changed, {found} moved, not {named}")
    return wrong, right, undecided


def _words(model: nn.Module, inputs: dict[str, Any], before: Recording) -> Iterator[tuple[str, str, str, str | None]]:
    """Yield what was changed, a layer, the word that must change, and the one that changes most.

    In a call with the words of two texts, those of the second are `word0.2`, `word1.2`, ...; each text must move its own.
    """
    moved: dict[int, set[str]] = {}
    for key in _IDS:
        ids = inputs.get(key)
        if not isinstance(ids, Tensor) or ids.ndim != 2:
            continue
        at = next((j for j in range(1, ids.shape[1]) if _FIRST <= int(ids[0, j]) < _LAST), None)
        if at is None:
            continue
        other = ids.clone()
        other[0, at] = _FIRST + (int(ids[0, at]) - _FIRST + 11) % (_LAST - _FIRST)
        after = captured(model, {**inputs, key: other})
        for number in _first_of(before, lambda record: record.keys, _WORD):
            record = before[number]
            if record.value is None or f"{_WORD}{at}" not in record.keys.prefix:
                continue
            change = key_changes(record, after[number])
            found = _most(change[0, : len(record.keys.prefix)], record.keys)
            others = moved.setdefault(number, set())
            free = [name for name in record.keys.prefix if name.partition(".")[0] == f"{_WORD}{at}" and name not in others]
            yield f"{key}[0, {at}]", record.layer, found if found in free else f"{_WORD}{at}", found
            others.update([found] if found else [])


def _queries(model: nn.Module, inputs: dict[str, Any], before: Recording) -> Iterator[tuple[str, str, str, str | None]]:
    for number in _first_of(before, lambda record: record.queries, _QUERY):
        record = before[number]
        names = [name for name in record.queries.prefix if name.startswith(_QUERY)]
        for name, table in list(_tables(model, len(names)))[:_TABLES]:
            row = len(names) // 2
            kept = table.detach().clone()
            with torch.no_grad():
                table.view(-1, *table.shape[-2:])[:, row] += 5 * torch.randn(
                    table.shape[-1], generator=torch.Generator().manual_seed(0)
                )
                after = captured(model, inputs)
                table.copy_(kept)
            weights = (after[number].operator.dense() - record.operator.dense()).abs()
            change = weights.sum((0, 1, 3))
            if record.queries == record.keys:  # a key that changed moves its column in the rows of all others
                change = change + 3 * weights.sum((0, 1, 2))
            yield (
                f"row {row} of {name}",
                record.layer,
                f"{_QUERY}{row}",
                _most(change[: len(record.queries.prefix)], record.queries),
            )


def _first_of(recording: Recording, side: Any, start: str) -> Iterator[int]:  # noqa: ANN401
    """Yield the number of the first record with each layout that has members of this name; those that read the image come first."""
    seen: set[TokenLayout] = set()
    order = sorted(range(len(recording)), key=lambda number: not recording[number].keys.grid)
    for number in order:
        layout = side(recording[number])
        if recording[number].reason is None and layout not in seen and any(name.startswith(start) for name in layout.prefix):
            seen.add(layout)
            yield number


def _tables(model: nn.Module, count: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters with a row for each query, except weights of layers."""
    for owner, module in model.named_modules():
        layer = isinstance(module, (nn.Linear, nn.Conv2d, nn.LayerNorm, nn.GroupNorm, nn.BatchNorm2d))
        for name, parameter in [] if layer else module.named_parameters(recurse=False):
            if parameter.ndim in (2, 3) and parameter.shape[-2] == count and parameter.shape[:-2].numel() == 1:
                yield f"{owner}.{name}", parameter


def _most(change: Tensor, layout: TokenLayout) -> str | None:
    """Return the name of the token that changed most; None if none did."""
    change = change.nan_to_num(0)
    return layout.prefix[int(change.argmax())] if float(change.max()) > 0 else None
