# mypy: disable-error-code="no-untyped-call"
"""Modes, hooks and transforms of the program: a capture shows in none of them, and what they change below the calls is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import FlopCounterMode

import visattn
from tests.capturing.moving import Moving, image, judged, keys_of, see

Body = Callable[[nn.Module, Tensor], Tensor]
_relu = torch.ops.aten.relu.default


class Logged(TorchDispatchMode):
    """Mode that counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    """Mode that counts function calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Turning(TorchDispatchMode):
    """Mode that reverses the order of tokens in one operation, while it is on."""

    on = True

    def __init__(self, operation: Any = _relu) -> None:
        super().__init__()
        self.operation = operation

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.flip(-2) if self.on and func is self.operation else out


class Answering(TorchDispatchMode):
    """Mode that computes a result by itself, out of sight of other modes."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _relu:
            with _disable_current_modes():
                return torch.relu(args[0]).flip(1)
        return func(*args, **(kwargs or {}))


class Under(TorchDispatchMode):
    """Mode that changes a result where no mode sees it."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C._DisableTorchDispatch():
            out = func(*args, **(kwargs or {}))
            return out.flip(1) if func is _relu else out


class TurningCalls(TorchFunctionMode):
    """Function mode that reverses the order of tokens in `torch.relu`, while it is on."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.flip(1) if Turning.on and func is torch.relu else out


def within(mode: Callable[[], AbstractContextManager[Any]]) -> Body:
    def body(_: nn.Module, t: Tensor) -> Tensor:
        with mode():
            return torch.relu(t) * 1.0

    return body


# --- what modes see


def counted(mode: Callable[[], Any], of: Callable[[Any], int], body: Callable[[Any, Tensor], Tensor]) -> Body:
    """Return a body whose result depends on what a mode has seen of it."""

    def run(model: nn.Module, t: Tensor) -> Tensor:
        with mode() as seen:
            out = body(model, t)
        return out * of(seen)

    return run


def _fused(_: Any, t: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(t[:, None], t[:, None], t[:, None])[:, 0]


def _written(_: Any, t: Tensor) -> Tensor:
    return (t @ t.mT).softmax(-1) @ t


def _part(model: Any, t: Tensor) -> Tensor:
    out: Tensor = model.part(t)
    return out


_BODIES = {"a module": _part, "fused attention": _fused, "written-out attention": _written}
_COUNTING: dict[str, tuple[Callable[[], Any], Callable[[Any], int]]] = {
    "operations": (Logged, lambda mode: len(mode.seen)),
    "calls": (Calls, lambda mode: len(mode.seen)),
    "flops": (lambda: FlopCounterMode(display=False), lambda mode: mode.get_total_flops()),
}


@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("body", _BODIES)
@pytest.mark.parametrize("counting", _COUNTING)
def test_modes_that_the_model_opens_see_nothing_of_a_capture(counting: str, body: str, context: Any) -> None:
    model = Moving(counted(*_COUNTING[counting], _BODIES[body]))
    for seed in (0, 1, 0):
        with context():
            expected = model(image(seed))
            with visattn.capture(model, features="all") as recording:
                found = model(image(seed))
        assert torch.equal(found, expected)
        assert [record.reason for record in recording] == [None] * (1 if body == "a module" else 2)


@pytest.mark.parametrize("outside", [Logged, Calls])
def test_modes_around_a_capture_see_the_model_alone_and_attention_is_recorded(outside: Callable[[], Any]) -> None:
    model = Moving(lambda m, t: _written(m, t) + _fused(m, t))
    with torch.no_grad(), outside() as plain:
        model(image())
    for _ in range(3):
        with torch.no_grad(), visattn.capture(model) as recording, outside() as inside:
            model(image())
        assert inside.seen == plain.seen
        assert [record.reason for record in recording] == [None] * 3
        with torch.no_grad(), outside(), visattn.capture(model) as recording:
            model(image())
        assert [record.reason for record in recording] == [None] * 3


# --- what modes change

_CHANGING: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a result": Turning,
    "its own answer": Answering,
    "below all modes": Under,
    "a call": TurningCalls,
}


@pytest.mark.parametrize("name", _CHANGING)
@pytest.mark.parametrize("around", [False, True])
def test_results_that_a_mode_changes_are_placed_rightly_or_lost(name: str, around: bool) -> None:
    model = Moving(lambda m, t: within(_CHANGING[name])(m, t) + t)  # two places in one token
    assert judged(model, image(), probes=4).startswith("refused: its tokens")
    model = Moving(within(nullcontext if around else _CHANGING[name]))
    with torch.no_grad():
        tokens = model.tokens(image()).relu()
    for _ in range(2):
        with _CHANGING[name]() if around else nullcontext():
            record = see(model, image())[0]
        assert record.reason is not None or torch.allclose(keys_of(record), tokens, atol=1e-5)


@contextmanager
def _turned_off() -> Iterator[None]:
    Turning.on = False
    try:
        yield
    finally:
        Turning.on = True


def library(t: Tensor) -> Tensor:
    """Run as a function of a library that has function modes receive it as one call."""
    if has_torch_function((t,)):
        called: Tensor = handle_torch_function(library, (t,), t)
        return called
    return t.flip(1) if Turning.on else t * 1.0


class Backward(torch.autograd.Function):
    """Function whose backward pass reverses tokens."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return t * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].flip(1) if Turning.on else gradients[0] * 1.0


def _by_gradient(_: nn.Module, t: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = t.detach().clone().requires_grad_()
        return torch.autograd.grad(Backward.apply(leaf), leaf, t.detach())[0]


BELOW: dict[str, Body] = {
    "a dispatch mode": within(Turning),
    "a dispatch mode at times": lambda m, t: within(Turning if Turning.on else nullcontext)(m, t),
    "a function mode": within(TurningCalls),
    "vmap": lambda _, t: torch.vmap(lambda one: one.flip(0) if Turning.on else one * 1.0)(t),
    "a function of a library": lambda _, t: library(t),
    "a backward pass": _by_gradient,
}


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", BELOW)
def test_what_changes_below_the_calls_between_forward_passes_is_noticed(name: str, context: Any) -> None:
    model = Moving(BELOW[name])
    for on in (False, False, True, True, False):
        with nullcontext() if on else _turned_off(), context(), visattn.capture(model, values=True) as recording:
            model(image())
        with nullcontext() if on else _turned_off(), torch.no_grad():
            tokens = model.between[0](model, model.tokens(image()))
        assert recording[0].reason is None
        assert torch.allclose(keys_of(recording[0]), tokens.flip(1) if on else tokens, atol=1e-5)


@pytest.mark.parametrize("outer", [Turning, TurningCalls])
def test_a_mode_around_a_capture_that_changes_between_forward_passes_is_noticed(outer: Callable[[], Any]) -> None:
    model = Moving(lambda _, t: torch.relu(t) * 1.0)
    for on in (False, False, True, True, False):
        with nullcontext() if on else _turned_off(), outer(), torch.no_grad(), visattn.capture(model, values=True) as recording:
            model(image())
        with torch.no_grad():
            tokens = model.tokens(image()).relu()
        assert torch.allclose(keys_of(recording[0]), tokens, atol=1e-5)  # in the order of the cells


def test_attention_that_a_mode_changes_is_unseen() -> None:
    def attend(model: nn.Module, t: Tensor) -> Tensor:
        with Turning(torch.ops.aten.bmm.default):
            return _written(model, t)

    def kernel(model: nn.Module, t: Tensor) -> Tensor:
        class Kernel(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
            ) -> Any:
                if "scaled_dot_product" in str(func):
                    args = (args[0].flip(2), *args[1:])
                return func(*args, **(kwargs or {}))

        with Kernel():
            return _fused(model, t.contiguous())

    for body in (attend, kernel):
        model = Moving(body)
        for context in (torch.no_grad, torch.enable_grad):
            with context():
                expected = model(image())
                with visattn.capture(model) as recording:
                    assert torch.equal(model(image()), expected)
            assert len(recording) == 1
            assert [unseen.reason for unseen in recording.unseen] == ["runs in a mode, or on a class of tensors, that changes it"]


class Own(Tensor):
    """Class of tensors without operations of its own."""


def test_tokens_of_another_class_are_placed() -> None:
    model = Moving(lambda _, t: (t.as_subclass(Own) * 1.0).flip(1))
    assert judged(model, image(), probes=4) == "right"
