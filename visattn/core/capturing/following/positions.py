"""Table of positions that a model adds to its tokens, and the place of each of its rows in the image."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from visattn.core.capturing.following.tape_readouts import Changing, Repeats
from visattn.core.capturing.following.tracing import TokenTracer
from visattn.core.capturing.tokens.arrangement import Tokens, arrange_tokens
from visattn.core.capturing.trace.operations import words
from visattn.core.capturing.trace.tape import Attention, Entry, Tape
from visattn.core.records import TokenLayout

_ADDS = words("add add_ __add__ __radd__ __iadd__")


class Positions(NamedTuple):
    """Table of positions, with a row for each token.

    Attributes:
        name: Last part of the name of the parameter or buffer that it is, or is computed from.
        table: The table, in the shape of the tokens of one image.
        tokens: Arrangement of the tokens that it is added to.
    """

    name: str
    table: Tensor
    tokens: Tokens


def positions_of(tape: Tape) -> Positions | None:
    """Return the table with a row for each token that is added to tokens of the image before the first attention, which reads the sum.

    The table may be a parameter or buffer of the model, or computed from these alone, as by resizing; it may be shared along an axis of the
    grid. Return None if there is none, or if there are several. The tape is traced once more, up to the first attention.
    """
    follower, tables = TokenTracer(tape), dict[int, Positions]()
    for entry in tape.entries:
        if entry.attention is not None:
            read = _read(tape, entry.attention)
            found = [table for slot, table in tables.items() if slot in read]
            return found[0] if len(found) == 1 else None
        follower.see(entry, attends=False)
        table = _added(follower, tape, entry)
        if table is not None and entry.outs[0] is not None:
            tables[entry.outs[0].slot] = table
    return None


def _read(tape: Tape, attention: Attention) -> set[int]:
    """Return the slots that the operands of an attention call were computed from."""
    read = {operand.slot for operand in attention.operands}
    for entry in reversed(tape.entries):
        made = {out.slot for out in entry.outs if out is not None} | {after for _, after in entry.rewritten}
        if made & read:
            read |= {ref.slot for ref in entry.refs} | {before for before, _ in entry.rewritten}
    return read


def _added(follower: TokenTracer, tape: Tape, entry: Entry) -> Positions | None:
    """Return the table that an entry adds to tokens."""
    result = entry.outs[0] if entry.outs else None
    if result is None or not entry.operation.own or entry.operation.name not in _ADDS or len(entry.refs) != 2:
        return None
    places = follower.places(result.slot)
    is_table = [follower.places(ref.slot).kind == "learned" for ref in entry.refs]
    if entry.kwargs or not places.placed or places.columns is not None or places.drift.away or not any(is_table):
        return None
    tokens = arrange_tokens(follower.planes, places.codes)
    table = _table(tape, entry.refs[is_table.index(True)].slot, result.shape)
    if tokens is None or len(tokens.layout.grid) != 2 or table is None or _are_pixels(tokens.layout):
        return None
    rows = tokens.take(table[1])[0, len(tokens.layout.prefix) :]
    return None if torch.equal(rows, rows[:1].expand_as(rows)) else Positions(*table, tokens)


def _are_pixels(layout: TokenLayout) -> bool:
    return layout.grid == (int(layout.box.height), int(layout.box.width))


def _table(tape: Tape, slot: int, shape: torch.Size) -> tuple[str, Tensor] | None:
    """Return the table in a slot, with its name, if it has a row for each token of each image, the same for all images.

    It is computed again, after the forward pass, from tensors that no call has overwritten in it.
    """
    repeats = Repeats(tape)
    try:
        table = repeats.tensor(slot, {}).detach()
    except Changing:
        return None
    homes = [home for home, _ in repeats.used]
    sources = {slot: outside.name for slot, outside in tape.outside.items() if outside.home in homes}
    overwritten = {before for entry in tape.entries for before in (*entry.before, *(old for old, _ in entry.rewritten))}
    if not sources or overwritten & sources.keys():
        return None
    of_images = table.broadcast_to(shape)
    name = next(iter(sources.values()))
    return (name, of_images[:1]) if torch.equal(of_images, of_images[:1].expand_as(of_images)) else None
