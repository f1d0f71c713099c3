"""Counts that no machine changes, as JSON: calls of Python and C functions, operations of PyTorch, and values that are read.

`python -m bench.counts` counts in the third call of each run. A value that is read makes a GPU finish all that was started before. Here,
where all tensors are on the CPU, a tensor counts as one of the device until `Tensor.cpu` copies it; reads of the copy cost nothing.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import timm
import torch
from PIL import Image
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import visattn

SIDE = 224
VIT, CNN = "vit_small_patch16_224", "resnet50"
EMPTY = "empty function mode"
_READING = ("__bool__", "__float__", "__int__", "__index__", "item", "tolist", "numpy", "nonzero", "equal", "cpu")


# ruff: noqa: ANN401 - functions of PyTorch take and return anything


class Empty(TorchFunctionMode):
    """Function mode that does nothing: what any interception of PyTorch's functions costs."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Number of operations that are dispatched."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class _Host(Tensor):
    """Tensor in memory of the CPU. What is computed from it alone is, too."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        given = [*args, *(kwargs or {}).values()]
        goes_to_device = func is Tensor.to and any(isinstance(value, torch.device) for value in given)
        return result.as_subclass(Tensor) if goes_to_device else result


def calls_of(run: Callable[[], object]) -> int:
    """Return the number of functions of Python and C that a run calls: the events `call` and `c_call` of a profiler."""
    count = 0

    def note(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@contextmanager
def reads() -> Iterator[list[str]]:
    """Note the functions by which values of tensors are read, as a list that grows."""
    seen: list[str] = []

    def reading(name: str) -> Callable[..., Any]:
        original = getattr(Tensor, name)

        def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(self, _Host):
                seen.append(name)
            result = original(self, *args, **kwargs)
            return result.clone().as_subclass(_Host) if name == "cpu" else result

        return read

    def equal(one: Tensor, other: Tensor) -> bool:
        if not isinstance(one, _Host):
            seen.append("equal")
        return same(one, other)

    same = torch.equal
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch, "equal", equal))
        for name in _READING:
            stack.enter_context(patch.object(Tensor, name, reading(name), create=True))
        yield seen


def runs() -> dict[str, Callable[[], object]]:
    """Return what is counted, by name."""
    torch.manual_seed(0)
    vit, cnn = (timm.create_model(name).eval() for name in (VIT, CNN))
    pixels = torch.randn(1, 3, SIDE, SIDE)
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8))

    def plain(model: nn.Module) -> object:
        with torch.no_grad():
            return model(pixels)

    def empty(model: nn.Module) -> object:
        with torch.no_grad(), Empty():
            return model(pixels)

    def capture() -> object:
        with torch.no_grad(), visattn.capture(vit):
            return vit(pixels)

    return {
        "plain forward": lambda: plain(vit),
        EMPTY: lambda: empty(vit),
        "capture": capture,
        "explain, attention": lambda: visattn.explain(vit, photo, method="attention"),
        "explain, relevance": lambda: visattn.explain(vit, photo, method="relevance", target=3),
        f"plain forward, {CNN}": lambda: plain(cnn),
        f"{EMPTY}, {CNN}": lambda: empty(cnn),
        "explain, Grad-CAM": lambda: visattn.explain(cnn, photo, method="gradcam", target=3),
    }


def main() -> dict[str, dict[str, Any]]:
    """Return the counts of each run: `calls`, `operations` and `reads`, the functions by which values are read."""
    warnings.simplefilter("ignore")
    counts: dict[str, dict[str, Any]] = {}
    for name, run in runs().items():
        run()
        run()
        calls = calls_of(run)
        with reads() as seen:
            run()
        with _Operations() as operations:  # type: ignore[no-untyped-call]
            run()
        counts[name] = {"calls": calls, "operations": operations.count, "reads": seen}
    return counts


_Operations.__module__ = "torch.counting"  # as one of PyTorch's own modes, it changes nothing that a capture relies on

if __name__ == "__main__":
    print(json.dumps(main()))
