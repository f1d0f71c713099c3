"""Live tensors of a running forward pass, by the number of their slot on the tape."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from visattn.core.capturing.placing.weak import Weak
from visattn.core.capturing.trace.call_tensors import address_of, memory_of, tensors_in
from visattn.core.capturing.trace.exposed import ExposedMemory, is_only_owner
from visattn.core.capturing.trace.operations import Operation
from visattn.core.capturing.trace.tape import Outside

_MEMBERS = "parameter", "buffer"
_LATEST = 4  # slots that are looked through before all slots are indexed


class Living:
    """Table of slots (numbers on the tape) and their tensors. It holds weak references, so it keeps no tensor alive.

    Attributes:
        refs: Weak reference to the tensor of each slot. A tensor that is overwritten gets a new slot; its last one is valid.
        versions: Version counter of the tensor when the slot was created; None if versions are not tracked or no longer apply.
        versioned: Whether versions are tracked, which inference mode does not do.
        count: Number of slots.
        exposed: Memory that other code can write to without being intercepted.
    """

    def __init__(self, overwritten: Callable[[Tensor], None]) -> None:
        """Start without tensors; `overwritten` is called with each tensor whose memory code that is not intercepted has written."""
        self._overwritten = overwritten
        self.refs: list[Callable[[], Tensor | None]] = []
        self.versions: list[int | None] = []
        self.count = 0
        self.exposed = ExposedMemory()
        self.versioned = not torch.is_inference_mode_enabled()
        self._slots: dict[int, int] = {}  # last slot by `id` of the tensor, for the first `_indexed` slots
        self._indexed = 0
        self._has_forgotten = False  # whether tensors have lost their slots
        self._by_memory: dict[
            int, tuple[int, ...]
        ] = {}  # the first `_placed` slots by address, without those of the model's tensors
        self._placed = 0

    def enlist(self, tensor: Tensor) -> int:
        """Add a slot for a tensor and return its number."""
        try:
            version = tensor._version if self.versioned else None
        except RuntimeError:  # a tensor of inference mode
            version = None
        self.refs += (Weak(tensor),)  # faster than a call
        self.versions += (version,)
        self.count += 1
        return self.count - 1

    def current(self, tensor: Tensor, outside: Container[int]) -> int | None:
        """Return the slot of a tensor (its number on the tape); None if it is new, or was overwritten without interception.

        Such a write shows in the tensor's version counter, or in its memory if other code such as NumPy can write there. The
        counters of tensors from `outside` the tape, such as parameters, do not matter.
        """
        slot = self.slot(tensor)
        if slot is None:
            return None
        if slot not in outside and self.is_written(slot, tensor):
            self.forget(tensor)
            return None
        if self.exposed and self.exposed.overwritten(tensor):
            self._overwritten(tensor)
            for _, view in self.sharing([memory_of(tensor)]):
                self.forget(view)
            return None
        return slot

    def slot(self, tensor: Tensor) -> int | None:
        """Return the last slot of a tensor, even if its memory was overwritten since; None if it has no slot."""
        refs = self.refs
        if not self._has_forgotten:
            for latest in range(self.count - 1, max(self.count - _LATEST, -1), -1):  # mostly, it was just made
                if refs[latest]() is tensor:
                    return latest
        slot = self._index().get(id(tensor))
        return slot if slot is not None and refs[slot]() is tensor else None  # another tensor may have had this `id` before

    def _index(self) -> dict[int, int]:
        """Return the last slot of each tensor by its `id`."""
        if self._indexed < self.count:
            for slot in range(self._indexed, self.count):
                tensor = self.refs[slot]()
                if tensor is not None:
                    self._slots[id(tensor)] = slot
            self._indexed = self.count
        return self._slots

    def tensors(self) -> list[Tensor]:
        """Return all tensors that are alive."""
        return [tensor for ref in self.refs if (tensor := ref()) is not None]

    def slots(self, results: Iterable[Any]) -> tuple[int | None, ...]:
        """Return the slot of each result that already has one, and None for the others."""
        return tuple(self.slot(result) if isinstance(result, Tensor) else None for result in results)

    def is_written(self, slot: int, tensor: Tensor) -> bool:
        """Check whether a tensor was written to since its slot was created."""
        version = self.versions[slot]
        return version is not None and version != tensor._version

    def forget(self, tensor: Tensor) -> None:
        """Treat a tensor as new to the tape, because its content is of unknown origin."""
        self._index().pop(id(tensor), None)
        self._has_forgotten = True

    def exchanged(self, tensor: Tensor) -> None:
        """Forget all slots of a tensor whose content the model swaps with that of another tensor."""
        self.forget(tensor)
        self.refs = [_gone if ref() is tensor else ref for ref in self.refs]

    def back_to(self, slots: int) -> None:
        """Drop all but the first `slots` slots. No tensor of a dropped slot may have an earlier slot too."""
        if slots < self._indexed:
            self._slots = {key: slot for key, slot in self._slots.items() if slot < slots}
            self._indexed = slots
        if slots < self._placed:
            self._by_memory, self._placed = {}, 0
        del self.refs[slots:], self.versions[slots:]
        self.count = slots

    def sharing(self, memories: Iterable[int]) -> list[tuple[int, Tensor]]:
        """Return the live tensors that lie in some storages, given by address, with their last slots and in order of these."""
        addresses = set(memories)
        return [
            (slot, tensor)
            for slot, ref in enumerate(self.refs)
            if (tensor := ref()) is not None and memory_of(tensor) in addresses and self.slot(tensor) == slot
        ]

    def targets(
        self,
        operation: Operation,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: Any,  # noqa: ANN401
    ) -> list[Tensor]:
        """Return the tensors that a call has overwritten: its first argument, if it works in place, or those of `out=`.

        A call that returns its first argument has overwritten it if the version counter has changed.
        """
        candidates = tensors_in(kwargs.get("out") if "out" in kwargs else args[0] if args else None)
        if operation.writes or "out" in kwargs or kwargs.get("inplace") is True:
            return candidates
        if not candidates or out is not candidates[0]:
            return []
        slot = self.slot(out)
        return candidates[:1] if slot is not None and self.is_written(slot, out) else []

    def beside(self, targets: Sequence[Tensor], outside: Mapping[int, Outside]) -> list[tuple[int, Tensor]]:
        """Return the other tensors in the memory of overwritten ones, such as views of them, with their slots.

        Parameters and buffers are left out. `targets` are the overwritten tensors.
        """
        memories = {memory_of(target) for target in targets}
        if self.exposed:
            self.exposed.refresh(memories)
        tensors = self._in_memories(memories, outside)
        if not all(self._is_among(target, tensors, outside) for target in targets):  # the storage was given other memory
            self._by_memory, self._placed = {}, 0
            tensors = self._in_memories(memories, outside)
        target_ids = {id(target) for target in targets}
        return [(slot, tensor) for slot, tensor in tensors if id(tensor) not in target_ids and self.slot(tensor) == slot]

    def is_alone(self, target: Tensor, outside: Mapping[int, Outside]) -> bool:
        """Check whether a tensor that is on the tape is the only one in its memory, apart from parameters and buffers.

        False does not mean that it is not.
        """
        if self.exposed:
            return False
        if is_only_owner(target):
            return True
        self._place(outside)
        address, is_found = memory_of(target), False
        if address not in self._by_memory:
            return False
        for slot in self._by_memory[address]:
            tensor = self.refs[slot]()
            if tensor is target:
                is_found = True
            elif tensor is not None:
                return False
        return is_found

    def _in_memories(self, memories: Iterable[int], outside: Mapping[int, Outside]) -> list[tuple[int, Tensor]]:
        """Return the live tensors in some storages, given by address, with their slots and in order of these; no members of the model."""
        self._place(outside)
        slots = [slot for address in memories if address in self._by_memory for slot in self._by_memory[address]]
        return [(slot, tensor) for slot in sorted(slots) if (tensor := self.refs[slot]()) is not None]

    def _place(self, outside: Mapping[int, Outside]) -> None:
        """Note the memories of all tensors that are not placed yet."""
        refs, by_memory = self.refs, self._by_memory
        with torch._C.DisableTorchFunction():
            for slot in range(self._placed, self.count):
                tensor = refs[slot]()
                if tensor is None or (slot in outside and outside[slot].kind in _MEMBERS):
                    continue
                address = address_of(tensor)
                try:
                    by_memory[address] += (slot,)
                except KeyError:
                    by_memory[address] = (slot,)
        self._placed = self.count

    def _is_among(self, target: Tensor, tensors: Sequence[tuple[int, Tensor]], outside: Mapping[int, Outside]) -> bool:
        """Check whether an overwritten tensor that is on the tape was found in its memory."""
        for _, tensor in tensors:
            if tensor is target:
                return True
        slot = self.slot(target)
        return slot is None or _is_member(slot, outside)

    def clear(self) -> None:
        """Drop all slots."""
        self._slots.clear()
        self.exposed.clear()
        self.refs, self.versions, self.count, self._indexed = [], [], 0, 0
        self._by_memory, self._placed, self._has_forgotten = {}, 0, False


def _is_member(slot: int, outside: Mapping[int, Outside]) -> bool:
    """Check whether the tensor in a slot is a parameter or a buffer."""
    return slot in outside and outside[slot].kind in _MEMBERS


def _gone() -> None:
    """Stand for a reference to a tensor that no longer has its content."""
