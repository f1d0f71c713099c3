"""Gradients of a score with respect to attention weights and features, compared with autograd through the unfused model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import visattn
from tests import tiny
from tests.capturing import own, small
from tests.conftest import Figures
from visattn.core.operators import SoftmaxOperator
from visattn.core.records import AttentionRecord, Recording
from visattn.errors import CaptureError, OptionError

CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5}


class Written(TorchFunctionMode):
    """Function mode that runs fused calls unfused and keeps their weights, and the weights of each softmax in the model."""

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
    """Switch a timm model to its fused or unfused attention."""
    parts: list[Any] = [module for module in model.modules() if hasattr(module, "fused_attn")]
    for module in parts:
        module.fused_attn = fused


def difference(record: AttentionRecord, weights: Tensor, gradient: Tensor) -> float:
    """Return the largest difference of the gradients, relative to the largest gradient; windows are matched by their weights."""
    operator = record.operator.to(torch.float64)
    rows, columns = operator.query_index, operator.key_index
    if rows is None or columns is None:
        rows, columns = (torch.arange(count)[None] for count in operator.shape[2:])
    mine = torch.stack([operator._block(i)(slice(None)) for i in range(len(rows))], 2).transpose(1, 2)
    theirs, expected = (x.detach().flatten(0, -3).double() for x in (weights, gradient))
    order = torch.arange(len(theirs))
    if len(rows) > 1:
        order = torch.stack([(theirs - matrix).abs().amax((1, 2)).argmin() for matrix in mine.flatten(0, 2)])
        assert len(set(order.tolist())) == len(theirs)
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
    """Run a timm model with unfused attention; the weights behind its dropout count, which are multiplied by the values."""
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


@pytest.mark.full
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


def recorded(model: nn.Module, x: Tensor, **options: Any) -> tuple[Tensor, Recording]:
    with visattn.capture(model, gradients=True, **options) as recording:
        out = model(x)
    return out, recording


def gradients_of(recording: Recording) -> list[Tensor]:
    grads = [tile.grad for record in recording for tile in record.operator.tiles()]
    assert all(grad is not None for grad in grads)
    return [grad for grad in grads if grad is not None]


def frozen(model: nn.Module, but: str = "nothing") -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(but))
    return model


@pytest.mark.parametrize("trained", ["nothing", "head", "norm", "blocks.1", "blocks.0.attn.proj", "pos_embed"])
def test_frozen_parameters_change_no_gradient(trained: str) -> None:
    x = tiny.pixels(2)
    expected, whole = recorded(tiny.vit(), x)
    logits, recording = recorded(frozen(tiny.vit(), trained), x)
    assert torch.equal(logits, expected)
    found, wanted = (gradients_of(r.gradients(out[1, 2])) for r, out in ((recording, logits), (whole, expected)))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert not x.requires_grad
    assert x.grad is None


def test_scores_have_independent_gradients_and_leave_the_model_unchanged() -> None:
    model, x = tiny.vit(), tiny.pixels(2).requires_grad_()
    kept = torch.ones_like(model.get_parameter("head.weight"))
    model.get_parameter("head.weight").grad = kept
    logits, recording = recorded(model, x)
    both = [gradients_of(recording.gradients(logits[0, i])) for i in (3, 1)]
    for i, class_ in enumerate((3, 1)):
        again, fresh = recorded(tiny.vit(), tiny.pixels(2))
        torch.testing.assert_close(both[i], gradients_of(fresh.gradients(again[0, class_])), rtol=0, atol=0)
    assert not torch.equal(both[0][0], both[1][0])
    together = gradients_of(recording.gradients(logits[0, [3, 1]]))
    torch.testing.assert_close(together, [a + b for a, b in zip(*both, strict=True)])
    assert all(record.operator.gradient is None for record in recording)
    assert x.grad is None
    for name, parameter in model.named_parameters():
        assert parameter.grad is (kept if name == "head.weight" else None)
    assert torch.equal(kept, torch.ones_like(kept))


def test_score_of_one_image_has_no_gradient_in_another() -> None:
    logits, recording = recorded(tiny.vit(), tiny.pixels(2))
    for grad in gradients_of(recording.gradients(logits[0, 3])):
        assert float(grad[0].abs().max()) > 0
        assert float(grad[1].abs().max()) == 0


def test_score_of_one_forward_pass_has_no_gradient_in_another() -> None:
    model = tiny.vit()
    with visattn.capture(model, gradients=True) as recording:
        logits = [model(tiny.pixels(2, seed=i)) for i in range(2)]
    found = recording.gradients(logits[1][0, 3])
    assert [float(grad.abs().max()) > 0 for grad in gradients_of(found)] == [False, False, True, True]
    alone = recorded(tiny.vit(), tiny.pixels(2, seed=1))
    expected = gradients_of(alone[1].gradients(alone[0][0, 3]))
    torch.testing.assert_close(gradients_of(found.select(forward=1)), expected, rtol=0, atol=0)


OUTSIDE: dict[str, Callable[[], Tensor]] = {
    "a number": lambda: torch.zeros(()),
    "of another graph": lambda: torch.ones(3, requires_grad=True).prod(),
    "of another forward": lambda: tiny.vit()(tiny.pixels(2))[0, 3],
}


@pytest.mark.parametrize("name", list(OUTSIDE))
def test_score_that_does_not_depend_on_the_recording_is_refused(name: str) -> None:
    _, recording = recorded(tiny.vit(), tiny.pixels(2))
    with pytest.raises(OptionError, match="no gradient of the score with respect to what was recorded"):
        recording.gradients(OUTSIDE[name]())


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_forward_without_a_graph_is_refused(off: Callable[[], Any]) -> None:
    with pytest.raises(CaptureError, match="the model runs under no_grad or inference_mode"), off():
        recorded(tiny.vit(), tiny.pixels())


class Partly(nn.Module):
    """Model of which a part records no autograd graph."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.vit = way, own.vit()

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.vit.patches(x).flatten(2).transpose(1, 2)
        if self.way == "no_grad":
            with torch.no_grad():
                tokens = self.vit.blocks[0](tokens)
        elif self.way == "reentrant checkpoint":
            tokens = checkpoint(self.vit.blocks[0], tokens, use_reentrant=True)
        else:
            tokens = self.vit.blocks[0](tokens).detach()
        out: Tensor = self.vit.head(self.vit.blocks[1](tokens).mean(1))
        return out


@pytest.mark.parametrize("way", ["no_grad", "reentrant checkpoint"])
def test_layer_without_a_graph_is_refused_by_name(way: str) -> None:
    with pytest.raises(CaptureError, match=r"vit\.blocks\.0\.attn runs where autograd records no graph"):
        recorded(Partly(way), tiny.pixels())


@pytest.mark.parametrize("trained", ["vit", "vit.head"])
def test_layer_cut_off_by_a_detach_has_zero_gradient(trained: str) -> None:
    logits, recording = recorded(frozen(Partly("detach"), trained), tiny.pixels(), features="none")
    if trained == "vit":
        assert [float(grad.abs().max()) > 0 for grad in gradients_of(recording.gradients(logits[0, 3]))] == [False, True]
    else:
        with pytest.raises(OptionError, match="no gradient of the score"):
            recording.gradients(logits[0, 3])


def test_gradients_of_features_equal_autograd() -> None:
    model, x = tiny.vit(), tiny.pixels(2)
    logits, recording = recorded(model, x, features="blocks.*")
    kept: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name.startswith("blocks."):
            module.register_forward_hook(lambda _, __, out, name=name: kept.__setitem__(name, out))
    score = model(x)[0, 3]
    expected = dict(zip(kept, torch.autograd.grad(score, list(kept.values())), strict=True))
    found = {feature.layer: feature for feature in recording.gradients(logits[0, 3]).features}
    assert found.keys() == expected.keys()
    assert len(found) > 10
    for name, feature in found.items():
        assert feature.gradient is not None
        torch.testing.assert_close(feature.value, kept[name], rtol=0, atol=0)
        torch.testing.assert_close(feature.gradient, expected[name], rtol=0, atol=0)


def test_gradients_of_tokens_are_in_their_order() -> None:
    logits, recording = recorded(tiny.vit(), tiny.pixels(2), features="all")
    found = recording.gradients(logits[0, 3])
    assert [feature.layer for feature in found.features] == ["blocks.0", "blocks.1", "norm"]
    for feature in found.features:
        assert feature.gradient is not None
        assert feature.gradient.shape == feature.value.shape
        assert float(feature.gradient[0].abs().max()) > 0
    last = found.features[-1].gradient
    assert last is not None
    assert float(last[:, 1:].abs().max()) == 0  # the head reads the class token


def test_gradients_of_chosen_layers_equal_those_of_a_full_recording() -> None:
    x = tiny.pixels(2)
    (logits, whole), (same, part) = recorded(tiny.vit(), x), recorded(tiny.vit(), x, layers="blocks.1.*")
    assert len(part) == 1
    torch.testing.assert_close(
        gradients_of(part.gradients(same[0, 3])), gradients_of(whole.gradients(logits[0, 3]))[1:], rtol=0, atol=0
    )


@pytest.mark.parametrize("heads", [(4, 2), (4, 1)], ids=["two heads of keys", "one head of keys"])
def test_gradients_of_grouped_queries_equal_autograd(heads: tuple[int, int]) -> None:
    kept: list[Tensor] = []

    def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(heads[0] // heads[1], 1) for x in (k, v))
        kept.append((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1))
        return kept[-1] @ v

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    x = tiny.pixels(2)
    logits, recording = recorded(own.vit(fused, heads=heads[0], groups=heads[1]), x)
    score = own.vit(written, heads=heads[0], groups=heads[1])(x)[0, 3]
    torch.testing.assert_close(
        gradients_of(recording.gradients(logits[0, 3])), list(torch.autograd.grad(score, kept)), rtol=1e-5, atol=1e-7
    )
    assert all(isinstance(record.operator, SoftmaxOperator) for record in recording)
