"""Live tensors of a running forward pass, by the number of their slot on the tape."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from visattn.capturing.placing.weak import Weak
from visattn.capturing.trace.arguments import memory_of, tensors_in
from visattn.capturing.trace.exposed import ExposedMemory
from visattn.capturing.trace.operations import Operation
from visattn.capturing.trace.tape import Outside


class Living:
    """Table of slots and their tensors. It holds weak references, so it keeps no tensor alive.

    Attributes:
        refs: Weak reference to the tensor of each slot. A tensor that is overwritten gets a new slot; its last slot is the valid one.
        versions: Version counter of the tensor when the slot was created; None if versions are not tracked or no longer apply.
        exposed: Memory that other code can write to without being intercepted.
    """

    def __init__(self, overwritten: Callable[[Tensor], None]) -> None:
        """Start without tensors; `overwritten` is told of each whose memory was written by code that is not intercepted."""
        self._overwritten = overwritten
        self.refs: list[Callable[[], Tensor | None]] = []
        self.versions: list[int | None] = []
        self.exposed = ExposedMemory()
        self._versioned = not torch.is_inference_mode_enabled()
        self._slots: dict[int, int] = {}  # slot by `id` of the tensor, for slots before `_listed`
        self._listed = 0

    def enlist(self, tensor: Tensor) -> int:
        """Add a slot for a tensor and return its number."""
        self.refs.append(Weak(tensor))
        self.versions.append(None if not self._versioned or tensor.is_inference() else tensor._version)
        return len(self.refs) - 1

    def current(self, tensor: Tensor, outside: Container[int]) -> int | None:
        """Return the slot of a tensor; None if it is new, or was overwritten without interception.

        The version counters of tensors from `outside` the tape do not matter.
        """
        slot = self.slot(tensor)
        if slot is None:
            return None
        if slot not in outside and self.is_written(slot, tensor):
            self.forget(tensor)
            return None
        if self.exposed and self.exposed.overwritten(tensor):
            self._overwritten(tensor)
            for _, other in self.sharing([memory_of(tensor)]):
                self.forget(other)
            return None
        return slot

    def slot(self, tensor: Tensor) -> int | None:
        """Return the last slot of a tensor, even if its memory was overwritten since; None if it has no slot."""
        refs = self.refs
        if self._listed < len(refs):
            for slot in range(self._listed, len(refs)):
                known = refs[slot]()
                if known is not None:
                    self._slots[id(known)] = slot
            self._listed = len(refs)
        found = self._slots.get(id(tensor))
        return found if found is not None and refs[found]() is tensor else None

    def tensors(self) -> list[Tensor]:
        """Return all tensors that are alive."""
        return [tensor for known in self.refs if (tensor := known()) is not None]

    def slots(self, results: Iterable[Any]) -> tuple[int | None, ...]:
        """Return the slot of each result that already has one, and None for the others."""
        return tuple(self.slot(result) if isinstance(result, Tensor) else None for result in results)

    def is_written(self, slot: int, tensor: Tensor) -> bool:
        """Check whether a tensor was written to since its slot was created."""
        version = self.versions[slot]
        return version is not None and version != tensor._version

    def forget(self, tensor: Tensor) -> None:
        """Treat a tensor as one that is new to the tape."""
        self._slots.pop(id(tensor), None)

    def exchanged(self, tensor: Tensor) -> None:
        """Forget all slots of a tensor that will hold the content of another."""
        self.forget(tensor)
        self.refs = [_gone if known() is tensor else known for known in self.refs]

    def back_to(self, slots: int) -> None:
        """Drop all but the first `slots` slots. No tensor of a dropped slot may have an earlier slot too."""
        if slots < self._listed:
            self._slots, self._listed = {key: slot for key, slot in self._slots.items() if slot < slots}, slots
        del self.refs[slots:], self.versions[slots:]

    def sharing(self, memories: Iterable[int]) -> list[tuple[int, Tensor]]:
        """Return the live tensors in the given storages with their last slots, in order."""
        wanted = set(memories)
        return [
            (slot, tensor)
            for slot, known in enumerate(self.refs)
            if (tensor := known()) is not None and memory_of(tensor) in wanted and self.slot(tensor) == slot
        ]

    def targets(
        self,
        operation: Operation,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: Any,  # noqa: ANN401
    ) -> list[Tensor]:
        """Return the tensors that a call has overwritten."""
        given = tensors_in(kwargs.get("out") if "out" in kwargs else args[0] if args else None)
        if operation.writes or "out" in kwargs or kwargs.get("inplace") is True:
            return given
        if not given or out is not given[0]:
            return []
        slot = self.slot(out)
        return given[:1] if slot is not None and self.is_written(slot, out) else []

    def beside(self, targets: Sequence[Tensor], outside: Mapping[int, Outside]) -> list[tuple[int, Tensor]]:
        """Return slots and tensors that share memory with overwritten tensors, without parameters and buffers."""
        memories, own = {memory_of(target) for target in targets}, {id(target) for target in targets}
        self.exposed.refresh(memories)
        return [
            (slot, tensor)
            for slot, tensor in self.sharing(memories)
            if id(tensor) not in own and (slot not in outside or outside[slot].kind not in ("parameter", "buffer"))
        ]

    def clear(self) -> None:
        """Drop all slots."""
        self._slots.clear()
        self.exposed.clear()
        self.refs, self.versions, self._listed = [], [], 0


def _gone() -> None:
    """Stand for a reference to a tensor that no longer has its content."""
