"""Function mode that intercepts every function call of a forward pass, records the tape and reports each attention call.

It recognizes fused calls and attention that is written as a softmax followed by a weighted mean of values. `nn.MultiheadAttention`
reaches a mode as a single call, so the mode runs its body in order to intercept the calls inside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import repeat
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack
from torch._higher_order_ops.flex_attention import flex_attention
from torch.overrides import TorchFunctionMode

from visattn._support.faces import Later
from visattn.core.capturing.intercept.calls import Call, FusedCall, ProductCall, SampledCall
from visattn.core.capturing.intercept.held import SAMPLE, SCORING, Held, is_weighing, product_behind, sampled_behind
from visattn.core.capturing.intercept.running_module import Owners
from visattn.core.capturing.intercept.written_out import PRODUCT, Product, note_weights, product_of, sum_of, tensors_of
from visattn.core.capturing.placing.modes_around import apart, aside, function_modes, strange
from visattn.core.capturing.placing.steps import is_plain
from visattn.core.capturing.trace.keywords import in_order, restored
from visattn.core.capturing.trace.noting import plainly
from visattn.core.capturing.trace.operations import ASK, LENGTHS, MULTIPLY, SOFTMAX, SQUASH, operation_of, overwrites
from visattn.core.capturing.trace.tape import Attention, Entry, Operand
from visattn.core.capturing.trace.tracer import Tracer
from visattn.core.operators.fused import LogSumExpReader

if TYPE_CHECKING:
    from visattn.core.capturing.gating.finder import GateFinder
    from visattn.core.capturing.intercept import flex
else:
    flex = Later("visattn.core.capturing.intercept.flex")

_LONG = 512  # number of queries above which reading the kernel's log-sum-exp is cheaper than computing a softmax
_FUSED = frozenset({F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default, flex_attention})
_PLAIN_TYPES = frozenset({(), (Tensor,), (nn.Parameter,), (Tensor, nn.Parameter), (nn.Parameter, Tensor)})
_CHANGED = "runs in a mode, or on a class of tensors, that changes it"
_NESTED = "runs on nested tensors"
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def _why_unreadable(tensor: Tensor) -> str:
    """Return why a capture cannot read the values of a tensor, as a part of a sentence; empty if it can."""
    return "runs inside torch.func" if _wrapped(tensor) else _NESTED if tensor.is_nested else ""


# glibc keeps freed memory up to twice the largest block that was mapped and freed. Freeing this block, which is never touched,
# raises that limit: the pages of a dropped recording are then reused for the next one instead of going back to the system.
torch.empty((32 << 20) - (64 << 10), dtype=torch.uint8)

# both take the layer name, the module, the call and its note on the tape
Receive = Callable[[str, nn.Module, Call, Attention], None]  # runs after the call
# runs before the call, and may compute its result; a tensor replaces it
Replace = Callable[[str, nn.Module, Call, Attention, Callable[[], Tensor]], Tensor | None]


class CaptureMode(TorchFunctionMode):
    """Function mode that passes each attention call of one model to `receive`.

    The model keeps its own kernels, and its results stay bit-identical. If `replace` returns a tensor, the model continues with
    that tensor instead.

    Attributes:
        tracer: Recorder of the running forward pass; None between forward passes.
        twin: The image and the tensor that replaces it in all calls, or None.
        calls: Number of attention calls of each layer in this forward pass.
        hidden: Layers whose attention cannot be recorded, and why.
        held: Operands of the latest products that may belong to attention.
        gates: Function that returns the finder of gates, if they are asked for.
    """

    gates: Callable[[], GateFinder] | None = None

    def __init__(
        self,
        owners: Owners,
        receive: Receive,
        replace: Replace | None,
        answers_at_keys: Callable[[nn.Module], bool],
        *,
        vectors: bool,
    ) -> None:
        """Prepare to intercept calls; the model itself is not modified. `answers_at_keys`: see `ModelDescription`; `vectors`: `Watch`."""
        super().__init__()
        self.owners, self._receive, self._replace = owners, receive, replace
        self._answers_at_keys = answers_at_keys
        self.tracer: Tracer | None = None
        self.twin: tuple[Tensor, Tensor] | None = None
        self.calls: Counter[str] = Counter()
        self.hidden: dict[str, str] = {}
        self.held, self._vectors = Held(), vectors
        self._is_above_strange_modes = False  # function modes that are not PyTorch's and may change what calls do

    def __enter__(self) -> CaptureMode:
        self._is_above_strange_modes = strange(function_modes())
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run a function of PyTorch that was called inside the `with` block; PyTorch calls this method instead of the function.

        The fast case comes first: the call is the next one on the tape of an earlier forward pass, and all that takes part is plain.
        """
        tracer = self.tracer
        if tracer is None:  # no forward pass of the model is running
            return func(*args, **restored(func, kwargs) or {})
        entry = tracer.comparison.upcoming if tracer.known else None
        are_modes_around = _len_torch_dispatch_stack() or aside.modes[-1] or self._is_above_strange_modes
        if entry is None or are_modes_around or types not in _PLAIN_TYPES:
            return self._run_intercepted(tracer, func, types, args, kwargs)
        if not tracer.comparison.is_simple_call(entry, func, args, kwargs):
            return self._run_intercepted(tracer, func, types, args, kwargs)
        if entry.attention is not None or entry.shapes is None or entry.kept or entry.scoring or entry.gate:
            return self._run_known(tracer, entry, func, args, kwargs or {}, odd=False)
        out = func(*args, **kwargs) if kwargs else func(*args)
        if not tracer.comparison.takes(entry, args, kwargs or {}, out):
            tracer.confirm(entry, args, kwargs or {}, out)
        return out

    def _run_intercepted(
        self,
        tracer: Tracer,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
    ) -> Any:  # noqa: ANN401
        """Run one call of the forward pass, with the open dispatch modes out of the way, and with keywords in declared order."""
        if func in ASK and self.twin is None:
            return self._ask(tracer, func, args, kwargs or {})
        kwargs = restored(func, kwargs) or {}
        if len(kwargs) > 1 and type(func) is not FunctionType and any(map(isinstance, kwargs.values(), repeat(Tensor))):
            kwargs = in_order(func, kwargs)  # PyTorch's Python functions have put them in order
        if self.twin is not None:
            image, substitute = self.twin
            args, kwargs = _exchanged(args, image, substitute), _exchanged(kwargs, image, substitute)
        if not _len_torch_dispatch_stack():
            odd = self._is_above_strange_modes or strange(types)
            return self._run(tracer, func, args, kwargs, odd=odd)
        with apart() as dispatch_modes:
            odd = self._is_above_strange_modes or strange([*types, *map(type, dispatch_modes)])
            return self._run(tracer, func, args, kwargs, odd=odd)

    def _run(self, tracer: Tracer, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, odd: bool) -> Any:  # noqa: ANN401
        """Run one call of the forward pass, note it on the tape (list of calls), and return its result.

        `odd` tells whether a mode or a class of tensors takes part that is not PyTorch's, so that the call may do anything.
        """
        if odd and func not in ASK:
            tracer.distrust()
        if tracer.known:
            entry = tracer.expected(func, args, kwargs) if func not in ASK else None
            if entry is None and overwrites(func, args, kwargs):
                entry = tracer.elsewhere(func, args, kwargs)  # once it has run, its operands are others
            if entry is not None:
                return self._run_known(tracer, entry, func, args, kwargs, odd=odd)
        if func in ASK:
            return self._ask(tracer, func, args, kwargs)
        if func is F.multi_head_attention_forward:
            return plainly(self._in_parts, args, kwargs)
        may_attend = func in _FUSED or operation_of(func).name in _ATTENDING
        if may_attend:
            return self._run_candidate(tracer, None, func, args, kwargs, odd=odd)
        out = tracer.run(func, args, kwargs)
        self._note(func, args, kwargs, out)
        return out

    def _run_known(
        self,
        tracer: Tracer,
        entry: Entry,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        odd: bool,
    ) -> Any:  # noqa: ANN401
        """Run a call that the known tape expects as its `entry`, and return its result; `odd`: see `_run`."""
        if entry.attention is not None:
            return self._run_candidate(tracer, entry, func, args, kwargs, odd=odd)
        run = tracer.run if entry.contents else plainly  # contents of index tensors may differ from those on the tape
        out = run(func, args, kwargs)
        tracer.confirm(entry, args, kwargs, out)
        if entry.kept or (entry.scoring and self._vectors):
            self.held.hold(tracer.at - 1, args, kwargs)
        if entry.gate and self.gates is not None:
            self.gates().read(entry, args, kwargs, out)
        return out

    def _ask(self, tracer: Tracer, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Run a call that only asks for metadata."""
        if func in LENGTHS:
            tracer.read_length(args[0] if args else None)
        return plainly(func, args, kwargs)

    def _in_parts(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run the body of `F.multi_head_attention_forward`, whose calls are intercepted."""
        with self:
            return _multi_head_attention(*args, **kwargs)

    def _run_candidate(
        self,
        tracer: Tracer,
        entry: Entry | None,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        odd: bool,
    ) -> Any:  # noqa: ANN401
        """Run a call that may be attention, such as a product of matrices; if it is attention of a layer, pass it to the receiver.

        `entry` is the entry of the known tape that the call matches, if any; `odd`: see `_run`.
        """
        reasons = () if entry is not None else map(_why_unreadable, tensors_of(args, kwargs))
        reason = next(filter(None, reasons), "")
        if reason:
            if func in _FUSED or operation_of(func).name in SOFTMAX:
                self._hide(reason)
            if reason != _NESTED:
                tracer.distrust()
            return plainly(func, args, kwargs)
        if entry is None and tracer.known:
            entry = tracer.elsewhere(func, args, kwargs)
        fused, attention = func in _FUSED, None if entry is None else entry.attention
        may_be_product = not fused and (entry is None or attention is not None)
        product = self._product(tracer, func, args, kwargs, attention) if may_be_product else None
        owner = None  # module that computes the attention, with its name
        if fused or product is not None:
            owner = self.owners.current() if attention is None else (attention.layer, self.owners.modules[attention.owner])
        if owner is not None:
            return self._run_attention(tracer, func, args, kwargs, *owner, product, entry, odd=odd)
        if attention is not None:
            self.hidden[attention.layer] = "overwrites the operands of its attention"
        if entry is None:
            out = tracer.run(func, args, kwargs)
            self._note(func, args, kwargs, out)
        else:
            out = plainly(func, args, kwargs)
            tracer.confirm(entry, args, kwargs, out)
        return out

    def _run_attention(
        self,
        tracer: Tracer,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        layer: str,
        owner: nn.Module,
        product: Product | None,
        entry: Entry | None,
        *,
        odd: bool,
    ) -> Any:  # noqa: ANN401
        """Run an attention call of a layer, pass it to the receiver, and return its result, or the tensor that replaces it.

        `product` is the product of weights and values that the call computes; None for a fused call. `entry` is the entry of the
        known tape that the call matches, if any.
        """
        if torch._C._current_graph_task_id() >= 0:  # a backward pass recomputes layers (checkpointing)
            return plainly(func, args, kwargs)
        flex_results = plainly(func, args, kwargs) if func is flex_attention else None  # the attention's result and others
        call: Call
        if func is flex_attention:
            call = flex.flex_call(args, kwargs, layer)
            func, args, kwargs = F.scaled_dot_product_attention, args[:3], {}
        elif product is None:
            call = FusedCall(*args, **kwargs)
        else:
            call = SampledCall(product) if product.samples else ProductCall(product)
        attention = None if entry is None else entry.attention
        if attention is None:
            attention = self._described_attention(tracer, layer, owner, call, product, args, kwargs)
        if self._vectors and isinstance(call, ProductCall):
            call.scored = self.held.operands(tracer, attention.scores)
        self.calls[layer] += 1
        run = tracer.run if entry is None and product is not None else plainly
        compute = partial(self._run_call, entry, call, partial(run, func), args, kwargs)
        out = None if self._replace is None else self._replace(layer, owner, call, attention, compute)
        if out is None:
            out = compute() if flex_results is None else flex_results[0]
            if odd and (flex_results is not None or not _is_own(func, args, kwargs, out)):
                self.calls[layer] -= 1
                self.hidden[layer] = _CHANGED
                if product is not None:
                    self._note(func, args, kwargs, out)
                return out if flex_results is None else flex_results
        call.out = out if call.out is None else call.out
        if entry is None:
            tracer.write(func, args, kwargs, out, attention)
        else:
            tracer.confirm(entry, args, kwargs, out)
        with torch._C.DisableTorchFunction():
            self._receive(layer, owner, call, attention)
        return out if flex_results is None else (out, *flex_results[1:])

    def _run_call(
        self, entry: Entry | None, call: Call, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor:
        """Run an attention call and return its result; for a fused call with many queries, also keep the kernel's log-sum-exp.

        `entry` is the entry of the known tape that the call matches, if any.
        """
        if not isinstance(call, FusedCall) or call.rows <= _LONG:
            result: Tensor = run(args, kwargs)
            return result
        reader = LogSumExpReader()  # type: ignore[no-untyped-call]
        with reader:
            result = run(args, kwargs)
        if reader.lse is not None:
            call.know(reader.lse)
        return result

    def _product(
        self,
        tracer: Tracer,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        attention: Attention | None,
    ) -> Product | None:
        """Return the product of attention weights and values that a call is about to compute; None for any other call.

        It is a product of matrices, or the sum over an elementwise product. `attention` is the attention that the call is on the
        known tape; without it, weights are what comes from a softmax.
        """

        def is_weights(index: int, operand: Tensor) -> bool:
            return tracer.slot_of(operand) in tracer.tape.weights if attention is None else index == attention.position

        product = product_of(func, args, kwargs, is_weights)
        if product is not None:
            # doubtful: values that do not come from the image are learned, and may mix heads
            multiplies_tokens = (
                not product.doubtful or attention is not None or tracer.place_of(product.value) in tracer.tape.descends
            )
            return product if multiplies_tokens else None
        multiplied = self.held.factors(tracer, args[0] if args else kwargs.get("input"))
        if multiplied is None:
            return None
        number, factors = multiplied
        product = sum_of(func, args, kwargs, factors, is_weights)
        if product is None:
            return None
        # values of deformable attention were sampled from maps by earlier calls, whose second operands are the points
        samplings = sampled_behind(tracer.tape, tracer.place_of(product.value)) if attention is None else attention.samples
        points = {
            sampling: operands[1] for sampling in samplings if (operands := self.held.operands(tracer, sampling)) is not None
        }
        for kept_number in (number, *points):
            tracer.tape.entries[kept_number].kept = True
        if len(points) == len(samplings):
            return product._replace(samples=points)
        return product if attention is None else None

    def _note(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:  # noqa: ANN401
        """Note a call on the tape that has run and is no attention; keep its operands if a later attention may need them."""
        tracer = self.tracer
        assert tracer is not None  # noqa: S101
        try:
            entry = tracer.met(func, args, kwargs, out)
            if entry is not None:
                note_weights(tracer, entry, args, out)
                if self.gates is not None and entry.operation.name in _GATING:
                    self.gates().note(tracer, entry, args, kwargs, out)
                is_scoring = self._vectors and entry.operation.own and entry.operation.name in SCORING
                is_sampling = entry.operation.own and entry.operation.name == SAMPLE
                if is_scoring or is_sampling or is_weighing(tracer.tape, entry):
                    self.held.hold(tracer.at - 1, args, kwargs)
        except Exception:  # an unusual kind of tensor; the tape is not complete
            tracer.tape.whole = False

    def _described_attention(
        self,
        tracer: Tracer,
        layer: str,
        owner: nn.Module,
        call: Call,
        product: Product | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Attention:
        """Return the description of an attention call for the tape: its layer, operands, sizes, and the scores behind its weights.

        `product` is the product of weights and values that the call computes; None for a fused call.
        """
        operands: tuple[Operand, ...]
        if product is not None:
            operands = tuple(
                Operand(tracer.place_of(tensor), axes=product.axes, weighs=tensor is product.operand)
                for tensor in (product.operand, product.value)
            )
            softmaxes = tracer.tape.weights.get(operands[0].slot, frozenset())
        else:
            assert isinstance(call, FusedCall)  # noqa: S101
            names = enumerate(("query", "key", "value"))
            query, key, value = (args[index] if index < len(args) else kwargs[name] for index, name in names)
            operands = (
                Operand(tracer.place_of(query), 1),
                Operand(tracer.place_of(key), call.groups),
                Operand(tracer.place_of(value), call.groups),
            )
            softmaxes = frozenset()
        scores = product_behind(tracer.tape, softmaxes)
        if scores is not None:
            tracer.tape.entries[scores].scoring = True
        return Attention(
            layer,
            call=self.calls[layer],
            owner=self.owners.modules.index(owner),
            operands=operands,
            fused=product is None,
            lead=tuple(call.lead),
            rows=call.rows,
            columns=call.columns,
            position=None if product is None else product.position,
            answers_at_keys=self._answers_at_keys(owner),
            softmaxes=softmaxes,
            scores=scores,
            doubtful=product is not None and product.doubtful,
            samples=() if product is None else tuple(product.samples),
        )

    def _hide(self, reason: str) -> None:
        """List the running layer among those whose attention cannot be recorded."""
        owner = self.owners.current()
        if owner is not None:
            layer, _ = owner
            self.hidden[layer] = reason


_ATTENDING = PRODUCT | SOFTMAX | {"einsum", "sum"}
_GATING = MULTIPLY | SQUASH | {"einsum"}


def _exchanged(value: Any, old: Tensor, new: Tensor) -> Any:  # noqa: ANN401
    """Return arguments of a call, which may be nested, with one tensor replaced by another."""
    if value is old:
        return new
    if type(value) in (tuple, list):
        return type(value)(_exchanged(item, old, new) for item in value)
    if isinstance(value, dict):
        return {name: _exchanged(item, old, new) for name, item in value.items()}
    return value


def _is_own(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> bool:  # noqa: ANN401
    """Check whether PyTorch alone, without the modes that are open, gives the result `out`; False for a call with dropout."""
    dropout = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0)
    is_random = func in _FUSED and dropout
    if is_random or not all(map(is_plain, (*tensors_of(args, kwargs), out))):
        return False
    with torch._C.DisableTorchFunction(), torch.no_grad():
        return torch.equal(func(*args, **kwargs), out)


def _opened(function: FunctionType) -> Callable[..., Any]:
    """Return a copy of a function of PyTorch that function modes no longer receive as one call; they receive the calls inside it.

    The body of the function asks `has_torch_function` whether to hand itself over as a whole. In the copy, the answer is no.
    """
    names = {**function.__globals__, "has_torch_function": lambda _: False}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_multi_head_attention = _opened(F.multi_head_attention_forward)  # type: ignore[arg-type]
