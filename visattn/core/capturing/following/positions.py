"""Table of positions that a model adds to its tokens, and the place of each of its rows in the image."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from visattn.core.capturing.following.repeating import Changing, Repeats
from visattn.core.capturing.following.tracing import TokenTracer
from visattn.core.capturing.tokens.arrangement import Tokens, arrange_tokens
from visattn.core.capturing.trace.operations import words
from visattn.core.capturing.trace.tape import Entry, Tape

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
    """Return the first table with a row for each token that is added to tokens of the image, before any attention; None if there is none.

    The table may be a parameter or buffer of the model, or computed from these alone, as by resizing. The tape is traced once more, up to
    the first attention.
    """
    follower = TokenTracer(tape)
    for entry in tape.entries:
        if entry.attention is not None:
            return None
        follower.see(entry, attends=False)
        found = _added(follower, tape, entry)
        if found is not None:
            return found
    return None


def _added(follower: TokenTracer, tape: Tape, entry: Entry) -> Positions | None:
    """Return the table that an entry adds to tokens."""
    result = entry.outs[0] if entry.outs else None
    if result is None or not entry.operation.own or entry.operation.name not in _ADDS or len(entry.refs) != 2:
        return None
    places = follower.places(result.slot)
    is_table = [follower.places(ref.slot).kind == "learned" for ref in entry.refs]
    if not places.placed or places.columns is not None or places.drift.away or not any(is_table):
        return None
    tokens = arrange_tokens(follower.planes, places.codes)
    table = _table(tape, entry.refs[is_table.index(True)].slot, result.shape)
    if tokens is None or len(tokens.layout.grid) != 2 or table is None:
        return None
    return Positions(*table, tokens)


def _table(tape: Tape, slot: int, shape: torch.Size) -> tuple[str, Tensor] | None:
    """Return the table in a slot, with its name, if it has a row for each token of each image, the same for all images."""
    repeats = Repeats(tape)
    try:
        table = repeats.tensor(slot, {}).detach()
    except Changing:
        return None
    homes = [home for home, _ in repeats.used]
    names = [outside.name for outside in tape.outside.values() if outside.home in homes]
    if table.numel() not in (shape[1:].numel(), shape.numel()) or not names:
        return None
    of_images = table.reshape(-1, *shape[1:])
    return (names[0], of_images[:1]) if torch.equal(of_images, of_images[:1].expand_as(of_images)) else None
