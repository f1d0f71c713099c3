"""Comparison of the calls of a forward pass with the entries of a known tape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from visattn.capturing.placing.kernels import kernel_of
from visattn.capturing.placing.nodes import shape_of
from visattn.capturing.trace.arguments import is_transformed, results_of, tensors_in
from visattn.capturing.trace.choices import Choices
from visattn.capturing.trace.living import Living
from visattn.capturing.trace.members import Members
from visattn.capturing.trace.tape import Entry, Ref, Tape, alike


class Comparison:
    """Comparison with a tape. Tensors that match get the slots that they have there.

    Attributes:
        tape: The tape.
    """

    def __init__(self, tape: Tape, living: Living, members: Members) -> None:
        """Compare with `tape` from here on."""
        self.tape, self._living, self._members, self._choices = tape, living, members, Choices()

    # --- before a call runs

    def is_call(self, entry: Entry, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Check whether a call that is about to run is that of an entry."""
        if func is not entry.func and func != entry.func:
            return False
        slots = len(self._living.refs)
        same = (
            len(args) == len(entry.args)
            and self._all_same(args, entry.args)
            and list(kwargs) == list(entry.kwargs)
            and self._all_same(list(kwargs.values()), list(entry.kwargs.values()))
            and self._kernels_fit(entry)
            and (not entry.points or self._points_fit(entry))
        )
        if not same:
            self._living.back_to(slots)
        return same

    def is_simple_call(
        self, entry: Entry, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> bool:
        """Check the same, faster, for calls with simple arguments. A call that fails may still match."""
        quick, living = entry.quick, self._living
        if (func is not entry.func and func != entry.func) or quick is None or living.exposed or self._members.is_exchanged():
            return False
        if kwargs:
            if list(kwargs) != list(entry.kwargs):
                return False
            args = (*args, *kwargs.values())
        if len(args) != len(quick):
            return False
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
                if outside is None or slot != met or not self._members.is_kept(value, outside):
                    break
                living.enlist(value)
                met += 1
        else:
            if not entry.kernels or self._kernels_fit(entry):
                return True
        living.back_to(slots)
        return False

    def _kernels_fit(self, entry: Entry) -> bool:
        """Check whether the kernels of an entry's convolutions still say the same about places."""
        for slot, kind, kernel in entry.kernels:
            weight = self._living.refs[slot]()
            if weight is None or kernel_of(weight, kind) != kernel:
                return False
        return True

    def _points_fit(self, entry: Entry) -> bool:
        """Check whether a call reads values as far from their tokens as on the tape."""
        with torch._C.DisableTorchFunction():
            return all((given := self._living.refs[slot]()) is not None and points.fits(given) for slot, points in entry.points)

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
        slot = self._living.current(value, self.tape.outside)
        if slot is not None:
            return slot == was.slot
        outside = self.tape.outside.get(was.slot)
        if outside is None or was.slot != len(self._living.refs) or shape_of(value) != outside.shape:
            return False
        if not self._members.is_kept(value, outside) or self._living.exposed:
            if is_transformed(value) or value.is_floating_point() != outside.floating:
                return False
            stored = self._members.stored(value)
            if (("unknown", "") if stored is None else stored[:2]) != (outside.kind, outside.name):
                return False
        self._living.enlist(value)
        return True

    # --- after it has run

    def is_result(self, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> bool:  # noqa: ANN401
        """Check whether a call that matches an entry has returned, and overwritten, what it did on the tape."""
        if entry.single is None:
            return self._chose_the_same(entry, args, kwargs) and self._made_the_same(entry, args, kwargs, out)
        same = type(out) is Tensor and out.shape == entry.single and self._is_same_object(entry, args, kwargs, out)
        if same:
            self._living.enlist(out)
        return same

    def _is_same_object(self, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> bool:
        """Check whether a call returned a new tensor or one of its arguments, whichever it did on the tape."""
        before = entry.before[0]
        if before is not None:
            return self._living.refs[before]() is out
        for value in args:
            if value is out:
                return False
        return not kwargs or all(value is not out for value in kwargs.values())

    def _chose_the_same(self, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Check the content of tensors that choose elements."""
        for slot, content in entry.contents.items():
            given = next((x for x in tensors_in((args, kwargs)) if self._living.slot(x) == slot), None)
            if given is None or given.dtype != content.dtype:
                return False
            if not (torch.equal(given, content) if entry.choice is None else self._choices.fits(entry.choice, given)):
                return False
        return True

    def _made_the_same(self, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> bool:  # noqa: ANN401
        results = results_of(args, out, entry.operation.writes)
        if len(results) != len(entry.outs):
            return False
        for result, made in zip(results, entry.outs, strict=True):
            if isinstance(result, Tensor) != (made is not None) or (made is not None and shape_of(result) != made.shape):
                return False
        if self._living.slots(results) != entry.before:
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

    def renew(self, entries: Iterable[Entry]) -> None:
        """Give entries of an earlier forward pass the tokens that this one picked, with which those that follow are compared."""
        self._choices.renew(entries)
