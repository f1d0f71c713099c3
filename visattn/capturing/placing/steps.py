"""Record of the operations inside each function call: PyTorch's own, with named arguments and what they write, as schemas say.

A function mode sees each call of a model, and a dispatch mode, open during the call, sees the operations that it consists of. A call such
as `einsum` or `F.linear` thus becomes views and products, a keyword or an `out=` is an argument like any other, and what is overwritten is
known.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


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
    """

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    memory: int
    floating: bool
    number: bool


@dataclass(eq=False, slots=True)
class Step:
    """Operation of PyTorch that ran.

    Attributes:
        op: The operation; None for memory that was written, or read, by code that is not intercepted.
        given: Arguments by name, with tensors replaced by `Node`.
        outs: Results; None for one that is no tensor.
        written: Each overwritten tensor: its number before and after.
        sharing: Other tensors that share the overwritten memory.
        contents: Values of arguments that choose elements, by name.
        choice: Number of the choice, if tokens were picked by their content and form a set of their own.
    """

    op: OpOverload | None
    given: dict[str, Any]
    outs: tuple[Node | None, ...] = ()
    written: tuple[tuple[Node, Node], ...] = ()
    sharing: tuple[Node, ...] = ()
    contents: dict[str, Any] = field(default_factory=dict)
    choice: int | None = None


class Signature(NamedTuple):
    """Facts of the schema of an operation.

    Attributes:
        names: Names of the arguments.
        written: Names of those that are overwritten.
        shared: For each result, the name of the argument that it is, or is a view of; None for new memory.
        composite: Whether it is only a way to call other operations.
    """

    names: tuple[str, ...]
    written: tuple[str, ...]
    shared: tuple[str | None, ...]
    composite: bool


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_signatures: dict[OpOverload, Signature] = {}


def signature_of(op: OpOverload) -> Signature:
    """Return what the schema of an operation says."""
    found = _signatures.get(op)
    if found is None:
        arguments = op._schema.arguments
        aliases = {one.name: set(one.alias_info.before_set) for one in arguments if one.alias_info is not None}
        returns = op._schema.returns
        shared = tuple(_shared(aliases, one.alias_info, str(one.type)) for one in returns)
        name, overload = op._schema.name, op._schema.overload_name
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(f"{name}.{overload}" if overload else name, _COMPOSITE)
        found = _signatures[op] = Signature(
            tuple(one.name for one in arguments),
            tuple(one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write),
            shared,
            composite,
        )
    return found


def _shared(aliases: Mapping[str, set[str]], own: Any, kind: str) -> str | None:  # noqa: ANN401
    """Return the argument that a result shares memory with; a list of views names its argument's elements, not the argument."""
    if own is None:
        return next(iter(aliases), None) if kind == "List[Tensor]" else None
    return next((name for name, sets in aliases.items() if sets & set(own.before_set)), next(iter(aliases), None))


class Nodes:
    """Tensors of a running forward pass, by number. It holds weak references, so it keeps no tensor alive.

    Attributes:
        facts: Form of each tensor.
        outside: Kind and name of the tensors that no step has made; see `Outside`.
        unseen: Memories that were written by code that is not intercepted, since this was last asked.
    """

    def __init__(self, stored: Callable[[Tensor], tuple[str, str] | None]) -> None:
        """Start without tensors; `stored` returns kind and name of a tensor of the model."""
        self.facts: list[Facts] = []
        self.outside: dict[int, tuple[str, str]] = {}
        self.unseen: list[int] = []
        self._stored = stored
        self._known: dict[int, tuple[weakref.ref[Tensor], Node]] = {}  # by `id`
        self._memories: dict[int, int] = {}  # by address of the storage
        self._tensors: dict[int, list[weakref.ref[Tensor]]] = {}  # by memory
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
        for memory in {one.memory for one in facts}:
            nodes._tensors[memory] = []
            nodes._versions[memory] = -2
        for node, tensor in living:
            memory = facts[node].memory
            nodes._tensors[memory].append(weakref.ref(tensor))
            nodes._versions[memory] = _version(tensor)
            nodes._known[id(tensor)] = weakref.ref(tensor), node
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

    def written(self, tensor: Tensor, node: Node) -> Node:
        """Give an overwritten tensor its next number."""
        memory = self.facts[node].memory
        self._dirty[memory] = tensor
        return self._add(tensor, memory)

    def forget(self, tensor: Tensor) -> None:
        """Treat a tensor as one that is new: it was given other memory."""
        self._known.pop(id(tensor), None)

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
            self._tensors[memory].append(weakref.ref(tensor))
        self._known[id(tensor)] = weakref.ref(tensor), node
        return node

    def _memory(self, tensor: Tensor) -> int | None:
        address = _address(tensor)
        return None if address is None else self._memories.get(address)

    def _live(self, memory: int) -> list[Tensor]:
        """Return the live tensors of a memory, and forget the others."""
        tensors = [tensor for ref in self._tensors[memory] if (tensor := ref()) is not None]
        self._tensors[memory] = [weakref.ref(tensor) for tensor in tensors]
        return tensors

    def _compare(self, tensor: Tensor, node: Node) -> None:
        """Notice a write that was not intercepted."""
        memory, version = self.facts[node].memory, _version(tensor)
        if version != self._versions[memory] and memory not in self._dirty:
            self._versions[memory] = version
            self.unseen.append(memory)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _address(tensor: Tensor) -> int | None:
    """Return what distinguishes the storage of a tensor from all others that live; None if it has none."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        return None
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr() or -storage._cdata  # other libraries may share the elements of a storage
    except (RuntimeError, NotImplementedError):  # tensors of other classes
        return None


Wanted = Callable[[OpOverload], Sequence[str]]  # names of the arguments whose values choose elements


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that notes each operation; it is open during one function call at a time.

    Attributes:
        nodes: Tensors of the forward pass.
        steps: Steps that were noted and not taken yet.
    """

    def __init__(self, nodes: Nodes, wanted: Wanted) -> None:
        """Start without steps."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.nodes, self.steps, self._wanted = nodes, list[Step](), wanted

    def read(self, tensor: Tensor) -> None:
        """Note that other code may read the numbers of a tensor."""
        self.steps.append(Step(None, {"read": self.nodes.of(tensor)}))

    def taken(self) -> list[Step]:
        """Return the steps noted so far, and forget them."""
        steps, self.steps = self.steps, []
        return steps

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or not all(map(_is_plain, tensors((args, list(kwargs.values()))))):
            return func(*args, **kwargs)
        signature = signature_of(func)
        if signature.composite:  # under inference_mode; otherwise autograd has called the others already
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        named = dict(zip(signature.names, args, strict=False)) | dict(kwargs)
        given = {name: self._noted(value) for name, value in named.items()}
        contents = {name: _copied(named[name]) for name in self._wanted(func) if named.get(name) is not None}
        out = func(*args, **kwargs)
        self.steps.append(self._step(func, signature, named, given, contents, out))
        return out

    def _step(
        self,
        func: OpOverload,
        signature: Signature,
        named: Mapping[str, Any],
        given: dict[str, Any],
        contents: dict[str, Any],
        out: Any,  # noqa: ANN401
    ) -> Step:
        """Note an operation that has run."""
        targets = [x for name in signature.written for x in tensors(named.get(name))]
        before = [self.nodes.of(x) for x in targets]
        self._flag()
        sharing = self.nodes.sharing(before, targets) if targets else ()
        written = tuple((node, self.nodes.written(x, node)) for node, x in zip(before, targets, strict=True))
        outs: list[Node | None] = []
        for result, shared in zip(out if isinstance(out, (tuple, list)) else (out,), _each(signature.shared, out), strict=True):
            if isinstance(result, Tensor):
                outs.append(self.nodes.made(result, next(tensors_in_nodes(given.get(shared or "")), None)))
            elif isinstance(result, (tuple, list)):
                outs += [self.nodes.made(x, None) for x in result if isinstance(x, Tensor)]
            else:
                outs.append(None)
        return Step(func, given, tuple(outs), written, sharing, contents)

    def _noted(self, value: Any) -> Any:  # noqa: ANN401
        if isinstance(value, Tensor):
            node = self.nodes.of(value)
            self._flag()
            return node
        return [self._noted(item) for item in value] if isinstance(value, (tuple, list)) else value

    def _flag(self) -> None:
        """Note memory that was written by code that is not intercepted."""
        while self.nodes.unseen:
            self.steps.append(Step(None, {"memory": self.nodes.unseen.pop()}))


def _is_plain(tensor: Tensor) -> bool:
    """Check whether a tensor is one of PyTorch's own, with elements in memory; nested tensors and other classes are left alone."""
    return type(tensor) in _OWN and tensor.layout is torch.strided and not tensor.is_nested


_OWN = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})


def _each(shared: tuple[str | None, ...], out: Any) -> tuple[str | None, ...]:  # noqa: ANN401
    """Return, for each result, what it shares; a list of results has one entry in the schema."""
    if isinstance(out, (tuple, list)):
        return shared if len(shared) == len(out) else (*shared, *(shared[:1] or (None,)) * len(out))[-len(out) :] if out else ()
    return shared[:1] or (None,)


def _copied(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, Tensor):
        return value.detach().clone()
    return [_copied(item) for item in value] if isinstance(value, (tuple, list)) else value


def tensors(value: Any) -> Iterator[Tensor]:  # noqa: ANN401
    """Yield the tensors in a value."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)


def tensors_in_nodes(value: Any) -> Iterator[Node]:  # noqa: ANN401
    """Yield the nodes in a value."""
    if isinstance(value, Node):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in_nodes(item)
