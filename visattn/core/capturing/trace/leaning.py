"""Check that the kernels of convolutions say of places what they said on a known tape, since code may write weights without any trace.

Nothing is read while the model runs: each kernel leaves a mark when its convolution runs, and all marks are compared at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from visattn.core.capturing.placing.kernels import UNKNOWN, Kernel, Kind, kernel_of, kernel_with, mass_of
from visattn.core.capturing.trace.living import Living
from visattn.core.capturing.trace.tape import Entry, Tape
from visattn.core.capturing.trace.verdicts import LARGE, Verdict, Verdicts, mark_of

_Kernels = tuple[tuple[int, Kind, Kernel], ...]


class Leaning:
    """Kernels of the convolutions that have run in a forward pass, which agrees with a known tape so far."""

    def __init__(self) -> None:
        """Start without kernels."""
        self._ran: list[tuple[Entry, list[Tensor | None], list[Tensor]]] = []  # entry, large kernels, marks
        self._are_same: Verdict | None = None

    def note(self, entry: Entry, living: Living, tape: Tape) -> bool:
        """Mark the kernels of a call that is about to run; return False if one of them is gone.

        The mark of a large kernel that the model keeps is a random projection of each row, that of any other is its mass.
        """
        large: list[Tensor | None] = []
        marks: list[Tensor] = []
        with torch.no_grad():
            for slot, *_ in entry.kernels:
                weight = living.refs[slot]()
                if weight is None:
                    return False
                is_kept = slot in tape.outside and tape.outside[slot].home is not None
                is_projected = is_kept and weight.numel() > LARGE
                large += (weight if is_projected else None,)
                marks += (mark_of(weight) if is_projected else mass_of(weight),)
        self._ran += ((entry, large, marks),)
        return True

    def ask(self, verdicts: Verdicts) -> None:
        """Ask whether all marks are those of the tape, now that the forward pass has ended."""
        marks, known = self._marks()
        are_comparable = marks and [mark.shape for mark in marks] == [mark.shape for mark in known]
        if are_comparable and len({mark.device for mark in marks}) == 1:
            self._are_same = verdicts.on((_joined(marks) == _joined(known)).all())

    def _marks(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the marks of this forward pass, and those of the tape."""
        return [mark for *_, marks in self._ran for mark in marks], [mark for entry, *_ in self._ran for mark in entry.marks]

    def settled(self, tape: Tape, at: int, others: list[Tape]) -> Tape:
        """Return the tape of this forward pass, with its kernels: `tape`, one of the others with the same calls, or a new one.

        Args:
            tape: Known tape that the forward pass agrees with, but for its kernels.
            at: Number of entries that it agrees with.
            others: Tapes of other earlier forward passes; the one that is returned is removed.
        """
        are_same = self._are_same() if self._are_same is not None else _are_equal(*self._marks())
        ran, self._ran, self._are_same = self._ran, [], None
        if are_same:
            return tape
        changed: dict[Entry, _Kernels] = {}
        for entry, large, marks in ran:
            now = zip(entry.kernels, large, marks, strict=True)
            kernels = tuple((slot, kind, _kernel(weight, mark, kind)) for (slot, kind, _), weight, mark in now)
            if kernels == entry.kernels:
                entry.marks = tuple(marks)
            else:
                changed[entry] = kernels
        return _with_kernels(tape, changed, at, others) if changed else tape


def _with_kernels(tape: Tape, changed: Mapping[Entry, _Kernels], at: int, others: list[Tape]) -> Tape:
    for other in others:
        pairs = zip(other.entries[:at], tape.entries[:at], strict=False)
        if len(other.entries) >= at and all(_is_same(theirs, mine, changed) for theirs, mine in pairs):
            others.remove(other)
            return other
    entries = [_changed(entry, changed[entry]) if entry in changed else entry for entry in tape.entries]
    return replace(tape, entries=entries, conclusions=None, projections=None, vectors={})


def _is_same(other: Entry, entry: Entry, changed: Mapping[Entry, _Kernels]) -> bool:
    """Check whether an entry of another tape is the same call, with the kernels that it has now."""
    kernels = changed.get(entry, entry.kernels)
    return other.kernels == kernels and (other is entry or (other.func is entry.func and other.args is entry.args))


def _changed(entry: Entry, kernels: _Kernels) -> Entry:
    made, steps = copy(entry), list(entry.steps)
    numbers = [number for number, step in enumerate(steps) if step.kernel is not None and step.kernel is not UNKNOWN]
    for number, (_, _, kernel) in zip(numbers, kernels, strict=True):
        steps[number] = copy(steps[number])
        steps[number].kernel = kernel
    made.steps, made.kernels, made.marks = tuple(steps), kernels, ()
    return made


def _kernel(weight: Tensor | None, mark: Tensor, kind: Kind) -> Kernel:
    """Return what a kernel says about places; a large one, `weight`, must still be as it was when it left its mark."""
    if weight is None:
        return kernel_with(mark.cpu(), kind)
    return kernel_of(weight, kind) if torch.equal(mark_of(weight), mark) else UNKNOWN


def _are_equal(marks: Sequence[Tensor], known: Sequence[Tensor]) -> bool:
    return len(marks) == len(known) and all(map(torch.equal, marks, known))


def _joined(marks: Sequence[Tensor]) -> Tensor:
    return torch.cat([mark.flatten() for mark in marks])
