"""Cut of a model at its readout: the last tensor that holds each token apart, and through which all of its output passes.

From there back to the last attention, each layer changes each token alone, and all tokens in the same way. What follows is the readout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from visattn.capturing.placing import moves, pointwise, products, windows
from visattn.capturing.placing.nodes import Node, tensors_in_nodes
from visattn.capturing.placing.shadows import Shadows
from visattn.capturing.placing.steps import Step
from visattn.capturing.placing.table import row_of
from visattn.capturing.placing.work import Work
from visattn.capturing.tokens.arrangement import Tokens, arrange_tokens
from visattn.capturing.tokens.codes import same_along
from visattn.capturing.tokens.planes import compact
from visattn.capturing.trace.tape import Tape
from visattn.records import TokenLayout

_BRANCHES = 4  # most tensors of a cut


class Part(NamedTuple):
    """Tensor that holds apart all tokens of a layout, all of its patches, or all others.

    Attributes:
        slot: Its slot.
        tokens: Arrangement of the tokens that it holds; None for the result of a single query.
        layout: The layout: that of the queries or keys of an attention call.
    """

    slot: int
    tokens: Tokens | None
    layout: TokenLayout

    def take(self, activation: Tensor, images: int) -> Tensor:
        """Return the tokens of such a tensor in the order of the layout, `(B, N, D)`; those that it does not hold are zero."""
        if self.tokens is None:
            return activation.reshape(images, 1, -1)
        found = self.tokens.take(activation)
        missing = len(self.layout) - found.shape[1]
        return torch.nn.functional.pad(found, (0, 0, missing, 0) if self.tokens.layout.grid else (0, 0, 0, missing))


class Cut(NamedTuple):
    """Tensors from which the output is computed; several only if the model has branches with tokens of their own.

    Attributes:
        parts: These tensors.
        entries: Indices of the entries between them and the output, in order.
        outputs: Slots of the output that are computed from them.
    """

    parts: tuple[Part, ...]
    entries: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def pools(self) -> bool:
        """True if the output is computed from all of these tokens together, not from each alone."""
        return not set(self.outputs) <= {part.slot for part in self.parts}


def find_cut(tape: Tape, last: int, shadows: Shadows, layouts: Iterable[TokenLayout], answer: TokenLayout | None) -> Cut | None:
    """Return the tensors that the output is computed from; None if no tensor holds all tokens apart.

    Args:
        tape: A complete tape.
        last: Index of the last attention call.
        shadows: Places of all tensors.
        layouts: Layouts of the tokens of all attention calls.
        answer: Layout of the query of that call, if it has a single, learned one.
    """
    start = last + 1
    mixed = _mixed(tape, start, shadows)
    known = [layout for layout in layouts if layout.space != "unknown"]

    def part_in(slot: int) -> Part | None:
        node = tape.nodes.get(slot)
        places = None if node is None or node in mixed else shadows.of(node)
        if places is None or places.columns is not None or not places.located:
            return None
        tokens = arrange_tokens(shadows.planes, places.codes)
        layout = None if tokens is None else next((layout for layout in known if _holds(tokens.layout, layout)), None)
        return None if tokens is None or layout is None else Part(slot, tokens, layout)

    outputs = tuple(slot for slot in dict.fromkeys(tape.output) if slot in tape.descends)
    pooled = tuple(slot for slot in outputs if part_in(slot) is None)
    frontier, needed, overwritten = set(pooled or outputs), list[int](), set[int]()
    for number in reversed(range(start, len(tape.entries) + 1)):
        if number < len(tape.entries):
            entry = tape.entries[number]
            made = {out.slot for out in entry.outs if out is not None} | {after for _, after in entry.rewritten}
            if entry.writes:
                overwritten |= {slot for slot in entry.before if slot is not None} | {before for before, _ in entry.rewritten}
            if not made & frontier:
                continue
            needed.append(number)
            frontier = (frontier - made) | {ref.slot for ref in entry.refs if ref.slot in tape.descends}
        if frontier & overwritten or not 0 < len(frontier) <= _BRANCHES:
            continue
        parts = tuple(part for slot in sorted(frontier) if (part := part_in(slot)) is not None)
        if len(parts) == len(frontier) == len({part.layout for part in parts}) and _are_apart(tape, sorted(frontier), shadows):
            return Cut(parts, tuple(reversed(needed)), pooled or outputs)
    result = tape.entries[last].outs[0]
    if answer is None or result is None or frontier != {result.slot}:
        return None
    return Cut((Part(result.slot, None, answer),), tuple(reversed(needed)), pooled or outputs)


def _holds(layout: TokenLayout, asking: TokenLayout) -> bool:
    """Check whether tokens are all those of a call, all of its patches, or all of its others."""
    if layout == asking:
        return True
    if layout.grid:
        return not layout.prefix and (layout.grid, layout.box, layout.holes) == (asking.grid, asking.box, asking.holes)
    return bool(asking.grid) and layout.prefix == asking.prefix


def _are_apart(tape: Tape, slots: Sequence[int], shadows: Shadows) -> bool:
    """Check that no token is held by two tensors."""
    codes = [torch.unique(compact(shadows.of(tape.nodes[slot]).codes)) for slot in slots]
    every = torch.cat(codes)
    return len(torch.unique(every)) == len(every)


def _mixed(tape: Tape, start: int, shadows: Shadows) -> set[int]:
    """Return the nodes behind entry `start` whose tokens were mixed, or treated differently."""
    mixed, powers = set[int](), set[int]()

    def descends(node: Node) -> bool:
        places = shadows.of(node)
        return node in mixed or places.placed or places.kind == "lost" or places.behind is not None

    for entry in tape.entries[start:]:
        if not entry.steps:
            mixed |= {tape.nodes[out.slot] for out, was in zip(entry.outs, entry.before, strict=True) if out and was is None}
        for step in entry.steps:
            coming = [node for node in tensors_in_nodes(list(step.given.values())) if descends(node)]
            outs = [node for node in (*step.outs, *(after for _, after in step.written)) if node is not None]
            if not coming:
                continue
            name, row = ("", None) if step.op is None else row_of(step.op)
            work = Work(step, name, shadows, [tape.facts[node] for node in outs])
            power = len(set(coming)) < len(coming) or (row is not None and row.effect == "power")
            ends = row is not None and (row.effect == "statistic" or row.rule in _PRODUCTS)
            if not outs or mixed.intersection(coming) or not _acts_alone(work, coming):
                mixed.update(outs)
            elif power or (powers.intersection(coming) and not ends):
                powers.update(outs)
    return mixed | powers


_PRODUCTS = products.multiplied, products.linear, windows.convolved  # behind these and a statistic, a power is an activation


def _is_own(step: Step) -> bool:
    """Check that a step writes to nothing, or in place to memory that no other tensor shares."""
    return all(not step.sharing and before == step.given.get("self") for before, _ in step.written)


def _acts_alone(work: Work, coming: Sequence[Node]) -> bool:
    """Check whether a step changes each token alone, and all in the same way. `coming` are the arguments that hold tokens."""
    op = work.step.op
    row = None if op is None or work.step.random else row_of(op)[1]
    if row is None or row.effect == "uneven" or not work.outs[0].floating or not _is_own(work.step):
        return False
    if row.rule in (moves.same, pointwise.combined):
        return _meets_alike(work, coming, set(coming) if row.effect == "adds" else set(work.nodes()))
    if row.rule.__module__ == moves.__name__:
        return row.rule is moves.joined_by or list(coming) == [next(work.nodes())]
    axes = row.mixes(work, coming[0]) if row.mixes is not None and len(coming) == 1 else None
    return axes is not None and all(
        same_along(work.places(coming[0]).codes, dim % len(work.facts(coming[0]).shape)) for dim in axes
    )


def _meets_alike(work: Work, coming: Sequence[Node], operands: Iterable[Node]) -> bool:
    """Check whether, of the operands of an elementwise step, those that hold tokens differ from token to token, and no others."""
    made = (*work.step.outs, *(after for _, after in work.step.written))
    codes = work.places(next(node for node in made if node is not None)).codes
    tokens = [dim for dim in range(codes.ndim) if not same_along(codes, dim)]
    return all(work.varies(node, dim, codes.ndim) == (node in coming) for node in operands for dim in tokens)
