"""Shadow of each tensor of a forward pass: the places of its elements, also if tensors share memory and parts are overwritten."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from visattn.core.capturing.placing.nodes import Facts
from visattn.core.capturing.placing.places import LEARNED, LOST, Places, later, whole
from visattn.core.capturing.tokens.codes import same_along
from visattn.core.capturing.tokens.planes import Planes
from visattn.core.capturing.tokens.points import widest


@dataclass(eq=False)
class _Memory:
    """Position codes of all elements of a memory that several tensors share and that was written to.

    Attributes:
        template: Places whose other fields hold for every tensor in this memory.
        codes: For each element, the cell of the image that it comes from.
        columns: For scores, likewise for the columns (keys); None for other tensors.
        copies: Number of the copy that each element belongs to; None for no copies.
    """

    template: Places
    codes: Tensor
    columns: Tensor | None = None
    copies: Tensor | None = None

    def reach(self, end: int) -> None:
        """Make room for elements up to `end`, if the memory has grown; what they hold is unknown."""
        if end > len(self.codes):
            grown_codes = self.codes.new_full((end,), LOST)
            grown_codes[: len(self.codes)] = self.codes
            missing = end - len(self.codes)
            self.codes = grown_codes
            self.columns = None if self.columns is None else torch.nn.functional.pad(self.columns, (0, missing), value=LOST)
            self.copies = None if self.copies is None else torch.nn.functional.pad(self.copies, (0, missing))

    def of(self, facts: Facts) -> Places:
        """Return the places of a tensor in this memory, which its strides pick from it."""
        self.reach(_end(facts))

        def view(memory: Tensor | None) -> Tensor | None:
            return None if memory is None else memory.as_strided(facts.shape, facts.stride, facts.offset).clone()

        codes = view(self.codes)
        assert codes is not None  # noqa: S101 - there always are codes
        kind = self.template.kind
        if codes.numel():
            low, high = (int(end) for end in torch.aminmax(codes))
            if low >= LEARNED and high < 0:
                kind = "learned"
            elif high == LOST:
                kind = "lost"
            elif low == high < 0:
                kind = "foreign"
        return self.template._replace(kind=kind, codes=codes, columns=view(self.columns), copies=view(self.copies))

    def store(self, facts: Facts, places: Places) -> None:
        """Write the position codes of a tensor into those of its memory; `facts` has its strides."""
        earlier = self.template
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
        base = places if places.placed or not earlier.placed else earlier
        self.template = base._replace(
            behind=later(earlier.behind, places.behind),
            mixture=earlier.mixture or places.mixture,
            drift=widest(earlier.drift, places.drift),
            summed=earlier.summed or places.summed,
            weighted=earlier.weighted or places.weighted,
            leaning=earlier.leaning or places.leaning,
            others=None,
        )


class Shadows:
    """Places of tensors, by node (number of a tensor).

    Attributes:
        planes: Planes of the forward pass, that is grids of image cells and sets of other tokens.
        facts: Form of each tensor.
        overwritten: Memories that were written to.
        told: Whether Python, or other code, may have read numbers from the image.
    """

    def __init__(self, planes: Planes, facts: Sequence[Facts], first: Callable[[int], Places]) -> None:
        """Start without places; `first` returns those of a tensor that no step has made."""
        self.planes, self.facts, self.overwritten, self.told = planes, facts, set[int](), False
        self._first = first
        self._places: dict[int, Places] = {}
        self._memories: dict[int, _Memory] = {}  # those with codes for each element, because a part was overwritten
        self._of_memory: dict[int, list[int]] = {}  # tensors in each memory
        self._even: dict[int, frozenset[int]] = {}

    def of(self, node: int) -> Places:
        """Return the places of a tensor: the cell of the image that each of its elements comes from.

        If a part of its memory was overwritten, they are read there. Otherwise the step that made the tensor has set them.
        """
        facts = self.facts[node]
        memory = self._memories.get(facts.memory)
        if memory is not None and node in self._places:
            return memory.of(facts)
        places = self._places.get(node)
        if places is None:
            sharing = [other for other in self._of_memory.get(facts.memory, []) if facts.stride]
            places = self._memory_of(sharing).of(facts) if sharing else self._first(node)
            self.put(node, places)
        return places

    def put(self, node: int, places: Places) -> None:
        """Set the places of a tensor."""
        self._places[node] = places
        self._of_memory.setdefault(self.facts[node].memory, []).append(node)

    def lose(self, node: int, why: str) -> None:
        """Note that it is unknown where the elements of a tensor come from."""
        self.put(node, whole("lost", self.facts[node].shape, self.planes.device, why))

    def lose_memory(self, memory: int, why: str) -> None:
        """Note that it is unknown where the elements of a memory, and so of all tensors in it, come from."""
        self._memories.pop(memory, None)
        self.overwritten.add(memory)
        for node in self._of_memory.get(memory, []):
            self._places[node] = whole("lost", self.facts[node].shape, self.planes.device, why)

    def write(self, before: int, node: int, places: Places, sharing: Sequence[int]) -> None:
        """Note that a tensor was overwritten, and with it the elements that other tensors share with it, as in `x[:, 0] = 1`.

        The tensor has the number `before` until the write and `node` from then on; `sharing` are the other tensors in its memory.
        """
        facts = self.facts[node]
        self.overwritten.add(facts.memory)
        memory = self._memories.get(facts.memory)
        form = facts[:3]  # shape, stride, offset
        other_views = [other for other in sharing if self.facts[other][:3] != form]
        same_views = [other for other in sharing if self.facts[other][:3] == form]
        self.of(before)
        is_simple = not other_views or not facts.stride
        if memory is None and is_simple:
            for view in (node, *same_views):
                self.put(view, places)
            for view in other_views:
                self.lose(view, "a write to its memory")
            return
        if memory is None:
            memory = self._memories[facts.memory] = self._memory_of([before, *sharing])
        memory.store(facts, places)
        self.put(node, places)

    def even(self, node: int) -> frozenset[int]:
        """Return axes of a tensor along which all elements are equal, because it was made by copying them."""
        return frozenset() if self.facts[node].memory in self.overwritten else self._even.get(node, frozenset())

    def note_even(self, node: int, axes: frozenset[int]) -> None:
        """Note axes along which all elements are equal."""
        self._even[node] = axes

    def _memory_of(self, nodes: Sequence[int]) -> _Memory:
        """Return the position codes of all elements of a memory, put together from those of the tensors `nodes` in it."""
        tensors = [(self.facts[node], self.of(node)) for node in nodes]
        consistent = [(facts, places) for facts, places in tensors if _has_one_place_each(facts, places)]
        tensors = consistent or tensors
        size = max(_end(facts) for facts, _ in tensors)
        _, first_places = tensors[0]
        memory = _Memory(first_places, torch.full((size,), LOST, dtype=torch.int32, device=self.planes.device))
        for facts, places in sorted(tensors, key=_count_of_elements):
            memory.store(facts, places)
        return memory


def _count_of_elements(tensor: tuple[Facts, Places]) -> int:
    """Return the number of elements of a tensor, given with its places."""
    facts, _ = tensor
    return facts.shape.numel()


def _repeated(facts: Facts) -> list[int]:
    """Return the axes along which an expanded tensor repeats its memory."""
    return [dim for dim, (size, step) in enumerate(zip(facts.shape, facts.stride, strict=True)) if step == 0 and size > 1]


def _has_one_place_each(facts: Facts, places: Places) -> bool:
    """Check whether each element of the memory has one place, unlike a gate that was expanded to the cells it comes from."""
    return all(same_along(places.codes, dim) for dim in _repeated(facts))


def _write(memory_codes: Tensor, facts: Facts, codes: Tensor) -> None:
    """Write the position codes of a tensor into those of its memory; where repeated elements have several, they are lost."""
    for dim in _repeated(facts):
        first_codes = codes.narrow(dim, 0, 1)
        codes = first_codes if same_along(codes, dim) else torch.full_like(first_codes, LOST)
    memory_codes.as_strided(codes.shape, facts.stride, facts.offset).copy_(codes)


def _end(facts: Facts) -> int:
    """Return the index behind the last element of a tensor in its memory."""
    return facts.offset + sum((size - 1) * step for size, step in zip(facts.shape, facts.stride, strict=True)) + 1
