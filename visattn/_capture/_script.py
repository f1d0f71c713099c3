"""Where a known forward attends, written down once and read ever after: between those places the mode is off.

A function mode makes every operation of a forward slower, most of all behind a large one. So in the second forward of a size each
attention is noted as a place in the course of things: after which call of which module it comes, and how many function calls later. In
the third the mode is on from that module to the next one only. Whatever then is not as it was written ends in an error: another
function at that place or more of them around it, other sizes, or a place that is never reached.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils.hooks import RemovableHandle

from visattn.errors import CaptureError

OTHERWISE = "{} was called otherwise than in the forward before, at the same size. Run the model again."

_this = threading.local()  # whether this thread reads
_ALL = 1 << 60  # more function calls than any forward makes

Moment = tuple[int, bool]  # number of a module; whether its call ended there or began


class Step(NamedTuple):
    """A function call of interest.

    Attributes:
        moment: The last before it; None if there was none since the step before.
        times: How often that moment was met since the step before.
        passed: Function calls since then.
        func: What is called.
        layer: Dotted name of the owner; empty for a function that is entered.
        owner: Its number in the model.
        operand: Which of its tensors are weights, where they are written out.
        until: The next moment; None if the next step comes first.
        left: Function calls before that.
    """

    moment: Moment | None
    times: int
    passed: int
    func: Callable[..., Any]
    layer: str
    owner: int
    operand: int | None
    until: Moment | None = None
    left: int = 0


class Script(Protocol):
    """What the mode asks.

    Attributes:
        passing: How many more function calls are of no interest.
    """

    passing: int

    def met(self, func: Callable[..., Any]) -> Step | None:
        """The step that a function call is, where that is known; asked about each one that `passing` does not cover."""

    def note(self, func: Callable[..., Any], layer: str = "", owner: int = 0, operand: int | None = None) -> None:
        """State that the call that was met last is a step."""

    def close(self) -> None:
        """Leave model and mode as they were."""


class Writer:
    """Writes `steps` while the mode is on."""

    passing = 0

    def __init__(self, modules: Sequence[nn.Module], elsewhere: Callable[[], bool]) -> None:
        """Begin with the forward of the first module, which has all the others."""
        self.steps: list[Step] = []
        self._moment: Moment | None = None
        self._times: Counter[Moment] = Counter()
        self._passed = 0
        moments = ((number, after) for number in range(1, len(modules)) for after in (False, True))
        self._handles = _hooked(modules, moments, elsewhere, self._came)

    def met(self, _func: Callable[..., Any]) -> None:
        """Count it."""
        self._passed += 1

    def note(self, func: Callable[..., Any], layer: str = "", owner: int = 0, operand: int | None = None) -> None:
        """Write a step."""
        times = 0 if self._moment is None else self._times[self._moment]
        self.steps.append(Step(self._moment, times, self._passed - 1, func, layer, owner, operand))
        self._moment, self._passed = None, 0
        self._times.clear()

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _came(self, moment: Moment) -> None:
        if self._moment is None and self.steps:
            self.steps[-1] = self.steps[-1]._replace(until=moment, left=self._passed)
        self._times[moment] += 1
        self._moment, self._passed = moment, 0


class Reader:
    """Turns the mode on where a step is near."""

    def __init__(
        self, steps: Sequence[Step], mode: TorchFunctionMode, modules: Sequence[nn.Module], elsewhere: Callable[[], bool]
    ) -> None:
        """Begin with the forward of the first module; the mode must be `free`."""
        _this.reads = True
        self._steps, self._mode, self._on = iter(steps), mode, True
        self._done: Step | None = None  # until it is left
        self._next()
        if self._step is None or self._step.moment is not None:
            self._turn(False)
        moments = dict.fromkeys(moment for step in steps for moment in (step.moment, step.until) if moment is not None)
        self._handles = _hooked(modules, moments, elsewhere, self._came)

    def met(self, func: Callable[..., Any]) -> Step:
        """The next step.

        Raises:
            CaptureError: If it is of another function.
        """
        step = self._step
        assert step is not None  # noqa: S101 - behind the last one everything passes
        if func is not step.func:
            raise CaptureError(OTHERWISE.format(step.layer or "the model"))
        self._done = step
        self._next()
        return step

    def note(self, func: Callable[..., Any], layer: str = "", owner: int = 0, operand: int | None = None) -> None:
        """It is known."""

    def close(self) -> None:
        """Take the hooks off and turn the mode on for good."""
        for handle in self._handles:
            handle.remove()
        self._turn(True)
        _this.reads = False

    def _next(self) -> None:
        step = self._step = next(self._steps, None)
        self._times = 0
        self.passing = step.passed if step is not None and step.moment is None else _ALL

    def _came(self, moment: Moment) -> None:
        done = self._done
        if done is not None and moment == done.until:
            if _ALL - self.passing != done.left:
                raise CaptureError(OTHERWISE.format(done.layer or "the model"))
            self._turn(False)
            self._done = None
        step = self._step
        if step is not None and moment == step.moment:
            self._times += 1
            if self._times == step.times:
                self.passing = step.passed
                self._turn(True)

    def _turn(self, on: bool) -> None:
        if on and not self._on:
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        elif self._on and not on:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._on = on


def free(mode: TorchFunctionMode) -> bool:
    """Whether `mode` can be turned off and on: it is asked first, and no other of this thread is turned off, to come back above it."""
    return not getattr(_this, "reads", False) and _get_current_function_mode() is mode  # type: ignore[no-untyped-call]


def _hooked(
    modules: Sequence[nn.Module], moments: Iterable[Moment], elsewhere: Callable[[], bool], came: Callable[[Moment], None]
) -> list[RemovableHandle]:
    """Hooks that tell of moments."""

    def hook(moment: Moment) -> RemovableHandle:
        def tell(*_: object) -> None:
            if not elsewhere():
                came(moment)

        module = modules[moment[0]]
        return module.register_forward_hook(tell) if moment[1] else module.register_forward_pre_hook(tell)

    return [hook(moment) for moment in moments]
