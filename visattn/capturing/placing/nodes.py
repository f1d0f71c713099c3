"""Tensors of a running forward pass by number, with their form and the memory that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from visattn.capturing.placing.weak import Weak


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
        self._known: dict[int, tuple[Weak, Node]] = {}  # by `id`
        self._memories: dict[int, int] = {}  # by address of the storage
        self._tensors: dict[int, list[Weak]] = {}  # by memory
        self._versions: dict[int, int] = {}  # by memory
        self._dirty: dict[int, Tensor] = {}  # memories that the running call has made or overwritten, with a tensor in each

    def of(self, tensor: Tensor) -> Node:
        """Return the number of a tensor; one that is new belongs to the model, or to code that is not intercepted."""
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor:
            self._compare(tensor, known[1])
            return known[1]
        memory = self._memory(tensor)
        shared = memory is not None and bool(self._live(memory))
        node = self._add(tensor, memory if shared else None)
        if shared:
            self._compare(tensor, node)
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
        """Return the tensors of a forward pass that has agreed with an earlier one so far, under the numbers of that one."""
        nodes = cls(stored)
        nodes.facts, nodes.outside = list(facts), dict(origins)
        nodes.dynamic = any(one.dynamic for one in facts)
        for memory in {one.memory for one in facts}:
            nodes._tensors[memory] = []
            nodes._versions[memory] = -2
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
        """Continue with another tensor under the number of an equal one, unless it is a view of memory that is known."""
        node = self._known.pop(id(noted))[1]
        if (memory := self._memory(used)) is not None and self._live(memory):
            self.facts[node] = self.facts[node]._replace(memory=memory)
        address, memory = _address(used), self.facts[node].memory
        if address is not None:
            self._memories[address] = memory
        plain = address is not None
        self.facts[node] = self.facts[node]._replace(
            stride=tuple(used.stride()) if plain else (), offset=int(used.storage_offset()) if plain else 0
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
        """Return the other live tensors in the memories of these."""
        memories, own = dict.fromkeys(self.facts[node].memory for node in nodes), {id(x) for x in but}
        return tuple(self._known[id(tensor)][1] for memory in memories for tensor in self._live(memory) if id(tensor) not in own)

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
        node = Node(len(self.facts))
        if memory is None:
            memory = len(self._tensors)
            self._tensors[memory] = []
            self._dirty[memory] = tensor
            self._versions[memory] = _version(tensor)
            address = _address(tensor)
            if address is not None:
                self._memories[address] = memory
        plain = _address(tensor) is not None
        self.facts.append(
            Facts(
                shape_of(tensor),
                tuple(tensor.stride()) if plain else (),
                int(tensor.storage_offset()) if plain else 0,
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

    def _memory(self, tensor: Tensor) -> int | None:
        address = _address(tensor)
        return None if address is None else self._memories.get(address)

    def _live(self, memory: int) -> list[Tensor]:
        """Return the live tensors of a memory, and forget the others."""
        tensors = [tensor for ref in self._tensors[memory] if (tensor := ref()) is not None]
        self._tensors[memory] = [Weak(tensor) for tensor in tensors]
        return tensors

    def _compare(self, tensor: Tensor, node: Node) -> None:
        """Notice a write that was not intercepted."""
        memory, version = self.facts[node].memory, _version(tensor)
        if version in (-1, self._versions[memory]) or memory in self._dirty:
            return
        if self._versions[memory] != -1:
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
    except (RuntimeError, NotImplementedError):
        return None


def _address(tensor: Tensor) -> int | None:
    """Return what distinguishes the storage of a tensor from all others that live; None if it has none."""
    storage = storage_of(tensor)
    return (
        None if storage is None else storage.data_ptr() or -storage._cdata
    )  # other libraries may share the elements of a storage


def tensors_in_nodes(value: Any) -> Iterator[Node]:  # noqa: ANN401
    """Yield the nodes in a value."""
    if isinstance(value, Node):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in_nodes(item)
