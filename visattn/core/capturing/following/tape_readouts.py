"""Readout of a model, as its tape proves it: the gradient of the output at the tokens that it is computed from.

The gradient is taken through the part of the tape that is linear in these tokens, whose values therefore do not matter. It is the
readout if this part ends at the output, or at one tensor of which each token gives the same multiple: what follows then changes no
share.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from visattn.core.capturing.following.cut import Cut
from visattn.core.capturing.placing.nodes import Node, tensors_in_nodes
from visattn.core.capturing.placing.operation_table import row_of
from visattn.core.capturing.placing.steps import Step
from visattn.core.capturing.placing.weak import Home
from visattn.core.capturing.trace.call_tensors import SWITCH, results_of
from visattn.core.capturing.trace.tape import Entry, Ref, Tape
from visattn.core.capturing.trace.verdicts import Verdict, Verdicts, mark_of
from visattn.core.records import PROBES, Readout, probes_of, shares_of

APART = "the model's output holds each token apart"
VALUES = "which tokens the output is computed from depends on their values"
_PARALLEL = 1e-4  # largest difference between directions that count as one


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
    """Gradients of the output of a tape at the tensors of a cut, taken again when the weights they depend on have changed.

    Attributes:
        images: Number of images.
        named: Readouts with these shares, by part of the cut, once their queries have names.
    """

    def __init__(self, tape: Tape, cut: Cut, images: int) -> None:
        """Find the calls behind the cut that are linear in its tokens."""
        self._tape, self._cut, self.images = tape, cut, images
        self._linear, self._ends = _linear(tape, cut)
        self._repeats = Repeats(tape)
        self._shares: tuple[Tensor, ...] | None = None
        self._taken = False
        self.named: dict[int, Readout] = {}

    def ask(self, verdicts: Verdicts) -> Verdict | None:
        """Ask whether all weights are those that the shares were taken with; None if there are none to compare."""
        pairs = [(_marked(home), mark) for home, mark in self._repeats.used]
        conditions = [(now == mark).all() for now, mark in pairs if now is not None and _fits(now, mark)]
        return verdicts.on(torch.stack(conditions).all()) if conditions and len(conditions) == len(pairs) else None

    def shares(self, weights_are_same: Verdict | None = None) -> tuple[Tensor, ...] | None:
        """Return the shares `(B, N)` of the tokens in each part of the cut, on the CPU; None if they depend on values.

        `weights_are_same` is the outcome of `ask`, if it was asked.
        """
        if self._taken and (self._are_same() if weights_are_same is None else weights_are_same()):
            return self._shares
        self._repeats.used.clear()
        self.named.clear()
        self._taken = True
        try:
            with _apart_from_the_model(self._tape.device):
                self._shares = self._measured()
                if self._shares is not None and not any(bool(part.any()) for part in self._shares):
                    self._shares = self._measured(torch.randn_like)  # a head of zeros, as before training
            self._shares = None if self._shares is None else tuple(map(Tensor.cpu, self._shares))
        except Exception:  # a call that cannot be repeated
            self._shares = None
        return self._shares

    def _are_same(self) -> bool:
        return all(_is_same(_marked(home), mark) for home, mark in self._repeats.used)

    def _measured(self, weigh: Callable[[Tensor], Tensor] = Tensor.detach) -> tuple[Tensor, ...] | None:
        """Take the gradient of the ends of the linear part at the tokens, and return the shares; None if they depend on values.

        `weigh` takes each parameter and returns the one to compute with: by default itself.
        """
        self._repeats.weigh = weigh
        ends_at_output = set(self._ends) <= set(self._cut.outputs)
        behind_cut = self._tape.entries[self._cut.entries[0] :]
        if any(entry.func is SWITCH for entry in behind_cut):
            return None
        if not self._ends or not (ends_at_output or len(self._ends) == 1):
            return None
        tensors: dict[int, Tensor] = {}  # by slot
        for part in self._cut.parts:
            shape = self._tape.facts[self._tape.nodes[part.slot]].shape
            tensors[part.slot] = torch.zeros(shape, device=self._tape.device, requires_grad=True)
        tokens = [tensors[part.slot] for part in self._cut.parts]
        for number in self._linear:
            self._repeats.call(self._tape.entries[number], tensors)
        ends = [tensors[slot] for slot in self._ends if tensors[slot].requires_grad]
        return self._shares_at(tokens, ends, at_output=ends_at_output)

    def _shares_at(self, tokens: Sequence[Tensor], ends: Sequence[Tensor], *, at_output: bool) -> tuple[Tensor, ...] | None:
        """Return the shares of tokens in tensors that were computed from them; None if what follows these changes the shares.

        What follows a single tensor changes no share if the gradients of all tokens are parallel, as behind a weighted sum.
        """
        parts = list(zip(self._cut.parts, tokens, strict=True))
        if not ends:
            return tuple(torch.zeros(part.take(x, self.images).shape[:2]) for part, x in parts)
        squares = [torch.zeros((), device=self._tape.device, dtype=torch.float64)] * len(tokens)
        for probes in _probes(ends, self.images, at_output=at_output):
            raw = torch.autograd.grad(ends, tokens, probes, retain_graph=True, allow_unused=True)
            filled = [torch.zeros_like(x) if gradient is None else gradient for x, gradient in zip(tokens, raw, strict=True)]
            gradients = [part.take(x, self.images).double() for part, x in zip(self._cut.parts, filled, strict=True)]
            if not at_output:
                of_all_tokens = torch.cat([gradient.flatten(1, -2) for gradient in gradients], 1)  # (B, N, D)
                if not all(map(_are_parallel, of_all_tokens)):
                    return None
            squares = [total + gradient.square().sum(-1) for total, gradient in zip(squares, gradients, strict=True)]
        return tuple(shares_of(total.sqrt()) for total in squares)


def _marked(home: Home) -> Tensor | None:
    tensor = home.tensor()
    return None if tensor is None else mark_of(tensor)


def _is_same(now: Tensor | None, mark: Tensor) -> bool:
    """Check whether the mark of a weight is that of the time before."""
    return now is not None and _fits(now, mark) and torch.equal(now, mark)


def _fits(now: Tensor, mark: Tensor) -> bool:
    return (now.dtype, now.shape, now.device) == (mark.dtype, mark.shape, mark.device)


def _probes(ends: Sequence[Tensor], images: int, *, at_output: bool) -> list[list[Tensor]]:
    """Return gradients at the ends: those that stand for all numbers of an output, or a random one, which no two tokens share."""
    generator, device = torch.Generator().manual_seed(0), ends[0].device
    are_rows_images = at_output and all(len(end) == images for end in ends)
    if not are_rows_images:
        count = PROBES if at_output else 1
        return [[torch.randn(end.shape, generator=generator).to(device) for end in ends] for _ in range(count)]
    sizes = [end[0].numel() for end in ends]
    return [
        [part.to(device).reshape(end.shape) for part, end in zip(torch.split(probe, sizes, 1), ends, strict=True)]
        for probe in probes_of(images, sum(sizes))
    ]


def _are_parallel(vectors: Tensor) -> bool:
    """Check whether all vectors `(N, D)` that are not zero have one direction, or the opposite one."""
    norms = torch.linalg.vector_norm(vectors, dim=-1)
    is_nonzero = norms > 1e-12 * norms.max()
    directions = vectors[is_nonzero] / norms[is_nonzero, None]
    return not len(directions) or bool(((directions @ directions[0]).abs() > 1 - _PARALLEL).all())


# --- the linear part


def _linear(tape: Tape, cut: Cut) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Find the calls behind a cut that are linear in its tokens, as a mean or a linear layer is.

    Returns:
        Indices of these entries, and the slots where the linear part ends: those that other calls continue from, and outputs.
    """
    linear_slots, later_slots = {part.slot for part in cut.parts}, set[int]()
    entries, ends = list[int](), dict[int, None]()
    for number in cut.entries:
        entry = tape.entries[number]
        arguments = {ref.slot for ref in entry.refs}
        linear_arguments = arguments & linear_slots
        reads_later = bool(arguments & later_slots)
        if not linear_arguments and not reads_later:
            continue
        results = {out.slot for out in entry.outs if out is not None} | {after for _, after in entry.rewritten}
        may_be_linear = not reads_later and not entry.writes
        if may_be_linear and is_linear(entry, {int(tape.nodes[slot]) for slot in linear_arguments}):
            linear_slots |= results
            entries.append(number)
        else:
            later_slots |= results
            ends.update(dict.fromkeys(sorted(linear_arguments)))
    ends.update(dict.fromkeys(slot for slot in cut.outputs if slot in linear_slots))
    return tuple(entries), tuple(ends)


def is_linear(entry: Entry, nodes: Collection[int], *, in_place: bool = False) -> bool:
    """Check whether all steps of a call are linear in these nodes.

    Args:
        entry: The call.
        nodes: Numbers of the tensors in question.
        in_place: Whether it may overwrite its first argument, as `+=` does.
    """
    if not entry.steps:
        return entry.attention is None and all(slot is not None for slot in entry.before)
    if not all(made is None or made.floating for made in entry.outs):
        return False
    reached = set(nodes)
    for step in entry.steps:
        arguments = {name for name, value in step.given.items() if any(node in reached for node in tensors_in_nodes(value))}
        if not arguments:
            continue
        if not _is_linear_step(step, arguments, in_place=in_place):
            return False
        results = (*step.outs, *(after for _, after in step.written))
        reached |= {node for node in results if node is not None}
    return True


def _is_linear_step(step: Step, arguments: set[str], *, in_place: bool = False) -> bool:
    """Check whether a step is linear in the arguments of these names."""
    if step.op is None or step.random:
        return False
    name, row = row_of(step.op)
    if row is None:
        return False
    if row.makes:  # a tensor of zeros or ones in the shape of its argument
        return True
    writes = step.written and name != "as_strided"
    if writes and not (in_place and _writes_to_first(step)):
        return False
    if step.given.get("rounding_mode") is not None:
        return False
    return row.linear is not None and row.linear(arguments)


def _writes_to_first(step: Step) -> bool:
    """Check whether a step overwrites its first argument alone, whose memory no other tensor shares."""
    written: list[Node] = [before for before, _ in step.written]
    return written == [step.given.get("self")] and not step.sharing
