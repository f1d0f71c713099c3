"""Function mode for a forward pass whose autograd graph is linear, so that its output is the sum of what `Plan` says.

The model computes what it always does, to the bit; only the graph differs. Each summand begins at a leaf of the graph. A call that adds a
constant, such as the bias of a layer, is noted with this constant: what the call returns when all summands are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from visattn.core.capturing.intercept.calls import Call, ProductCall, SampledCall
from visattn.core.capturing.intercept.mode import CaptureMode
from visattn.core.capturing.linear import frozen
from visattn.core.capturing.linear.plan import Action, plan_of
from visattn.core.capturing.trace.call_tensors import tensors_in
from visattn.core.capturing.trace.noting import plainly
from visattn.core.capturing.trace.operations import words
from visattn.core.capturing.trace.tape import Entry
from visattn.core.capturing.trace.tracer import Tracer
from visattn.errors import CaptureError

_DETACHING = words("detach detach_")  # the value goes on, so its share does


class OtherOperations(CaptureError):
    """The forward pass ran other operations than the one that its plan was made of."""


class Noted(NamedTuple):
    """Summand, or constant that is added, of a running forward pass.

    Attributes:
        layer: Name of the module that ran.
        action: What the plan says about the call; None for the pixels.
        at: Tensor in the graph.
        value: Its value, or that of the constant.
        func: Name of the function that was called.
    """

    layer: str
    action: Action | None
    at: Tensor
    value: Tensor
    func: str = ""


class LinearMode(CaptureMode):
    """Mode of a forward pass that repeats one that was captured before, with a linear graph.

    Attributes:
        noted: Summands and constants so far.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - of `CaptureMode`
        """See `CaptureMode`."""
        super().__init__(*args, **kwargs)
        self.noted: list[Noted] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # noqa: ANN401
        """See `CaptureMode`; no call takes its short way."""
        tracer = self.tracer
        if tracer is None:
            return super().__torch_function__(func, types, args, kwargs)
        if not tracer.known:
            raise OtherOperations(
                "a second forward pass ran other operations than the first, so its output cannot be taken apart."
            )
        return self._run_intercepted(tracer, func, types, args, kwargs)

    def begin(self, pixels: Tensor) -> Tensor:
        """Begin a forward pass: return pixels that are a leaf of the graph."""
        self.noted.clear()
        leaf = pixels.detach().clone().requires_grad_()
        self.noted.append(Noted("", None, leaf, leaf.detach()))
        return leaf.clone()  # the model may write to it

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
        plan = plan_of(tracer.tape)
        action = plan.actions.get(tracer.at)
        if action is not None and action.freezes:
            plan.layers[tracer.at] = self._layer()
        if entry.attention is not None:
            return self._run_candidate(tracer, entry, func, args, kwargs, odd=odd)
        run = tracer.run if entry.contents else plainly
        if action is None:
            with _without_graph(args, kwargs):
                out = run(func, args, kwargs)
        else:
            slots = {id(tensor): slot for slot in action.slots if (tensor := tracer.tensor(slot)) is not None}
            with torch.enable_grad():  # a frozen part of the model may run without
                out = self._acted(action, entry, run, func, args, kwargs, slots)
        tracer.confirm(entry, args, kwargs, out)
        if entry.kept or (entry.scoring and self._vectors):
            self.held.hold(tracer.at - 1, args, kwargs)
        return out

    def _acted(
        self,
        action: Action,
        entry: Entry,
        run: Callable[..., Any],
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        slots: Mapping[int, int],
    ) -> Any:  # noqa: ANN401
        """Run a call as the plan says; `slots` are those of the action, by `id` of their tensors."""
        if action.kind == "begin":
            with torch.no_grad():
                out = run(func, args, kwargs)
            if out is None:  # an assignment, `x[mask] = 0`
                self._written(action, entry, args[0])
                return None
            return self._leaf(action, entry, out)
        if entry.operation.own and entry.operation.name in _DETACHING:
            return args[0].view_as(args[0])
        if action.kind == "freeze":
            return run(func, *_mapped((args, kwargs), lambda x: x.detach() if id(x) in slots else x))
        zero = _at_zero(entry, func, args, kwargs, slots) if action.adds else None  # before a call that writes in place
        if action.kind == "norm":
            with torch.no_grad():
                out = run(func, args, kwargs)
            out = frozen.norm(entry.operation.name, args, kwargs, out)
        else:
            out = run(func, args, kwargs)
        results = [out] if isinstance(out, Tensor) else [x for x in out if isinstance(x, Tensor)]
        constants = [zero] if isinstance(zero, Tensor) else [x for x in zero or () if isinstance(x, Tensor)]
        for result, constant in zip(results, constants, strict=False):
            if result.requires_grad and result.is_floating_point():
                self._keep(action, entry, result, constant)
        return out

    def _leaf(self, action: Action, entry: Entry, out: Any) -> Any:  # noqa: ANN401
        """Return the result of a call as one that begins a summand."""
        results = [out] if isinstance(out, Tensor) else list(out)
        changed = []
        for result, before in zip(results, entry.before, strict=False):
            if not isinstance(result, Tensor) or not result.is_floating_point():
                changed.append(result)
            elif before is not None:
                changed.append(self._written(action, entry, result))
            else:
                changed.append(self._begun(action, entry, result).clone())  # the model may write to it
        return changed[0] if isinstance(out, Tensor) else type(out)(changed)

    def _written(self, action: Action, entry: Entry, tensor: Tensor) -> Tensor:
        """Return a tensor that a call wrote to; its summand begins with what stands there now."""
        return tensor.copy_(self._begun(action, entry, tensor))

    def _begun(self, action: Action, entry: Entry, value: Tensor) -> Tensor:
        """Return a leaf with a value, at which a summand begins."""
        leaf = value.detach().clone().requires_grad_()
        self._keep(action, entry, leaf, leaf)
        return leaf

    def _keep(self, action: Action, entry: Entry, at: Tensor, value: Tensor) -> None:
        self.noted.append(Noted(self._layer(), action, at, value.detach(), entry.operation.name))

    def _layer(self) -> str:
        """Return the name of the module that runs."""
        owner = self.owners.current()
        return "" if owner is None else owner[0]

    def _run_call(
        self, entry: Entry | None, call: Call, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor:
        """Run an attention call so that a summand begins at its result, or with frozen weights."""
        tracer = self.tracer
        assert tracer is not None and entry is not None  # noqa: S101, PT018 - a forward pass runs, and its tape is known
        action = plan_of(tracer.tape).actions.get(tracer.at)
        with torch.no_grad():
            out = super()._run_call(entry, call, run, args, kwargs)
        if action is None:
            return out
        if action.kind == "pool":
            return frozen.replaced(call.mix(call.weigh().detach()), out)
        if isinstance(call, ProductCall) and not isinstance(call, SampledCall):
            return self._weighted(action, entry, call, run, args, kwargs)
        call.out = self._begun(action, entry, out)
        return call.out.clone()  # the model may write to it

    def _weighted(
        self,
        action: Action,
        entry: Entry,
        call: ProductCall,
        run: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Tensor:
        """Run a product of weights and values so that a summand begins at the weights."""
        assert call.operand is not None  # noqa: S101 - kept until the call ends
        weights = self._begun(action, entry, call.operand)
        out: Tensor = run(*call.starting_at(weights, (args, kwargs)))
        call.operand = weights
        if out.requires_grad:
            return out
        self.noted.pop()  # a sum of a product, which was made before
        return self._begun(action, entry, out).clone()


def _at_zero(
    entry: Entry, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], slots: Mapping[int, int]
) -> Any:  # noqa: ANN401
    """Return what a linear call returns when the summands that it reads are zero, or what can be broadcast to it."""
    if (
        entry.operation.own
        and entry.operation.name == "linear"
        and len(slots) == 1
        and id(args[0] if args else kwargs["input"]) in slots
    ):
        return args[2] if len(args) > 2 else kwargs.get("bias")

    def changed(tensor: Tensor) -> Tensor:
        if id(tensor) in slots:
            return torch.zeros_like(tensor)
        return tensor.clone() if entry.writes else tensor

    with torch.no_grad(), torch._C.DisableTorchFunction():
        positional, named = _mapped((args, kwargs), changed)
        return func(*positional, **named)


def _without_graph(args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Return a context in which a call makes no graph. It is that of the caller if there is none to make, as views keep their mode."""
    makes_graph = any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))
    return torch.no_grad() if makes_graph else nullcontext()


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:  # noqa: ANN401
    """Return arguments of a call, which may be nested, with each tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {name: _mapped(item, change) for name, item in value.items()}
    return value
