"""Memory of tensors that other code, such as NumPy, can write to without being intercepted."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from visattn.capturing.placing.nodes import storage_of
from visattn.capturing.trace.arguments import memory_of

_OWN = 2  # owners of a storage that one tensor uses: the tensor, and the storage as Python sees it while it is asked


class ExposedMemory(dict[int, tuple[Tensor, Tensor]]):
    """Memory that other code can write to. Maps its address to a view of all of it and a copy.

    Attributes:
        changed: Memories in which such a write was found.
    """

    def __init__(self) -> None:
        """Start without memory."""
        super().__init__()
        self.changed: set[int] = set()

    def add(self, tensor: Tensor) -> None:
        """Register the memory of a tensor and copy its content."""
        memory = memory_of(tensor)
        if memory in self or storage_of(tensor) is None:
            return
        with torch.no_grad(), torch._C.DisableTorchFunction():
            view = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            self[memory] = view, view.clone()

    def overwritten(self, tensor: Tensor) -> bool:
        """Check whether the memory of a tensor has changed without an intercepted write."""
        memory = memory_of(tensor)
        view, before = self.get(memory, (None, None))
        found = view is not None and before is not None and not torch.equal(view, before)
        if found:
            self.changed.add(memory)
        return found

    def is_changed(self, tensor: Tensor) -> bool:
        """Check whether the memory of a tensor has ever changed without an intercepted write."""
        return bool(self) and (self.overwritten(tensor) or memory_of(tensor) in self.changed)

    def refresh(self, memories: Iterable[int]) -> None:
        """Copy the content again, after a write that was intercepted."""
        for memory in self.keys() & set(memories):
            view, _ = self[memory]
            self[memory] = view, view.clone()


def is_foreign(tensor: Tensor) -> bool:
    """Check whether the memory of a tensor belongs, or was given, to other code such as NumPy: PyTorch does not resize it."""
    storage = storage_of(tensor)
    return storage is not None and bool(storage.nbytes()) and storage.device.type != "meta" and not storage.resizable()


def is_shared(tensor: Tensor) -> bool:
    """Check whether other code may hold the memory of a tensor: it is foreign, or has owners beside the tensor, as with DLPack."""
    storage = storage_of(tensor)
    if storage is None or not storage.nbytes() or storage.device.type == "meta":
        return False
    owners = torch._C._storage_Use_Count(storage._cdata)
    return is_foreign(tensor) or owners > _OWN or (not tensor.requires_grad and tensor._use_count() > 1)  # type: ignore[attr-defined]
