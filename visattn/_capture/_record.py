"""One capture from start to end: hooks for the pixels' size and the tokens, the interception for the attention."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from visattn._capture._anatomy import Anatomy
from visattn._capture._mode import CaptureMode, own
from visattn._checks import printable
from visattn.errors import CaptureError, NoAttentionCaptured, UnsupportedModel
from visattn.operators import SoftmaxOperator
from visattn.records import AttentionRecord, FeatureRecord, Recording

Features = Literal["last", "all", "none"]


@contextmanager
def record(model: nn.Module, anatomy: Anatomy, *, layers: str, values: bool, features: Features) -> Iterator[Recording]:
    """Record the forward passes of `model` inside the `with`; see `visattn.capture`."""
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedModel("a TorchScript model runs outside Python and shows no attention. Use the original module.")
    recording = Recording(readout=anatomy.readout, captured=layers, provenance=anatomy.provenance)
    thread = threading.get_ident()
    calls: Counter[str] = Counter()
    sums: list[Tensor] = []
    forward = -1

    def start(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        nonlocal forward
        if threading.get_ident() == thread:
            forward += 1
            calls.clear()
            recording.input_size = int(args[0].shape[-2]), int(args[0].shape[-1])

    def receive(layer: str, owner: nn.Module, operator: SoftmaxOperator, value: Tensor) -> None:
        if forward < 0:
            raise CaptureError(f"{layer} ran before the model saw an image. Call the whole model inside the capture.")
        sums.extend(part.sum(dtype=torch.float32) for part in (operator.query, operator.key))  # now, while they are in cache
        kind, queries, keys = anatomy.place(owner, *operator.shape[2:], recording.input_size)
        recording.records.append(
            AttentionRecord(
                layer=layer,
                call=calls[layer],
                forward=forward,
                kind=kind,
                operator=operator,
                queries=queries,
                keys=keys,
                value=own(value) if values else None,
                output_weight=anatomy.output_weight(owner),
            )
        )
        calls[layer] += 1

    def keep(layer: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(_module: nn.Module, _args: object, tokens: Tensor) -> None:
            if threading.get_ident() == thread and forward >= 0:
                layout = anatomy.layout(recording.input_size)
                recording.features.append(FeatureRecord(layer, forward, "tokens", own(tokens), layout=layout))

        return hook

    with ExitStack() as stack:
        stack.callback(anatomy.stem.register_forward_pre_hook(start).remove)
        chosen = list(anatomy.tokens.items())
        for name, module in {"last": chosen[-1:], "all": chosen, "none": []}[features]:
            stack.callback(module.register_forward_hook(keep(name)).remove)
        mode = stack.enter_context(CaptureMode(model, receive, layers))
        yield recording
    if forward < 0:
        raise CaptureError("the model was not run inside the capture. Call model(pixels) inside the with block.")
    if not recording.records:
        raise NoAttentionCaptured(_why_nothing(model, layers, list(mode.passed_by)))
    _check_finite(recording, sums)


def _why_nothing(model: nn.Module, layers: str, passed_by: list[str]) -> str:
    if passed_by:
        return f"no attention captured: no layer's name matches {printable(layers)!r}; the model's are {', '.join(passed_by)}."
    eager = [name for name, module in model.named_modules() if getattr(module, "fused_attn", None) is False]
    if eager:
        return (
            f"no attention captured: {len(eager)} layers compute it without the fused kernel (first: {eager[0]}). Set "
            "module.fused_attn = True on them; the result is the same."
        )
    return f"no attention captured: no layer of {type(model).__name__} called the fused softmax attention."


def _check_finite(recording: Recording, sums: list[Tensor]) -> None:
    """Refuse NaN in what the kernels were given: some turn a row of NaN into zeros, so the model's output does not tell."""
    if not all(math.isfinite(float(total)) for total in sums):
        for item in recording.records:
            operator = item.operator
            assert isinstance(operator, SoftmaxOperator)  # noqa: S101 - receive() makes no other
            for name, tensor in (("query", operator.query), ("key", operator.key)):
                _refuse_nan(f"{item.layer}: {{}} of {tensor.numel()} {name} values", tensor)
    for feature in recording.features:
        _refuse_nan(f"{feature.layer}: {{}} of {feature.value.numel()} token values", feature.value)


def _refuse_nan(what: str, tensor: Tensor) -> None:
    if math.isfinite(float(tensor.sum(dtype=torch.float32))):  # one pass where all is well
        return
    if bad := int((~tensor.isfinite()).sum()):
        raise CaptureError(f"{what.format(bad)} are NaN or infinite. Check the weights and the input.")
