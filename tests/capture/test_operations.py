"""Every operation that torch lets a mode see, once between the embedding and the attention: none breaks, none is placed wrongly."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import get_overridable_functions, resolve_name

from tests.capture.moving import GRID, WIDTH, Moving, image, judged
from tests.conftest import Figures

# no calls with these: they end the process, touch files, want other devices, or are not about numbers
SKIPPED = {
    "of other devices": "cuda xpu mps ipu npu pin_memory is_pinned cudnn miopen fbgemm mkldnn record_stream to_mkldnn share_memory",
    "of the graph": "backward register_hook register_post_accumulate_grad_hook retain_grad grad_fn is_leaf requires_grad_ detach_",
    "of Python": "__reduce_ex__ __setstate__ __deepcopy__ __dir__ __torch_dispatch__ __hash__ apply_ map_ map2_ module_load __iter__",
    "of storage": "set_ resize_ resize_as_ resize resize_as_sparse_ data_ptr storage untyped_storage _typed_storage new stft istft",
    "of quantized, sparse and distributed tensors": "quantize dequantize q_ int_repr sparse fake_quantize choose_qparams embedding",
}
NEAR = [
    lambda t: (t,),
    lambda t: (t, t),
    lambda t: (t, 1),
    lambda t: (t, -1),
    lambda t: (t, 0.5),
    lambda t: (t, 2, 1),
    lambda t: (t, t, t),
    lambda t: (t, (1, 2)),
    lambda t: (t, (WIDTH,)),
    lambda t: (t, 0, 1, 2),
    lambda t: (t, 1, torch.arange(96).flip(0)),
    lambda t: (t, 1, torch.arange(96)[None, :, None].expand_as(t)),
    lambda t: (t, torch.arange(96 * WIDTH).view_as(t)),
    lambda t: (t, t > 0, t),
    lambda t: (t, t > 0, 1.0),
    lambda t: (t > 0, t, t),
    lambda t: (t, torch.eye(WIDTH)),
    lambda t: (t, torch.eye(WIDTH)[None]),
    lambda t: (t, torch.eye(WIDTH), torch.ones(WIDTH)),
    lambda t: (t, WIDTH, None, None),
    lambda t: ([t, t],),
    lambda t: ([t[:, :48], t[:, 48:]], 1),
    lambda t: (t, (2, 3), (1, 2)),
    lambda t: (t, 1, 1, t[:, :1]),
    lambda t: (t.mT, torch.eye(96)[:, :, None]),
    lambda t: (1, t),
]
Call = tuple[Callable[..., Any], Callable[[Tensor], tuple[Any, ...]]]


def functions() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Name, function, and why it is not called."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for overridable in get_overridable_functions().values():
            for func in overridable:
                name = resolve_name(func) or repr(func)
                last = name.rsplit(".", 1)[-1]
                reason = next((why for why, words in SKIPPED.items() if any(word in name for word in words.split())), "")
                if last.startswith("_") and not last.startswith("__") and last != "__get__":
                    reason = "private"
                yield name, func, reason


def made(func: Callable[..., Any], arguments: Callable[[Tensor], tuple[Any, ...]], t: Tensor) -> Tensor | None:
    """What a call makes of tokens, as tokens; None if it is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        out = func(*arguments(t.clone()))
    if isinstance(out, (tuple, list)):
        out = next((x for x in out if isinstance(x, Tensor)), None)
    if not isinstance(out, Tensor) or out.dtype != torch.float32 or out.layout != torch.strided:
        return None
    if out.ndim == 2 and len(out) == 96:
        return out[None]
    return out if out.ndim == 3 and len(out) == 1 and out.shape[1] > 1 and out.shape[2] > 0 else None


@cache
def calls() -> dict[str, Call]:
    """The first generic call of each function that makes tokens of tokens."""
    found: dict[str, Call] = {}
    t = torch.randn(1, 96, WIDTH, generator=torch.Generator().manual_seed(5))
    for name, func, reason in functions():
        if reason or name in found:
            continue
        for arguments in NEAR:
            try:
                tokens = made(func, arguments, t)
            except Exception:
                continue
            if tokens is not None and bool(tokens.isfinite().all()):
                found[name] = func, arguments
                break
    return found


class Probed(Moving):
    def __init__(self, func: Callable[..., Any], arguments: Callable[[Tensor], tuple[Any, ...]]) -> None:
        super().__init__(lambda _, t: made(func, arguments, t))  # type: ignore[arg-type,return-value]


def decided(model: Moving, x: Tensor) -> bool:
    """Whether lighting one patch changes one token, and another for each patch."""
    with torch.no_grad():
        before, met = model.between[0](model, model.tokens(x)), []
        for row, column in ((0, 0), (2, 7), (5, 3), (7, 11)):
            lit = x.clone()
            lit[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 3
            after = model.between[0](model, model.tokens(lit))
            met.append(((after - before).abs().amax((0, 2)) > 1e-5).nonzero().flatten().tolist())
    return (
        before.shape[1] == GRID[0] * GRID[1] and all(len(tokens) == 1 for tokens in met) and len({tuple(one) for one in met}) == 4
    )


def test_operations_between_embedding_and_attention(figures: Figures) -> None:
    reasons: dict[str, int] = {}
    for _, _, reason in functions():
        reasons[reason or "called, or not with such arguments"] = (
            reasons.get(reason or "called, or not with such arguments", 0) + 1
        )
    x, wrong, decisive, placed, refused = image(), {}, 0, 0, []
    for name, (func, arguments) in calls().items():
        model = Probed(func, arguments)
        try:
            with torch.no_grad():
                model(x)
        except Exception:
            continue  # without a capture too
        verdicts = {judged(model, x, probes=3, covers=False)}
        if any(verdict.startswith("wrong") for verdict in verdicts):
            wrong[name] = verdicts
        if decided(model, x):
            decisive += 1
            placed += verdicts == {"right"}
            refused += [] if verdicts == {"right"} else [(name, *verdicts)]
    for reason, count in reasons.items():
        figures(f"operations: {reason}", count, "-")
    figures("operations: called", len(calls()), "300 or more")
    figures("operations: one patch decides", decisive, "-")
    figures("operations: of these placed", placed / decisive, "0.9 or more")
    assert not wrong
    assert len(calls()) >= 300
    assert placed / decisive >= 0.9, refused


def test_a_model_of_operations_is_no_special_case() -> None:
    assert isinstance(Probed(torch.relu, NEAR[0]), nn.Module)
    with pytest.raises(KeyError):
        calls()["no such function"]
