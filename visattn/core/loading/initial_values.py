"""Networks built without the random initial values of their parameters, which a checkpoint replaces at once.

Buffers keep their values: tables of rotary positions, window masks and relative indices are computed as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode


class _Skip(TorchFunctionMode):
    """Leaves out every in-place operation on a parameter."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Call an operation, unless it would only fill a parameter; see `TorchFunctionMode`."""
        name = getattr(func, "__name__", "")
        first = args[0] if args else (kwargs or {}).get("tensor")
        if isinstance(first, nn.Parameter) and name.endswith("_") and not name.endswith("__") and name != "requires_grad_":
            return first
        return func(*args, **(kwargs or {}))


@contextmanager
def without_initial_values() -> Iterator[None]:
    """Leave parameters of networks that are built inside the block without values; all must be filled afterward.

    Yields:
        Nothing.
    """
    with _Skip():
        yield
