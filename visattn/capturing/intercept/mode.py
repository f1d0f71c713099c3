"""Function mode that intercepts every function call of a forward pass, records the tape and reports each attention call.

It recognizes fused calls and attention that is written as a softmax followed by a weighted mean of values. `nn.MultiheadAttention` reaches
a mode as a single call, so the mode runs its body in order to intercept the calls inside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.flex_attention import flex_attention as flex
from torch.overrides import TorchFunctionMode

from visattn.capturing.intercept.calls import Call, FusedCall, ProductCall, SampledCall
from visattn.capturing.intercept.dropped import restored
from visattn.capturing.intercept.flex import flex_call
from visattn.capturing.intercept.held import SAMPLE, SCORING, Held, is_weighing, product_behind, sampled_behind
from visattn.capturing.intercept.owners import Owners
from visattn.capturing.intercept.softmax import PRODUCT, Product, note_weights, product_of, sum_of, tensors_of
from visattn.capturing.placing.apart import apart, are_around, function_modes, strange
from visattn.capturing.placing.steps import is_plain
from visattn.capturing.trace.noting import plainly
from visattn.capturing.trace.operations import ASK, LENGTHS, SOFTMAX, operation_of
from visattn.capturing.trace.tape import Attention, Entry, Operand
from visattn.capturing.trace.tracer import Tracer
from visattn.operators.fused import LogSumExpReader

_LONG = 512  # number of queries above which reading the kernel's log-sum-exp is cheaper than computing a softmax
_FUSED = frozenset({F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default})
_CHANGED = "runs in a mode, or on a class of tensors, that changes it"
_NESTED = "runs on nested tensors"
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def _unreadable(tensor: Tensor) -> str:
    """Say why a tensor has no plain values; empty if it has."""
    return "runs inside torch.func" if _wrapped(tensor) else _NESTED if tensor.is_nested else ""


# glibc keeps freed memory up to twice the largest block that was mapped and freed. Freeing this block, which is never touched, raises
# that limit: the pages of a dropped recording are then reused for the next one instead of going back to the system.
torch.empty((32 << 20) - (64 << 10), dtype=torch.uint8)

# both take the layer name, the module, the call and its note on the tape
Receive = Callable[[str, nn.Module, Call, Attention], None]  # runs after the call
Replace = Callable[[str, nn.Module, Call, Attention], Tensor | None]  # runs before the call; a tensor replaces its result


class CaptureMode(TorchFunctionMode):
    """Function mode that passes each attention call of one model to `receive`.

    The model keeps its own kernels, and its results stay bit-identical. If `replace` returns a tensor, the model continues with that
    tensor instead.

    Attributes:
        tracer: Recorder of the running forward pass; None between forward passes.
        twin: The image and the tensor that replaces it in all calls, or None.
        calls: Number of attention calls of each layer in this forward pass.
        hidden: Layers whose attention cannot be recorded, and why.
        held: Operands of the latest products that may belong to attention.
    """

    def __init__(
        self,
        model: nn.Module,
        receive: Receive,
        replace: Replace | None = None,
        answers_at_keys: Callable[[nn.Module], bool] | None = None,
        *,
        vectors: bool = False,
    ) -> None:
        """Prepare to intercept calls; the model itself is not modified. `vectors`: see `Watch`."""
        super().__init__()
        self.owners, self._receive, self._replace = Owners(model), receive, replace
        self._answers_at_keys = answers_at_keys or (lambda _: False)
        self.tracer: Tracer | None = None
        self.twin: tuple[Tensor, Tensor] | None = None
        self.calls: Counter[str] = Counter()
        self.hidden: dict[str, str] = {}
        self.held, self._vectors = Held(), vectors
        self._strange = False  # whether the mode lies above function modes that may change what calls do

    def __enter__(self) -> CaptureMode:
        self._strange = strange(function_modes())
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        tracer, kwargs = self.tracer, restored(func, kwargs)
        if tracer is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        if not are_around():
            return self._intercepted(tracer, func, args, kwargs, odd=self._strange or (bool(types) and strange(types)))
        with apart() as modes:
            odd = self._strange or strange([*types, *map(type, modes)])
            return self._intercepted(tracer, func, args, kwargs, odd=odd)

    def _intercepted(
        self,
        tracer: Tracer,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        *,
        odd: bool,
    ) -> Any:  # noqa: ANN401
        """Run a call of the model. `odd`: whether code that is not PyTorch's takes part in it."""
        if odd and func not in ASK:
            tracer.distrust()
        if self.twin is not None:
            args, kwargs = _exchanged(args, *self.twin), _exchanged(kwargs or {}, *self.twin)
        entry = None
        kwargs = kwargs or {}
        if tracer.known:
            entry = tracer.quickly(func, args, kwargs)
            if entry is None and func not in ASK:
                entry = tracer.expected(func, args, kwargs)
            if entry is not None and entry.attention is None:
                run = tracer.run if entry.contents else plainly  # contents may differ
                out = run(func, args, kwargs)
                tracer.confirm(entry, args, kwargs, out)
                if entry.kept or (entry.scoring and self._vectors):
                    self.held.hold(tracer.at - 1, args, kwargs)
                return out
        if func in LENGTHS and args:
            tracer.read_length(args[0])
        if func in ASK:
            return plainly(func, args, kwargs)
        if func is F.multi_head_attention_forward:
            return plainly(self._in_parts, args, kwargs)
        operation = operation_of(func)
        fused = func in _FUSED or func is flex
        if not fused and operation.name not in _ATTENDING:  # the common case without a known tape
            out = tracer.run(func, args, kwargs)
            self._met(func, args, kwargs, out)
            return out
        why = next((found for tensor in tensors_of(args, kwargs) if (found := _unreadable(tensor))), "")
        if why:
            if fused or operation.name in SOFTMAX:
                self._hide(why)
            if why != _NESTED:
                tracer.distrust()
            return plainly(func, args, kwargs)
        if entry is None and tracer.known:
            entry = tracer.elsewhere(func, args, kwargs)
        return self._attend(func, args, kwargs, fused, entry.attention if entry is not None else None, entry, odd=odd)

    def _in_parts(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run the body of `F.multi_head_attention_forward`, whose calls are intercepted."""
        with self:
            return _multi_head_attention(*args, **kwargs)

    def _attend(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        fused: bool,
        attention: Attention | None,
        entry: Entry | None,
        *,
        odd: bool,
    ) -> Any:  # noqa: ANN401
        """Run a call that is, or may be, attention, and report it if it is."""
        tracer = self.tracer
        assert tracer is not None  # noqa: S101
        recorded = entry is None or attention is not None
        product = self._product(tracer, func, args, kwargs, attention) if recorded and not fused else None
        owner = None
        if attention is not None and (fused or product is not None):
            owner = attention.layer, self.owners.modules[attention.owner]
        elif fused or product is not None:
            owner = self.owners.current()
        if owner is None:
            if attention is not None:
                self.hidden[attention.layer] = "overwrites the operands of its attention"
            out = (tracer.run if entry is None else plainly)(func, args, kwargs)
            if entry is None:
                self._met(func, args, kwargs, out)
            else:
                tracer.confirm(entry, args, kwargs, out)
            return out
        if torch._C._current_graph_task_id() >= 0:  # a backward pass recomputes layers (checkpointing)
            return plainly(func, args, kwargs)
        whole = plainly(func, args, kwargs) if func is flex else None
        call: Call
        if func is flex:
            call = flex_call(args, kwargs, owner[0])
            func, args, kwargs = F.scaled_dot_product_attention, args[:3], {}
        else:
            kind = SampledCall if product is not None and product.samples else ProductCall
            call = kind(product) if product is not None else FusedCall(*args, **kwargs)
        if attention is None:
            attention = self._described(tracer, *owner, call, product, args, kwargs)
        if self._vectors and isinstance(call, ProductCall):
            call.scored = self.held.operands(tracer, attention.scores)
        self.calls[owner[0]] += 1
        out = self._replace(*owner, call, attention) if self._replace is not None else None
        if out is None:
            run = tracer.run if entry is None and product is not None else plainly
            out = whole[0] if whole is not None else _made(call, partial(run, func), args, kwargs)
            if odd and (whole is not None or not _is_own(func, args, kwargs, out)):
                self.calls[owner[0]] -= 1
                self.hidden[owner[0]] = _CHANGED
                if product is not None:
                    self._met(func, args, kwargs, out)
                return out if whole is None else whole
        call.out = out
        if entry is None:
            tracer.write(func, args, kwargs, out, attention)
        else:
            tracer.confirm(entry, args, kwargs, out)
        with torch._C.DisableTorchFunction():
            self._receive(*owner, call, attention)
        return out if whole is None else (out, *whole[1:])

    def _product(
        self,
        tracer: Tracer,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        attention: Attention | None,
    ) -> Product | None:
        """Return the product of weights and values that a call computes; None for any other call."""

        def is_weights(index: int, operand: Tensor) -> bool:
            return tracer.slot_of(operand) in tracer.tape.weights if attention is None else index == attention.position

        product = product_of(func, args, kwargs, is_weights)
        if product is not None:  # doubtful: learned values may mix heads, and are no tokens
            tokens = not product.doubtful or attention is not None or tracer.place_of(product.value) in tracer.tape.descends
            return product if tokens else None
        factors = self.held.factors(tracer, args[0] if args else kwargs.get("input"))
        product = None if factors is None else sum_of(func, args, kwargs, factors[1], is_weights)
        if product is None or factors is None:
            return None
        samples = sampled_behind(tracer.tape, tracer.place_of(product.value)) if attention is None else attention.samples
        points = {one: operands[1] for one in samples if (operands := self.held.operands(tracer, one)) is not None}
        for one in (factors[0], *points):
            tracer.tape.entries[one].kept = True
        if len(points) == len(samples):
            return product._replace(samples=points)
        return product if attention is None else None

    def _met(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:  # noqa: ANN401
        tracer = self.tracer
        assert tracer is not None  # noqa: S101
        try:
            entry = tracer.met(func, args, kwargs, out)
            if entry is not None:
                note_weights(tracer, entry, args, out)
                scoring = self._vectors and entry.operation.own and entry.operation.name in SCORING
                sampling = entry.operation.own and entry.operation.name == SAMPLE
                if scoring or sampling or is_weighing(tracer.tape, entry):
                    self.held.hold(tracer.at - 1, args, kwargs)
        except Exception:  # an unusual kind of tensor; the tape is not complete
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
        """Build the note of an attention call for the tape."""
        if product is not None:
            operands = tuple(
                Operand(tracer.place_of(x), axes=product.axes, weighs=x is product.operand)
                for x in (product.operand, product.value)
            )
        else:
            assert isinstance(call, FusedCall)  # noqa: S101
            given = [args[i] if i < len(args) else kwargs[name] for i, name in enumerate(("query", "key", "value"))]
            operands = tuple(Operand(tracer.place_of(x), call.groups if i else 1) for i, x in enumerate(given))
        softmaxes = frozenset() if product is None else tracer.tape.weights.get(operands[0].slot, frozenset())
        scores = product_behind(tracer.tape, softmaxes)
        if scores is not None:
            tracer.tape.entries[scores].scoring = True
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
            softmaxes,
            scores,
            product is not None and product.doubtful,
            () if product is None else tuple(product.samples),
        )

    def _hide(self, why: str) -> None:
        owner = self.owners.current()
        if owner is not None:
            self.hidden[owner[0]] = why


_ATTENDING = PRODUCT | SOFTMAX | {"einsum", "sum"}


def _exchanged(value: Any, one: Tensor, other: Tensor) -> Any:  # noqa: ANN401
    """Replace one tensor by another in (nested) arguments."""
    if value is one:
        return other
    if type(value) in (tuple, list):
        return type(value)(_exchanged(item, one, other) for item in value)
    if isinstance(value, dict):
        return {name: _exchanged(item, one, other) for name, item in value.items()}
    return value


def _made(call: Call, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Run a call; for a long fused call, also read the kernel's log-sum-exp."""
    if not isinstance(call, FusedCall) or call.rows <= _LONG:
        made: Tensor = func(args, kwargs)
        return made
    reader = LogSumExpReader()  # type: ignore[no-untyped-call]
    with reader:
        made = func(args, kwargs)
    if reader.lse is not None:
        call.know(reader.lse)
    return made


def _is_own(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> bool:  # noqa: ANN401
    """Check whether PyTorch alone, without the modes that are open, gives this result."""
    drops = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0)
    if (func in _FUSED and drops) or not all(map(is_plain, (*tensors_of(args, kwargs), out))):
        return False
    with torch._C.DisableTorchFunction(), torch.no_grad():
        return torch.equal(func(*args, **kwargs), out)


def _entered(function: FunctionType) -> Callable[..., Any]:
    """Return a copy of a function that is no longer dispatched to a mode as a whole; the calls inside it still are."""
    inside = {**function.__globals__, "has_torch_function": lambda _: False}
    clone = FunctionType(function.__code__, inside, function.__name__, function.__defaults__, function.__closure__)
    clone.__kwdefaults__ = function.__kwdefaults__
    return clone


_multi_head_attention = _entered(F.multi_head_attention_forward)  # type: ignore[arg-type]
