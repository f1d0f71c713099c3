"""Tapes that tests put together call by call, from steps and places that are given; slots and nodes have the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visattn.core.capturing.placing.nodes import Facts, Node
from visattn.core.capturing.placing.places import Places, whole
from visattn.core.capturing.placing.shadows import Shadows
from visattn.core.capturing.placing.steps import Step
from visattn.core.capturing.tokens.planes import Planes
from visattn.core.capturing.trace.operations import operation_of
from visattn.core.capturing.trace.tape import Entry, Made, Ref, Tape
from visattn.core.geometry import Box

BOX, CPU = Box(0.0, 0.0, 12.0, 20.0), torch.device("cpu")
TOKENS, SIZE = 6, 4
OPS = torch.ops.aten


def put_in_slot(tape: Tape, shadows: Shadows, slot: int, places: Places) -> Made:
    """Put a tensor with given places into a slot of a tape."""
    node = Node(len(tape.facts))
    tape.facts.append(Facts(places.shape, torch.empty(places.shape).stride(), 0, int(node), True, True))
    tape.nodes[slot] = node
    shadows.put(node, places)
    return Made(slot, places.shape, True)


class Chain:
    """Two images of two by three tokens; each call adds an entry, and its result gets the next slot."""

    def __init__(self) -> None:
        self.planes = Planes(2, (12, 20), CPU)
        self.tape = Tape()
        self.codes = self.grid(2, 3)
        self.shadows = Shadows(self.planes, self.tape.facts, lambda node: whole("lost", self.tape.facts[node].shape, CPU, "fft"))

    def grid(self, rows: int, columns: int) -> Tensor:
        """Return the position codes of a grid, `(2, N)`."""
        return self.planes.codes(self.planes.grid(rows, columns, BOX)).flatten(1)

    def put(self, places: Places, *, floating: bool = True, descends: bool = True) -> Node:
        """Add a tensor."""
        node = Node(len(self.tape.facts))
        self.tape.facts.append(Facts(places.shape, torch.empty(places.shape).stride(), 0, int(node), floating, True))
        self.tape.nodes[int(node)] = node
        self.shadows.put(node, places)
        if descends:
            self.tape.descends.add(int(node))
        return node

    def tokens(self, codes: Tensor | None = None, size: int = SIZE, **more: Any) -> Node:
        """Add vectors `(2, N, size)` of tokens `(2, N)`."""
        codes = self.codes if codes is None else codes
        return self.put(Places("placed", codes[..., None].expand(*codes.shape, size), **more))

    def learned(self, *shape: int, **more: Any) -> Node:
        return self.put(whole("learned", shape, CPU, "w")._replace(**more), descends=False)

    def lost(self, *shape: int) -> Node:
        return self.put(whole("lost", shape, CPU, "fft"))

    def entry(self, steps: Sequence[Step], reads: Sequence[int], *outs: int | None, **more: Any) -> Entry:
        """Add a call of these steps that reads and makes tensors in slots."""
        made = tuple(
            None if slot is None else Made(slot, self.tape.facts[slot].shape, self.tape.facts[slot].floating) for slot in outs
        )
        more = {"before": (None,) * len(outs)} | more
        entry = Entry(F.relu, operation_of(F.relu), tuple(Ref(int(slot)) for slot in reads), {}, made, "", **more)
        entry.steps = tuple(steps)
        self.tape.entries.append(entry)
        return entry

    def call(self, op: Any, result: Node, /, **given: Any) -> Node:
        """Add a call of one step; return its result."""
        reads = [int(node) for value in given.values() for node in _nodes(value)]
        self.entry([Step(op, given, (result,))], reads, int(result))
        return result


def _nodes(value: Any) -> list[Node]:
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, Node)]
