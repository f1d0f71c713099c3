"""Finder of gates: it decides for each product of a new tape, and reads the gates in each forward pass that has such a tape."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from visattn.core.capturing.forward import Forward
from visattn.core.capturing.gating.factors import Sources, operands
from visattn.core.capturing.gating.owners import Running, owner, running_modules
from visattn.core.capturing.gating.products import Multiplied, gate_record, multiplied
from visattn.core.capturing.intercept.written_out import tensors_of
from visattn.core.capturing.tokens.equations import Equation
from visattn.core.capturing.trace.operations import SQUASH
from visattn.core.capturing.trace.tape import Entry, Tape
from visattn.core.capturing.trace.tracer import Tracer
from visattn.core.records import FeatureRecord

# takes the forward pass that has ended, and the slot of the product
Record = Callable[[Forward, int | None], list[FeatureRecord]]
Keep = Callable[[Tensor, Tensor, Record], Tensor]  # takes a gate, the product and the record; returns the copy of the gate


class Gating(NamedTuple):
    """Gate that an entry of a tape multiplies features by.

    Attributes:
        product: Which of its factors it is.
        owner: Index of the module that computed it.
        within: Indices of all modules that ran when it was bounded.
        before: Entry with another gate of this module whose result the features are, but not the gate; None if there is none.
    """

    product: Multiplied
    owner: int
    within: frozenset[int]
    before: Entry | None


class _Gate:
    """Gate in the running forward pass: its values, the product of several if they multiply the same features one after another."""

    def __init__(self, shape: torch.Size) -> None:
        self.shape, self.value = shape, torch.empty(0)


class GateFinder:
    """Finder of the gates of one capture."""

    def __init__(self, modules: Mapping[nn.Module, str], told: Mapping[nn.Module, Sequence[Tensor]], keep: Keep) -> None:
        """Start without gates.

        Args:
            modules: Modules of the model, with their names.
            told: Gates that modules tell themselves; more may be added while the capture runs.
            keep: Function that receives each gate when features are multiplied by it.
        """
        self._modules, self._names = list(modules), list(modules.values())
        self._told, self._keep = told, keep
        self._sources: Sources | None = None
        self._gates: dict[Entry, _Gate] = {}

    def note(self, tracer: Tracer, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:  # noqa: ANN401
        """Note on a tape that is recorded whether its last entry bounds a tensor or multiplies features by a gate, and read that gate."""
        if entry.operation.own and entry.operation.name in SQUASH:
            entry.within = running_modules(self._modules, tracer)
        elif operands(entry):
            entry.gate = self._gating(tracer, entry, args, kwargs)
            self.read(entry, args, kwargs, out)

    def read(self, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:  # noqa: ANN401
        """Keep the gate of an entry that has just run, if it has one."""
        gating = entry.gate
        if not isinstance(gating, Gating) or not isinstance(out, Tensor):
            return
        with torch._C.DisableTorchFunction(), torch.no_grad():
            value = gating.product.gate(tensors_of(args, kwargs))
            earlier = None if gating.before is None else self._gates.get(gating.before)
            if earlier is not None:
                earlier.value = earlier.value * value
                self._gates[entry] = earlier
                return
            gate = self._gates[entry] = _Gate(out.shape)
            gate.value = self._keep(value, out, lambda forward, slot: self._record(gating, gate, forward, slot))

    def clear(self) -> None:
        """Release the gates of a forward pass that has ended."""
        self._gates, self._sources = {}, None

    def _gating(self, tracer: Tracer, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Gating | None:
        sources, tape = self._sources_of(tracer.tape), tracer.tape
        equation = Equation.of(args) if entry.operation.name == "einsum" else None
        product = multiplied(sources, entry, equation, tensors_of(args, kwargs))
        if product is None:
            return None
        squashing: list[Sequence[Running]] = [tape.entries[number].within for number in product.squashes]
        gate, features = (operands(entry)[side].slot for side in (product.side, 1 - product.side))
        before = self._before(sources, features, sources.behind(gate))
        first = features if before is None else _features_of(before)  # that gates of rows and columns multiply one after another
        views = sources.views(first)
        module = owner(
            squashing, running_modules(self._modules, tracer), lambda slot: bool(views & sources.views(slot)), self._modules
        )
        if module is None:
            return None
        gating = None if before is None else before.gate
        continues = isinstance(gating, Gating) and (gating.owner, gating.product.of) == (module, product.of)
        within = frozenset(call.module for calls in squashing for call in calls)
        return Gating(product, module, within, before if continues else None)

    def _before(self, sources: Sources, features: int, behind: Collection[int]) -> Entry | None:
        """Return the entry that multiplied features by another gate just before, if the present gate is not computed from the result."""
        number = None if features in behind else sources.number(features)
        entry = None if number is None else sources.tape.entries[number]
        return entry if entry is not None and isinstance(entry.gate, Gating) else None

    def _sources_of(self, tape: Tape) -> Sources:
        if self._sources is None or self._sources.tape is not tape:
            self._sources = Sources(tape)
        return self._sources

    def _record(self, gating: Gating, gate: _Gate, forward: Forward, slot: int | None) -> list[FeatureRecord]:
        """Return the record of a gate; none if a module around it has told it, or if the gate is not one for each image."""
        around = [self._modules[index] for index in gating.within]
        told = [value for module in around for value in self._told.get(module, ())]
        if self._is_of_library(gating.owner) or any(_are_equal(value, gate.value) for value in told):
            return []
        if len(gate.value) != forward.inputs.batch:
            return []
        return [gate_record(self._names[gating.owner], forward.number, gate.value, gate.shape, forward.tokens(slot))]

    def _is_of_library(self, owner: int) -> bool:
        """Check whether a module of a library, which has its own entry or publishes, has told its gates."""
        module = self._modules[owner]
        return module in self._told and type(module).__module__.partition(".")[0] in ("visattn", "timm", "torchvision")


def _features_of(entry: Entry) -> int:
    """Return the slot of the features that an entry multiplies by a gate; of several such entries in a row, those of the first."""
    gating = entry.gate
    assert isinstance(gating, Gating)  # noqa: S101
    return operands(entry)[1 - gating.product.side].slot if gating.before is None else _features_of(gating.before)


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Check whether gates have the same values, in whatever shape."""
    with torch.no_grad():
        return one.numel() == other.numel() and torch.equal(one.flatten(), other.flatten().to(one.dtype))
