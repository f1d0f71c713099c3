"""Notes of the operations inside the calls of a running forward pass, under the numbers of a known tape where the pass agrees with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from visattn.capturing.placing.apart import inside, is_apart
from visattn.capturing.placing.nodes import Node, Nodes
from visattn.capturing.placing.steps import APART, Recorder, Step
from visattn.capturing.placing.table import contents_of
from visattn.capturing.trace.arguments import tensors_in
from visattn.capturing.trace.living import Living
from visattn.capturing.trace.operations import Operation, operation_of
from visattn.capturing.trace.tape import Entry, Tape

_APART = {name.removeprefix("linalg_"): op for name, op in APART.items()}
_ASKING: set[Callable[..., Any]] = set()  # functions that have returned no tensor


def plainly(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Run a call without notes, in the dispatch modes that are open around it."""
    if is_apart():
        with inside():
            return func(*args, **kwargs)
    return func(*args, **kwargs)


class Noting:
    """Recorder of steps for a tracer."""

    def __init__(self, stored: Callable[[Tensor], tuple[str, str] | None]) -> None:
        """Start without steps; `stored` returns kind and name of a tensor of the model."""
        self._stored, self._recorder = stored, Recorder(Nodes(stored), contents_of)
        self._lengths: set[Node] = set()  # tensors of a known tape whose shape the model has read
        self._resumed = -1  # number of entries at which the tensors of a known tape were taken over

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Run a call and note its operations."""
        try:
            operation = operation_of(func)
            if operation.own and operation.name in _APART:
                return self._apart(_APART[operation.name], func, args, kwargs)
            with self._recorder:
                return plainly(func, args, kwargs)
        finally:
            self._recorder.nodes.settle()

    def _apart(
        self,
        op: OpOverload | None,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:  # noqa: ANN401
        """Run a call that must not run under a dispatch mode, and note it as one operation; without one, what it writes is unknown."""
        if op is not None:
            named = {"self" if name == "input" else name: value for name, value in kwargs.items() if name != "return_indices"}
            return self._recorder.noted(op, partial(func, *args, **kwargs), args, named)
        out = func(*args, **kwargs)
        for tensor in tensors_in(kwargs.get("out")):
            self._recorder.nodes.overwritten(tensor)
        return out

    def taken(self) -> tuple[Step, ...]:
        """Return the steps noted so far, and forget them."""
        return tuple(self._recorder.taken())

    def asks(self, func: Callable[..., Any]) -> bool:
        """Check whether a function is known to return no tensor."""
        return func in _ASKING

    def asked(self, func: Callable[..., Any]) -> None:
        """Note that a function has returned no tensor."""
        _ASKING.add(func)

    def share(self, tape: Tape) -> None:
        """Let a tape that is recorded grow with the recorder."""
        tape.facts, tape.origins = self._recorder.nodes.facts, self._recorder.nodes.outside

    def resume(self, tape: Tape, at: int, living: Living) -> None:
        """Take the tensors of a known tape over, with which the forward pass has agreed up to entry `at`."""
        if self._resumed == at:
            return
        self._resumed = at
        tensors = [
            (tape.nodes[slot], tensor)
            for slot, known in enumerate(living.refs)
            if slot in tape.nodes and (tensor := known()) is not None and living.slot(tensor) == slot
        ]
        self._recorder = Recorder(Nodes.resumed(self._stored, tape.facts, tape.origins, tensors), contents_of)
        self._recorder.steps += [Step(None, {"length": node}) for node in sorted(self._lengths)]

    def outside(self, tape: Tape, slot: int, tensor: Tensor, kind: str, name: str) -> None:
        """Note the node of a tensor that no call has made."""
        nodes = self._recorder.nodes
        tape.nodes[slot] = nodes.begin(tensor, kind, name) if kind in ("pixels", "input") else nodes.of(tensor)

    def number(self, tape: Tape, entry: Entry, results: Sequence[Any], shared: Sequence[tuple[int, Tensor]]) -> None:
        """Note the node of each slot that a call has made or overwritten."""
        nodes = self._recorder.nodes
        for made, result in zip(entry.outs, results, strict=True):
            if made is not None:
                tape.nodes[made.slot] = nodes.of(result)
        for (_, after), (_, tensor) in zip(entry.rewritten, shared, strict=True):
            tape.nodes[after] = nodes.of(tensor)

    def overwritten(self, tensor: Tensor) -> None:
        """Note that the memory of a tensor was written by code that is not intercepted."""
        self._recorder.nodes.overwritten(tensor)

    def stands_for(self, noted: Sequence[Any], used: Sequence[Any]) -> None:
        """Give the results that the model uses the numbers of equal ones, which another run of the call has made."""
        for one, other in zip(noted, used, strict=False):
            if isinstance(one, Tensor) and isinstance(other, Tensor) and one is not other:
                self._recorder.nodes.stands_for(one, other)

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
        """Note that a tensor will hold the content of another."""
        self._recorder.nodes.forget(tensor)

    def handed_out(self, operation: Operation, tensor: Tensor) -> None:
        """Note a tensor whose memory was exchanged, or whose numbers other code may read."""
        if operation.name == "set data":
            self._recorder.nodes.forget(tensor)
        if operation.tells:
            self.read(tensor)

    def clear(self) -> None:
        """Release all tensors."""
        self._recorder.nodes.clear()
