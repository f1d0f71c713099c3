"""Cut of a model at its readout: the last tensor that holds each token apart, and through which all of its output passes.

From there back to the last attention, each layer changes each token alone, and all tokens in the same way. What follows is the
readout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from visattn.core.capturing.placing import moves, pointwise, products, windows
from visattn.core.capturing.placing.nodes import Node, tensors_in_nodes
from visattn.core.capturing.placing.operation_table import row_of
from visattn.core.capturing.placing.shadows import Shadows
from visattn.core.capturing.placing.work import Work
from visattn.core.capturing.tokens.arrangement import Tokens, arrange_tokens
from visattn.core.capturing.tokens.codes import same_along
from visattn.core.capturing.tokens.planes import compact
from visattn.core.capturing.trace.tape import Tape
from visattn.core.records import TokenLayout

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
        held = self.tokens.take(activation)
        missing = len(self.layout) - held.shape[1]
        prefix_is_missing = bool(self.tokens.layout.grid)  # it holds the patches, which come after a class token
        return torch.nn.functional.pad(held, (0, 0, missing, 0) if prefix_is_missing else (0, 0, 0, missing))


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

    Walk from the output back to the last attention, up to the first tensors that hold each token apart.

    Args:
        tape: A complete tape.
        last: Index of the last attention call.
        shadows: Places of all tensors.
        layouts: Layouts of the tokens of all attention calls.
        answer: Layout of the query of that call, if it has a single, learned one.
    """
    mixed_nodes = _mixed(tape, last + 1, shadows)
    known_layouts = [layout for layout in layouts if layout.space != "unknown"]
    part_in = partial(_part_in, tape, shadows, mixed_nodes, known_layouts)
    image_outputs = tuple(slot for slot in dict.fromkeys(tape.output) if slot in tape.descends)
    pooled_outputs = tuple(slot for slot in image_outputs if part_in(slot) is None)
    outputs = pooled_outputs or image_outputs
    sources, entries = set(outputs), tuple[int, ...]()
    for sources, entries, are_intact in _sources(tape, last + 1, outputs):
        if not are_intact or not 0 < len(sources) <= _BRANCHES:
            continue
        slots = sorted(sources)
        parts = tuple(part for slot in slots if (part := part_in(slot)) is not None)
        different_layouts = {part.layout for part in parts}
        if len(parts) == len(slots) == len(different_layouts) and _are_apart(tape, slots, shadows):
            return Cut(parts, entries, outputs)
    result = tape.entries[last].outs[0]
    if answer is None or result is None or sources != {result.slot}:
        return None
    return Cut((Part(result.slot, None, answer),), entries, outputs)


def _part_in(tape: Tape, shadows: Shadows, mixed: set[int], layouts: Sequence[TokenLayout], slot: int) -> Part | None:
    """Return the tensor in a slot with the layout of its tokens; None if it does not hold all tokens of one of these layouts apart.

    `mixed` are the nodes in which tokens were mixed.
    """
    node = tape.nodes.get(slot)
    places = None if node is None or node in mixed else shadows.of(node)
    if places is None or places.columns is not None or not places.located:
        return None
    tokens = arrange_tokens(shadows.planes, places.codes)
    if tokens is None:
        return None
    layout = next((layout for layout in layouts if _holds(tokens.layout, layout)), None)
    return None if layout is None else Part(slot, tokens, layout)


def _sources(tape: Tape, start: int, outputs: Iterable[int]) -> Iterator[tuple[set[int], tuple[int, ...], bool]]:
    """Yield the slots that the outputs are computed from: the outputs themselves, then ever earlier tensors, back to entry `start`.

    With them come the entries between them and the outputs, in order, and whether no later call overwrites one of them.
    """
    sources, entries, overwritten = set(outputs), tuple[int, ...](), set[int]()
    yield sources, entries, True
    for number in reversed(range(start, len(tape.entries))):
        entry = tape.entries[number]
        results = {out.slot for out in entry.outs if out is not None} | {after for _, after in entry.rewritten}
        if entry.writes:
            overwritten |= {slot for slot in entry.before if slot is not None} | {before for before, _ in entry.rewritten}
        if not results & sources:
            continue
        entries = number, *entries
        sources = (sources - results) | {ref.slot for ref in entry.refs if ref.slot in tape.descends}
        yield sources, entries, not sources & overwritten


def _holds(layout: TokenLayout, call_layout: TokenLayout) -> bool:
    """Check whether the tokens of a tensor are all tokens of an attention call, all of its patches, or all but its patches."""
    if layout == call_layout:
        return True
    if layout.grid:
        patches = layout.grid, layout.box, layout.holes
        return not layout.prefix and patches == (call_layout.grid, call_layout.box, call_layout.holes)
    return bool(call_layout.grid) and layout.prefix == call_layout.prefix


def _are_apart(tape: Tape, slots: Sequence[int], shadows: Shadows) -> bool:
    """Check that no token is held by two of these tensors, so that no share is counted twice."""
    codes_of_each = [torch.unique(compact(shadows.of(tape.nodes[slot]).codes)) for slot in slots]
    all_codes = torch.cat(codes_of_each)
    return len(torch.unique(all_codes)) == len(all_codes)


def _mixed(tape: Tape, start: int, shadows: Shadows) -> set[int]:
    """Return the nodes from entry `start` on in which tokens were mixed, or changed differently from token to token.

    A power is such a change, as in a product of tokens with themselves: large tokens weigh more. It counts no longer if a linear
    layer or a statistic follows, since it then is part of an activation or a normalization.
    """
    mixed, powers = set[int](), set[int]()

    def may_hold_tokens(node: Node) -> bool:
        """Check whether a tensor comes from the image, or may do so."""
        places = shadows.of(node)
        return node in mixed or places.placed or places.kind == "lost" or places.behind is not None

    for entry in tape.entries[start:]:
        if not entry.steps:  # a call that was not taken apart
            mixed |= {tape.nodes[out.slot] for out, was in zip(entry.outs, entry.before, strict=True) if out and was is None}
        for step in entry.steps:
            token_args = [node for node in tensors_in_nodes(list(step.given.values())) if may_hold_tokens(node)]
            results = [node for node in (*step.outs, *(after for _, after in step.written)) if node is not None]
            if not token_args:
                continue
            name, row = ("", None) if step.op is None else row_of(step.op)
            work = Work(step, name, shadows, [tape.facts[node] for node in results])
            multiplies_tokens = len(set(token_args)) < len(token_args)
            is_power = multiplies_tokens or (row is not None and row.effect == "power")
            ends_power = row is not None and (row.effect == "statistic" or row.rule in _PRODUCTS)
            if not results or mixed.intersection(token_args) or not _acts_alone(work, token_args):
                mixed.update(results)
            elif is_power or (powers.intersection(token_args) and not ends_power):
                powers.update(results)
    return mixed | powers


_PRODUCTS = products.multiplied, products.linear, windows.convolved  # behind these and a statistic, a power is an activation


def _acts_alone(work: Work, token_args: Sequence[Node]) -> bool:
    """Check whether a step changes each token alone, and all in the same way. `token_args` are the arguments that hold tokens."""
    step = work.step
    row = None if step.op is None or step.random else row_of(step.op)[1]
    if row is None or row.effect == "uneven" or not work.outs[0].floating:
        return False
    if step.written and (step.sharing or any(before != step.given.get("self") for before, _ in step.written)):
        return False  # it writes to another tensor, or to memory that another tensor shares
    if row.rule in (moves.same, pointwise.combined):
        # a sum may add a constant that differs from token to token, a product may not
        operands = set(token_args) if row.effect == "adds" else set(work.nodes())
        return _meets_alike(work, token_args, operands)
    if row.rule.__module__ == moves.__name__:
        return row.rule is moves.joined_by or list(token_args) == [next(work.nodes())]
    mixed_axes = row.mixes(work, token_args[0]) if row.mixes is not None and len(token_args) == 1 else None
    return mixed_axes is not None and all(
        same_along(work.places(token_args[0]).codes, dim % len(work.facts(token_args[0]).shape)) for dim in mixed_axes
    )


def _meets_alike(work: Work, token_args: Sequence[Node], operands: Iterable[Node]) -> bool:
    """Check whether, of the operands of an elementwise step, those that hold tokens differ from token to token, and no others."""
    results = (*work.step.outs, *(after for _, after in work.step.written))
    codes = work.places(next(node for node in results if node is not None)).codes
    token_axes = [dim for dim in range(codes.ndim) if not same_along(codes, dim)]
    return all(work.varies(node, dim, codes.ndim) == (node in token_args) for node in operands for dim in token_axes)
