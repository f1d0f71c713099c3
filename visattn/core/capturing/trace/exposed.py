"""Memory of tensors that other code, such as NumPy, can write to without being intercepted."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from visattn.core.capturing.placing.nodes import storage_of
from visattn.core.capturing.trace.call_tensors import memory_of

_OWN = 2  # owners of a storage that one tensor uses: the tensor, and the storage as Python sees it while it is asked


class ExposedMemory(dict[int, tuple[Tensor, Tensor]]):
    """Memory that other code, such as NumPy, can write to. Maps its address to a view of all of it, and a copy to compare with.

    Attributes:
        changed: Addresses of memories in which such a write was found.
    """

    def __init__(self) -> None:
        """Start without memory."""
        super().__init__()
        self.changed: set[int] = set()

    def add(self, tensor: Tensor) -> None:
        """Watch the memory of a tensor from here on: copy its content, to notice writes of code that is not intercepted."""
        address = memory_of(tensor)
        if address in self or storage_of(tensor) is None:
            return
        with torch.no_grad(), torch._C.DisableTorchFunction():
            view = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            self[address] = view, view.clone()

    def overwritten(self, tensor: Tensor) -> bool:
        """Check whether the memory of a tensor differs from its copy, so that code that is not intercepted has written there."""
        address = memory_of(tensor)
        view, copy = self.get(address, (None, None))
        is_overwritten = view is not None and copy is not None and not torch.equal(view, copy)
        if is_overwritten:
            self.changed.add(address)
        return is_overwritten

    def is_changed(self, tensor: Tensor) -> bool:
        """Check whether code that is not intercepted has ever written into the memory of a tensor."""
        return bool(self) and (self.overwritten(tensor) or memory_of(tensor) in self.changed)

    def refresh(self, memories: Iterable[int]) -> None:
        """Copy the content of some memories, given by address, again, after a write that was intercepted."""
        for address in self.keys() & set(memories):
            view, _ = self[address]
            self[address] = view, view.clone()


def is_foreign(tensor: Tensor) -> bool:
    """Check whether the memory of a tensor belongs, or was given, to other code such as NumPy: PyTorch does not resize it."""
    storage = storage_of(tensor)
    return storage is not None and bool(storage.nbytes()) and storage.device.type != "meta" and not storage.resizable()


def is_only_owner(tensor: Tensor) -> bool:
    """Check whether a plain tensor's memory has no other owner, such as a view of it. False does not mean that it has."""
    storage = storage_of(tensor) if type(tensor) is Tensor else None  # that of other classes may be in tensors which they hold
    if storage is None or not storage.resizable():  # two storages may hold the memory of one NumPy array
        return False
    return torch._C._storage_Use_Count(storage._cdata) == _OWN


def is_shared(tensor: Tensor) -> bool:
    """Check whether code such as NumPy may hold the memory of a tensor: it belongs to it, or has owners beside the tensor."""
    storage = storage_of(tensor)
    if storage is None or not storage.nbytes() or storage.device.type == "meta":
        return False
    storage_owners = torch._C._storage_Use_Count(storage._cdata)
    if is_foreign(tensor) or storage_owners > _OWN:
        return True
    return not tensor.requires_grad and bool(tensor._use_count() > 1)  # type: ignore[attr-defined]
