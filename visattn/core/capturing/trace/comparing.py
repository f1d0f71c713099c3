"""Comparison of the calls of a forward pass with the entries of a known tape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from visattn.core.capturing.placing.kernels import kernel_of
from visattn.core.capturing.placing.nodes import shape_of
from visattn.core.capturing.trace.call_tensors import is_transformed, results_of, tensors_in
from visattn.core.capturing.trace.choices import Choices
from visattn.core.capturing.trace.living import Living
from visattn.core.capturing.trace.members import Members
from visattn.core.capturing.trace.tape import Entry, Ref, Tape, alike


class Comparison:
    """Comparison of a running forward pass with a tape (list of calls) of an earlier one.

    Tensors that match get the slots (numbers) that they have on the tape.

    Attributes:
        tape: The tape.
    """

    def __init__(self, tape: Tape, living: Living, members: Members) -> None:
        """Compare with `tape` from here on. `living` holds the tensors of the forward pass, `members` those of the model."""
        self.tape, self._living, self._members, self._choices = tape, living, members, Choices()

    # --- before a call runs

    def is_call(self, entry: Entry, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Check whether a call that is about to run is that of an entry: same function, and equal arguments.

        Tensors are equal if they come from the same earlier call. Tensors that are met for the first time, such as parameters, get
        slots; these are dropped again if the call turns out to be another.
        """
        if func is not entry.func and func != entry.func:
            return False
        slots_before = len(self._living.refs)
        has_equal_arguments = (
            len(args) == len(entry.args)
            and self._all_same(args, entry.args)
            and list(kwargs) == list(entry.kwargs)
            and self._all_same(list(kwargs.values()), list(entry.kwargs.values()))
            and self._kernels_fit(entry)
            and (not entry.points or self._points_fit(entry))
        )
        if not has_equal_arguments:
            self._living.back_to(slots_before)
        return has_equal_arguments

    def is_simple_call(
        self, entry: Entry, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> bool:
        """Check what `is_call` checks, faster, for calls whose arguments are tensors, numbers and the like.

        False does not mean that the call is another. The entry holds its arguments as pairs: `(slot, None)` for a tensor, where the
        slot is its number on the tape, and `(-1, value)` for any other.
        """
        quick, living = entry.quick, self._living
        if (func is not entry.func and func != entry.func) or quick is None or living.exposed or self._members.is_exchanged():
            return False
        if kwargs or entry.kwargs:
            if not kwargs or list(kwargs) != list(entry.kwargs):
                return False
            args = (*args, *kwargs.values())
        if len(args) != len(quick):
            return False
        refs, versions = living.refs, living.versions
        slots_before = next_slot = len(refs)
        for value, (slot, recorded) in zip(args, quick):  # noqa: B905 - of equal length, and faster
            if slot < 0:  # no tensor
                if value is not recorded and (type(value) is not type(recorded) or value != recorded):
                    break
            elif slot < next_slot:  # a tensor that was met before
                tensor, version = refs[slot](), versions[slot]
                if tensor is None or tensor is not value or (version is not None and version != tensor._version):
                    break
            else:  # a tensor of the model that is met for the first time
                outside = self.tape.outside.get(slot)
                if outside is None or slot != next_slot or not self._members.is_kept(value, outside):
                    break
                living.enlist(value)
                next_slot += 1
        else:
            if not entry.kernels or self._kernels_fit(entry):
                return True
        living.back_to(slots_before)
        return False

    def _kernels_fit(self, entry: Entry) -> bool:
        """Check whether the weights of an entry's convolutions are still centered as they were: other weights may move tokens."""
        for slot, kind, kernel in entry.kernels:
            weight = self._living.refs[slot]()
            if weight is None or kernel_of(weight, kind) != kernel:
                return False
        return True

    def _points_fit(self, entry: Entry) -> bool:
        """Check whether a call samples values (as `grid_sample` does) as far from their tokens as on the tape."""
        with torch._C.DisableTorchFunction():
            return all(
                (positions := self._living.refs[slot]()) is not None and points.fits(positions) for slot, points in entry.points
            )

    def _all_same(self, values: Sequence[Any], recorded: Sequence[Any]) -> bool:
        """Check whether each value is the same as the one on the tape."""
        return all(self._same(value, recorded_value) for value, recorded_value in zip(values, recorded, strict=True))

    def _same(self, value: Any, recorded: Any) -> bool:  # noqa: ANN401
        """Check whether an argument of a call is the one on the tape, which holds a `Ref` instead of each tensor."""
        kind = type(recorded)
        if kind is Ref:
            return self._same_tensor(value, recorded)
        if kind is tuple or kind is list:
            return type(value) is kind and len(value) == len(recorded) and self._all_same(value, recorded)
        if kind is slice:
            return type(value) is slice and self._all_same(
                (value.start, value.stop, value.step), (recorded.start, recorded.stop, recorded.step)
            )
        if kind is dict:
            return (
                type(value) is dict
                and list(value) == list(recorded)
                and self._all_same(list(value.values()), list(recorded.values()))
            )
        return alike(value, recorded)

    def _same_tensor(self, value: Any, recorded: Ref) -> bool:  # noqa: ANN401
        """Check whether a tensor has the slot (number on the tape) that the tape has at this argument.

        A tensor that is met for the first time must be of the same kind, name, shape and type as the one on the tape, which must
        come next there; it then gets the slot.
        """
        if not isinstance(value, Tensor):
            return False
        slot = self._living.current(value, self.tape.outside)
        if slot is not None:
            return slot == recorded.slot
        outside = self.tape.outside.get(recorded.slot)
        if outside is None or recorded.slot != len(self._living.refs) or shape_of(value) != outside.shape:
            return False
        if not self._members.is_kept(value, outside) or self._living.exposed:
            if is_transformed(value) or value.is_floating_point() != outside.floating:
                return False
            stored = self._members.stored(value)
            origin = ("unknown", "") if stored is None else stored[:2]
            if origin != (outside.kind, outside.name):
                return False
        self._living.enlist(value)
        return True

    # --- after it has run

    def is_result(self, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> bool:  # noqa: ANN401
        """Check whether a call that matches an entry has returned, and overwritten, what it did on the tape.

        If so, its results get the slots (numbers) that they have there.
        """
        if entry.single is None:
            return self._selects_same_elements(entry, args, kwargs) and self._has_same_results(entry, args, kwargs, out)
        # the common case: a call that only returns one tensor
        agrees = type(out) is Tensor and out.shape == entry.single and self._is_same_object(entry, args, kwargs, out)
        if agrees:
            self._living.enlist(out)
        return agrees

    def _is_same_object(self, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> bool:
        """Check whether a call returned a new tensor or one of its arguments, whichever it did on the tape."""
        slot_before = entry.before[0]
        if slot_before is not None:
            return self._living.refs[slot_before]() is out
        for value in args:
            if value is out:
                return False
        return not kwargs or all(value is not out for value in kwargs.values())

    def _selects_same_elements(self, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Check whether index tensors and masks, as in `tokens[mask]`, select the elements that they selected on the tape.

        Tokens that a model picks by their content, as the best of them, may be others, as long as all entries of this choice agree.
        """
        for slot, content in entry.contents.items():
            index = next((tensor for tensor in tensors_in((args, kwargs)) if self._living.slot(tensor) == slot), None)
            if index is None or index.dtype != content.dtype:
                return False
            fits = torch.equal(index, content) if entry.choice is None else self._choices.fits(entry.choice, index)
            if not fits:
                return False
        return True

    def _has_same_results(self, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> bool:  # noqa: ANN401
        """Check whether the results of a call have the shapes on the tape, and whether it overwrote the same tensors."""
        results = results_of(args, out, entry.operation.writes)
        if len(results) != len(entry.outs):
            return False
        for result, recorded in zip(results, entry.outs, strict=True):
            if isinstance(result, Tensor) != (recorded is not None):
                return False
            if recorded is not None and shape_of(result) != recorded.shape:
                return False
        if self._living.slots(results) != entry.before:
            return False
        if overwritten := self._living.targets(entry.operation, args, kwargs, out):
            sharing = self._living.beside(overwritten, self.tape.outside)
            if [slot for slot, _ in sharing] != [slot for slot, _ in entry.rewritten]:
                return False
            for _, tensor in sharing:
                self._living.enlist(tensor)
        for result in results:
            if isinstance(result, Tensor):
                self._living.enlist(result)
        return True

    def renew(self, entries: Iterable[Entry]) -> None:
        """Replace the tokens that an earlier forward pass picked by content, in its entries, by those that this one has picked."""
        self._choices.renew(entries)
