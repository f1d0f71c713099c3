"""Comparison of the calls of a forward pass with the entries of a known tape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from visattn._support.faces import Later
from visattn.core.capturing.placing.nodes import shape_of
from visattn.core.capturing.placing.weak import Weak
from visattn.core.capturing.trace.call_tensors import is_transformed, results_of, tensors_in
from visattn.core.capturing.trace.living import Living
from visattn.core.capturing.trace.members import Members
from visattn.core.capturing.trace.tape import Entry, Ref, Tape, alike
from visattn.core.capturing.trace.verdicts import Verdicts

if TYPE_CHECKING:
    from visattn.core.capturing.trace import choices, leaning
else:
    choices, leaning = Later(f"{__package__}.choices"), Later(f"{__package__}.leaning")

_LIST = -2  # slot of an argument that is a list or tuple, see `Entry.quick`


class Comparison:
    """Comparison of a running forward pass with a tape (list of calls) of an earlier one.

    Tensors that match get the slots (numbers) that they have on the tape.

    Every call of every forward pass comes to `is_simple_call` and `takes`, so these call nothing that an operator can do.

    Attributes:
        tape: The tape.
        at: Number of its entries that the forward pass has agreed with.
        upcoming: The entry after these, which the next call is compared with; None at the end of the tape.
    """

    def __init__(self, tape: Tape, living: Living, members: Members, kept: dict[int, Tensor] | None = None) -> None:
        """Compare with a tape from its beginning.

        Args:
            tape: Tape of an earlier forward pass.
            living: Tensors of this forward pass.
            members: Tensors of the model.
            kept: Receives the results of simple calls from the first attention on, by slot; None if they are not kept.
        """
        self.at, self._living, self._members, self._kept = 0, living, members, kept
        self._choices: choices.Choices | None = None  # once tokens were picked by their content
        self._leaning: leaning.Leaning | None = None  # once a convolution ran whose kernel may lean
        self.follow(tape)

    def follow(self, tape: Tape) -> None:
        """Compare with a tape from here on; it begins with the entries that the forward pass has agreed with."""
        self.tape, self._length = tape, len(tape.entries)
        self.upcoming = tape.entries[self.at] if self.at < self._length else None

    def ask(self, verdicts: Verdicts) -> None:
        """Ask whether the kernels of all convolutions are those of the tape, now that the forward pass has ended."""
        if self._leaning is not None:
            self._leaning.ask(verdicts)

    def settle(self, others: list[Tape]) -> None:
        """Compare the kernels of convolutions so far, and follow the tape that has them; `others` are tapes of other forward passes."""
        if self._leaning is not None:
            tape = self._leaning.settled(self.tape, self.at, others)
            if tape is not self.tape:
                self.follow(tape)

    def advance(self) -> None:
        """Go to the next entry: the upcoming one has run, and agrees."""
        self.at += 1
        self.upcoming = self.tape.entries[self.at] if self.at < self._length else None

    # --- before a call runs

    def is_call(self, entry: Entry, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Check whether a call that is about to run is that of an entry: same function, and equal arguments.

        Tensors are equal if they come from the same earlier call. Tensors that are met for the first time, such as parameters, get
        slots; these are dropped again if the call turns out to be another.
        """
        if func is not entry.func and func != entry.func:
            return False
        slots_before = self._living.count
        has_equal_arguments = (
            len(args) == len(entry.args)
            and self._all_same(args, entry.args)
            and list(kwargs) == list(entry.kwargs)
            and self._all_same(list(kwargs.values()), list(entry.kwargs.values()))
            and (not entry.kernels or self._notes_kernels(entry))
            and (not entry.points or self._points_fit(entry))
        )
        if not has_equal_arguments:
            self._living.back_to(slots_before)
        return has_equal_arguments

    def is_simple_call(
        self, entry: Entry, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> bool:
        """Check what `is_call` checks, faster, for calls whose arguments are tensors, numbers and the like.

        False does not mean that the call is another. The entry holds its arguments as pairs, see `Entry.quick`.
        """
        quick, living = entry.quick, self._living
        if (func is not entry.func and func != entry.func) or quick is None or living.exposed or self._members.swapped:
            return False
        if kwargs or entry.kwargs:
            if not kwargs or [*kwargs] != [*entry.kwargs]:
                return False
            args = [*args]
            for name in kwargs:
                args += (kwargs[name],)
        refs, versions, outside = living.refs, living.versions, self.tape.outside
        count = slots_before = living.count
        try:
            for value, (slot, recorded) in zip(args, quick, strict=True):
                if slot < 0:  # no tensor
                    if value is not recorded and (type(value) is not type(recorded) or value != recorded):
                        break
                    if slot == _LIST and [*map(type, value)] != [*map(type, recorded)]:  # True equals 1
                        break
                elif slot < count:  # a tensor that was met before
                    tensor, version = refs[slot](), versions[slot]
                    if tensor is None or tensor is not value or (version is not None and version != tensor._version):
                        break
                elif slot != count or slot not in outside or not self._members.is_kept(value, outside[slot]):
                    break
                else:  # a tensor of the model that is met for the first time
                    versions += (value._version if living.versioned else None,)
                    refs += (Weak(value),)
                    living.count = count = count + 1
            else:
                if not entry.kernels or self._notes_kernels(entry):
                    return True
        except (ValueError, RuntimeError):  # another number of arguments; a tensor of inference mode, which has no version
            pass
        living.back_to(slots_before)
        return False

    def _notes_kernels(self, entry: Entry) -> bool:
        """Note the kernels of a call that is about to run; return False if one of them is gone."""
        if self._leaning is None:
            self._leaning = leaning.Leaning()
        return self._leaning.note(entry, self._living, self.tape)

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
        if outside is None or recorded.slot != self._living.count or shape_of(value) != outside.shape:
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

    def takes(self, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> bool:  # noqa: ANN401
        """Go on if a simple call that matches the upcoming entry has returned the tensors that it did on the tape.

        They get their slots there. False does not mean that the call has returned others.
        """
        living, results = self._living, (out,) if entry.single else out
        if entry.shapes is None or (type(results) is not tuple and type(results) is not list):
            return False
        versions: list[int | None] = []
        try:
            for result, shape, slot_before in zip(results, entry.shapes, entry.before, strict=True):
                if type(result) is not Tensor or result.shape != shape:
                    return False
                if slot_before is None:
                    for value in args:
                        if value is result:
                            return False
                    for name in kwargs:
                        if kwargs[name] is result:
                            return False
                elif living.refs[slot_before]() is not result:
                    return False
                try:
                    versions += (result._version if living.versioned else None,)
                except RuntimeError:  # a tensor of inference mode
                    versions += (None,)
        except ValueError:  # another number of results
            return False
        if entry.writes and not self._overwrites_same(entry, [out]):
            return False
        kept = self._kept if self._kept or entry.attention is not None else None
        if kept is not None and entry.attention is not None and not entry.attention.doubtful:
            kept.clear()
        for result in results:
            if kept is not None:
                kept[living.count] = result
            living.refs += (Weak(result),)
            living.count += 1
        living.versions += versions
        self.at = following = self.at + 1
        self.upcoming = self.tape.entries[following] if following < self._length else None
        return True

    def is_result(self, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> bool:  # noqa: ANN401
        """Go on if a call that matches the upcoming entry has returned, and overwritten, what it did on the tape.

        Its results get the slots (numbers) that they have there.
        """
        if entry.shapes is not None:
            return self.takes(entry, args, kwargs, out)
        agrees = self._selects_same_elements(entry, args, kwargs) and self._has_same_results(entry, args, kwargs, out)
        if agrees:
            self.advance()
        return agrees

    def _selects_same_elements(self, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Check whether index tensors and masks, as in `tokens[mask]`, select the elements that they selected on the tape.

        Tokens that a model picks by their content, as the best of them, may be others, as long as all entries of this choice agree.
        """
        for slot, content in entry.contents.items():
            index = next((tensor for tensor in tensors_in((args, kwargs)) if self._living.slot(tensor) == slot), None)
            if index is None or index.dtype != content.dtype:
                return False
            if not (torch.equal(index, content) if entry.choice is None else self._picks_same(entry.choice, index)):
                return False
        return True

    def _picks_same(self, number: int, index: Tensor) -> bool:
        if self._choices is None:
            self._choices = choices.Choices()
        return self._choices.fits(number, index)

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
        overwritten = self._living.targets(entry.operation, args, kwargs, out)
        if overwritten and not self._overwrites_same(entry, overwritten):
            return False
        for result in results:
            if isinstance(result, Tensor):
                self._living.enlist(result)
        return True

    def _overwrites_same(self, entry: Entry, overwritten: Sequence[Tensor]) -> bool:
        """Check whether a call has overwritten what it did on the tape; if so, tensors that share the memory get their new slots."""
        if not entry.rewritten and len(overwritten) == 1 and self._living.is_alone(overwritten[0], self.tape.outside):
            return True
        sharing = self._living.beside(overwritten, self.tape.outside)
        if [slot for slot, _ in sharing] != [slot for slot, _ in entry.rewritten]:
            return False
        for _, tensor in sharing:
            self._living.enlist(tensor)
        return True

    def renew(self, entries: Iterable[Entry]) -> None:
        """Replace the tokens that an earlier forward pass picked by content, in its entries, by those that this one has picked."""
        if self._choices is not None:
            self._choices.renew(entries)
