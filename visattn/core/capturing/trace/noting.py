"""Notes of the operations inside the calls of a running forward pass.

Where the pass agrees with a known tape, tensors keep the numbers (nodes) that they have there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from visattn.core.capturing.placing.modes_around import aside, inside
from visattn.core.capturing.placing.nodes import Node, Nodes
from visattn.core.capturing.placing.operation_table import contents_of
from visattn.core.capturing.placing.steps import APART, Recorder, Step
from visattn.core.capturing.trace.call_tensors import tensors_in
from visattn.core.capturing.trace.living import Living
from visattn.core.capturing.trace.operations import Operation, operation_of
from visattn.core.capturing.trace.tape import Entry, Tape

_APART = {name.removeprefix("linalg_"): op for name, op in APART.items()}
_RETURNING_NO_TENSOR: set[Callable[..., Any]] = set()  # functions that have returned none so far, such as `Tensor.size`


def plainly(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Run a call without notes, in the dispatch modes that the model or its surroundings have opened."""
    if aside.modes[-1]:  # modes were taken off
        with inside():
            return func(*args, **kwargs)
    return func(*args, **kwargs)


class Noting:
    """Recorder of steps (operations of PyTorch, such as `aten.addmm`) inside the calls of a forward pass, for its tracer."""

    def __init__(self, stored: Callable[[Tensor], tuple[str, str] | None]) -> None:
        """Start without steps; `stored` returns kind and name of a tensor of the model."""
        self._stored, self._recorder = stored, Recorder(Nodes(stored), contents_of)
        self._lengths: set[Node] = set()  # tensors of a known tape whose shape the model has read
        self._resumed_at: int | None = None  # number of entries at which the tensors of a known tape were taken over

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Run a call, note the operations that it consists of, and return its result."""
        try:
            operation = operation_of(func)
            if operation.own and operation.name in _APART:
                return self._run_apart(_APART[operation.name], func, args, kwargs)
            with self._recorder:
                return plainly(func, args, kwargs)
        finally:
            self._recorder.nodes.settle()

    def _run_apart(
        self,
        op: OpOverload | None,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:  # noqa: ANN401
        """Run a call that computes something else under a dispatch mode, such as `max_pool1d`, and note it as one operation `op`.

        Without an operation, what the call writes into `out=` is of unknown origin.
        """
        if op is not None:
            op_kwargs = {"self" if name == "input" else name: value for name, value in kwargs.items() if name != "return_indices"}
            return self._recorder.noted(op, partial(func, *args, **kwargs), args, op_kwargs)
        out = func(*args, **kwargs)
        for tensor in tensors_in(kwargs.get("out")):
            self._recorder.nodes.overwritten(tensor)
        return out

    def taken(self) -> tuple[Step, ...]:
        """Return the steps (operations of PyTorch) that were noted since the last time, and forget them."""
        return tuple(self._recorder.taken())

    def asks(self, func: Callable[..., Any]) -> bool:
        """Check whether a function is known to return no tensor, so that it only asks for metadata."""
        return func in _RETURNING_NO_TENSOR

    def asked(self, func: Callable[..., Any]) -> None:
        """Note that a function has returned no tensor."""
        _RETURNING_NO_TENSOR.add(func)

    def share(self, tape: Tape) -> None:
        """Let a tape that is recorded hold the forms and origins of all tensors that the recorder will meet."""
        tape.facts, tape.origins = self._recorder.nodes.facts, self._recorder.nodes.outside

    def resume(self, tape: Tape, at: int, living: Living) -> None:
        """Start to record steps in the middle of a forward pass, which has agreed with a known tape up to entry `at`.

        Its tensors, which nobody has noted in this pass, get the numbers (nodes) that they have on the tape.
        """
        if self._resumed_at == at:
            return
        self._resumed_at = at
        tensors = [
            (tape.nodes[slot], tensor)
            for slot, ref in enumerate(living.refs)
            if slot in tape.nodes and (tensor := ref()) is not None and living.slot(tensor) == slot
        ]
        nodes = Nodes.resumed(self._stored, tape.facts, tape.origins, tensors)
        self._recorder = Recorder(nodes, contents_of)
        self._recorder.steps += [Step(None, {"length": node}) for node in sorted(self._lengths)]

    def outside(self, tape: Tape, slot: int, tensor: Tensor, kind: str, name: str) -> None:
        """Note the node (number among the steps) of a tensor that no call has made, such as the image or a parameter."""
        nodes = self._recorder.nodes
        tape.nodes[slot] = nodes.begin(tensor, kind, name) if kind in ("pixels", "input") else nodes.of(tensor)

    def number(self, tape: Tape, entry: Entry, results: Sequence[Any], shared: Sequence[tuple[int, Tensor]]) -> None:
        """Note the node (number among the steps) of each tensor that a call has made or overwritten, by slot (number on the tape).

        `shared` are the tensors that share memory with an overwritten one, with their old slots.
        """
        nodes = self._recorder.nodes
        for result_on_tape, result in zip(entry.outs, results, strict=True):
            if result_on_tape is not None:
                tape.nodes[result_on_tape.slot] = nodes.of(result)
        for (_, new_slot), (_, tensor) in zip(entry.rewritten, shared, strict=True):
            tape.nodes[new_slot] = nodes.of(tensor)

    def overwritten(self, tensor: Tensor) -> None:
        """Note that the memory of a tensor was written by code that is not intercepted."""
        self._recorder.nodes.overwritten(tensor)

    def stands_for(self, noted: Sequence[Any], used: Sequence[Any]) -> None:
        """Give the results of a call that the model uses the numbers (nodes) of equal results of a second run.

        The first run was not noted, so the call was repeated; `noted` are the results of the repetition.
        """
        for noted_result, used_result in zip(noted, used, strict=False):
            if isinstance(noted_result, Tensor) and isinstance(used_result, Tensor) and noted_result is not used_result:
                self._recorder.nodes.stands_for(noted_result, used_result)

    @property
    def dynamic(self) -> bool:
        """True if the shape of some tensor depends on what tensors hold."""
        return self._recorder.nodes.dynamic

    def read_length(self, tensor: Tensor) -> None:
        """Note that the model reads the shape of a tensor."""
        self._recorder.read_length(tensor)

    def keep_length(self, tape: Tape, slot: int | None) -> None:
        """Note that the model reads the shape of a tensor of a known tape, for the case that it leaves this tape."""
        if slot in tape.nodes and tape.facts[tape.nodes[slot]].dynamic:
            self._lengths.add(tape.nodes[slot])

    def read(self, tensor: Tensor) -> None:
        """Note that other code may read the numbers of a tensor."""
        self._recorder.read(tensor)

    def exchanged(self, tensor: Tensor) -> None:
        """Note that the model swaps the content of a tensor with that of another, so that its origin is unknown."""
        self._recorder.nodes.forget(tensor)

    def handed_out(self, operation: Operation, tensor: Tensor) -> None:
        """Note a tensor that got other memory by `tensor.data = ...`, or whose numbers other code may read, as by `item()`."""
        if operation.name == "set data":
            self._recorder.nodes.forget(tensor)
        if operation.tells:
            self.read(tensor)

    def clear(self) -> None:
        """Release all tensors."""
        self._recorder.nodes.clear()
