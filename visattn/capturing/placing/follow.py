"""Places of all tensors of a forward pass, step by step.

One function decides what is known of a result: it is *placed* by the rule of its operation, *learned* if all its arguments are, *foreign*
if another input took part, and *lost* in every other case: an operation without a rule, a rule that raises, memory that was written by
code that is not intercepted, numbers that were read from image tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visattn.capturing.placing import moves, pointwise, writes
from visattn.capturing.placing.places import LEARNED, LOST, Kind, Places, Positions, later, whole
from visattn.capturing.placing.products import is_sum
from visattn.capturing.placing.steps import Facts, Node, Step, tensors_in_nodes
from visattn.capturing.placing.table import Row, row_of
from visattn.capturing.placing.work import Work
from visattn.capturing.tokens.planes import Planes

UNWATCHED = "a tensor of an earlier forward pass, or of code that is not intercepted"
_FROM_NUMBERS = frozenset({"fill"})
_SIZES = frozenset(
    {"dim", "size", "n", "m", "dtype", "layout", "memory_format", "steps", "correction"}
)  # numbers that are no values


@dataclass(eq=False)
class _Memory:
    """Codes of all elements of a memory that several tensors share and that was written to; one status for each element."""

    template: Places
    codes: Tensor
    columns: Tensor | None
    copies: Tensor | None

    def reach(self, end: int) -> None:
        """Make room for elements up to `end`, if the memory has grown; what they hold is unknown."""
        if end > len(self.codes):
            grown = self.codes.new_full((end,), LOST)
            grown[: len(self.codes)] = self.codes
            pad = end - len(self.codes)
            self.codes = grown
            self.columns = None if self.columns is None else torch.nn.functional.pad(self.columns, (0, pad), value=LOST)
            self.copies = None if self.copies is None else torch.nn.functional.pad(self.copies, (0, pad))

    def of(self, facts: Facts) -> Places:
        self.reach(_end(facts))

        def seen(flat: Tensor | None) -> Tensor | None:
            return None if flat is None else flat.as_strided(facts.shape, facts.stride, facts.offset).clone()

        codes = seen(self.codes)
        assert codes is not None  # noqa: S101 - there always are codes
        kind = self.template.kind
        if codes.numel():
            low, high = (int(end) for end in torch.aminmax(codes))
            if high < 0:
                kind = "learned" if low >= LEARNED else "lost" if high == LOST else "foreign" if low == high else kind
        return self.template._replace(kind=kind, codes=codes, columns=seen(self.columns), copies=seen(self.copies))


class Follower:
    """Places of the tensors of a forward pass, as far as it was followed.

    Attributes:
        planes: Planes of the forward pass.
        call: Name of the call that the steps belong to, for reasons.
        told: Whether a number was read from a tensor that comes from the image, or may.
    """

    def __init__(self, planes: Planes, facts: list[Facts], first: Any) -> None:  # noqa: ANN401
        """Start without places; `first` returns those of a tensor that no step has made."""
        self.planes, self.told, self.call = planes, False, ""
        self._facts, self._first = facts, first
        self._places: dict[int, Places] = {}
        self._memories: dict[int, _Memory] = {}
        self._of_memory: dict[int, list[int]] = {}

    def of(self, node: int) -> Places:
        """Return the places of a tensor."""
        facts = self._facts[node]
        memory = self._memories.get(facts.memory)
        if memory is not None and node in self._places:
            return memory.of(facts)
        found = self._places.get(node)
        if found is None:
            sharing = [other for other in self._of_memory.get(facts.memory, []) if facts.stride]
            found = self._flat(sharing).of(facts) if sharing else self._first(node)
            self.put(node, found)
        return found

    def put(self, node: int, places: Places) -> None:
        """Set the places of a tensor."""
        self._places[node] = places
        self._of_memory.setdefault(self._facts[node].memory, []).append(node)

    def lose(self, node: int, why: str) -> None:
        """Note that it is unknown where the elements of a tensor come from."""
        self.put(node, whole("lost", self._facts[node].shape, self.planes.device, why))

    def see(self, step: Step) -> None:
        """Follow a step; after any error its results, and what it has written, are lost."""
        try:
            self._see(step)
        except Exception:  # an operation with unexpected behavior
            for node in (*(node for node in step.outs if node is not None), *(node for _, node in step.written), *step.sharing):
                self.lose(node, self.call)

    def _see(self, step: Step) -> None:
        if step.op is None and "read" in step.given:
            self._read(step.given["read"])
            return
        if step.op is None:
            self._lose_memory(step.given["memory"], "a write that was not intercepted")
            return
        name, row = row_of(step.op)
        outs = [node for node in step.outs if node is not None]
        found = self._results(step, name, row, outs)
        targets = dict(step.written)
        after = {node for _, node in step.written}
        for node, places in zip(outs, found, strict=False):  # in-place operations on lists return nothing
            if node not in after:
                self.put(node, places)
        results = self._written_results(step, name, found)
        for (before, node), places in zip(targets.items(), results, strict=True):
            self._write(before, node, places, step.sharing)

    def _read(self, node: int) -> None:
        """Note that numbers were read from a tensor: what is made from numbers afterwards may come from there. A flag is no number."""
        places = self.of(node)
        apart = places.kind == "learned" or bool(places.positions) or not self._facts[node].number
        self.told = self.told or not apart

    def _written_results(self, step: Step, name: str, found: Sequence[Places]) -> list[Places]:
        """Return the new places of each overwritten tensor."""
        count = len(step.written)
        if not count:
            return []
        if len(found) == count or (not step.outs and len(found) >= count):
            return list(found[:count])
        return [whole("lost", self._facts[node].shape, self.planes.device, name) for _, node in step.written]

    def _results(self, step: Step, name: str, row: Row | None, outs: Sequence[Node]) -> list[Places]:
        """Return the places of all results: the one function that decides what is known."""
        facts = [self._facts[node] for node in outs] or [self._facts[node] for _, node in step.written]
        skipped = ("self",) if step.given.get("beta") == 0 else ()
        nodes = [
            node
            for key, value in step.given.items()
            if not key.startswith("out") and key not in skipped
            for node in tensors_in_nodes(value)
        ]
        known = [] if row is not None and row.makes else [self.of(node) for node in nodes]
        kind, cause = _kind(known)
        chosen = [self.of(node) for key in _INDICES for node in tensors_in_nodes(step.given.get(key))] if name in _READING else []
        positions = _positions(known, chosen, row)
        if name == "_local_scalar_dense":
            self._read(nodes[0])
        if self.told and _holds_number(step, name, row):
            return [self._whole("lost", one, "numbers that were read from a tensor") for one in facts]
        if row is None:
            why = self.call or name if kind == "placed" else cause
            return [
                self._whole("lost" if kind in ("placed", "lost") else kind, one, why)._replace(positions=positions)
                for one in facts
            ]
        work = Work(step, name, self.planes, facts, self.of, self._facts)
        if row.makes:
            return _listed(row.rule(work))
        work.sets = kind != "placed"
        behind = later(*(one.behind for one in known))
        try:
            if kind == "lost":
                raise ValueError(cause)
            plain = not any(bool((one.codes >= 0).any()) for one in known)
            if work.sets and plain and row.rule.__module__ not in _MOVING and name != "embedding":
                made = [self._whole(kind, one, cause)._replace(positions=positions) for one in facts]
            else:
                made = _listed(_each(step, work, row))
        except Exception as error:
            if work.sets and kind != "lost":
                made = [self._whole(kind, one, cause)._replace(positions=positions) for one in facts]
            else:
                why = str(error) or name
                lost = [self._whole("lost", one, self.call if why == name and self.call else why) for one in facts]
                made = [
                    one._replace(summed=is_sum(error) or (name not in _SOFTMAX and any(x.summed for x in known))) for one in lost
                ]
        made += [self._whole("lost", one, name) for one in facts[len(made) :]]
        return [
            self._checked(places, one, name, kind, cause, positions)._replace(behind=later(places.behind, behind))
            for places, one in zip(made, facts, strict=False)
        ]

    def _checked(self, places: Places, facts: Facts, name: str, kind: Kind, cause: str, positions: Positions) -> Places:
        if places.shape != facts.shape:
            return self._whole("lost" if kind in ("placed", "lost") else kind, facts, name)._replace(positions=positions)
        if kind == "placed":
            if places.kind != "placed" or bool((places.codes < -1).all()):  # constants that were chosen by image tokens
                return self._whole("lost", facts, places.name or name)._replace(summed=places.summed)
            return places
        return places._replace(kind=kind, name=places.name or cause, copies=None, positions=positions)

    def _whole(self, kind: Kind, facts: Facts, name: str) -> Places:
        return whole(kind, facts.shape, self.planes.device, name)

    # --- memory

    def _write(self, before: int, node: int, places: Places, sharing: Sequence[int]) -> None:
        """Overwrite a tensor, and the elements that others share with it."""
        facts = self._facts[node]
        memory = self._memories.get(facts.memory)
        others = [other for other in sharing if self._facts[other][:3] != facts[:3]]
        same = [other for other in sharing if self._facts[other][:3] == facts[:3]]
        self.of(before)
        if memory is None and (not others or not facts.stride):
            for one in (node, *same):
                self.put(one, places)
            for other in others:
                self.lose(other, "a write to its memory")
            return
        if memory is None:
            memory = self._memories[facts.memory] = self._flat([before, *sharing])
        self._store(memory, facts, places)
        self._places[node] = places

    def _flat(self, nodes: Sequence[int]) -> _Memory:
        """Return the codes of all elements of a memory, as the tensors in it have them."""
        found = [(self._facts[node], self.of(node)) for node in nodes]
        size = max(_end(facts) for facts, _ in found)
        device = self.planes.device
        memory = _Memory(found[0][1], torch.full((size,), LOST, dtype=torch.int32, device=device), None, None)
        for facts, places in sorted(found, key=lambda one: one[0].shape.numel()):
            self._store(memory, facts, places)
        return memory

    def _store(self, memory: _Memory, facts: Facts, places: Places) -> None:
        """Write the codes of a tensor into those of its memory."""
        was = memory.template
        memory.reach(_end(facts))
        memory.codes.as_strided(facts.shape, facts.stride, facts.offset).copy_(places.codes)
        if places.columns is not None and memory.columns is None:
            memory.columns = memory.codes.clone()
        if memory.columns is not None:
            memory.columns.as_strided(facts.shape, facts.stride, facts.offset).copy_(
                places.codes if places.columns is None else places.columns
            )
        if places.copies is not None and memory.copies is None:
            memory.copies = torch.zeros_like(memory.codes)
        if memory.copies is not None:
            memory.copies.as_strided(facts.shape, facts.stride, facts.offset).copy_(
                torch.zeros((), dtype=torch.int32) if places.copies is None else places.copies
            )
        base = places if places.placed or not was.placed else was
        memory.template = base._replace(
            behind=later(was.behind, places.behind),
            mixture=was.mixture or places.mixture,
            sampled=was.sampled or places.sampled,
            summed=was.summed or places.summed,
            others=None,
        )

    def _lose_memory(self, memory: int, why: str) -> None:
        self._memories.pop(memory, None)
        for node in self._of_memory.get(memory, []):
            self._places[node] = whole("lost", self._facts[node].shape, self.planes.device, why)


_READING = frozenset({"embedding", "index", "_unsafe_index", "gather", "index_select", "take"})  # rows of tables
_INDICES = "indices", "index"
_SOFTMAX = frozenset({"_softmax", "_log_softmax", "_safe_softmax"})
_MOVING = frozenset({moves.__name__, writes.__name__})  # their rules keep zeros


def _holds_number(step: Step, name: str, row: Row | None) -> bool:
    """Check whether a result has the value of a number that the model passes, other than zero."""
    if name not in _FROM_NUMBERS and row is not None and not row.makes and row.rule is not pointwise.combined:
        return False
    if name in ("lift_fresh", "lift"):
        return True
    given = (value for key, value in step.given.items() if key not in _SIZES)
    return any(isinstance(value, (int, float, complex)) and not isinstance(value, bool) and value != 0 for value in given)


def _end(facts: Facts) -> int:
    return facts.offset + sum((size - 1) * step for size, step in zip(facts.shape, facts.stride, strict=True)) + 1


def _kind(known: Sequence[Places]) -> tuple[Kind, str]:
    """Return what is known of a result from its arguments, and the name that says it."""
    for kind in ("placed", "lost", "foreign", "learned"):
        of = [places for places in known if places.kind == kind]
        if of:
            return kind, next((places.name for places in of if places.name), "")
    return "learned", ""


def _positions(known: Sequence[Places], chosen: Sequence[Places], row: Row | None) -> Positions:
    """Return whether a result comes, of other inputs, from whole numbers and booleans only; see `Places.positions`."""
    found = {one.positions for one in known if one.kind == "foreign"}
    if not found or "" in found or any(one.positions == "given" for one in chosen):
        return ""
    return "given" if found == {"given"} and row is not None and row.rule.__module__ == moves.__name__ else "computed"


def _listed(found: Any) -> list[Places]:  # noqa: ANN401
    return list(found) if isinstance(found, list) else [found]


def _each(step: Step, work: Work, row: Row) -> Any:  # noqa: ANN401
    """Run a rule; for an operation on lists of tensors, once for each."""
    assert step.op is not None  # noqa: S101 - a step of the model
    if not step.op._schema.name.startswith("aten::_foreach_"):
        return row.rule(work)
    made: list[Places] = []
    for number, facts in enumerate(work.outs):
        given = {
            key: value[number] if isinstance(value, list) and any(isinstance(x, Node) for x in value) else value
            for key, value in step.given.items()
        }
        one = Work(Step(step.op, given), work.name, work.planes, [facts], work.places, work._facts)
        one.sets = work.sets
        made += _listed(row.rule(one))[:1]
    return made
