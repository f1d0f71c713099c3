"""The tape of a forward: every operation, what it was given and what it made, without a single number of the image.

Where tokens lie is a function of the tape alone: of the operations, of which result went into which, of arguments that are no
tensors, of shapes, and of the content of tensors by which others are indexed. So two forwards with one tape have their tokens at the
same places, whatever made the model do what it did: its settings, its arguments, its data, a global, a clock.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from visattn.capturing.trace.operations import Operation

_KEPT = 8  # tapes of a model

# values that are compared; any other is taken for a new one each time
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
_COUNTED = frozenset({int, bool, type(None)})


class Ref:
    """A tensor on the tape: the number of its slot. A tensor that is written over goes on in another slot."""

    __slots__ = ("slot",)

    def __init__(self, slot: int) -> None:
        """Name a slot."""
        self.slot = slot


class Strange:
    """An argument that cannot be compared."""


STRANGE = Strange()


class Made(NamedTuple):
    """A result: its slot, its shape, and whether it holds fractions."""

    slot: int
    shape: torch.Size
    floating: bool


class Outside(NamedTuple):
    """A tensor that no operation of the tape made.

    Attributes:
        kind: `pixels`; `input`: another argument of the model; `parameter`, `buffer`; `attribute`: of a module, and no buffer;
            `unknown`: it came from code that is not watched.
        name: Its last name, or that of the argument.
        shape: Its shape.
        floating: Whether it holds fractions.
        known: The tensor itself, while it lives.
    """

    kind: str
    name: str
    shape: torch.Size
    floating: bool
    known: weakref.ref[Tensor]


class Operand(NamedTuple):
    """How an operand of an attention comes from a slot: by a permutation of its axes, or by heads that are repeated."""

    slot: int
    axes: tuple[int, ...] | None = None
    groups: int = 1


@dataclass(frozen=True, eq=False)
class Attention:
    """An attention call on the tape.

    Attributes:
        layer: Dotted name of the module that made it.
        call: Which call of that module in this forward.
        owner: Number of that module.
        operands: The weights and the values of a product; query, key and value of a fused call.
        fused: Whether it is a fused call.
        lead: The axes before tokens.
        rows: Number of queries in a group.
        columns: Number of keys in a group.
        position: Which tensor of the product are the weights.
        answers_at_keys: See `Anatomy`.
        softmaxes: Entries whose softmax made the weights.
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


@dataclass(eq=False, slots=True)
class Entry:
    """One operation.

    Attributes:
        func: The function.
        operation: What is known of it.
        args: Its arguments, tensors as `Ref`.
        kwargs: Likewise.
        outs: Its results that are tensors; None for one that is not.
        layer: The module that ran.
        writes: Whether it wrote over a tensor.
        rewritten: Slots that shared memory with what was written over, before and after.
        contents: What was in tensors that choose by their content.
        attention: The attention call, if it is one.
        single: Shape of its one result, where it does nothing but make that.
        before: Slots that the results had before, where they are tensors that were there already.
        refs: The tensors that it was given.
        quick: Its arguments, then its keyword arguments, as slot and value, one of which says nothing; None if they are not simple.
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
    attention: Attention | None = None
    single: torch.Size | None = None
    before: tuple[int | None, ...] = ()
    refs: tuple[Ref, ...] = field(init=False)
    quick: tuple[tuple[int, Any], ...] | None = field(init=False)

    def __post_init__(self) -> None:
        """Collect the tensors that it was given."""
        refs: list[Ref] = []
        quick: list[tuple[int, Any]] = []
        given = (*self.args, *self.kwargs.values())
        for value in given:
            kind = type(value)
            if kind is Ref:
                refs.append(value)
                quick.append((value.slot, None))
            elif kind in PLAIN or ((kind is tuple or kind is list) and all(type(item) in _COUNTED for item in value)):
                quick.append((-1, value))
            else:
                refs += _refs(value)
        self.refs = tuple(refs)
        self.quick = tuple(quick) if len(quick) == len(given) else None


def _refs(value: Any) -> Iterator[Ref]:  # noqa: ANN401
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _refs(item)
    elif isinstance(value, dict):
        yield from _refs(list(value.values()))
    elif isinstance(value, slice):
        yield from _refs((value.start, value.stop, value.step))


@dataclass(eq=False)
class Tape:
    """What one forward did.

    Attributes:
        entries: The operations in order.
        outside: Tensors from outside by slot, in the order in which they were met.
        descends: Slots that have anything from the image, or may have.
        weights: Slots that a softmax made, or what was done to its result, and the entries of those softmaxes.
        logarithms: Likewise of logarithms of a softmax.
        output: Slots of what the model gave.
        device: Where the image lies.
        conclusions: What follows from the tape, once somebody asked.
        whole: Whether every operation is on it.
    """

    entries: list[Entry] = field(default_factory=list)
    outside: dict[int, Outside] = field(default_factory=dict)
    descends: set[int] = field(default_factory=set)
    weights: dict[int, frozenset[int]] = field(default_factory=dict)
    logarithms: dict[int, frozenset[int]] = field(default_factory=dict)
    output: tuple[int, ...] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    conclusions: object = None
    whole: bool = True

    def beginning(self, length: int, slots: int) -> Tape:
        """The first entries, before `slots` was made."""
        return Tape(
            self.entries[:length],
            {slot: known for slot, known in self.outside.items() if slot < slots},
            {slot for slot in self.descends if slot < slots},
            {slot: made for slot, made in self.weights.items() if slot < slots},
            {slot: made for slot, made in self.logarithms.items() if slot < slots},
            device=self.device,
        )


def plain(value: Any) -> Any:  # noqa: ANN401
    """An argument that is no tensor as it is kept: one that can be compared, or `STRANGE`."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if isinstance(value, (np.generic, np.ndarray)):
        return np.array(value)
    return STRANGE


def alike(given: Any, known: Any) -> bool:  # noqa: ANN401
    """Whether an argument is the one that was kept."""
    kind = type(known)
    if kind in PLAIN:
        return type(given) is kind and given == known
    if kind is np.ndarray and isinstance(given, (np.generic, np.ndarray)):
        return bool(given.dtype == known.dtype and np.array_equal(given, known))
    return False


def same_beginning(tape: Tape, begun: Tape) -> bool:
    """Whether forwards were given tensors of the same shapes."""
    given = [known[:4] for known in tape.outside.values() if known.kind in ("pixels", "input")]
    return tape.device == begun.device and given == [known[:4] for known in begun.outside.values()]


class Tapes:
    """The last tapes of each model."""

    def __init__(self) -> None:
        """Start with none."""
        self._of: weakref.WeakKeyDictionary[nn.Module, list[Tape]] = weakref.WeakKeyDictionary()

    def of(self, model: nn.Module) -> list[Tape]:
        """The tapes of a model, the last first."""
        return list(self._of.get(model, ()))

    def keep(self, model: nn.Module, tape: Tape) -> None:
        """Keep a tape, or note that it was met again."""
        others = [known for known in self._of.get(model, ()) if known is not tape]
        self._of[model] = [tape, *others][:_KEPT]

    def clear(self) -> None:
        """Forget all."""
        self._of.clear()


TAPES = Tapes()


def forget() -> None:
    """Follow the tokens of every model anew."""
    TAPES.clear()
