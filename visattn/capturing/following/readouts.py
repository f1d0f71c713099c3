"""Readout of a model, as its tape proves it: the gradient of the output at the tokens that it is computed from.

The gradient is taken through the part of the tape that is linear in these tokens, whose values therefore do not matter. It is the readout
if this part ends at the output, or at one tensor of which each token gives the same multiple: what follows then changes no share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from visattn.capturing.following.cut import Cut
from visattn.capturing.placing.nodes import tensors_in_nodes
from visattn.capturing.placing.steps import Step
from visattn.capturing.placing.table import row_of
from visattn.capturing.placing.weak import Home
from visattn.capturing.trace.arguments import SWITCH, results_of
from visattn.capturing.trace.tape import Entry, Ref, Tape
from visattn.records import PROBES, probes_of, shares_of

APART = "the model's output holds each token apart"
VALUES = "which tokens the output is computed from depends on their values"
_MOST = 1 << 22  # numbers of a weight of which a copy is kept; the gradient at a larger one is taken each time
_PARALLEL = 1e-4  # largest difference between directions that count as one


class _Changing(Exception):
    """Error: a value that the gradient needs is not the same in each forward pass, or is gone."""


@contextmanager
def _apart_from_the_model(device: torch.device) -> Iterator[None]:
    """Record a graph whatever the model's modes are, and show nothing of it to the hooks that it has set for its own graph."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x))
        yield


class Readouts:
    """Gradients of the output of a tape at the tensors of a cut, taken again when the weights they depend on have changed."""

    def __init__(self, tape: Tape, cut: Cut, images: int) -> None:
        """Find the linear part."""
        self._tape, self._cut, self.images = tape, cut, images
        self._linear, self._ends = _linear(tape, cut)
        self._used: list[tuple[Home, Tensor]] = []  # places of the weights, and copies of them
        self._shares: tuple[Tensor, ...] | None = None
        self._taken = False
        self._weigh: Callable[[Tensor], Tensor] = Tensor.detach

    def shares(self) -> tuple[Tensor, ...] | None:
        """Return the shares `(B, N)` of the tokens in each part of the cut; None if they depend on values."""
        if not self._taken or not all(_is_same(home.tensor(), copy) for home, copy in self._used):
            self._used.clear()
            self._taken = True
            try:
                with _apart_from_the_model(self._tape.device):
                    self._shares = self._taken_now()
                    if self._shares is not None and not any(bool(part.any()) for part in self._shares):
                        self._shares = self._taken_now(torch.randn_like)  # a head of zeros, as before training
            except Exception:  # a call that cannot be repeated
                self._shares = None
        return self._shares

    def _taken_now(self, weigh: Callable[[Tensor], Tensor] = Tensor.detach) -> tuple[Tensor, ...] | None:
        """Take the gradient with the model's own parameters, or with what `weigh` makes of them."""
        self._weigh = weigh
        at_output = set(self._ends) <= set(self._cut.outputs)
        if any(entry.func is SWITCH for entry in self._tape.entries[self._cut.entries[0] :]):
            return None
        if not self._ends or not (at_output or len(self._ends) == 1):
            return None
        values: dict[int, Tensor] = {}
        for slot, _, _ in self._cut.parts:
            shape = self._tape.facts[self._tape.nodes[slot]].shape
            values[slot] = torch.zeros(shape, device=self._tape.device, requires_grad=True)
        tokens = [values[part.slot] for part in self._cut.parts]
        for number in self._linear:
            self._repeat(self._tape.entries[number], values)
        ends = [values[slot] for slot in self._ends if values[slot].requires_grad]
        if not ends:
            return tuple(
                torch.zeros(part.take(x, self.images).shape[:2]) for part, x in zip(self._cut.parts, tokens, strict=True)
            )
        squares = [torch.zeros((), device=self._tape.device, dtype=torch.float64)] * len(tokens)
        for probes in _probes(ends, self.images, at_output=at_output):
            slopes = torch.autograd.grad(ends, tokens, probes, retain_graph=True, allow_unused=True)
            taken = [
                part.take(torch.zeros_like(x) if slope is None else slope, self.images).double()
                for part, x, slope in zip(self._cut.parts, tokens, slopes, strict=True)
            ]
            if not at_output and not all(map(_parallel, torch.cat([x.flatten(1, -2) for x in taken], 1))):
                return None
            squares = [total + x.square().sum(-1) for total, x in zip(squares, taken, strict=True)]
        return tuple(shares_of(total.sqrt()) for total in squares)

    def _repeat(self, entry: Entry, values: dict[int, Tensor]) -> None:
        """Repeat a call; `values` holds the tensors by slot."""
        args, kwargs = self._given(entry.args, values), self._given(entry.kwargs, values)
        results = results_of(args, entry.func(*args, **kwargs), writes=False)
        for made, result in zip(entry.outs, results, strict=True):
            if made is not None:
                values[made.slot] = _plain(result)

    def _given(self, value: Any, values: dict[int, Tensor]) -> Any:  # noqa: ANN401
        if isinstance(value, Ref):
            return self._value(value.slot, values)
        if isinstance(value, dict):
            return {name: self._given(item, values) for name, item in value.items()}
        if isinstance(value, slice):
            return slice(*(self._given(item, values) for item in (value.start, value.stop, value.step)))
        return type(value)(self._given(item, values) for item in value) if type(value) in (tuple, list) else value

    def _value(self, slot: int, values: dict[int, Tensor]) -> Tensor:
        """Return the tensor of a slot: one of the model, or one that is computed from those of the model alone."""
        if slot in values:
            return values[slot]
        outside = self._tape.outside.get(slot)
        if outside is None:
            entry = next((entry for entry in self._tape.entries if any(out and out.slot == slot for out in entry.outs)), None)
            if entry is None or slot in self._tape.descends or entry.writes or any(step.random for step in entry.steps):
                raise _Changing
            self._repeat(entry, values)
            return values[slot]
        tensor = None if outside.home is None else outside.home.tensor()
        if outside.home is None or tensor is None:
            raise _Changing
        self._used.append((outside.home, tensor.detach().clone() if tensor.numel() <= _MOST else tensor.new_empty(0)))
        values[slot] = _plain(self._weigh(tensor) if outside.kind == "parameter" else tensor.detach())
        return values[slot]


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor in single precision; a copy of one that allows no gradients."""
    if tensor.is_floating_point() and tensor.dtype != torch.float32:
        return tensor.float()
    return tensor.clone() if tensor.is_inference() else tensor


def _is_same(tensor: Tensor | None, copy: Tensor) -> bool:
    """Check whether weights are still those of a copy. Their contents are compared, since writes through `.data` are not counted."""
    return tensor is not None and tensor.dtype == copy.dtype and torch.equal(tensor.detach(), copy)


def _probes(ends: Sequence[Tensor], images: int, *, at_output: bool) -> list[list[Tensor]]:
    """Return gradients at the ends: those that stand for all numbers of an output, or a random one, which no two tokens share."""
    generator, device = torch.Generator().manual_seed(0), ends[0].device
    if not at_output or any(len(end) != images for end in ends):
        return [
            [torch.randn(end.shape, generator=generator).to(device) for end in ends] for _ in range(PROBES if at_output else 1)
        ]
    sizes = [end[0].numel() for end in ends]
    return [
        [part.to(device).reshape(end.shape) for part, end in zip(torch.split(probe, sizes, 1), ends, strict=True)]
        for probe in probes_of(images, sum(sizes))
    ]


def _parallel(vectors: Tensor) -> bool:
    """Check whether all vectors `(N, D)` that are not zero have one direction, or the opposite one."""
    norms = torch.linalg.vector_norm(vectors, dim=-1)
    read = norms > 1e-12 * norms.max()
    directions = vectors[read] / norms[read, None]
    return not len(directions) or bool(((directions @ directions[0]).abs() > 1 - _PARALLEL).all())


# --- the linear part


def _linear(tape: Tape, cut: Cut) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the entries that are linear in the tokens of a cut, and the slots that others continue from, or that are the output."""
    reached, beyond, entries, ends = {part.slot for part in cut.parts}, set[int](), list[int](), dict[int, None]()
    for number in cut.entries:
        entry = tape.entries[number]
        before = {ref.slot for ref in entry.refs}
        here = before & reached
        if not here and not before & beyond:
            continue
        outs = {out.slot for out in entry.outs if out is not None} | {after for _, after in entry.rewritten}
        if not before & beyond and not entry.writes and _is_linear(entry, {int(tape.nodes[slot]) for slot in here}):
            reached |= outs
            entries.append(number)
        else:
            beyond |= outs
            ends.update(dict.fromkeys(sorted(here)))
    ends.update(dict.fromkeys(slot for slot in cut.outputs if slot in reached))
    return tuple(entries), tuple(ends)


def _is_linear(entry: Entry, tokens: set[int]) -> bool:
    """Check whether the steps of a call are linear in these nodes."""
    if not entry.steps:
        return entry.attention is None and all(slot is not None for slot in entry.before)
    if not all(made is None or made.floating for made in entry.outs):
        return False
    reached = set(tokens)
    for step in entry.steps:
        coming = {name for name, value in step.given.items() if any(node in reached for node in tensors_in_nodes(value))}
        if not coming:
            continue
        if not _is_linear_step(step, coming):
            return False
        reached |= {node for node in (*step.outs, *(after for _, after in step.written)) if node is not None}
    return True


def _is_linear_step(step: Step, coming: set[str]) -> bool:
    if step.op is None or step.random:
        return False
    name, row = row_of(step.op)
    if row is None or row.makes:
        return row is not None
    if (step.written and name != "as_strided") or step.given.get("rounding_mode") is not None:
        return False
    return row.linear is not None and row.linear(coming)
