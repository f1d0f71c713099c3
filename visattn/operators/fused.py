"""Fused attention kernels that also give the log-sum-exp of each row, and the reading of it while a model runs.

PyTorch's public `scaled_dot_product_attention` keeps the log-sum-exp to itself; the kernel under it returns it as its second
result. Only the CPU kernel is read here: elsewhere weights are rebuilt with a softmax of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from visattn.errors import OptionError

_SDPA = torch.ops.aten.scaled_dot_product_attention.default
_FLASH_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def fused_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Attention and the log-sum-exp of its rows, in one pass without the matrix.

    Args:
        query: `(B, heads, q, d)`.
        key: `(B, heads, k, d)`.
        value: `(B, heads, k, d)`; the kernel wants the same head dimension.
        bias: `(B, heads, q, k)` or None.
        scale: Factor of the scores.

    Returns:
        `(B, heads, q, d)` and `(B, heads, q)`.

    Raises:
        OptionError: On a device other than the CPU.
    """
    if query.device.type != "cpu":
        raise OptionError(f"the reversed implementation runs on the CPU only, got {query.device}. Use implementation='tiles'.")
    out, lse = _FLASH_CPU(query, key, value, 0.0, False, attn_mask=bias, scale=scale)
    return out, lse


class LogSumExpReader(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the log-sum-exp that a fused call computes anyway; the call's result is untouched, bit for bit."""

    lse: Tensor | None = None

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func is _SDPA:  # under inference mode only the composite shows: run its parts under this mode
            with self:
                return func.decompose(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if func is _FLASH_CPU:
            self.lse = out[1].detach()
        return out
