"""Tape of a forward pass: every operation with its arguments and results, but no image values.

Token locations depend on the tape alone: on the operations, the data flow between them, non-tensor arguments, shapes, the content
of index tensors, and how far from their tokens values are read. Two forward passes with the same tape therefore have the same token
locations. It does not matter what made the model choose these operations: its settings, its arguments, its data, a global variable
or a clock.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from visattn.core.capturing.placing.kernels import Kernel, Kind
from visattn.core.capturing.placing.nodes import Facts, Node, shape_of
from visattn.core.capturing.placing.steps import Step
from visattn.core.capturing.placing.weak import Home
from visattn.core.capturing.tokens.points import Points
from visattn.core.capturing.trace.keywords import DROPPED
from visattn.core.capturing.trace.operations import Operation
from visattn.core.capturing.trace.product_axes import Axes

_MOST_TAPES = 8  # that are kept for each model

# types compared with `==`; values of other types, except NumPy arrays, never count as equal
PLAIN = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        torch.dtype,
        torch.device,
        torch.Size,
        torch.layout,
        torch.memory_format,
        type(...),
    }
)
_is_nested = attrgetter("is_nested")
_ITEMS_OF_SIMPLE_LISTS = frozenset({int, bool, type(None), type(...)})


class Ref:
    """Reference to a tensor on the tape, by slot number. A tensor that is overwritten continues in a new slot."""

    __slots__ = ("slot",)

    def __init__(self, slot: int) -> None:
        """Set the slot number."""
        self.slot = slot


class Strange:
    """Placeholder for an argument that cannot be compared."""


STRANGE = Strange()


class Made(NamedTuple):
    """Result of an operation: its slot, its shape, and whether its dtype is floating point."""

    slot: int
    shape: torch.Size
    floating: bool


class Outside(NamedTuple):
    """Tensor that no operation of the tape produced.

    Attributes:
        kind: `pixels`; `input`: another argument of the model; `parameter`; `buffer`; `attribute`: attribute of a module that is
            not a registered buffer; `unknown`: produced by code that is not intercepted.
        name: Last part of its name in the model, or name of the argument.
        shape: Shape of the tensor.
        floating: Whether its dtype is floating point.
        home: Where the model keeps it; None if that is unknown.
    """

    kind: str
    name: str
    shape: torch.Size
    floating: bool
    home: Home | None = None


class Stored(NamedTuple):
    """Tensor of the model: kind and name, as in `Outside`, and its home, if it is a direct member of a module."""

    kind: str
    name: str
    home: Home | None = None


class Operand(NamedTuple):
    """Operand of an attention call.

    Attributes:
        slot: The slot.
        groups: How often each head is repeated (grouped-query attention).
        axes: Axes of the product of weights and values; None for a fused call.
        weighs: Whether the operand is the weights of that product.
    """

    slot: int
    groups: int = 1
    axes: Axes | None = None
    weighs: bool = False

    def view(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the shape of the slot with the axes of the call, `(*lead, tokens, d)` or `(*lead, q, k)`."""
        if self.axes is not None:
            return self.axes.weights(tensor) if self.weighs else self.axes.values(tensor)
        return tensor if self.groups == 1 else tensor.repeat_interleave(self.groups, -3)


@dataclass(frozen=True, eq=False)
class Attention:
    """Attention call on the tape.

    Attributes:
        layer: Dotted name of the module that made the call.
        call: Index of the call among those of this module in the forward pass.
        owner: Index of this module in the model.
        operands: Query, key and value of a fused call; otherwise the weights and values of a product.
        fused: Whether it is a fused call (`scaled_dot_product_attention`, `flex_attention`).
        lead: Sizes of the axes before the token axis.
        rows: Number of queries in a group.
        columns: Number of keys in a group.
        position: Index of the weights among the operands of the product; None for a fused call.
        answers_at_keys: See `ModelDescription`.
        softmaxes: Indices of the entries whose softmax produced the weights.
        scores: Index of the entry whose product of queries and keys the softmax normalizes; None if there is none, or several.
        doubtful: Whether it may be a gate. It is attention only if its values turn out to be different tokens.
        samples: Indices of the entries that sampled its values from maps (deformable attention).
    """

    layer: str
    call: int
    owner: int
    operands: tuple[Operand, ...]
    fused: bool
    lead: tuple[int, ...]
    rows: int
    columns: int
    position: int | None = None
    answers_at_keys: bool = False
    softmaxes: frozenset[int] = frozenset()
    scores: int | None = None
    doubtful: bool = False
    samples: tuple[int, ...] = ()


@dataclass(eq=False, slots=True)
class Entry:
    """One operation on the tape.

    Attributes:
        func: Function that was called.
        operation: Properties of the function.
        args: Arguments, with tensors replaced by `Ref`.
        kwargs: Keyword arguments, with tensors replaced by `Ref`.
        outs: One item per result; None for a result that is not a tensor.
        layer: Dotted name of the module that ran; empty for operations that need none.
        writes: Whether the operation overwrote a tensor.
        rewritten: Old and new slot of each tensor that shares memory with an overwritten one.
        contents: Values of index tensors and masks, by slot.
        kernels: Slots of the kernels of its convolutions, how they are used, and what their values say about places.
        marks: Marks of these kernels when they were last found to say so, to find out quickly whether they were written since.
        points: Slots of the points at which it reads values, which are measured in each forward pass.
        choice: Number of the choice, if tokens were picked by their content and form a set of their own. Another forward pass may
            then pick others, as long as entries with one number pick the same tokens.
        attention: Attention call, if the operation is one.
        shapes: Shapes of the results, if the operation only returns tensors (new ones or arguments), and overwrites at most the one
            that it returns; otherwise None.
        single: Whether it returns one tensor, and not a tuple or list of tensors.
        before: One item per result: its slot if the tensor existed before the call, otherwise None.
        scoring: Whether it multiplies the queries and keys of an attention call that the model writes out.
        kept: Whether its operands are kept for an attention call that sums its results.
        gate: Gate that it multiplies features by, if gates were looked for; see `capturing.gating`.
        within: Calls of modules that ran, if it bounds what may be a gate.
        steps: PyTorch's own operations that it consists of; empty for an attention call.
        refs: Tensors among the arguments.
        quick: Arguments and keyword arguments for fast comparison: `(slot, None)` for a tensor, `(-2, value)` for a list or tuple,
            `(-1, value)` for any other. None if an argument is not simple.
    """

    func: Callable[..., Any]
    operation: Operation
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[Made | None, ...]
    layer: str
    writes: bool = False
    rewritten: tuple[tuple[int, int], ...] = ()
    contents: Mapping[int, Tensor] = field(default_factory=dict)
    kernels: tuple[tuple[int, Kind, Kernel], ...] = ()
    marks: tuple[Tensor, ...] = ()
    points: tuple[tuple[int, Points], ...] = ()
    choice: int | None = None
    attention: Attention | None = None
    shapes: tuple[torch.Size, ...] | None = None
    single: bool = True
    before: tuple[int | None, ...] = ()
    scoring: bool = False
    kept: bool = False
    gate: object = None
    within: Any = ()
    steps: tuple[Step, ...] = ()
    refs: tuple[Ref, ...] = field(init=False)
    quick: tuple[tuple[int, Any], ...] | None = field(init=False)

    def __post_init__(self) -> None:
        """Set `refs`, the tensors among the arguments, and `quick`, all arguments in a form that is fast to compare."""
        refs: list[Ref] = []
        quick: list[tuple[int, Any]] = []
        arguments = (*self.args, *self.kwargs.values())
        for value in arguments:
            kind = type(value)
            if kind is Ref:
                refs.append(value)
                quick.append((value.slot, None))
            elif kind in PLAIN or (kind is slice and _is_simple_item(value)):
                quick.append((-1, value))
            elif (kind is tuple or kind is list) and all(map(_is_simple_item, value)):
                quick.append((-2, value))
            else:
                refs += _refs_in(value)
        self.refs = tuple(refs)
        is_simple = len(quick) == len(arguments) and self.func not in DROPPED
        self.quick = tuple(quick) if is_simple else None

    @property
    def may_be_repeated(self) -> bool:
        """True if a call that ran without notes may run again for them: it writes to no tensor and draws no random numbers."""
        steps_are_pure = not any(step.op is None or step.written or step.random for step in self.steps)
        return steps_are_pure and self.operation.own and not (self.writes or self.operation.reforms or self.contents)

    def descends_from(self, slots: Set[int]) -> bool:
        """Check whether one of these tensors, given by slot (number on the tape), is among the arguments."""
        return any(ref.slot in slots for ref in self.refs)

    def simple_shapes(self, out: Any, overwritten: Sequence[Tensor]) -> tuple[torch.Size, ...] | None:  # noqa: ANN401
        """Return the shapes of the tensors that a call returned; None if it does more than `shapes` allows, or cannot be compared fast.

        `out` is what it returned, and `overwritten` what it has overwritten.
        """
        results = (out,) if type(out) is Tensor else out
        if (type(results) is not tuple and type(results) is not list) or not {*map(type, results)} <= {Tensor}:
            return None
        if any(map(_is_nested, results)):
            return None
        is_own = self.operation.own and getattr(self.func, "__name__", "") != "__get__"  # an attribute may come from elsewhere
        is_kept = all(slot is None or any(ref.slot == slot for ref in self.refs) for slot in self.before)
        writes_only_result = not overwritten or (len(overwritten) == 1 and overwritten[0] is out)
        is_simple = is_own and is_kept and writes_only_result and self.quick is not None and not self.contents
        return tuple(map(shape_of, results)) if is_simple else None


def _is_simple_item(item: object) -> bool:
    """Check whether an argument is a number, or a slice of whole numbers."""
    if type(item) is slice:
        return {*map(type, (item.start, item.stop, item.step))} <= {int, type(None)}
    return type(item) in _ITEMS_OF_SIMPLE_LISTS


def _refs_in(value: Any) -> Iterator[Ref]:  # noqa: ANN401
    """Yield the references to tensors in an argument, also in lists, dictionaries and slices."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _refs_in(item)
    elif isinstance(value, dict):
        yield from _refs_in(list(value.values()))
    elif isinstance(value, slice):
        yield from _refs_in((value.start, value.stop, value.step))


@dataclass(eq=False)
class Tape:
    """Operations of one forward pass.

    Attributes:
        entries: Operations in order.
        outside: Tensors that no operation produced, by slot, in order of first use.
        descends: Slots of tensors that depend, or may depend, on the image.
        weights: Slots that hold the result of a softmax, possibly after further steps, with the indices of the softmax entries.
        logarithms: Slots that hold the result of a log-softmax, in the same form.
        output: Slots of the model's output tensors; -1 for a tensor of unknown origin, -2 for a parameter that no operation used.
        device: Device of the image.
        facts: Form of each tensor of its steps, by node.
        origins: Kind and name of the nodes that no step made; see `Outside`.
        nodes: Node of each slot.
        packed: Grid `(frames, rows, columns)` of each image, if the patches of all images come in one sequence; otherwise empty.
        positions: Contents of the integer tensors with two or three entries for each packed patch: its place in its image.
        conclusions: Conclusions from the tape, once they were computed.
        projections: Output projections on the tape, once they were looked for.
        vectors: Queries and keys of attention calls that the model writes out, once they were looked for.
        plan: Which summands its output is linear in, once that was looked for.
        dynamic: Whether the shape of some tensor depends on what tensors hold.
        whole: Whether the tape holds all that determines token locations, so that later forward passes can be compared with it.
        gated: Whether gates were looked for.
        normalizes: Whether batch or instance norms ran.
    """

    entries: list[Entry] = field(default_factory=list)
    outside: dict[int, Outside] = field(default_factory=dict)
    descends: set[int] = field(default_factory=set)
    weights: dict[int, frozenset[int]] = field(default_factory=dict)
    logarithms: dict[int, frozenset[int]] = field(default_factory=dict)
    output: tuple[int, ...] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    facts: list[Facts] = field(default_factory=list)
    origins: dict[int, tuple[str, str]] = field(default_factory=dict)
    nodes: dict[int, Node] = field(default_factory=dict)
    packed: tuple[tuple[int, ...], ...] = ()
    positions: list[Tensor] = field(default_factory=list)
    conclusions: object = None
    projections: object = None
    vectors: dict[Attention, object] = field(default_factory=dict)
    plan: object = None
    dynamic: bool = False
    whole: bool = True
    gated: bool = False
    normalizes: bool = False

    def beginning(self, length: int, slots: int) -> Tape:
        """Return a new tape with the first `length` entries of this one, whose tensors have the slots (numbers) below `slots`."""
        return Tape(
            self.entries[:length],
            outside={slot: outside for slot, outside in self.outside.items() if slot < slots},
            descends={slot for slot in self.descends if slot < slots},
            weights={slot: softmaxes for slot, softmaxes in self.weights.items() if slot < slots},
            logarithms={slot: softmaxes for slot, softmaxes in self.logarithms.items() if slot < slots},
            device=self.device,
            facts=list(self.facts),
            origins=dict(self.origins),
            nodes={slot: node for slot, node in self.nodes.items() if slot < slots},
            packed=self.packed,
            positions=list(self.positions),
            normalizes=self.normalizes,
        )


def plain(value: Any) -> Any:  # noqa: ANN401
    """Return an argument that is no tensor, such as a number, in a form that can be compared later; else `STRANGE`."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if isinstance(value, (np.generic, np.ndarray)):
        return np.array(value)
    return STRANGE


def alike(given: Any, known: Any) -> bool:  # noqa: ANN401
    """Check whether an argument that is no tensor equals the one on the tape; arguments of unknown types never do."""
    kind = type(known)
    if kind in PLAIN:
        return type(given) is kind and given == known
    if kind is np.ndarray and isinstance(given, (np.generic, np.ndarray)):
        return bool(given.dtype == known.dtype and np.array_equal(given, known))
    return False


def same_beginning(tape: Tape, begun: Tape) -> bool:
    """Check whether a model received the same kinds of inputs in an earlier forward pass (`tape`) as in one that begins (`begun`).

    Names, shapes, kinds of numbers and device must be the same; values do not matter.
    """
    earlier = [outside[:4] for outside in tape.outside.values() if outside.kind in ("pixels", "input")]  # without their homes
    has_same_device_and_packing = (tape.device, tape.packed) == (begun.device, begun.packed)
    return has_same_device_and_packing and earlier == [outside[:4] for outside in begun.outside.values()]


class Tapes:
    """Latest tapes (lists of the calls of a forward pass) of each model."""

    def __init__(self) -> None:
        """Start without tapes."""
        self._by_model: weakref.WeakKeyDictionary[nn.Module, list[Tape]] = weakref.WeakKeyDictionary()

    def of(self, model: nn.Module) -> list[Tape]:
        """Return the tapes of a model, the latest first."""
        return list(self._by_model.get(model, ()))

    def keep(self, model: nn.Module, tape: Tape) -> None:
        """Store a tape as the latest of its model."""
        others = [other for other in self._by_model.get(model, ()) if other is not tape]
        self._by_model[model] = [tape, *others][:_MOST_TAPES]

    def clear(self) -> None:
        """Discard all tapes."""
        self._by_model.clear()


TAPES = Tapes()


def forget() -> None:
    """Discard the tapes of all models, so that their tokens are traced again."""
    TAPES.clear()
