"""Live tensors of a running forward pass, by the number of their slot on the tape."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from visattn.core.capturing.placing.weak import Weak
from visattn.core.capturing.trace.call_tensors import memory_of, tensors_in
from visattn.core.capturing.trace.exposed import ExposedMemory
from visattn.core.capturing.trace.operations import Operation
from visattn.core.capturing.trace.tape import Outside


class Living:
    """Table of slots (numbers on the tape) and their tensors. It holds weak references, so it keeps no tensor alive.

    Attributes:
        refs: Weak reference to the tensor of each slot. A tensor that is overwritten gets a new slot; its last one is valid.
        versions: Version counter of the tensor when the slot was created; None if versions are not tracked or no longer apply.
        exposed: Memory that other code can write to without being intercepted.
    """

    def __init__(self, overwritten: Callable[[Tensor], None]) -> None:
        """Start without tensors; `overwritten` is called with each tensor whose memory code that is not intercepted has written."""
        self._overwritten = overwritten
        self.refs: list[Callable[[], Tensor | None]] = []
        self.versions: list[int | None] = []
        self.exposed = ExposedMemory()
        self._versioned = not torch.is_inference_mode_enabled()
        self._slots: dict[int, int] = {}  # last slot by `id` of the tensor, for the first `_indexed` slots
        self._indexed = 0

    def enlist(self, tensor: Tensor) -> int:
        """Add a slot for a tensor and return its number."""
        self.refs.append(Weak(tensor))
        self.versions.append(None if not self._versioned or tensor.is_inference() else tensor._version)
        return len(self.refs) - 1

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
        if self._indexed < len(refs):
            for new_slot in range(self._indexed, len(refs)):
                enlisted = refs[new_slot]()
                if enlisted is not None:
                    self._slots[id(enlisted)] = new_slot
            self._indexed = len(refs)
        slot = self._slots.get(id(tensor))
        return slot if slot is not None and refs[slot]() is tensor else None  # another tensor may have had this `id` before

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
        self._slots.pop(id(tensor), None)

    def exchanged(self, tensor: Tensor) -> None:
        """Forget all slots of a tensor whose content the model swaps with that of another tensor."""
        self.forget(tensor)
        self.refs = [_gone if ref() is tensor else ref for ref in self.refs]

    def back_to(self, slots: int) -> None:
        """Drop all but the first `slots` slots. No tensor of a dropped slot may have an earlier slot too."""
        if slots < self._indexed:
            self._slots = {key: slot for key, slot in self._slots.items() if slot < slots}
            self._indexed = slots
        del self.refs[slots:], self.versions[slots:]

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
        target_ids = {id(target) for target in targets}
        self.exposed.refresh(memories)
        return [
            (slot, tensor)
            for slot, tensor in self.sharing(memories)
            if id(tensor) not in target_ids and (slot not in outside or outside[slot].kind not in ("parameter", "buffer"))
        ]

    def clear(self) -> None:
        """Drop all slots."""
        self._slots.clear()
        self.exposed.clear()
        self.refs, self.versions, self._indexed = [], [], 0


def _gone() -> None:
    """Stand for a reference to a tensor that no longer has its content."""
