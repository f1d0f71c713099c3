"""The interception: sees every attention of a forward, calls it through and hands its operands on.

Fused calls are seen as such; attention that is written out as a softmax followed by a product with values; and
`nn.MultiheadAttention`, which hands itself over to a mode as a whole, is entered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.flex_attention import flex_attention as flex
from torch.overrides import TorchFunctionMode

from visattn._capture._call import Call, FusedCall, ProductCall
from visattn._capture._flex import flex_call
from visattn._capture._follow import Follower
from visattn._capture._owner import Owners
from visattn._capture._script import Script, Step
from visattn._capture._softmax import SEEN, SOFTMAX, SoftmaxTrace
from visattn.operators._fused import LogSumExpReader

_LONG = 512  # tokens above which reading the kernel's log-sum-exp is cheaper than a softmax of one's own
_FUSED = frozenset({F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default})
_FIRST = _FUSED | SOFTMAX | {F.multi_head_attention_forward, flex}

# glibc keeps as much freed memory as twice the largest block that it has mapped and freed: without this one, never touched, it gives
# the pages of a dropped recording back and takes them anew for the next one.
torch.empty((32 << 20) - (64 << 10), dtype=torch.uint8)

Receive = Callable[[str, nn.Module, Call], None]  # owner's name, owner, a call that was made
Replace = Callable[[str, nn.Module, Call], Tensor | None]  # the same, before it is made: what the model goes on with instead


class CaptureMode(TorchFunctionMode):
    """Hands each attention call of one model to `receive`; results stay bit-identical, the kernel stays the model's own.

    Only where `replace` gives something does the model go on with that.
    """

    def __init__(self, model: nn.Module, receive: Receive, replace: Replace | None = None) -> None:
        """Prepare to see the calls; nothing is put on the model."""
        super().__init__()
        self.owners, self._receive, self._replace = Owners(model), receive, replace
        self.follower: Follower | None = None  # who follows the tokens of the running forward, where somebody must
        self.script: Script | None = None  # of a forward that is known
        self._softmax = SoftmaxTrace()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        script, step = self.script, None
        if script is not None:
            if script.passing:
                script.passing -= 1
                return func(*args, **kwargs) if kwargs else func(*args)
            step = script.met(func)
        if self.follower is None and func not in _FIRST and step is None and not (self._softmax.alive and func in SEEN):
            return func(*args, **kwargs) if kwargs else func(*args)  # most of a forward
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            if script is not None:
                script.note(func)
            with self:
                return _multi_head_attention(*args, **kwargs)
        fused, flexible = func in _FUSED, func is flex
        if step is not None and step.operand is not None:
            self._softmax.adopt(args, kwargs, step.operand)
        product = None if fused or flexible else self._softmax.product(func, args, kwargs, self._permuted)
        owner = self._owner(step) if fused or flexible or product else None
        if owner is None:
            out = func(*args, **kwargs)
            self._softmax.follow(func, args, out)
            if self.follower is not None:
                self.follower.see(func, args, kwargs, out)
            return out
        if script is not None:
            operand = None if product is None else self._softmax.position(args, kwargs, product.operand)
            script.note(func, owner[0], self.owners.modules.index(owner[1]), operand)
        if flexible:
            return self._flex(owner, func, args, kwargs)
        call: Call = ProductCall(product) if product else FusedCall(*args, **kwargs, repeat=self._repeated)
        out = self._replace(*owner, call) if self._replace is not None else None
        call.out = out = _made(call, func, args, kwargs) if out is None else out
        if self.follower is not None:
            self.follower.see(func, args, kwargs, out)
        self._receive(*owner, call)
        return out

    def _owner(self, step: Step | None) -> tuple[str, nn.Module] | None:
        """Who makes the call: as it was written down, else by the stack."""
        return self.owners.current() if step is None else (step.layer, self.owners.modules[step.owner])

    def _flex(
        self, owner: tuple[str, nn.Module], func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:  # noqa: ANN401
        results = func(*args, **kwargs)
        call = flex_call(args, kwargs, owner[0], self._repeated)
        replaced = self._replace(*owner, call) if self._replace is not None else None
        call.out = out = results[0] if replaced is None else replaced
        if self.follower is not None:
            self.follower.see(F.scaled_dot_product_attention, args[:3], {}, out)
        self._receive(*owner, call)
        return out, *results[1:]

    def _permuted(self, tensor: Tensor, axes: Sequence[int]) -> Tensor:
        return self._moved(torch.permute, tensor, tuple(axes))

    def _repeated(self, tensor: Tensor, times: int) -> Tensor:
        return self._moved(torch.repeat_interleave, tensor, times, -3) if times > 1 else tensor

    def _moved(self, func: Callable[..., Tensor], *args: object) -> Tensor:
        moved = func(*args)
        if self.follower is not None:
            self.follower.see(func, args, {}, moved)
        return moved


def _made(call: Call, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Make a call; a long fused one with the kernel's log-sum-exp."""
    if not isinstance(call, FusedCall) or call.rows <= _LONG:
        made: Tensor = func(*args, **kwargs)
        return made
    reader = LogSumExpReader()  # type: ignore[no-untyped-call]
    with reader:
        made = func(*args, **kwargs)
    call.lse = reader.lse
    return made


def _entered(function: FunctionType) -> Callable[..., Any]:
    """The same function, which no longer hands itself over to a mode as a whole; its inner calls still do."""
    inside = {**function.__globals__, "has_torch_function": lambda _: False}
    clone = FunctionType(function.__code__, inside, function.__name__, function.__defaults__, function.__closure__)
    clone.__kwdefaults__ = function.__kwdefaults__
    return clone


_multi_head_attention = _entered(F.multi_head_attention_forward)  # type: ignore[arg-type]
