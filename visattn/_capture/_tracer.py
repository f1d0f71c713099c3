"""Writing the tape of a forward, or comparing the forward with a known one, operation by operation.

As long as all is as on a known tape nothing is written and nobody follows tokens. At the first difference the known beginning is
taken over and the rest is written.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from visattn._capture._given import (
    Exposed,
    Known,
    Untraceable,
    changes,
    is_transformed,
    memory_of,
    results_of,
    shape_of,
    tensors_in,
    transformed,
)
from visattn._capture._operations import CHOOSE, PRODUCT, SOFTMAX, Operation, operation_of
from visattn._capture._tape import STRANGE, Attention, Entry, Made, Outside, Ref, Tape, alike, plain, same_beginning

_NAMED = PRODUCT | SOFTMAX | {"einsum", "tensordot", "linear", "sum", "mean"}  # operations that may be a part of an attention


class Tracer:
    """Tensors of a running forward, and its tape.

    Attributes:
        tape: The tape that is written, or that the forward was compared with so far.
        known: Whether all was as on a known tape until now.
        entries: Those of the tape.
        at: Number of entries that were met.
        alive: Slots of tensors by `id`; that of a tensor that is gone may be another's now.
        exact: Whether a tensor is still what it was can be told by its identity alone.
    """

    def __init__(
        self,
        pixels: Tensor | None,
        inputs: Sequence[tuple[str, Tensor]],
        stored: Callable[[Tensor], tuple[str, str] | None],
        layer: Callable[[], str],
        candidates: Iterable[Tape] = (),
    ) -> None:
        """Begin a forward.

        Args:
            pixels: The image.
            inputs: Other tensors that the model was given, by name.
            stored: Kind and name of a tensor that belongs to the model; None for others.
            layer: Says which module runs.
            candidates: Tapes of earlier forwards.
        """
        self._stored, self._layer = stored, layer
        self.alive: dict[int, Known] = {}
        self._exposed = Exposed()
        self._slots = 0
        self.at = 0
        self._versions = not torch.is_inference_mode_enabled()
        self.exact = not self._versions
        begun = Tape()
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

    def _begin(self, kind: str, name: str, tensor: Tensor) -> None:
        slot = self._enlist(tensor)
        self.tape.outside[slot] = Outside(kind, name, shape_of(tensor), tensor.is_floating_point(), weakref.ref(tensor))
        if kind == "pixels":
            self.tape.descends.add(slot)
            self.tape.device = tensor.device

    def _enlist(self, tensor: Tensor) -> int:
        """A new slot for a tensor."""
        slot = self._slots
        self._slots = slot + 1
        known = self.alive[id(tensor)] = Known(tensor)
        known.slot = slot
        if self._versions and not tensor.is_inference():
            known.version = tensor._version
        return slot

    def slot_of(self, tensor: Tensor) -> int | None:
        """Where a tensor stands on the tape; None if it was not met, or was written over unseen."""
        known = self.alive.get(id(tensor))
        if known is None or known() is not tensor:
            return None
        if known.version is not None and known.version != tensor._version and known.slot not in self.tape.outside:
            del self.alive[id(tensor)]
            return None
        if self._exposed and self._exposed.overwritten(tensor):
            for key in [
                key for key, one in self.alive.items() if (other := one()) is not None and self._exposed.share(other, tensor)
            ]:
                del self.alive[key]
            return None
        return known.slot

    def place_of(self, tensor: Tensor) -> int:
        """The slot of any tensor."""
        slot = self.slot_of(tensor)
        if slot is None:
            if is_transformed(tensor):
                raise Untraceable
            slot = self._enlist(tensor)
            kind, name = self._stored(tensor) or ("unknown", "")
            self.tape.outside[slot] = Outside(kind, name, shape_of(tensor), tensor.is_floating_point(), weakref.ref(tensor))
            if kind == "unknown" and tensor.ndim:
                self.tape.descends.add(slot)
        return slot

    def _living(self) -> Iterable[tuple[int, Tensor]]:
        return [(known.slot, tensor) for known in list(self.alive.values()) if (tensor := known()) is not None]

    def descends(self, tensor: object) -> bool:
        """Whether a tensor has anything from the image, or may have."""
        return isinstance(tensor, Tensor) and self.slot_of(tensor) in (*self.tape.descends, None)

    def expected(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Entry | None:
        """The entry that a call is, if all is as on the tape until now."""
        at = self.at
        if at >= len(self.entries):
            return None
        entry = self.entries[at]
        if func is not entry.func and func != entry.func:
            return None
        slots = self._slots
        if len(args) == len(entry.args) and self._all_same(args, entry.args):
            if kwargs or entry.kwargs:
                kwargs = kwargs or {}
                if list(kwargs) != list(entry.kwargs) or not all(
                    self._same(kwargs[name], was) for name, was in entry.kwargs.items()
                ):
                    self._back_to(slots)
                    return None
            return entry
        self._back_to(slots)
        return None

    def quickly(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Entry | None:
        """As `expected`, of a call whose arguments are simple and met before; None says nothing."""
        at = self.at
        entries = self.entries
        if at >= len(entries):
            return None
        entry = entries[at]
        if func is not entry.func and func != entry.func:
            return None
        quick = entry.quick
        if quick is None or not self.exact:
            return None
        if kwargs:
            if list(kwargs) != list(entry.kwargs):
                return None
            args = (*args, *kwargs.values())
        if len(args) != len(quick):
            return None
        alive, slots = self.alive, self._slots
        for value, (slot, was) in zip(args, quick):  # noqa: B905 - as many, and quick
            if slot >= 0:
                seen = alive.get(id(value))
                if (seen is None or seen.slot != slot or seen() is not value) and not (
                    slot == self._slots and isinstance(value, Tensor) and self._same_outside(value, slot)
                ):
                    break
            elif value is not was and (type(value) is not type(was) or value != was):
                break
        else:
            return entry
        self._back_to(slots)
        return None

    def _same_outside(self, value: Tensor, slot: int) -> bool:
        """Whether a tensor that is met for the first time is the one that was."""
        outside = self.tape.outside.get(slot)
        if outside is None or outside.known() is not value or shape_of(value) != outside.shape:
            return False
        self._enlist(value)
        return True

    def _back_to(self, slots: int) -> None:
        """Forget tensors that were met for the first time in a call that was not as expected."""
        if self._slots > slots:
            for key in [key for key, known in self.alive.items() if known.slot >= slots]:
                del self.alive[key]
            self._slots = slots

    def _all_same(self, given: Sequence[Any], known: Sequence[Any]) -> bool:
        alive = self.alive
        for value, was in zip(given, known, strict=True):
            if type(was) is Ref:
                seen = alive.get(id(value))
                quick = (
                    seen is not None and seen.slot == was.slot and seen.version is None and not self._exposed and seen() is value
                )
                if not quick and not self._same_tensor(value, was):
                    return False
            elif not self._same(value, was):
                return False
        return True

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
        if outside is None or was.slot != self._slots or shape_of(value) != outside.shape:
            return False
        if outside.known() is not value:
            if is_transformed(value) or value.is_floating_point() != outside.floating:
                return False
            if (self._stored(value) or ("unknown", "")) != (outside.kind, outside.name):
                return False
        self._enlist(value)
        return True

    def confirm(self, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any] | None, out: Any) -> None:  # noqa: ANN401
        """Take the results of an expected call."""
        single = entry.single
        if single is not None and type(out) is Tensor and out.shape == single:
            self._enlist(out)
            self.at += 1
        elif single is None and self._same_results(entry, args, kwargs or {}, out):
            self.at += 1
        else:
            self.met(entry.func, args, kwargs or {}, out)

    def elsewhere(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Entry | None:
        """The entry that a call is on another known tape that begins like this forward, if there is one."""
        while self.known:
            self._turn()
            if self.known and (entry := self.expected(func, args, kwargs)) is not None:
                return entry
        return None

    def met(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Entry | None:  # noqa: ANN401
        """Take note of a call that was made, is no attention, and is not the one that was expected."""
        if transformed((*args, *kwargs.values(), out)):
            return None
        if self.known and not operation_of(func).exposes and not changes(func, args, out):
            return None  # it asked for a size, or the like
        while self.known:
            self._turn()
            entry = self.expected(func, args, kwargs) if self.known else None
            if entry is not None and entry.attention is None and self._same_results(entry, args, kwargs, out):
                self.at += 1
                return None
        return self.write(func, args, kwargs, out)

    def _turn(self) -> None:
        """From here on the forward is another than the known one: go on with another tape that begins alike, or write."""
        length = self.at
        while self._candidates:
            other = self._candidates.pop(0)
            if other.entries[:length] == self.entries[:length]:  # taken over from each other, so they are the same objects
                self.tape, self.entries = other, other.entries
                return
        self.tape = self.tape.beginning(length, self._slots)
        self.entries, self.known = self.tape.entries, False

    def _same_results(self, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> bool:  # noqa: ANN401
        for slot, content in entry.contents.items():
            given = next((x for x in tensors_in((args, kwargs)) if self.slot_of(x) == slot), None)
            if given is None or given.dtype != content.dtype or not torch.equal(given, content):
                return False
        results = results_of(args, out, entry.operation.writes)
        if len(results) != len(entry.outs):
            return False
        for result, made in zip(results, entry.outs, strict=True):
            if isinstance(result, Tensor) != (made is not None) or (made is not None and shape_of(result) != made.shape):
                return False
        if targets := self._targets(entry.operation, args, kwargs, out):
            others = self._sharing(targets)
            if [slot for slot, _ in others] != [slot for slot, _ in entry.rewritten]:
                return False
            for _, tensor in others:
                self._enlist(tensor)
        for result in results:
            if isinstance(result, Tensor):
                self._enlist(result)
        return True

    def finished(self, output: Sequence[Tensor]) -> Tape:
        """The whole tape, when the forward has ended and gave these tensors."""
        slots = tuple(-1 if (slot := self.slot_of(tensor)) is None else slot for tensor in output)
        self.close()
        while self.known:
            if self.at == len(self.entries) and self.tape.output == slots:
                return self.tape
            self._turn()
        self.tape.output = slots
        return self.tape

    def close(self) -> None:
        """Let go of all tensors."""
        self.alive.clear()
        self._exposed.clear()

    def write(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: Any,  # noqa: ANN401
        attention: Attention | None = None,
    ) -> Entry | None:
        """Write a call on the tape, if it made or changed tensors."""
        operation = operation_of(func)
        if operation.exposes and args and isinstance(args[0], Tensor):
            self._exposed.add(args[0])
            self.exact = False
        results = results_of(args, out, operation.writes)
        if not any(isinstance(result, Tensor) for result in results):
            return None
        targets = self._targets(operation, args, kwargs, out)
        for target in targets:
            if (known := self.alive.get(id(target))) is not None:
                known.version = None  # what was written was seen
        noted, named = self._noted(tuple(args)), {name: self._noted(value) for name, value in kwargs.items()}
        layer = self._layer() if operation.name in _NAMED or not operation.own else ""
        entry = Entry(func, operation, noted, named, (), layer, attention=attention)
        tape, slots = self.tape, [ref.slot for ref in entry.refs]
        descends = any(slot in tape.descends for slot in slots)
        if descends and (operation.name in CHOOSE or not operation.own):
            entry.contents = {
                slot: tensor.detach().clone()
                for tensor in tensors_in((args, kwargs))
                if not tensor.is_floating_point() and (slot := self.slot_of(tensor)) is not None
            }
        if targets:
            entry.writes = True
            entry.rewritten = tuple((slot, self._enlist(tensor)) for slot, tensor in self._sharing(targets))
        entry.outs = tuple(
            Made(self._enlist(result), shape_of(result), result.is_floating_point()) if isinstance(result, Tensor) else None
            for result in results
        )
        if (
            len(entry.outs) == 1
            and entry.outs[0] is not None
            and not entry.writes
            and not entry.contents
            and type(out) is Tensor
            and not out.is_nested
        ):
            entry.single = entry.outs[0].shape
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
        if kind is tuple or kind is list:
            return kind(self._noted(item) for item in value)
        if kind is slice:
            return slice(self._noted(value.start), self._noted(value.stop), self._noted(value.step))
        if kind is dict:
            return {name: self._noted(item) for name, item in value.items()}
        if isinstance(value, (tuple, list)) and kind is not torch.Size and any(isinstance(item, Tensor) for item in value):
            return STRANGE if hasattr(value, "_fields") else [self._noted(item) for item in value]
        return plain(value)

    def _targets(
        self,
        operation: Operation,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: Any,  # noqa: ANN401
    ) -> list[Tensor]:
        """The tensors that a call has written over."""
        given = tensors_in(kwargs.get("out") if "out" in kwargs else args[0] if args else None)
        if operation.writes or "out" in kwargs or kwargs.get("inplace") is True:
            return given
        known = self.alive.get(id(out)) if given and out is given[0] else None
        return given[:1] if known is not None and known.version is not None and known.version != out._version else []

    def _sharing(self, targets: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        """Other living tensors in the memory of some that were written over, by slot."""
        memories, own = {memory_of(target) for target in targets}, {id(target) for target in targets}
        self._exposed.refresh(memories)
        outside = self.tape.outside
        return sorted(
            (
                (slot, tensor)
                for slot, tensor in self._living()
                if id(tensor) not in own
                and (slot not in outside or outside[slot].kind not in ("parameter", "buffer"))
                and memory_of(tensor) in memories
            ),
            key=lambda pair: pair[0],
        )
