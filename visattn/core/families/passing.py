"""What a module does with its input and output around a model inside it, proven by one forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from visattn._support.attempts import Attempt
from visattn._support.modes import evaluating, own_modes, same_randomness
from visattn.core.families.owners import family, owner
from visattn.core.families.spec import InputSpec


class Passing(NamedTuple):
    """Answers for a module: does it pass its input on unchanged, and does it then return the output unchanged?"""

    on: bool = False
    back: bool = False


class _Call(NamedTuple):
    """Call of the inner model, and how many operations ran before it, outside."""

    args: tuple[Any, ...]
    given: dict[str, Any]
    made: Any
    before: int


def passes(model: nn.Module, inner: nn.Module) -> Passing | None:
    """Run a model once, and look what its inner model is given and returns; None if it may run the next time."""
    calls: list[_Call] = []
    with own_modes(), torch.no_grad(), same_randomness(), evaluating(model):
        pixels, keyword = _blank(inner)
        outside = _Outside()
        with Attempt() as attempt, _told(inner, calls, outside), outside, outside.functions:
            output = model(pixels)
    if attempt.failed:
        return Passing() if attempt.lasts else None
    if len(calls) != 1 or calls[0].before:
        return Passing()
    call = calls[0]
    passed = {str(index): value for index, value in enumerate(call.args)} | call.given
    tensors = {name: value for name, value in passed.items() if isinstance(value, torch.Tensor)}
    on = (
        len(tensors) == 1
        and next(iter(tensors)) in ("0", keyword, "x", "pixel_values")
        and next(iter(tensors.values())) is pixels
    )
    same = output is call.made or (isinstance(output, torch.Tensor) and output is getattr(call.made, "logits", None))
    return Passing(on, on and same and not outside.count)


def _blank(inner: nn.Module) -> tuple[torch.Tensor, str]:
    """Return pixels for a model, and the name of the parameter that takes them."""
    spec: InputSpec = family(owner(inner)).input_spec(inner)
    like = next((each for each in inner.parameters() if each.is_floating_point()), torch.zeros(()))
    return torch.zeros(1, spec.channels, *spec.size, device=like.device, dtype=like.dtype), spec.keyword


@contextmanager
def _told(inner: nn.Module, calls: list[_Call], outside: _Outside) -> Iterator[None]:
    """Note each forward of a module with its arguments and output, while the block runs."""
    own, forward_of_inner = vars(inner).get("forward"), inner.forward

    def forward(*args: Any, **given: Any) -> Any:  # noqa: ANN401
        before = outside.count
        with outside.left():
            output = forward_of_inner(*args, **given)
        calls.append(_Call(args, given, output, before))
        return output

    vars(inner)["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del vars(inner)["forward"]
        else:
            vars(inner)["forward"] = own


class _Outside(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count of the operations that run outside of the inner model."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self._inside = 0, False
        self.functions = _Functions(self)

    @contextmanager
    def left(self) -> Iterator[None]:
        """Do not count the operations of the block."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def tell(self, name: str) -> None:
        """Count an operation, unless it only reads what a tensor is, or marks a range for the profiler, as wrappers of PyTorch do."""
        self.count += not self._inside and name not in _FACTS and not name.startswith(_MARKS)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        self.tell(str(func))
        return func(*args, **(kwargs or {}))


_MARKS = "profiler.", "_record_function_"
_FACTS = frozenset({"__get__", "size", "dim", "is_floating_point", "numel", "stride", "__len__"})


class _Functions(TorchFunctionMode):
    """Python's calls of PyTorch's functions, of which some read values and are no operation."""

    def __init__(self, outside: _Outside) -> None:
        super().__init__()
        self._outside = outside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        self._outside.tell(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))
