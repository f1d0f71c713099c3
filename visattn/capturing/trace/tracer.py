"""Recording of the tape of a forward pass, or its comparison with a known tape, operation by operation.

While the forward pass agrees with a known tape, nothing is recorded and no tokens are traced. At the first difference, the common
beginning is copied and the rest is recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator

from visattn.capturing.trace.arguments import (
    Untraceable,
    changes,
    is_transformed,
    lead_of,
    memory_of,
    positions_among,
    results_of,
    shape_of,
    tensors_in,
    transformed,
)
from visattn.capturing.trace.choices import Choices
from visattn.capturing.trace.living import Living
from visattn.capturing.trace.noting import Noting, plainly
from visattn.capturing.trace.operations import CHOOSE, PRODUCT, READ, SOFTMAX, operation_of
from visattn.capturing.trace.tape import PLAIN, STRANGE, Attention, Entry, Made, Outside, Ref, Tape, alike, plain, same_beginning

_NAMED = (
    PRODUCT | SOFTMAX | {"einsum", "tensordot", "linear", "sum", "mean", "grid_sample"}
)  # operations that can be part of attention


class Tracer:
    """Tensors and tape of a running forward pass.

    Attributes:
        tape: Tape that is being recorded, or the known tape that the forward pass agrees with so far.
        known: Whether the forward pass agrees with a known tape so far.
        entries: Entries of `tape`.
        at: Number of entries so far in this forward pass.
    """

    def __init__(
        self,
        pixels: Tensor | None,
        inputs: Sequence[tuple[str, Tensor]],
        stored: Callable[[Tensor], tuple[str, str] | None],
        layer: Callable[[], str],
        candidates: Iterable[Tape] = (),
        packed: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        """Begin a forward pass.

        Args:
            pixels: Image batch, or None.
            inputs: Names and values of the tensors that the model received; the pixels may be among them.
            stored: Function that returns kind and name of a tensor of the model, and None for other tensors.
            layer: Function that returns the name of the running module.
            candidates: Tapes of earlier forward passes.
            packed: Grids of the images, if their patches come in one sequence.
        """
        self._stored, self._layer = stored, layer
        self._living = Living()
        self._noting = Noting(stored)
        self._choices = Choices()
        self.at = 0
        begun = Tape(packed=packed)
        self._patches = lead_of(pixels.shape) if packed and pixels is not None else ()
        self.tape = begun
        given = [] if pixels is None else [("pixels", "", pixels)]
        given += [("input", name, tensor) for name, tensor in inputs if tensor is not pixels]
        for kind, name, tensor in given:
            self._begin(kind, name, tensor)
        self._candidates = [tape for tape in candidates if same_beginning(tape, begun)]
        self.known = bool(self._candidates)
        if self.known:
            self.tape = self._candidates.pop(0)
        self.entries = self.tape.entries
        if not self.known:
            self._noting.share(self.tape)

    def _begin(self, kind: str, name: str, tensor: Tensor) -> None:
        slot = self._found_outside(kind, name, tensor)
        if kind == "pixels":
            self.tape.descends.add(slot)
            self.tape.device = tensor.device

    def _found_outside(self, kind: str, name: str, tensor: Tensor) -> int:
        slot = self._living.enlist(tensor)
        self.tape.outside[slot] = Outside(kind, name, shape_of(tensor), tensor.is_floating_point(), weakref.ref(tensor))
        self._noting.outside(self.tape, slot, tensor, kind, name)
        return slot

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Run a call that is not on the known tape, and note the operations that it consists of."""
        if not self._noting.wanted or isinstance(func, HigherOrderOperator) or (self.known and self._noting.asks(func)):
            return plainly(func, args, kwargs)
        if self.known:
            self._resume()
        if self._living.exposed:
            for tensor in tensors_in((args, kwargs)):
                self.slot_of(tensor)  # notices what other code has written
        return self._noting.run(func, args, kwargs)

    def _resume(self) -> None:
        """Take the tensors of the known tape over, under their numbers there."""
        self._noting.resume(self.tape, self.at, self._living)

    def slot_of(self, tensor: Tensor) -> int | None:
        """Return the slot of a tensor; None if it is new, or was overwritten without interception."""
        living = self._living
        slot = living.slot(tensor)
        if slot is None:
            return None
        if slot not in self.tape.outside and living.is_written(slot, tensor):
            living.forget(tensor)
            return None
        if living.exposed and living.exposed.overwritten(tensor):
            self._noting.overwritten(tensor)
            for _, other in living.sharing([memory_of(tensor)]):
                living.forget(other)
            return None
        return slot

    def place_of(self, tensor: Tensor) -> int:
        """Return the slot of a tensor; add a tensor that is new as one from outside the tape.

        Raises:
            Untraceable: If it belongs to a torch.func transform.
        """
        slot = self.slot_of(tensor)
        if slot is None:
            if is_transformed(tensor):
                raise Untraceable
            kind, name = self._stored(tensor) or ("unknown", "")
            slot = self._found_outside(kind, name, tensor)
            if kind == "unknown" and tensor.ndim:
                self.tape.descends.add(slot)
        return slot

    def descends(self, tensor: object) -> bool:
        """Check whether a tensor depends, or may depend, on the image."""
        return isinstance(tensor, Tensor) and self.slot_of(tensor) in (*self.tape.descends, None)

    def expected(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Entry | None:
        """Return the next entry of the known tape if a call matches it; otherwise None."""
        at = self.at
        if at >= len(self.entries):
            return None
        entry = self.entries[at]
        if func is not entry.func and func != entry.func:
            return None
        slots = len(self._living.refs)
        if len(args) == len(entry.args) and self._all_same(args, entry.args):
            if kwargs or entry.kwargs:
                kwargs = kwargs or {}
                if list(kwargs) != list(entry.kwargs) or not all(
                    self._same(kwargs[name], was) for name, was in entry.kwargs.items()
                ):
                    self._living.back_to(slots)
                    return None
            return entry
        self._living.back_to(slots)
        return None

    def quickly(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Entry | None:
        """Try a fast version of `expected`, for calls with simple arguments. None means that the call may still match."""
        at = self.at
        entries = self.entries
        if at >= len(entries):
            return None
        entry = entries[at]
        if func is not entry.func and func != entry.func:
            return None
        quick = entry.quick
        living = self._living
        if quick is None or living.exposed:
            return None
        if kwargs:
            if list(kwargs) != list(entry.kwargs):
                return None
            args = (*args, *kwargs.values())
        if len(args) != len(quick):
            return None
        refs, versions = living.refs, living.versions
        slots = met = len(refs)
        for value, (slot, was) in zip(args, quick):  # noqa: B905 - of equal length, and faster
            if slot < 0:
                if value is not was and (type(value) is not type(was) or value != was):
                    break
            elif slot < met:
                seen, version = refs[slot](), versions[slot]
                if seen is None or seen is not value or (version is not None and version != seen._version):
                    break
            else:
                outside = self.tape.outside.get(slot)
                seen = None if outside is None or slot != met else outside.known()
                if outside is None or seen is None or seen is not value or shape_of(seen) != outside.shape:
                    break
                living.enlist(seen)
                met += 1
        else:
            return entry
        living.back_to(slots)
        return None

    def _all_same(self, given: Sequence[Any], known: Sequence[Any]) -> bool:
        return all(self._same(value, was) for value, was in zip(given, known, strict=True))

    def _same(self, value: Any, was: Any) -> bool:  # noqa: ANN401
        kind = type(was)
        if kind is Ref:
            return self._same_tensor(value, was)
        if kind is tuple or kind is list:
            return type(value) is kind and len(value) == len(was) and self._all_same(value, was)
        if kind is slice:
            return type(value) is slice and self._all_same((value.start, value.stop, value.step), (was.start, was.stop, was.step))
        if kind is dict:
            return type(value) is dict and list(value) == list(was) and self._all_same(list(value.values()), list(was.values()))
        return alike(value, was)

    def _same_tensor(self, value: Any, was: Ref) -> bool:  # noqa: ANN401
        if not isinstance(value, Tensor):
            return False
        slot = self.slot_of(value)
        if slot is not None:
            return slot == was.slot
        outside = self.tape.outside.get(was.slot)
        if outside is None or was.slot != len(self._living.refs) or shape_of(value) != outside.shape:
            return False
        if outside.known() is not value:
            if is_transformed(value) or value.is_floating_point() != outside.floating:
                return False
            if (self._stored(value) or ("unknown", "")) != (outside.kind, outside.name):
                return False
        self._living.enlist(value)
        return True

    def confirm(self, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any] | None, out: Any) -> None:  # noqa: ANN401
        """Register the results of an expected call; if they differ from the tape, handle the call as unexpected."""
        single = entry.single
        if single is None:
            same = self._same_results(entry, args, kwargs or {}, out)
        else:
            same = type(out) is Tensor and out.shape == single and self._same_object(entry, args, kwargs, out)
            if same:
                self._living.enlist(out)
        if same:
            self.at += 1
            if self._noting.wanted:
                self._noting.taken()
        else:
            self.met(entry.func, args, kwargs or {}, out)

    def _same_object(self, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any] | None, out: Tensor) -> bool:
        """Check whether a call returned a new tensor or one of its arguments, whichever it did on the tape."""
        before = entry.before[0]
        if before is not None:
            return self._living.refs[before]() is out
        for value in args:
            if value is out:
                return False
        return not kwargs or all(value is not out for value in kwargs.values())

    def elsewhere(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Entry | None:
        """Switch to another known tape with the same beginning whose next entry matches a call; return that entry, or None."""
        while self.known:
            self._turn()
            if self.known and (entry := self.expected(func, args, kwargs)) is not None:
                return entry
        return None

    def met(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Entry | None:  # noqa: ANN401
        """Register a call that was not expected and is not attention; return its entry if it was recorded."""
        if transformed((*args, *kwargs.values(), out)):
            return None
        if self.known and not operation_of(func).exposes and not changes(func, args, out):
            self._noting.asked(func)
            return None  # it only queried a size or other metadata
        while self.known:
            self._turn()
            entry = self.expected(func, args, kwargs) if self.known else None
            if entry is not None and entry.attention is None and self._same_results(entry, args, kwargs, out):
                self.at += 1
                return None
        return self.write(func, args, kwargs, out)

    def _turn(self) -> None:
        """Leave the known tape: switch to another one with the same beginning, or start recording."""
        length = self.at
        while self._candidates:
            other = self._candidates.pop(0)
            if other.entries[:length] == self.entries[:length]:  # tapes share the entry objects of a common beginning
                self.tape, self.entries = other, other.entries
                return
        self._resume()
        self.tape = self.tape.beginning(length, len(self._living.refs))
        self.entries, self.known = self.tape.entries, False
        self._noting.share(self.tape)
        self._choices.renew(self.entries)

    def _same_results(self, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> bool:  # noqa: ANN401
        for slot, content in entry.contents.items():
            given = next((x for x in tensors_in((args, kwargs)) if self._living.slot(x) == slot), None)
            if given is None or given.dtype != content.dtype:
                return False
            if not (torch.equal(given, content) if entry.choice is None else self._choices.fits(entry.choice, given)):
                return False
        results = results_of(args, out, entry.operation.writes)
        if len(results) != len(entry.outs):
            return False
        for result, made in zip(results, entry.outs, strict=True):
            if isinstance(result, Tensor) != (made is not None) or (made is not None and shape_of(result) != made.shape):
                return False
        if self._before(results) != entry.before:
            return False
        if targets := self._living.targets(entry.operation, args, kwargs, out):
            others = self._living.beside(targets, self.tape.outside)
            if [slot for slot, _ in others] != [slot for slot, _ in entry.rewritten]:
                return False
            for _, tensor in others:
                self._living.enlist(tensor)
        for result in results:
            if isinstance(result, Tensor):
                self._living.enlist(result)
        return True

    def _before(self, results: Iterable[Any]) -> tuple[int | None, ...]:
        """Return the slot of each result that already has one, and None for the others."""
        return tuple(self._living.slot(result) if isinstance(result, Tensor) else None for result in results)

    def finished(self, output: Sequence[Tensor]) -> Tape:
        """Return the complete tape of a forward pass that has ended with these output tensors."""
        slots = tuple(self._of_output(tensor) for tensor in output)
        while self.known and not (self.at == len(self.entries) and self.tape.output == slots):
            self._turn()
        if not self.known:
            self.tape.output = slots
        self.close()
        return self.tape

    def _of_output(self, tensor: Tensor) -> int:
        slot = self.slot_of(tensor)
        return slot if slot is not None else -1 if self._stored(tensor) is None else -2

    def close(self) -> None:
        """Release all tensors."""
        self._living.clear()
        self._noting.clear()

    def write(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: Any,  # noqa: ANN401
        attention: Attention | None = None,
    ) -> Entry | None:
        """Record a call if it returned or changed tensors; return its entry, or None."""
        operation = operation_of(func)
        if operation.exposes and args and isinstance(args[0], Tensor):
            self._living.exposed.add(args[0])
        if args and isinstance(args[0], Tensor):
            self._noting.handed_out(operation, args[0])
        results = results_of(args, out, operation.writes)
        if not any(isinstance(result, Tensor) for result in results):
            return None
        steps = self._noting.taken() if attention is None or not attention.fused else ()
        targets = self._living.targets(operation, args, kwargs, out)
        shared = self._living.beside(targets, self.tape.outside) if targets else []
        for slot in (*(self._living.slot(target) for target in targets), *(slot for slot, _ in shared)):
            if slot is not None:
                self._living.versions[slot] = None  # the write was intercepted
        noted, named = self._noted(tuple(args)), {name: self._noted(value) for name, value in kwargs.items()}
        layer = self._layer() if operation.name in _NAMED or not operation.own else ""
        entry = Entry(func, operation, noted, named, (), layer, attention=attention, steps=steps)
        tape, slots = self.tape, [ref.slot for ref in entry.refs]
        descends = any(slot in tape.descends for slot in slots)
        if descends and (operation.name in CHOOSE or not operation.own):
            choosing = args[1:] if operation.name in READ else args
            entry.contents = {
                slot: tensor.detach().clone()
                for tensor in tensors_in((choosing, kwargs))
                if not tensor.is_floating_point() and (slot := self.slot_of(tensor)) is not None
            }
        entry.before = self._before(results)
        if targets:
            entry.writes = True
            entry.rewritten = tuple((slot, self._living.enlist(tensor)) for slot, tensor in shared)
        entry.outs = tuple(
            Made(self._living.enlist(result), shape_of(result), result.is_floating_point())
            if isinstance(result, Tensor)
            else None
            for result in results
        )
        self._noting.number(tape, entry, results, shared)
        if self._patches:
            tape.positions += positions_among(results, self._patches)
        if entry.returns_only(out):
            entry.single = shape_of(out)
        if descends:
            tape.descends.update(made.slot for made in entry.outs if made is not None)
            tape.descends.update(slot for _, slot in entry.rewritten)
        tape.entries.append(entry)
        self.at += 1
        return entry

    def _noted(self, value: Any) -> Any:  # noqa: ANN401
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
        if isinstance(value, (tuple, list)) and kind is not torch.Size and any(isinstance(item, Tensor) for item in value):
            return STRANGE if hasattr(value, "_fields") else [self._noted(item) for item in value]
        return plain(value)
