"""The interception: sees every `scaled_dot_product_attention` of a forward, calls it through and keeps its operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from visattn._capture._owner import Owners
from visattn.operators import SoftmaxOperator
from visattn.operators._fused import LogSumExpReader

_LONG = 512  # tokens above which reading the kernel's log-sum-exp is cheaper than a softmax of one's own

# glibc keeps as much freed memory as twice the largest block that it has mapped and freed: without this one, never touched, it gives
# the pages of a dropped recording back and takes them anew for the next one.
torch.empty((32 << 20) - (64 << 10), dtype=torch.uint8)

# (owner's name, owner, operator, value)
Receive = Callable[[str, nn.Module, SoftmaxOperator, Tensor], None]


class CaptureMode(TorchFunctionMode):
    """Hands each attention call of one model to `receive`; results stay bit-identical, the kernel stays the model's own."""

    def __init__(self, model: nn.Module, receive: Receive, layers: str = "*") -> None:
        """Prepare to see the layers whose names match the glob; nothing is put on the model."""
        super().__init__()
        self._owners, self._receive, self._layers = Owners(model), receive, layers
        self.passed_by: dict[str, None] = {}  # names of other layers, in order

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        owner = self._owners.current()
        if owner is None:
            return func(*args, **(kwargs or {}))
        if not fnmatchcase(owner[0], self._layers):
            self.passed_by[owner[0]] = None
            return func(*args, **(kwargs or {}))
        call = _Call(*args, **(kwargs or {}))
        reader = LogSumExpReader()  # type: ignore[no-untyped-call]
        if call.rows > _LONG:
            with reader:
                out = func(*args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
        self._receive(*owner, call.operator(reader.lse), call.value)
        return out


class _Call:
    """The arguments of one call, under the names of the function's signature."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,  # weights are taken before dropout
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        self.query, self.key, self.value = query, key, value
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            self.key, self.value = (tensor.repeat_interleave(groups, -3) for tensor in (self.key, self.value))
        self.mask, self.is_causal, self.scale = attn_mask, is_causal, scale
        self.rows = query.shape[-2]

    def operator(self, lse: Tensor | None) -> SoftmaxOperator:
        return SoftmaxOperator(own(self.query), own(self.key), self._bias(), self.scale, lse=lse if lse is None else own(lse))

    def _bias(self) -> Tensor | None:
        mask = self.mask
        if self.is_causal:
            mask = torch.ones(self.rows, self.key.shape[-2], dtype=torch.bool, device=self.query.device).tril()
        if mask is None:
            return None
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -torch.inf)
        return own(mask.detach()).reshape(*(1,) * (4 - mask.ndim), *mask.shape)


def own(tensor: Tensor) -> Tensor:
    """`tensor` in memory of its own: a view would keep the whole joint query-key-value tensor alive."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)
