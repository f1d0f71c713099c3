"""Recording of the tape of a forward pass, or its comparison with a known tape, operation by operation.

While the forward pass agrees with a known tape, nothing is recorded and no tokens are traced. At the first difference, the common
beginning is copied and the rest is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator

from visattn.core.capturing.placing.nodes import shape_of
from visattn.core.capturing.trace.call_tensors import (
    SWITCH,
    Untraceable,
    changes,
    is_transformed,
    lead_of,
    memory_of,
    positions_among,
    results_of,
    tensors_in,
    transformed,
)
from visattn.core.capturing.trace.comparing import Comparison
from visattn.core.capturing.trace.deciding import note_values
from visattn.core.capturing.trace.exposed import is_foreign, is_shared
from visattn.core.capturing.trace.living import Living
from visattn.core.capturing.trace.members import Members
from visattn.core.capturing.trace.noting import Noting, plainly
from visattn.core.capturing.trace.operations import PRODUCT, SOFTMAX, operation_of, words
from visattn.core.capturing.trace.tape import (
    PLAIN,
    STRANGE,
    Attention,
    Entry,
    Made,
    Outside,
    Ref,
    Tape,
    plain,
    same_beginning,
)

_NAMED = (
    PRODUCT
    | SOFTMAX
    | words(
        "einsum tensordot linear sum mean cumsum grid_sample multi_dot chain_matmul vecdot dot conv1d conv2d bilinear addmv cov"
    )
)  # operations that can be part of attention
_RUNNING_HOOKS = frozenset({"grad", "backward"})  # run hooks and other code of the model that no function mode receives
_GIVEN = "pixels", "input"


class Tracer:
    """Tensors and tape (list of calls) of a running forward pass.

    Each tensor has a slot, its number on the tape; a tensor that is overwritten gets a new slot.

    Attributes:
        tape: Tape that is being recorded, or the known tape that the forward pass agrees with so far.
        known: Whether the forward pass agrees with a known tape so far.
        comparison: Comparison with the known tape.
        kept: Tensors made since the last attention call, by slot, if they are to be kept.
        used: Weak references to the tensors that no operation made, by slot, once the forward pass has ended.
    """

    def __init__(
        self,
        pixels: Tensor | None,
        inputs: Sequence[tuple[str, Tensor]],
        names: Mapping[nn.Module, str],
        layer: Callable[[], str],
        candidates: Iterable[Tape] = (),
        packed: tuple[tuple[int, ...], ...] = (),
        *,
        keep: bool = False,
    ) -> None:
        """Begin a forward pass.

        Args:
            pixels: Image batch, or None.
            inputs: Names and values of the tensors that the model received; the pixels may be among them.
            names: Modules of the model, with their names.
            layer: Function that returns the name of the running module.
            candidates: Tapes of earlier forward passes.
            packed: Grids of the images, if their patches come in one sequence.
            keep: Whether to keep the tensors behind the last attention call.
        """
        self._layer, self._keep = layer, keep
        self._noting = Noting(self._origin)
        self._living = Living(self._noting.overwritten)
        self._members = Members(names, self._living.exposed)
        self._has_told = False  # whether numbers from the image have reached code that is not intercepted, such as NumPy
        self.kept: dict[int, Tensor] = {}
        self.used: dict[int, Callable[[], Tensor | None]] = {}
        self.tape = new_tape = Tape(packed=packed)
        self._patches = lead_of(pixels.shape) if packed and pixels is not None else ()
        received = [] if pixels is None else [("pixels", "", pixels)]
        received += [("input", name, tensor) for name, tensor in inputs if tensor is not pixels]
        for kind, name, tensor in received:
            slot = self._add(tensor, kind, name)
            if kind == "pixels":
                new_tape.descends.add(slot)
                new_tape.device = tensor.device
        self._candidates = [tape for tape in candidates if same_beginning(tape, new_tape)]
        self.known = bool(self._candidates)
        if self.known:
            self.tape = self._candidates.pop(0)
        else:
            self._noting.share(new_tape)
        self.comparison = Comparison(self.tape, self._living, self._members, self.kept if keep else None)

    @property
    def at(self) -> int:
        """Number of entries so far in this forward pass."""
        return self.comparison.at if self.known else len(self.tape.entries)

    # --- tensors

    def slot_of(self, tensor: Tensor) -> int | None:
        """Return the slot of a tensor (its number on the tape); None if it is new, or was overwritten without interception."""
        return self._living.current(tensor, self.tape.outside)

    def tensor(self, slot: int) -> Tensor | None:
        """Return the tensor in a slot; None if it does not exist any longer."""
        return self._living.refs[slot]()

    def place_of(self, tensor: Tensor) -> int:
        """Return the slot of a tensor (its number on the tape); a new tensor, such as a parameter, gets one from here on.

        Raises:
            Untraceable: If it belongs to a torch.func transform.
        """
        slot = self.slot_of(tensor)
        if slot is None:
            if is_transformed(tensor):
                raise Untraceable
            kind, name = self._origin(tensor) or ("unknown", "")
            slot = self._add(tensor, kind, name)
            if kind == "unknown" and tensor.ndim:
                self.tape.descends.add(slot)
        return slot

    def descends(self, tensor: object) -> bool:
        """Check whether a tensor depends, or may depend, on the image."""
        return isinstance(tensor, Tensor) and ((slot := self.slot_of(tensor)) is None or slot in self.tape.descends)

    def exchanged(self, tensor: Tensor) -> None:
        """Treat a tensor as one of unknown origin, because the model swaps its content with that of another tensor."""
        self._living.exchanged(tensor)
        self._noting.exchanged(tensor)
        self._members.exchange(tensor)

    def _origin(self, tensor: Tensor) -> tuple[str, str] | None:
        """Return kind and name of a tensor that the model holds, such as `("parameter", "cls_token")`; None for others."""
        stored = self._members.stored(tensor)
        return None if stored is None else stored[:2]

    def _add(self, tensor: Tensor, kind: str, name: str) -> int:
        """Give a slot to a tensor that no call on the tape has made, such as the image or a parameter; return the slot."""
        slot = self._living.enlist(tensor)
        home = None if kind in (*_GIVEN, "unknown") else self._members.home(tensor)
        self.tape.outside[slot] = Outside(kind, name, shape_of(tensor), tensor.is_floating_point(), home)
        self._noting.outside(self.tape, slot, tensor, kind, name)
        return slot

    def _watch_shared_memory(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Watch memory that other code, such as NumPy, shares, if this call may be the first that gives it numbers from the image.

        Until then, such code cannot write anything from the image into the model's tensors.
        """
        operation = operation_of(func)
        if operation.tells:
            self._has_told = any(tensor.dtype != torch.bool and self.descends(tensor) for tensor in tensors_in(args))
        elif operation.writes or "out" in kwargs:
            overwritten = tensors_in((args[:1], kwargs.get("out")))
            self._has_told = any(map(is_foreign, overwritten))
        if self._has_told:
            for tensor in (*self._living.tensors(), *self._members.tensors()):
                if is_shared(tensor):
                    self._living.exposed.add(tensor)

    # --- calls

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Run a call that is new, or may differ from that of an earlier forward pass, and note PyTorch's operations inside it."""
        if isinstance(func, HigherOrderOperator):
            return plainly(func, args, kwargs)
        if not self._has_told:
            self._watch_shared_memory(func, args, kwargs)
        if self.known and self._noting.asks(func):
            return plainly(func, args, kwargs)
        if self.known:
            self._noting.resume(self.tape, self.at, self._living)
        if self._living.exposed:
            for tensor in tensors_in((args, kwargs)):
                self.slot_of(tensor)  # notices what other code has written
        return self._noting.run(func, args, kwargs)

    def read_length(self, tensor: object) -> None:
        """Note that the model reads the shape of a tensor, if shapes depend on what tensors hold, as after `nonzero`."""
        has_dynamic_shapes = self.tape.dynamic if self.known else self._noting.dynamic
        if not has_dynamic_shapes or not isinstance(tensor, Tensor):
            return
        if self.known:
            self._noting.keep_length(self.tape, self.slot_of(tensor))
        else:
            self._noting.read_length(tensor)

    def expected(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Entry | None:
        """Return the next entry of the known tape if a call that is about to run matches it; otherwise None."""
        entry = self.comparison.upcoming
        return entry if entry is not None and self.comparison.is_call(entry, func, args, kwargs) else None

    def elsewhere(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Entry | None:
        """Switch to the tape of another earlier forward pass, with the same beginning, whose next entry matches a call.

        Return that entry. If no tape fits, a new one is recorded from here on, and the answer is None.
        """
        while self.known:
            self._leave_tape()
            if self.known and (entry := self.expected(func, args, kwargs)) is not None:
                return entry
        return None

    def confirm(self, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:  # noqa: ANN401
        """Register the results of a call that matched an entry of the known tape (calls of an earlier forward pass) before it ran.

        If the results differ from the tape, the call is handled as unexpected. One that changes nothing is repeated to note its
        operations.
        """
        if self.comparison.takes(entry, args, kwargs, out) or self._agrees(entry, args, kwargs, out):
            return
        if entry.may_be_repeated:
            with torch.no_grad():
                repeated = self.run(entry.func, args, kwargs)
            self._noting.stands_for(results_of(args, repeated, writes=False), results_of(args, out, writes=False))
        self.met(entry.func, args, kwargs, out)

    def met(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Entry | None:  # noqa: ANN401
        """Register a call that has run, is no attention, and is not what the known tape expects; return its entry if recorded.

        It is not recorded if it only asked for metadata, or if the tape of another earlier forward pass has the same call.
        """
        if transformed((*args, *kwargs.values(), out)):
            self.distrust()
            return None
        if self.known and not operation_of(func).exposes and not changes(func, args, out):
            self._noting.asked(func)
            return None  # it only queried a size or other metadata
        while (entry := self.elsewhere(func, args, kwargs)) is not None:
            if entry.attention is None and self._agrees(entry, args, kwargs, out):
                return None
        return self.write(func, args, kwargs, out)

    def distrust(self) -> None:
        """Record a new tape that no later forward pass may rely on, because code that is not PyTorch's may change what calls do."""
        self._candidates.clear()
        if self.known:
            self._leave_tape()
        self.tape.whole = False

    def finished(self, output: Sequence[Tensor]) -> Tape:
        """Return the tape (list of calls) of a forward pass that has ended with these outputs: a known one, if all of it agrees."""
        slots = tuple(self._output_slot(tensor) for tensor in output)
        self.settle()
        while self.known and not (self.comparison.upcoming is None and self.tape.output == slots):
            self._leave_tape()
        if not self.known:
            self.tape.output, self.tape.dynamic = slots, self._noting.dynamic
        self.used = {slot: self._living.refs[slot] for slot in self.tape.outside}
        self.close()
        return self.tape

    def settle(self) -> None:
        """Take the tape whose kernels are those of the convolutions so far, if the forward pass agrees with a known one."""
        if self.known:
            self.comparison.settle(self._candidates)
            self.tape = self.comparison.tape

    def close(self) -> None:
        """Release all tensors but those that are kept."""
        self._living.clear()
        self._noting.clear()
        self._members.clear()

    def release(self) -> None:
        """Release all references, also weak ones, without waiting for the garbage collector."""
        self.close()
        self.used.clear()
        self.kept.clear()

    def _agrees(self, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> bool:  # noqa: ANN401
        """Check whether a call has the results that its entry on the tape of an earlier forward pass has; if so, go to the next."""
        agrees = self.comparison.is_result(entry, args, kwargs, out)
        if agrees:
            self._noting.taken()
            if self._keep:
                self._hold(entry, results_of(args, out, entry.operation.writes))
        return agrees

    def _leave_tape(self) -> None:
        """Stop to compare with a tape that no longer fits: switch to another one with the same beginning, or record a new one.

        A new tape starts with the entries that the forward pass has agreed with so far.
        """
        self.settle()
        length, entries = self.at, self.tape.entries
        while self._candidates:
            candidate = self._candidates.pop(0)
            if candidate.entries[:length] == entries[:length]:  # tapes share the entry objects of a common beginning
                self.tape = candidate
                self.comparison.follow(candidate)
                return
        self._noting.resume(self.tape, length, self._living)
        self.tape = self.tape.beginning(length, self._living.count)
        self.known = False
        self._noting.share(self.tape)
        self.comparison.renew(self.tape.entries)

    def _output_slot(self, tensor: Tensor) -> int:
        """Return the slot of an output tensor; -1 for a tensor of unknown origin, -2 for a parameter that no call has used."""
        slot = self.slot_of(tensor)
        if slot is not None:
            return slot
        return -1 if self._origin(tensor) is None else -2

    # --- recording

    def write(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: Any,  # noqa: ANN401
        attention: Attention | None = None,
    ) -> Entry | None:
        """Append a call that has run to the tape, with its arguments and results; return its entry.

        Return None, and record nothing, for a call that neither returned nor changed a tensor nor switched gradients on or off.
        """
        operation = operation_of(func)
        is_foreign_python = not operation.own and isinstance(func, FunctionType)
        if operation.name in _RUNNING_HOOKS or is_foreign_python:
            self.tape.whole = False
        if args and isinstance(args[0], Tensor):
            if operation.exposes:
                self._living.exposed.add(args[0])
            self._noting.handed_out(operation, args[0])
        results = results_of(args, out, operation.writes)
        has_tensors = any(isinstance(result, Tensor) for result in results)
        if not has_tensors and func is not SWITCH:
            return None
        steps = self._noting.taken() if attention is None or not attention.fused else ()
        overwritten = self._living.targets(operation, args, kwargs, out)
        sharing = self._note_writes(overwritten) if overwritten else []
        noted_args = self._noted(tuple(args))
        noted_kwargs = {name: self._noted(value) for name, value in kwargs.items()}
        layer = self._layer() if operation.name in _NAMED or not operation.own else ""
        entry = Entry(
            func, operation, noted_args, noted_kwargs, (), layer, attention=attention, steps=steps, writes=bool(overwritten)
        )
        note_values(self.tape, entry, args, kwargs, self.slot_of)
        self._note_results(entry, results, sharing)
        if self._keep:
            self._hold(entry, results)
        if self._patches:
            self.tape.positions += positions_among(results, self._patches)
        entry.shapes, entry.single = entry.simple_shapes(out, overwritten), isinstance(out, Tensor)
        self.tape.entries.append(entry)
        self.tape.normalizes |= operation.name in ("batch_norm", "instance_norm")
        return entry

    def _note_writes(self, overwritten: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        """Note which tensors a call has overwritten; return the others in the same memory, such as views, with their slots."""
        for tensor in overwritten:
            if memory_of(tensor) in self._living.exposed:
                self._noting.read(tensor)
        sharing = self._living.beside(overwritten, self.tape.outside)
        for slot in (*self._living.slots(overwritten), *(slot for slot, _ in sharing)):
            if slot is not None:
                self._living.versions[slot] = None  # the write was intercepted, so the version counter tells nothing new
        return sharing

    def _note_results(self, entry: Entry, results: Sequence[Any], sharing: Sequence[tuple[int, Tensor]]) -> None:
        """Give new slots (numbers on the tape) to the results of a call, and to tensors that share memory with what it overwrote.

        What a call computes from tensors that may depend on the image may depend on the image, too.
        """
        tape, living = self.tape, self._living
        entry.before = living.slots(results)
        entry.rewritten = tuple((slot, living.enlist(tensor)) for slot, tensor in sharing)
        entry.outs = tuple(
            Made(living.enlist(result), shape_of(result), result.is_floating_point()) if isinstance(result, Tensor) else None
            for result in results
        )
        self._noting.number(tape, entry, results, sharing)
        if entry.descends_from(tape.descends):
            tape.descends.update(result.slot for result in entry.outs if result is not None)
            tape.descends.update(slot for _, slot in entry.rewritten)

    def _hold(self, entry: Entry, results: Sequence[Any]) -> None:
        """Add the results of a call to `kept`, the tensors since the last attention, which empties it; before any it stays empty."""
        if entry.attention is None and not self.kept:
            return
        if entry.attention is not None and not entry.attention.doubtful:
            self.kept.clear()
        pairs = zip(entry.outs, results, strict=True)
        self.kept.update((on_tape.slot, result) for on_tape, result in pairs if on_tape is not None)

    def _noted(self, value: Any) -> Any:  # noqa: ANN401
        """Return an argument as the tape holds it: each tensor becomes a `Ref` with its slot, also inside lists and dictionaries.

        Numbers, strings and the like stay; what cannot be compared with later calls becomes `STRANGE`.
        """
        if isinstance(value, Tensor):
            return Ref(self.place_of(value))
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is tuple or kind is list:
            return kind(self._noted(item) for item in value)
        if kind is slice:
            return slice(self._noted(value.start), self._noted(value.stop), self._noted(value.step))
        if kind is dict:
            return {name: self._noted(item) for name, item in value.items()}
        if isinstance(value, (tuple, list)) and any(isinstance(item, Tensor) for item in value):
            return STRANGE if hasattr(value, "_fields") else [self._noted(item) for item in value]
        return plain(value)
