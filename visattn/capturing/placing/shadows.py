"""Shadow of each tensor of a forward pass: the places of its elements, also where tensors share memory and parts of it are overwritten."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from visattn.capturing.placing.nodes import Facts
from visattn.capturing.placing.places import LEARNED, LOST, Places, later, whole
from visattn.capturing.tokens.codes import same_along
from visattn.capturing.tokens.planes import Planes
from visattn.capturing.tokens.points import widest


@dataclass(eq=False)
class _Memory:
    """Codes of all elements of a memory that several tensors share and that was written to; one status for each element."""

    template: Places
    codes: Tensor
    columns: Tensor | None = None
    copies: Tensor | None = None

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
        """Return the places of a tensor in this memory."""
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

    def store(self, facts: Facts, places: Places) -> None:
        """Write the codes of a tensor."""
        was = self.template
        self.reach(_end(facts))
        _write(self.codes, facts, places.codes)
        if places.columns is not None and self.columns is None:
            self.columns = self.codes.clone()
        if self.columns is not None:
            _write(self.columns, facts, places.codes if places.columns is None else places.columns)
        if places.copies is not None and self.copies is None:
            self.copies = torch.zeros_like(self.codes)
        if self.copies is not None:
            _write(self.copies, facts, torch.zeros_like(places.codes) if places.copies is None else places.copies)
        base = places if places.placed or not was.placed else was
        self.template = base._replace(
            behind=later(was.behind, places.behind),
            mixture=was.mixture or places.mixture,
            drift=widest(was.drift, places.drift),
            summed=was.summed or places.summed,
            weighted=was.weighted or places.weighted,
            leaning=was.leaning or places.leaning,
            others=None,
        )


class Shadows:
    """Places of tensors, by node.

    Attributes:
        planes: Planes of the forward pass.
        facts: Form of each tensor.
        overwritten: Memories that were written to.
    """

    def __init__(self, planes: Planes, facts: Sequence[Facts], first: Callable[[int], Places]) -> None:
        """Start without places; `first` returns those of a tensor that no step has made."""
        self.planes, self.facts, self.overwritten = planes, facts, set[int]()
        self._first = first
        self._places: dict[int, Places] = {}
        self._memories: dict[int, _Memory] = {}
        self._of_memory: dict[int, list[int]] = {}
        self._even: dict[int, frozenset[int]] = {}

    def of(self, node: int) -> Places:
        """Return the places of a tensor."""
        facts = self.facts[node]
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
        self._of_memory.setdefault(self.facts[node].memory, []).append(node)

    def lose(self, node: int, why: str) -> None:
        """Note that it is unknown where the elements of a tensor come from."""
        self.put(node, whole("lost", self.facts[node].shape, self.planes.device, why))

    def lose_memory(self, memory: int, why: str) -> None:
        """Note that it is unknown where the elements of a memory come from."""
        self._memories.pop(memory, None)
        self.overwritten.add(memory)
        for node in self._of_memory.get(memory, []):
            self._places[node] = whole("lost", self.facts[node].shape, self.planes.device, why)

    def write(self, before: int, node: int, places: Places, sharing: Sequence[int]) -> None:
        """Overwrite a tensor, `node` from then on, and the elements that others share with it."""
        facts = self.facts[node]
        self.overwritten.add(facts.memory)
        memory = self._memories.get(facts.memory)
        others = [other for other in sharing if self.facts[other][:3] != facts[:3]]
        same = [other for other in sharing if self.facts[other][:3] == facts[:3]]
        self.of(before)
        if memory is None and (not others or not facts.stride):
            for one in (node, *same):
                self.put(one, places)
            for other in others:
                self.lose(other, "a write to its memory")
            return
        if memory is None:
            memory = self._memories[facts.memory] = self._flat([before, *sharing])
        memory.store(facts, places)
        self.put(node, places)

    def even(self, node: int) -> frozenset[int]:
        """Return axes of a tensor along which all elements are equal, because it was made by copying them."""
        return frozenset() if self.facts[node].memory in self.overwritten else self._even.get(node, frozenset())

    def note_even(self, node: int, axes: frozenset[int]) -> None:
        """Note axes along which all elements are equal."""
        self._even[node] = axes

    def _flat(self, nodes: Sequence[int]) -> _Memory:
        """Return the codes of all elements of a memory, as the tensors in it have them."""
        found = [(self.facts[node], self.of(node)) for node in nodes]
        found = [one for one in found if _is_whole(*one)] or found
        size = max(_end(facts) for facts, _ in found)
        memory = _Memory(found[0][1], torch.full((size,), LOST, dtype=torch.int32, device=self.planes.device))
        for facts, places in sorted(found, key=lambda one: one[0].shape.numel()):
            memory.store(facts, places)
        return memory


def _repeated(facts: Facts) -> list[int]:
    """Return the axes along which an expanded tensor repeats its memory."""
    return [dim for dim, (size, step) in enumerate(zip(facts.shape, facts.stride, strict=True)) if step == 0 and size > 1]


def _is_whole(facts: Facts, places: Places) -> bool:
    """Check whether each element of the memory has one place, unlike a gate that was expanded to the cells it comes from."""
    return all(same_along(places.codes, dim) for dim in _repeated(facts))


def _write(flat: Tensor, facts: Facts, codes: Tensor) -> None:
    """Write the codes of a tensor into those of its memory."""
    for dim in _repeated(facts):
        codes = codes.narrow(dim, 0, 1) if same_along(codes, dim) else torch.full_like(codes.narrow(dim, 0, 1), LOST)
    flat.as_strided(codes.shape, facts.stride, facts.offset).copy_(codes)


def _end(facts: Facts) -> int:
    return facts.offset + sum((size - 1) * step for size, step in zip(facts.shape, facts.stride, strict=True)) + 1
