"""Record of the operations inside each function call: PyTorch's own, with named arguments and what they write, as schemas say.

A function mode sees each call of a model, and a dispatch mode, open during the call, sees the operations that it consists of. A call such
as `einsum` or `F.linear` thus becomes views and products, a keyword or an `out=` is an argument like any other, and what is overwritten is
known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from visattn.core.capturing.placing.kernels import Kernel, kernel_of, kind_of
from visattn.core.capturing.placing.nodes import Node, Nodes, tensors_in_nodes
from visattn.core.capturing.tokens.points import Points


@dataclass(eq=False, slots=True)
class Step:
    """Operation of PyTorch that ran.

    Attributes:
        op: The operation; None for memory that was written, or read, by code that is not intercepted, and for a length that was read.
        given: Arguments by name, with tensors replaced by `Node`.
        outs: Results; None for one that is no tensor.
        written: Each overwritten tensor: its number before and after.
        sharing: Other tensors that share the overwritten memory.
        contents: Values of arguments that choose elements, by name.
        choice: Number of the choice, if tokens were picked by their content and form a set of their own.
        kernel: What the values of a convolution's kernel say about places; None if they do not matter.
        points: Points at which it reads values, if each forward pass can measure them.
    """

    op: OpOverload | None
    given: dict[str, Any]
    outs: tuple[Node | None, ...] = ()
    written: tuple[tuple[Node, Node], ...] = ()
    sharing: tuple[Node, ...] = ()
    contents: dict[str, Any] = field(default_factory=dict)
    choice: int | None = None
    kernel: Kernel | None = None
    points: Points | None = None

    @property
    def random(self) -> bool:
        """True if it draws random numbers."""
        return self.op is not None and torch.Tag.nondeterministic_seeded in self.op.tags


class Signature(NamedTuple):
    """Facts of the schema of an operation.

    Attributes:
        names: Names of the arguments.
        written: Names of those that are overwritten.
        shared: For each result, the name of the argument that it is, or is a view of; None for new memory.
        composite: Whether it is only a way to call other operations.
        counts: Whether the shape of its results depends on what its arguments hold, as that of `nonzero`.
    """

    names: tuple[str, ...]
    written: tuple[str, ...]
    shared: tuple[str | None, ...]
    composite: bool
    counts: bool


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_signatures: dict[OpOverload, Signature] = {}


def signature_of(op: OpOverload) -> Signature:
    """Return what the schema of an operation says about its arguments, such as which are overwritten, and its results."""
    signature = _signatures.get(op)
    if signature is None:
        arguments = op._schema.arguments
        aliases = {
            argument.name: set(argument.alias_info.before_set) for argument in arguments if argument.alias_info is not None
        }
        results = op._schema.returns
        shared = tuple(_shared_argument(aliases, result.alias_info, str(result.type)) for result in results)
        name, overload = op._schema.name, op._schema.overload_name
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(f"{name}.{overload}" if overload else name, _COMPOSITE)
        signature = _signatures[op] = Signature(
            tuple(argument.name for argument in arguments),
            tuple(argument.name for argument in arguments if argument.alias_info is not None and argument.alias_info.is_write),
            shared,
            composite,
            torch.Tag.dynamic_output_shape in op.tags,
        )
    return signature


def _shared_argument(aliases: Mapping[str, set[str]], result_alias: Any, result_type: str) -> str | None:  # noqa: ANN401
    """Return the name of the argument that a result shares memory with, as a view does; None for new memory.

    `aliases` are the alias sets of the arguments, as schemas name them. For a list of views a schema names the elements of the
    argument, not the argument, so the first argument with aliases is meant.
    """
    if result_alias is None:
        return next(iter(aliases), None) if result_type == "List[Tensor]" else None
    result_set = set(result_alias.before_set)
    return next((name for name, alias_set in aliases.items() if alias_set & result_set), next(iter(aliases), None))


# composite operations that compute something else while a dispatch mode is open, by name: they run outside of it
APART = {"max_pool1d": torch.ops.aten.max_pool1d.default, "linalg_matrix_rank": None}
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

    def read_length(self, tensor: Tensor) -> None:
        """Note that the model reads the shape of a tensor, if it depends on what tensors hold."""
        if self.nodes.dynamic and self.nodes.facts[node := self.nodes.of(tensor)].dynamic:
            self.steps.append(Step(None, {"length": node}))

    def taken(self) -> list[Step]:
        """Return the steps noted so far, and forget them."""
        steps, self.steps = self.steps, []
        return steps

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # noqa: ANN401
        """Run one operation inside a function call of the model, and note it; a composite one is split into its parts."""
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or not all(map(is_plain, tensors((args, list(kwargs.values()))))):
            return func(*args, **kwargs)
        signature = signature_of(func)
        runs_outside = func._schema.name.removeprefix("aten::") in APART
        if signature.composite and not runs_outside:  # under inference_mode; otherwise autograd has called the others already
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        return self.noted(func, partial(func, *args, **kwargs), args, kwargs)

    def noted(self, func: OpOverload, run: Callable[[], Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Run a call that is one operation, and note its arguments, its results and what it overwrites as a step."""
        signature = signature_of(func)
        arguments = dict(zip(signature.names, args, strict=False)) | dict(kwargs)
        given = {name: self._as_nodes(value) for name, value in arguments.items()}
        # copied before the operation runs, which may overwrite them
        contents = {name: _copied(arguments[name]) for name in self._wanted(func) if arguments.get(name) is not None}
        kernel = _kernel(func, arguments)
        out = run()
        step = self._step(func, signature, arguments, given, contents, out)
        step.kernel = kernel
        self.steps.append(step)
        return out

    def _step(
        self,
        func: OpOverload,
        signature: Signature,
        arguments: Mapping[str, Any],
        given: dict[str, Any],
        contents: dict[str, Any],
        out: Any,  # noqa: ANN401
    ) -> Step:
        """Return the step of an operation that has run, with numbers (nodes) for the tensors that it returned and overwrote.

        Args:
            func: The operation.
            signature: What its schema says.
            arguments: Its arguments by name.
            given: The same, with tensors replaced by their numbers.
            contents: Copies of arguments whose values choose elements, such as indices.
            out: Its result.
        """
        targets = [tensor for name in signature.written for tensor in tensors(arguments.get(name))]
        before = [self.nodes.of(tensor) for tensor in targets]
        self._note_unseen_writes()
        sharing = self.nodes.sharing(before, targets) if targets else ()
        written = tuple((node, self.nodes.written(tensor, node)) for node, tensor in zip(before, targets, strict=True))
        if self.nodes.dynamic and isinstance(out, list):  # as many results as elements along an axis
            self.steps += [
                Step(None, {"length": node}) for node in tensors_in_nodes([*given.values()]) if self.nodes.facts[node].dynamic
            ]
        outs: list[Node | None] = []
        results = out if isinstance(out, (tuple, list)) else (out,)
        for result, shared_name in zip(results, _shared_by_results(signature.shared, out), strict=True):
            if isinstance(result, Tensor):
                shared_node = next(tensors_in_nodes(given.get(shared_name or "")), None)
                outs.append(self.nodes.made(result, shared_node))
            elif isinstance(result, (tuple, list)):
                outs += [self.nodes.made(tensor, None) for tensor in result if isinstance(tensor, Tensor)]
            else:
                outs.append(None)
        for node in outs if signature.counts or self.nodes.dynamic else ():
            if node is not None and depends_on_values(func, given, self.nodes, self.nodes.facts[node].shape):
                self.nodes.depends(node)
        return Step(func, given, tuple(outs), written, sharing, contents)

    def _as_nodes(self, value: Any) -> Any:  # noqa: ANN401
        """Return an argument with each tensor replaced by its number (node), and note writes to it that were not intercepted."""
        if isinstance(value, Tensor):
            node = self.nodes.of(value)
            self._note_unseen_writes()
            return node
        return [self._as_nodes(item) for item in value] if isinstance(value, (tuple, list)) else value

    def _note_unseen_writes(self) -> None:
        """Note as steps that memory was written by code that is not intercepted, such as NumPy."""
        while self.nodes.unseen:
            self.steps.append(Step(None, {"memory": self.nodes.unseen.pop()}))


_SAME_SHAPE = (  # operations whose result has the shape of their first argument, whatever the others hold
    "index_put",
    "_index_put",
    "_unsafe_index_put",
    "scatter",
    "masked_scatter",
    "index_copy",
    "index_fill",
    "index_add",
)


def depends_on_values(op: OpOverload, given: Mapping[str, Any], nodes: Nodes, shape: torch.Size) -> bool:
    """Check whether the shape of a result depends on what tensors hold: elements were counted, or it comes from such a shape.

    For example, as many tokens as a mask picks, and what is computed from these.
    """
    if signature_of(op).counts:
        name = op._schema.name.removeprefix("aten::")
        is_mask = (not nodes.facts[node].number for node in tensors_in_nodes(given.get("indices")))
        return name not in ("index", "_unsafe_index") or any(is_mask)
    if not nodes.dynamic or op._schema.name.removeprefix("aten::").startswith(_SAME_SHAPE):
        return False
    arguments = [nodes.facts[node] for node in tensors_in_nodes([*given.values()])]
    # a static operand that is not broadcast fixes the shape
    is_fixed = torch.Tag.pointwise in op.tags and any(not facts.dynamic and facts.shape == shape for facts in arguments)
    return any(facts.dynamic for facts in arguments) and not is_fixed


def _kernel(op: OpOverload, arguments: Mapping[str, Any]) -> Kernel | None:
    """Return what the values of a convolution's kernel say about places; None if they do not matter, or for other operations."""
    if not op._schema.name.endswith("convolution"):
        return None
    kind = kind_of(arguments["weight"].shape[2:], arguments)
    return None if kind is None else kernel_of(arguments["weight"], kind)


def is_plain(tensor: Tensor) -> bool:
    """Check whether PyTorch itself runs the operations on a tensor, in memory; nested tensors and others of their own are left alone."""
    return type(tensor).__torch_dispatch__ is _OWN and tensor.layout is torch.strided and not tensor.is_nested


_OWN = Tensor.__torch_dispatch__


def _shared_by_results(shared: tuple[str | None, ...], out: Any) -> tuple[str | None, ...]:  # noqa: ANN401
    """Return, for each result in `out`, the name of the argument that it shares memory with; None for new memory.

    `shared` has one entry for each result in the schema, where a list of results, such as that of `split`, is a single one.
    """
    if isinstance(out, (tuple, list)):
        return shared if len(shared) == len(out) else (*shared, *(shared[:1] or (None,)) * len(out))[-len(out) :] if out else ()
    return shared[:1] or (None,)


def _copied(value: Any) -> Any:  # noqa: ANN401
    """Return a value with a copy of each tensor in it, in nested lists as well."""
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
