"""Tensors of a running forward pass by number, with their form and the memory that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from visattn.core.capturing.placing.weak import Weak


def shape_of(tensor: Tensor) -> torch.Size:
    """Return the shape of a tensor; for a nested tensor, which has none, its number of elements."""
    return torch.Size([tensor.numel()]) if tensor.is_nested else tensor.shape


class Node(int):
    """Number of a tensor. A tensor that is overwritten continues under a new number."""


class Facts(NamedTuple):
    """Form of a tensor.

    Attributes:
        shape: Its shape; of a nested tensor, its number of elements.
        stride: Its strides; empty if it has no memory of its own kind, as sparse and nested tensors.
        offset: Its first element in its memory.
        memory: Number of its memory, which its views share.
        floating: Whether its dtype is floating point.
        number: Whether its dtype is not boolean.
        dynamic: Whether its shape depends on what tensors hold, as that of the tokens that a mask picks.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    memory: int
    floating: bool
    number: bool
    dynamic: bool = False


class Nodes:
    """Tensors of a running forward pass, by number. It holds weak references, so it keeps no tensor alive.

    Attributes:
        facts: Form of each tensor.
        outside: Kind and name of the tensors that no step has made; see `Outside`.
        unseen: Memories that were written by code that is not intercepted, since this was last asked.
        dynamic: Whether some tensor has a shape that depends on what tensors hold.
    """

    def __init__(self, stored: Callable[[Tensor], tuple[str, str] | None]) -> None:
        """Start without tensors; `stored` returns kind and name of a tensor of the model."""
        self.facts: list[Facts] = []
        self.outside: dict[int, tuple[str, str]] = {}
        self.unseen: list[int] = []
        self.dynamic = False
        self._stored = stored
        self._known: dict[
            int, tuple[Weak, Node]
        ] = {}  # numbers of tensors by `id`, with a reference: another may get the `id` later
        self._memories: dict[int, int] = {}  # by address of the storage
        self._tensors: dict[int, list[Weak]] = {}  # by memory
        self._versions: dict[int, int] = {}  # by memory
        self._dirty: dict[int, Tensor] = {}  # memories that the running call has made or overwritten, with a tensor in each

    def of(self, tensor: Tensor) -> Node:
        """Return the number of a tensor; one that is new belongs to the model, or to code that is not intercepted."""
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor:
            node = known[1]
            self._notice_unseen_write(tensor, node)
            return node
        memory = self._memory_at(tensor)
        is_view_of_known = memory is not None and bool(self._live(memory))
        node = self._add(tensor, memory if is_view_of_known else None)
        if is_view_of_known:
            self._notice_unseen_write(tensor, node)
        else:
            self.outside[node] = self._stored(tensor) or ("unknown", "")
        return node

    @classmethod
    def resumed(
        cls,
        stored: Callable[[Tensor], tuple[str, str] | None],
        facts: Sequence[Facts],
        origins: Mapping[int, tuple[str, str]],
        living: Sequence[tuple[Node, Tensor]],
    ) -> Nodes:
        """Return the tensors of a forward pass that has agreed with an earlier one so far, under the numbers of that one.

        Args:
            stored: Function that returns kind and name of a tensor of the model.
            facts: Form of each tensor of the earlier forward pass up to here.
            origins: Kind and name of those that no step has made.
            living: Tensors of this forward pass that are alive, with their numbers.
        """
        nodes = cls(stored)
        nodes.facts, nodes.outside = list(facts), dict(origins)
        nodes.dynamic = any(form.dynamic for form in facts)
        for memory in {form.memory for form in facts}:
            nodes._tensors[memory] = []
            nodes._versions[memory] = -2  # no version of a tensor
        for node, tensor in living:
            memory = facts[node].memory
            nodes._tensors[memory].append(Weak(tensor))
            nodes._versions[memory] = _version(tensor)
            nodes._known[id(tensor)] = Weak(tensor), node
            address = _address(tensor)
            if address is not None:
                nodes._memories[address] = memory
        return nodes

    def begin(self, tensor: Tensor, kind: str, name: str) -> Node:
        """Add a tensor that the model receives."""
        node = self._add(tensor, None)
        self.outside[node] = kind, name
        return node

    def made(self, tensor: Tensor, shares: Node | None) -> Node:
        """Add a result, which shares the memory of another tensor or has its own; a result that is an argument keeps its number."""
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and shares is not None:
            return known[1]
        return self._add(tensor, None if shares is None else self.facts[shares].memory)

    def depends(self, node: Node) -> None:
        """Note that the shape of a tensor depends on what tensors hold."""
        self.facts[node], self.dynamic = self.facts[node]._replace(dynamic=True), True

    def stands_for(self, noted: Tensor, used: Tensor) -> None:
        """Give the number of a tensor, `noted`, to an equal one that the model continues with, `used`.

        Their memories are treated as one, unless `used` is a view of memory that is already known.
        """
        node = self._known.pop(id(noted))[1]
        if (memory := self._memory_at(used)) is not None and self._live(memory):
            self.facts[node] = self.facts[node]._replace(memory=memory)
        address, memory = _address(used), self.facts[node].memory
        if address is not None:
            self._memories[address] = memory
        has_memory = address is not None
        self.facts[node] = self.facts[node]._replace(
            stride=tuple(used.stride()) if has_memory else (), offset=int(used.storage_offset()) if has_memory else 0
        )
        self._tensors[memory] = [ref for ref in self._tensors[memory] if ref() is not noted] + [Weak(used)]
        self._versions[memory] = _version(used)
        self._known[id(used)] = Weak(used), node

    def written(self, tensor: Tensor, node: Node) -> Node:
        """Give an overwritten tensor its next number."""
        memory = self.facts[node].memory
        self._dirty[memory] = tensor
        return self._add(tensor, memory)

    def forget(self, tensor: Tensor) -> None:
        """Treat a tensor as one that is new: it was given other memory."""
        known = self._known.pop(id(tensor), None)
        if known is not None:
            memory = self.facts[known[1]].memory
            self._tensors[memory] = [Weak(other) for other in self._live(memory) if other is not tensor]

    def overwritten(self, tensor: Tensor) -> None:
        """Note that the memory of a tensor was written by code that is not intercepted."""
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor:
            self.unseen.append(self.facts[known[1]].memory)

    def settle(self) -> None:
        """Note the versions of memories that a call has made or overwritten, which autograd sets when the operation has returned."""
        for memory, tensor in self._dirty.items():
            self._versions[memory] = _version(tensor)
        self._dirty.clear()

    def sharing(self, nodes: Sequence[Node], but: Sequence[Tensor]) -> tuple[Node, ...]:
        """Return the live tensors, other than `but`, that share memory with the tensors `nodes`, by number."""
        memories = dict.fromkeys(self.facts[node].memory for node in nodes)
        own_ids = {id(tensor) for tensor in but}
        return tuple(
            self._known[id(tensor)][1] for memory in memories for tensor in self._live(memory) if id(tensor) not in own_ids
        )

    def memory_of(self, tensor: Tensor) -> int:
        """Return the number of a tensor's memory."""
        return self.facts[self.of(tensor)].memory

    def clear(self) -> None:
        """Release all tensors."""
        self._dirty.clear()
        self._known.clear()
        self._tensors.clear()
        self._memories.clear()

    def _add(self, tensor: Tensor, memory: int | None) -> Node:
        """Give a tensor the next number, and note its form; `memory` is None if it shares no memory that is known."""
        node = Node(len(self.facts))
        if memory is None:
            memory = len(self._tensors)
            self._tensors[memory] = []
            self._dirty[memory] = tensor
            self._versions[memory] = _version(tensor)
            address = _address(tensor)
            if address is not None:
                self._memories[address] = memory
        has_memory = _address(tensor) is not None
        self.facts.append(
            Facts(
                shape_of(tensor),
                tuple(tensor.stride()) if has_memory else (),
                int(tensor.storage_offset()) if has_memory else 0,
                memory,
                tensor.is_floating_point() or tensor.is_complex(),
                tensor.dtype != torch.bool,
            )
        )
        known = self._known.get(id(tensor))
        if known is None or known[0]() is not tensor:
            self._tensors[memory].append(Weak(tensor))
        self._known[id(tensor)] = Weak(tensor), node
        return node

    def _memory_at(self, tensor: Tensor) -> int | None:
        """Return the number of the memory at the address of a tensor; None if none is known there."""
        address = _address(tensor)
        return None if address is None else self._memories.get(address)

    def _live(self, memory: int) -> list[Tensor]:
        """Return the live tensors of a memory, and forget the others."""
        tensors = [tensor for ref in self._tensors[memory] if (tensor := ref()) is not None]
        self._tensors[memory] = [Weak(tensor) for tensor in tensors]
        return tensors

    def _notice_unseen_write(self, tensor: Tensor, node: Node) -> None:
        """Note that the memory of a tensor was written by code that is not intercepted, if its version counter says so."""
        memory, version = self.facts[node].memory, _version(tensor)
        if version in (-1, self._versions[memory]) or memory in self._dirty:
            return
        if self._versions[memory] != -1:  # otherwise no version was known before
            self.unseen.append(memory)
        self._versions[memory] = version


def _version(tensor: Tensor) -> int:
    """Return the number of writes to the memory of a tensor; -1 if none are counted."""
    return -1 if torch.is_inference_mode_enabled() or tensor.is_inference() else tensor._version


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor; None for nested and sparse ones, and for classes of tensors without elements in memory."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        return None
    try:
        with torch._C.DisableTorchFunction():  # a capture around this one must not take it for a read
            storage = tensor.untyped_storage()
            storage.data_ptr()
        return storage
    except RuntimeError:  # NotImplementedError is one, too
        return None


def _address(tensor: Tensor) -> int | None:
    """Return a number that distinguishes the storage of a tensor from all others that live; None if it has none.

    It is the address of its elements, which tensors of other libraries may share, or that of an empty storage itself.
    """
    storage = storage_of(tensor)
    return None if storage is None else storage.data_ptr() or -storage._cdata


def tensors_in_nodes(value: Any) -> Iterator[Node]:  # noqa: ANN401
    """Yield the nodes in a value."""
    if isinstance(value, Node):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in_nodes(item)
