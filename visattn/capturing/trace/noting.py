"""Notes of the operations inside the calls of a running forward pass, under the numbers of a known tape where the pass agrees with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from visattn.capturing.placing.steps import Nodes, Recorder, Step
from visattn.capturing.placing.table import contents_of
from visattn.capturing.trace.living import Living
from visattn.capturing.trace.operations import Operation
from visattn.capturing.trace.tape import Entry, Tape

STEPS = False  # whether operations are noted, for `visattn.capturing.placing`, which no conclusion is drawn from yet
_ASKING: set[Callable[..., Any]] = set()  # functions that have returned no tensor


def plainly(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Run a call without notes."""
    return func(*args, **kwargs)


class Noting:
    """Recorder of steps for a tracer; it does nothing unless `STEPS` is set.

    Attributes:
        wanted: Whether steps are noted.
    """

    def __init__(self, stored: Callable[[Tensor], tuple[str, str] | None]) -> None:
        """Start without steps; `stored` returns kind and name of a tensor of the model."""
        self.wanted = STEPS
        self._stored, self._recorder = stored, Recorder(Nodes(stored), contents_of)
        self._resumed = -1  # number of entries at which the tensors of a known tape were taken over

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Run a call and note its operations."""
        try:
            with self._recorder:
                return func(*args, **kwargs)
        finally:
            self._recorder.nodes.settle()

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
        if not self.wanted or self._resumed == at:
            return
        self._resumed = at
        tensors = [
            (tape.nodes[slot], tensor)
            for slot, known in enumerate(living.refs)
            if slot in tape.nodes and (tensor := known()) is not None and living.slot(tensor) == slot
        ]
        self._recorder = Recorder(Nodes.resumed(self._stored, tape.facts, tape.origins, tensors), contents_of)

    def outside(self, tape: Tape, slot: int, tensor: Tensor, kind: str, name: str) -> None:
        """Note the node of a tensor that no call has made."""
        if self.wanted:
            nodes = self._recorder.nodes
            tape.nodes[slot] = nodes.begin(tensor, kind, name) if kind in ("pixels", "input") else nodes.of(tensor)

    def number(self, tape: Tape, entry: Entry, results: Sequence[Any], shared: Sequence[tuple[int, Tensor]]) -> None:
        """Note the node of each slot that a call has made or overwritten."""
        if not self.wanted:
            return
        nodes = self._recorder.nodes
        for made, result in zip(entry.outs, results, strict=True):
            if made is not None:
                tape.nodes[made.slot] = nodes.of(result)
        for (_, after), (_, tensor) in zip(entry.rewritten, shared, strict=True):
            tape.nodes[after] = nodes.of(tensor)

    def overwritten(self, tensor: Tensor) -> None:
        """Note that the memory of a tensor was written by code that is not intercepted."""
        self._recorder.nodes.overwritten(tensor)

    def handed_out(self, operation: Operation, tensor: Tensor) -> None:
        """Note a tensor whose memory was exchanged, or whose numbers other code may read."""
        if not self.wanted:
            return
        if operation.name == "set data":
            self._recorder.nodes.forget(tensor)
        if operation.exposes or operation.name == "tolist":
            self._recorder.read(tensor)

    def clear(self) -> None:
        """Release all tensors."""
        self._recorder.nodes.clear()
