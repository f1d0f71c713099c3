"""Access to the log-sum-exp that fused attention kernels compute for each row.

PyTorch's public `scaled_dot_product_attention` does not return the log-sum-exp, but the underlying kernels return it as their second
result: `(B, heads, q)` on the CPU and of flash attention, `(B, heads, q')` with padding of the memory-efficient kernel, and
`(B, heads, q, 1)` of cuDNN. The latter two compute it on request.
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
_KERNELS: dict[Any, int | None] = {  # with the place of the argument that requests the log-sum-exp
    _FLASH_CPU: None,
    torch.ops.aten._scaled_dot_product_flash_attention.default: None,
    torch.ops.aten._scaled_dot_product_efficient_attention.default: 4,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default: 4,
}


def fused_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Compute attention and the log-sum-exp of its rows in one fused call, without building the matrix.

    Args:
        query: `(B, heads, q, d)`.
        key: `(B, heads, k, d)`.
        value: `(B, heads, k, d)`; the kernel requires the head dimension of query and key.
        bias: `(B, heads, q, k)` or None.
        scale: Scale of the scores.

    Returns:
        The attention output, `(B, heads, q, d)`, and the log-sum-exp, `(B, heads, q)`.

    Raises:
        OptionError: If the device is not the CPU.
    """
    if query.device.type != "cpu":
        raise OptionError(f"the reversed implementation runs only on the CPU, got {query.device}. Use implementation='tiles'.")
    out, lse = _FLASH_CPU(query, key, value, 0.0, False, attn_mask=bias, scale=scale)
    return out, lse


class LogSumExpReader(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that reads the log-sum-exp from fused attention calls, without changing their results."""

    lse: Tensor | None = None

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func is _SDPA:  # inference mode dispatches only the composite operation: decompose it under this mode
            with self:
                return func.decompose(*args, **(kwargs or {}))
        request = _KERNELS.get(func)
        if request is not None:
            args = (*args[:request], True, *args[request + 1 :])
        out = func(*args, **(kwargs or {}))
        if func in _KERNELS:
            rows, lse = out[0].shape[-2], out[1].detach()
            self.lse = lse.reshape(*lse.shape[: out[0].ndim - 2], -1)[..., :rows]
        return out
