"""The interception: sees every attention of a forward, calls it through and hands its operands on.

Fused calls are seen as such, `flex_attention` too; attention that is written out as a softmax followed by a product with values; and
`nn.MultiheadAttention`, which hands itself over to a mode as a whole, is entered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from visattn._capture._call import Call, FusedCall, ProductCall
from visattn._capture._flex import flex, is_flex
from visattn._capture._follow import Follower
from visattn._capture._owner import Owners
from visattn._capture._softmax import SoftmaxTrace
from visattn.operators._fused import LogSumExpReader

_LONG = 512  # tokens above which reading the kernel's log-sum-exp is cheaper than a softmax of one's own
_FUSED = (F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)

# glibc keeps as much freed memory as twice the largest block that it has mapped and freed: without this one, never touched, it gives
# the pages of a dropped recording back and takes them anew for the next one.
torch.empty((32 << 20) - (64 << 10), dtype=torch.uint8)

Receive = Callable[[str, nn.Module, Call, Tensor], None]  # owner's name, owner, call, the result that the model goes on with


class CaptureMode(TorchFunctionMode):
    """Hands each attention call of one model to `receive`; results stay bit-identical, the kernel stays the model's own."""

    def __init__(self, model: nn.Module, receive: Receive) -> None:
        """Prepare to see the calls; nothing is put on the model."""
        super().__init__()
        self._owners, self._receive = Owners(model), receive
        self._softmax = SoftmaxTrace(self._permuted)
        self.follower: Follower | None = None  # who follows the tokens of the running forward, where somebody must

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:
                return _multi_head_attention(*args, **kwargs)
        call: Call
        if func in _FUSED:
            owner = self._owners.current()
            if owner is None:
                return func(*args, **kwargs)
            call = _fused(func, args, kwargs, self._repeated)
            out = call.out
            if self.follower is not None:
                self.follower.see(func, args, kwargs, out)
        elif is_flex(func):
            owner = self._owners.current()
            if owner is None:
                return func(*args, **kwargs)
            call, results = flex(func, args, kwargs, owner[0], self._repeated)
            if self.follower is not None:
                self.follower.see(F.scaled_dot_product_attention, args[:3], {}, call.out)
            self._receive(*owner, call, call.out)
            return results
        else:
            out = func(*args, **kwargs)
            if self.follower is not None:
                self.follower.see(func, args, kwargs, out)
            product = self._softmax.follow(func, args, kwargs, out)
            owner = self._owners.current() if product else None
            if product is None or owner is None:
                return out
            call = ProductCall(*product)
        self._receive(*owner, call, out)
        return out

    def _permuted(self, tensor: Tensor, axes: Sequence[int]) -> Tensor:
        return self._moved(torch.permute, tensor, tuple(axes))

    def _repeated(self, tensor: Tensor, times: int) -> Tensor:
        return self._moved(torch.repeat_interleave, tensor, times, -3) if times > 1 else tensor

    def _moved(self, func: Callable[..., Tensor], *args: object) -> Tensor:
        moved = func(*args)
        if self.follower is not None:
            self.follower.see(func, args, {}, moved)
        return moved


def _fused(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], repeat: Callable[[Tensor, int], Tensor]
) -> FusedCall:
    """Run a fused call; above some length with the kernel's log-sum-exp. `repeat` gives several heads of queries the same keys."""

    def named(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,  # weights are taken before dropout
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> FusedCall:
        reader = LogSumExpReader()  # type: ignore[no-untyped-call]
        if query.shape[-2] > _LONG:
            with reader:
                out = func(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = (repeat(tensor, groups) for tensor in (key, value))
        return FusedCall(value, out, query, key, attn_mask, is_causal, scale, reader.lse)

    return named(*args, **kwargs)


def _entered(function: FunctionType) -> Callable[..., Any]:
    """The same function, which no longer hands itself over to a mode as a whole; its inner calls still do."""
    inside = {**function.__globals__, "has_torch_function": lambda _: False}
    clone = FunctionType(function.__code__, inside, function.__name__, function.__defaults__, function.__closure__)
    clone.__kwdefaults__ = function.__kwdefaults__
    return clone


_multi_head_attention = _entered(F.multi_head_attention_forward)  # type: ignore[arg-type]
