"""Tensors of a running forward, by the number of their slot on the tape."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from visattn.capturing.trace.arguments import memory_of


class Living:
    """Which tensor stands in which slot, without keeping any of them alive.

    Attributes:
        refs: The tensor of each slot. One that is written over goes on in another slot, and the last one is its own.
        versions: How often its memory had been written to when the slot was made; None where that says nothing.
        exposed: Memory that was handed to where writes are not seen.
    """

    def __init__(self) -> None:
        """Start with none."""
        self.refs: list[weakref.ref[Tensor]] = []
        self.versions: list[int | None] = []
        self.exposed = Exposed()
        self._versioned = not torch.is_inference_mode_enabled()
        self._slots: dict[int, int] = {}  # by `id`, of the slots before `_listed`
        self._listed = 0

    def enlist(self, tensor: Tensor) -> int:
        """A new slot for a tensor."""
        self.refs.append(weakref.ref(tensor))
        self.versions.append(None if not self._versioned or tensor.is_inference() else tensor._version)
        return len(self.refs) - 1

    def slot(self, tensor: Tensor) -> int | None:
        """The last slot of a tensor, whatever was done to its memory; None if it has none."""
        refs = self.refs
        if self._listed < len(refs):
            for slot in range(self._listed, len(refs)):
                known = refs[slot]()
                if known is not None:
                    self._slots[id(known)] = slot
            self._listed = len(refs)
        found = self._slots.get(id(tensor))
        return found if found is not None and refs[found]() is tensor else None

    def is_written(self, slot: int, tensor: Tensor) -> bool:
        """Whether the memory of the tensor in a slot was written to since."""
        version = self.versions[slot]
        return version is not None and version != tensor._version

    def forget(self, tensor: Tensor) -> None:
        """Take a tensor for one that was never met."""
        self._slots.pop(id(tensor), None)

    def back_to(self, slots: int) -> None:
        """Forget the tensors behind the first `slots`, none of which stands in an earlier slot too."""
        if slots < self._listed:
            self._slots, self._listed = {key: slot for key, slot in self._slots.items() if slot < slots}, slots
        del self.refs[slots:], self.versions[slots:]

    def sharing(self, memories: Iterable[int]) -> list[tuple[int, Tensor]]:
        """All tensors in some memories by their last slots, in order."""
        wanted = set(memories)
        return [
            (slot, tensor)
            for slot, known in enumerate(self.refs)
            if (tensor := known()) is not None and memory_of(tensor) in wanted and self.slot(tensor) == slot
        ]

    def clear(self) -> None:
        """Forget all."""
        self._slots.clear()
        self.exposed.clear()
        self.refs, self.versions, self._listed = [], [], 0


class Exposed(dict[int, tuple[Tensor, Tensor]]):
    """Memory that was handed to where writes are not seen: by its address a view, and what was in it."""

    def add(self, tensor: Tensor) -> None:
        """State that a tensor's memory was handed out."""
        with torch.no_grad():
            view = tensor.detach()
            self.setdefault(memory_of(tensor), (view, view.clone()))

    def overwritten(self, tensor: Tensor) -> bool:
        """Whether somebody wrote into the memory of a tensor."""
        view, before = self.get(memory_of(tensor), (None, None))
        return view is not None and before is not None and not torch.equal(view, before)

    def refresh(self, memories: Iterable[int]) -> None:
        """Take what is there now for what should be there: the write was seen."""
        for memory in self.keys() & set(memories):
            view, _ = self[memory]
            self[memory] = view, view.clone()
