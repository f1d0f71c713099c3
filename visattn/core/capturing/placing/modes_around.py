"""Modes that the model, or code around it, has opened: a capture works out of their sight and lets the model's calls run in them.

PyTorch hands an operation to the dispatch mode that was opened last, which may log it, change it, or answer it by itself. A capture
must not appear in such logs, and it needs the operations that really run. So its own modes lie below all others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

_TRUSTED = frozenset(
    {"torch", "torchvision", "visattn"}
)  # libraries whose modes and classes of tensors leave results as they are


class _Aside(threading.local):
    """Modes that were taken off the stack, the lowest first; one entry for each time."""

    def __init__(self) -> None:
        self.modes: list[list[TorchDispatchMode]] = [[]]


aside = _Aside()


@contextmanager
def apart() -> Iterator[Sequence[TorchDispatchMode]]:
    """Take the open dispatch modes off PyTorch's stack, so that a capture's own operations run without them.

    They are back at the end; `inside` puts them back for one call of the model.

    Yields:
        The modes that were taken off, the lowest first.
    """
    modes = _taken()
    aside.modes.append(modes)
    try:
        yield modes
    finally:
        _put_back(aside.modes.pop())


@contextmanager
def inside() -> Iterator[None]:
    """Put the modes that were taken off back on top of those that were opened since, for one call of the model."""
    modes = aside.modes[-1]
    aside.modes.append([])
    _put_back(modes)
    try:
        yield
    finally:
        aside.modes.pop()
        for _ in modes:
            _pop_mode()


@contextmanager
def hidden() -> Iterator[None]:
    """Run a capture's own work, in hooks of the model, out of sight of all modes that were opened above the capture's.

    Function modes and dispatch modes are taken off PyTorch's stacks, and are back at the end.
    """
    function_modes: list[TorchFunctionMode] = []
    while (mode := _get_current_function_mode()) is not None and not _is_own(mode):  # type: ignore[no-untyped-call]
        function_modes.append(mode)
        torch._C._pop_torch_function_stack()
    dispatch_modes = _taken()
    aside.modes.append([])
    try:
        yield
    finally:
        aside.modes.pop()
        _put_back(dispatch_modes)
        for mode in reversed(function_modes):
            torch._C._push_on_torch_function_stack(mode)


def strange(kinds: Sequence[type]) -> bool:
    """Check whether classes of modes or tensors may change what calls do, in a way that the calls do not show."""
    return any(kind.__module__.partition(".")[0] not in _TRUSTED for kind in kinds)


def function_modes() -> list[type]:
    """Return the classes of the open function modes."""
    return [type(mode) for mode in _get_current_function_mode_stack()]  # type: ignore[no-untyped-call]


def _is_own(mode: Any) -> bool:  # noqa: ANN401
    """Check whether a mode belongs to a capture."""
    return type(mode).__module__.startswith("visattn.core.capturing.")


def _taken() -> list[TorchDispatchMode]:
    """Take all dispatch modes off PyTorch's stack and return them, the lowest first."""
    return [_pop_mode() for _ in range(_len_torch_dispatch_stack())][::-1]


def _put_back(modes: Sequence[TorchDispatchMode]) -> None:
    """Push dispatch modes on PyTorch's stack, the lowest first."""
    for mode in modes:
        _push_mode(mode)
