"""The interception: sees every function of a forward, writes the tape, and hands each attention on.

Fused calls are seen as such; attention that is written out as a softmax followed by a product with values; and
`nn.MultiheadAttention`, which hands itself over to a mode as a whole, is entered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.flex_attention import flex_attention as flex
from torch.overrides import TorchFunctionMode

from visattn.capturing.intercept.calls import Call, FusedCall, ProductCall
from visattn.capturing.intercept.flex import flex_call
from visattn.capturing.intercept.owners import Owners
from visattn.capturing.intercept.softmax import PRODUCT, Product, note_weights, product_of, tensors_of
from visattn.capturing.trace.operations import ASK, SOFTMAX, operation_of
from visattn.capturing.trace.tape import Attention, Entry, Operand
from visattn.capturing.trace.tracer import Tracer
from visattn.operators.fused import LogSumExpReader

_LONG = 512  # tokens above which reading the kernel's log-sum-exp is cheaper than a softmax of one's own
_FUSED = frozenset({F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default})
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor

# glibc keeps as much freed memory as twice the largest block that it has mapped and freed: without this one, never touched, it gives
# the pages of a dropped recording back and takes them anew for the next one.
torch.empty((32 << 20) - (64 << 10), dtype=torch.uint8)

Receive = Callable[[str, nn.Module, Call, Attention], None]  # owner's name, owner, a call that was made, and its note on the tape
Replace = Callable[[str, nn.Module, Call, Attention], Tensor | None]  # the same, before: what the model goes on with instead


class CaptureMode(TorchFunctionMode):
    """Hands each attention call of one model to `receive`; results stay bit-identical, the kernel stays the model's own.

    Only where `replace` gives something does the model go on with that.

    Attributes:
        tracer: Writes the tape of the running forward; None while none runs.
        twin: The image, and what the model is given in its place.
        calls: How often each layer attended in this forward.
        hidden: Layers that attend where it cannot be recorded, and why.
    """

    def __init__(
        self,
        model: nn.Module,
        receive: Receive,
        replace: Replace | None = None,
        answers_at_keys: Callable[[nn.Module], bool] | None = None,
    ) -> None:
        """Prepare to see the calls; nothing is put on the model."""
        super().__init__()
        self.owners, self._receive, self._replace = Owners(model), receive, replace
        self._answers_at_keys = answers_at_keys or (lambda _: False)
        self.tracer: Tracer | None = None
        self.twin: tuple[Tensor, Tensor] | None = None
        self.calls: Counter[str] = Counter()
        self.hidden: dict[str, str] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        tracer = self.tracer
        if tracer is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        if self.twin is not None:
            args, kwargs = _exchanged(args, *self.twin), _exchanged(kwargs or {}, *self.twin)
        entry = None
        if tracer.known:
            entry = tracer.quickly(func, args, kwargs)
            if entry is None and func not in ASK:
                entry = tracer.expected(func, args, kwargs)
            if entry is not None and entry.attention is None:
                out = func(*args, **kwargs) if kwargs else func(*args)
                tracer.confirm(entry, args, kwargs, out)
                return out
        kwargs = kwargs or {}
        if func in ASK:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return _multi_head_attention(*args, **kwargs)
        operation = operation_of(func)
        fused = func in _FUSED or func is flex
        if not fused and operation.name not in _ATTENDING:  # most of what is not known
            out = func(*args, **kwargs)
            self._met(func, args, kwargs, out)
            return out
        if any(map(_wrapped, tensors_of(args, kwargs))):
            if fused or operation.name in SOFTMAX:
                self._hide("runs inside torch.func")
            return func(*args, **kwargs)
        if entry is None and tracer.known:
            entry = tracer.elsewhere(func, args, kwargs)
        return self._attend(func, args, kwargs, fused, entry.attention if entry is not None else None, entry)

    def _attend(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        fused: bool,
        attention: Attention | None,
        entry: Entry | None,
    ) -> Any:  # noqa: ANN401
        """A call that is an attention, or may be one."""
        tracer = self.tracer
        assert tracer is not None  # noqa: S101
        product: Product | None = None
        if not fused and entry is None:
            product = product_of(func, args, kwargs, lambda _, x: tracer.slot_of(x) in tracer.tape.weights)
        elif attention is not None and not fused:
            position = attention.position
            product = product_of(func, args, kwargs, lambda i, _: i == position)
        owner = None
        if attention is not None:
            owner = attention.layer, self.owners.modules[attention.owner]
        elif fused or product is not None:
            owner = self.owners.current()
        if owner is None:
            out = func(*args, **kwargs)
            if entry is None:
                self._met(func, args, kwargs, out)
            else:
                tracer.confirm(entry, args, kwargs, out)
            return out
        if torch._C._current_graph_task_id() >= 0:  # a backward pass computes layers again
            return func(*args, **kwargs)
        whole = func(*args, **kwargs) if func is flex else None
        call: Call
        if func is flex:
            call = flex_call(args, kwargs, owner[0])
            func, args, kwargs = F.scaled_dot_product_attention, args[:3], {}
        else:
            call = ProductCall(product) if product is not None else FusedCall(*args, **kwargs)
        if attention is None:
            attention = self._described(tracer, *owner, call, product, args, kwargs)
        self.calls[owner[0]] += 1
        out = self._replace(*owner, call, attention) if self._replace is not None else None
        if out is None:
            out = whole[0] if whole is not None else _made(call, func, args, kwargs)
        call.out = out
        if entry is None:
            tracer.write(func, args, kwargs, out, attention)
        else:
            tracer.confirm(entry, args, kwargs, out)
        with torch._C.DisableTorchFunction():
            self._receive(*owner, call, attention)
        return out if whole is None else (out, *whole[1:])

    def _met(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:  # noqa: ANN401
        tracer = self.tracer
        assert tracer is not None  # noqa: S101
        try:
            entry = tracer.met(func, args, kwargs, out)
            if entry is not None:
                note_weights(tracer, entry, args, out)
        except Exception:  # a tensor that is like no other; what comes of it has no place
            tracer.tape.whole = False

    def _described(
        self,
        tracer: Tracer,
        layer: str,
        owner: nn.Module,
        call: Call,
        product: Product | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Attention:
        """The note of an attention."""
        if product is not None:
            operands = tuple(
                Operand(tracer.place_of(x), axes)
                for x, axes in ((product.operand, product.axes), (product.value, product.value_axes))
            )
        else:
            assert isinstance(call, FusedCall)  # noqa: S101
            given = [args[i] if i < len(args) else kwargs[name] for i, name in enumerate(("query", "key", "value"))]
            operands = tuple(Operand(tracer.place_of(x), None, call.groups if i else 1) for i, x in enumerate(given))
        return Attention(
            layer,
            self.calls[layer],
            self.owners.modules.index(owner),
            operands,
            product is None,
            tuple(call.lead),
            call.rows,
            call.columns,
            None if product is None else product.position,
            self._answers_at_keys(owner),
            frozenset() if product is None else tracer.tape.weights.get(operands[0].slot, frozenset()),
        )

    def _hide(self, why: str) -> None:
        owner = self.owners.current()
        if owner is not None:
            self.hidden[owner[0]] = why


_ATTENDING = PRODUCT | SOFTMAX | {"einsum"}


def _exchanged(value: Any, one: Tensor, other: Tensor) -> Any:  # noqa: ANN401
    """Arguments with one tensor exchanged for another."""
    if value is one:
        return other
    if type(value) in (tuple, list):
        return type(value)(_exchanged(item, one, other) for item in value)
    if isinstance(value, dict):
        return {name: _exchanged(item, one, other) for name, item in value.items()}
    return value


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
