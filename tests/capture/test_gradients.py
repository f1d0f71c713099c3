"""Gradients of a score with respect to attention weights and features, against autograd through the model written out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import visattn
from tests.capture import small
from tests.conftest import Figures
from visattn.records import AttentionRecord

CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5}


class Written(TorchFunctionMode):
    """Runs every fused call written out and keeps its weights, and those of each softmax that a model writes out itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self.attend(*args, **kwargs)
        out = func(*args, **kwargs)
        if getattr(func, "__name__", "") in ("softmax", "_softmax") and out.ndim > 3 and out.requires_grad:
            self.weights.append(out)
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        scale = options.get("scale")
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        self.weights.append((scores if attn_mask is None else scores + attn_mask).softmax(-1))
        return self.weights[-1] @ v


def fuse(model: nn.Module, fused: bool) -> None:
    """Put a model of timm on its fused branch, or on the one that it writes out."""
    parts: list[Any] = [module for module in model.modules() if hasattr(module, "fused_attn")]
    for module in parts:
        module.fused_attn = fused


def difference(record: AttentionRecord, weights: Tensor, gradient: Tensor) -> float:
    """Largest difference of the gradients by tile, relative to the largest; windows are matched by their weights."""
    operator = record.operator.to(torch.float64)
    rows, columns = operator.query_index, operator.key_index
    if rows is None or columns is None:
        rows, columns = (torch.arange(count)[None] for count in operator.shape[2:])
    mine = torch.stack([operator._block(i)(slice(None)) for i in range(len(rows))], 2).transpose(1, 2)
    theirs, expected = (x.detach().flatten(0, -3).double() for x in (weights, gradient))
    order = torch.arange(len(theirs))
    if len(rows) > 1:
        order = torch.stack([(theirs - matrix).abs().amax((1, 2)).argmin() for matrix in mine.flatten(0, 2)])
        assert order.unique().numel() == len(theirs)
    assert float((mine.flatten(0, 2) - theirs[order]).abs().max()) < 1e-4
    matched = expected[order].view_as(mine)
    want, found = torch.zeros(2, *operator.shape, dtype=torch.float64)
    for i, (q, k) in enumerate(zip(rows, columns, strict=True)):
        want[:, :, q[q >= 0][:, None], k[k >= 0]] = matched[:, i][..., q >= 0, :][..., k >= 0]
    for tile in operator.tiles(50):
        assert tile.grad is not None
        found[:, :, tile.queries[:, None], tile.keys] = tile.grad
    assert float(want.abs().max()) > 0
    return float((found - want).abs().max() / want.abs().max())


@contextmanager
def written_out(model: nn.Module) -> Iterator[Written]:
    """A model of timm on the branch that it writes out; what counts is what its dropout hands to the product with values."""
    written, handles = Written(), []

    def instead(_module: nn.Module, _args: object, out: Tensor) -> None:
        if written.weights and written.weights[-1].shape == out.shape:
            written.weights[-1] = out

    for name, module in model.named_modules():
        if name.endswith("attn_drop"):
            handles.append(module.register_forward_hook(instead))
    fuse(model, False)
    with written:
        yield written
    for handle in handles:
        handle.remove()


FUSED = [
    "vit",
    "vit pooled by attention",
    "deit distilled",
    "beit",
    "eva rope",
    "swin",
    "maxvit",
    "hiera",
    "cait",
    "xcit",
    "crossvit",
]
FUSED += ["volo", "pvt_v2", "twins", "tiny_vit"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", FUSED)
def test_gradients_equal_autograd_through_the_model_written_out(name: str, dtype: torch.dtype, figures: Figures) -> None:
    model, x = small.MODELS[name]()
    model, x = model.to(dtype), x.to(dtype)
    fuse(model, True)
    with visattn.capture(model, gradients=True) as recording:
        logits = model(x)
    found = recording.gradients(logits[0, 3])
    with written_out(model) as written:
        score = model(x)[0, 3]
    expected = torch.autograd.grad(score, written.weights, allow_unused=True)
    differences = [
        difference(record, weights, gradient)
        for record, weights, gradient in zip(found, written.weights, expected, strict=True)
        if gradient is not None
    ]
    assert len(differences) >= 2
    worst = max(differences)
    figures(f"gradients of {name}, {dtype}", worst, f"<= {CLOSE[dtype]}")
    assert worst <= CLOSE[dtype]
