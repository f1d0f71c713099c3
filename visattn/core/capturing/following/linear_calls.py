"""Calls of a tape that are linear in some of their arguments, as a linear layer and a mean are."""

from __future__ import annotations

from collections.abc import Collection

from visattn.core.capturing.placing.nodes import Node, tensors_in_nodes
from visattn.core.capturing.placing.operation_table import row_of
from visattn.core.capturing.placing.steps import Step
from visattn.core.capturing.trace.tape import Entry


def is_linear(entry: Entry, nodes: Collection[int], *, in_place: bool = False) -> bool:
    """Check whether all steps of a call are linear in these nodes.

    Args:
        entry: The call.
        nodes: Numbers of the tensors in question.
        in_place: Whether it may overwrite its first argument, as `+=` does.
    """
    if not entry.steps:
        return entry.attention is None and all(slot is not None for slot in entry.before)
    if not all(made is None or made.floating for made in entry.outs):
        return False
    reached = set(nodes)
    for step in entry.steps:
        arguments = {name for name, value in step.given.items() if any(node in reached for node in tensors_in_nodes(value))}
        if not arguments:
            continue
        if not _is_linear_step(step, arguments, in_place=in_place):
            return False
        results = (*step.outs, *(after for _, after in step.written))
        reached |= {node for node in results if node is not None}
    return True


def _is_linear_step(step: Step, arguments: set[str], *, in_place: bool = False) -> bool:
    """Check whether a step is linear in the arguments of these names."""
    if step.op is None or step.random:
        return False
    name, row = row_of(step.op)
    if row is None:
        return False
    if row.makes:  # a tensor of zeros or ones in the shape of its argument
        return True
    writes = step.written and name != "as_strided"
    if writes and not (in_place and _writes_to_first(step)):
        return False
    if step.given.get("rounding_mode") is not None:
        return False
    return row.linear is not None and row.linear(arguments)


def _writes_to_first(step: Step) -> bool:
    """Check whether a step overwrites its first argument alone, whose memory no other tensor shares."""
    written: list[Node] = [before for before, _ in step.written]
    return written == [step.given.get("self")] and not step.sharing
