"""Repetition of calls of a tape with tensors of the model alone, or with others in place of some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from visattn.core.capturing.placing.weak import Home
from visattn.core.capturing.trace.call_tensors import results_of
from visattn.core.capturing.trace.tape import Entry, Ref, Tape
from visattn.core.capturing.trace.verdicts import mark_of


class Changing(Exception):
    """Error: a value that a call needs is not the same in each forward pass, or is gone."""


class Repeats:
    """Repeats calls of a tape.

    Attributes:
        used: Places of the model's tensors that were used, and their marks.
        weigh: Function from a parameter to the one to compute with: by default itself.
    """

    def __init__(self, tape: Tape) -> None:
        """Repeat calls of this tape."""
        self._tape = tape
        self.used: list[tuple[Home, Tensor]] = []
        self.weigh: Callable[[Tensor], Tensor] = Tensor.detach

    def call(self, entry: Entry, tensors: dict[int, Tensor]) -> None:
        """Repeat a call with other tensors, and add its results to `tensors`, which holds tensors by slot."""
        args, kwargs = self._filled(entry.args, tensors), self._filled(entry.kwargs, tensors)
        results = results_of(args, entry.func(*args, **kwargs), writes=False)
        for made, result in zip(entry.outs, results, strict=True):
            if made is not None:
                tensors[made.slot] = _plain(result)

    def tensor(self, slot: int, tensors: dict[int, Tensor]) -> Tensor:
        """Return the tensor of a slot: one of the model, or one that is computed from those of the model alone.

        Raises:
            Changing: If it may be another one in each forward pass.
        """
        if slot in tensors:
            return tensors[slot]
        outside = self._tape.outside.get(slot)
        if outside is None:
            makers = (entry for entry in self._tape.entries if any(out and out.slot == slot for out in entry.outs))
            entry = next(makers, None)
            if entry is None or slot in self._tape.descends or entry.writes or any(step.random for step in entry.steps):
                raise Changing
            self.call(entry, tensors)
            return tensors[slot]
        tensor = None if outside.home is None else outside.home.tensor()
        if outside.home is None or tensor is None:
            raise Changing
        self.used.append((outside.home, mark_of(tensor)))
        tensors[slot] = _plain(self.weigh(tensor) if outside.kind == "parameter" else tensor.detach())
        return tensors[slot]

    def _filled(self, value: Any, tensors: dict[int, Tensor]) -> Any:  # noqa: ANN401
        """Return an argument of the tape, nested or not, with tensors instead of references to slots."""
        if isinstance(value, Ref):
            return self.tensor(value.slot, tensors)
        if isinstance(value, dict):
            return {name: self._filled(item, tensors) for name, item in value.items()}
        if isinstance(value, slice):
            return slice(*(self._filled(item, tensors) for item in (value.start, value.stop, value.step)))
        return type(value)(self._filled(item, tensors) for item in value) if type(value) in (tuple, list) else value


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor in single precision; a copy of one that allows no gradients."""
    if tensor.is_floating_point() and tensor.dtype != torch.float32:
        return tensor.float()
    return tensor.clone() if tensor.is_inference() else tensor
