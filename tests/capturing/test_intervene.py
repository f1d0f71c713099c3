"""Interventions, compared with a model that is changed directly in the same way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import visattn
from tests import tiny
from visattn import AttentionCall
from visattn.core.capturing.interventions import permuted
from visattn.errors import CaptureError, LayoutError, OptionError, ShapeError


def swin() -> nn.Module:
    """Build a Swin of two stages with two blocks, of which the second is shifted; the first stage has 4 windows of 16 tokens."""
    options: dict[str, Any] = {"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}
    return _sharp(timm.models.swin_transformer.SwinTransformer(**options, num_classes=3))


def hiera() -> nn.Module:
    options: dict[str, Any] = {"img_size": (64, 64), "embed_dim": 16, "num_heads": 1, "stages": (1, 2), "q_pool": 1}
    return _sharp(timm.models.hiera.Hiera(**options, mask_unit_size=(4, 4), mask_unit_attn=(True, False), num_classes=3))


def _sharp(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("qkv.weight"):
                parameter.copy_(torch.randn(parameter.shape) * 0.3)
            elif parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape) * 0.1)
    return model.eval()


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int], str]] = {
    "vit": (tiny.vit, tiny.INPUT, "blocks.1.attn"),
    "swin, shifted windows": (swin, (32, 32), "layers.0.blocks.1.attn"),
    "hiera, mask units": (hiera, (64, 64), "blocks.0.attn"),
}
every = pytest.mark.parametrize(("build", "size", "layer"), list(MODELS.values()), ids=list(MODELS))


@torch.no_grad()
def logits(model: nn.Module, x: Tensor, **options: Any) -> Tensor:
    with visattn.intervene(model, **options):
        out: Tensor = model(x)
    return out


def projection(model: nn.Module, layer: str) -> nn.Linear:
    found = model.get_submodule(layer).proj
    assert isinstance(found, nn.Linear)
    return found


@every
def test_identity_edit_does_not_change_explicit_attention(build: Any, size: Any, layer: str) -> None:
    model, x = build(), tiny.pixels(2, size)
    written = logits(model, x, layer=layer)
    assert torch.equal(logits(model, x, layer=layer, edit=lambda weights, _: weights), written)
    assert torch.equal(logits(model, x, layer=layer, scale=1.0), written)
    torch.testing.assert_close(written, model(x), rtol=1e-4, atol=1e-5)


@every
@pytest.mark.parametrize("head", [0, 1])
def test_scaling_a_head_to_zero_equals_zeroing_its_slice_of_the_projection(build: Any, size: Any, layer: str, head: int) -> None:
    model, x = build(), tiny.pixels(2, size)
    if layer == "blocks.0.attn":  # one head only
        head = 0
    changed = copy.deepcopy(model)
    heads = model.get_submodule(layer).num_heads if layer != "blocks.0.attn" else 1
    width = projection(changed, layer).in_features // heads
    with torch.no_grad():
        projection(changed, layer).weight[:, head * width : (head + 1) * width] = 0
    torch.testing.assert_close(logits(model, x, layer=layer, head=head, scale=0.0), changed(x), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(changed(x), model(x), atol=1e-4)


class KeyMask(TorchFunctionMode):
    """Function mode that adds minus infinity to the scores of some keys of one fused call; `masked` is `(groups, keys)` in its order."""

    def __init__(self, number: int, masked: Tensor) -> None:
        super().__init__()
        self.number, self.masked = number, masked

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.number -= 1
            if self.number == -1:
                query, key = args[:2]
                bias = torch.zeros(*query.shape[:-1], key.shape[-2])
                bias.masked_fill_(self.masked.view(*self.masked.shape[:-1], 1, self.masked.shape[-1]), -torch.inf)
                return func(query, key, args[2], attn_mask=bias)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("token", [0, 1, 6])
def test_masking_a_token_equals_masking_its_key(token: int) -> None:
    model, x = tiny.vit(), tiny.pixels(2)
    masked = torch.zeros(1, 1, 7, dtype=torch.bool)
    masked[..., token] = True
    with KeyMask(1, masked), torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(logits(model, x, layer="blocks.1.attn", mask=[token]), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(expected, model(x), atol=1e-4)


@pytest.mark.parametrize(("row", "column"), [(0, 0), (1, 2), (3, 6), (7, 7)])
def test_masking_a_token_equals_masking_its_key_in_the_shifted_window(row: int, column: int) -> None:
    """Compare with the paper's cyclic shift, for an 8 x 8 grid with windows of 4 shifted by 2."""
    model, x = swin(), tiny.pixels(1, (32, 32))
    shifted = (row - 2) % 8, (column - 2) % 8
    window, place = shifted[0] // 4 * 2 + shifted[1] // 4, shifted[0] % 4 * 4 + shifted[1] % 4
    plain = model(x)

    def mask_key(scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[window, :, :, place] = -torch.inf
        return scores

    class Scores(TorchFunctionMode):
        calls = -1

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "") == "softmax":
                self.calls += 1
                if self.calls == 1:
                    args = (mask_key(args[0]), *args[1:])
            return func(*args, **(kwargs or {}))

    with Scores(), torch.no_grad():
        expected = model(x)
    found = logits(model, x, layer="layers.0.blocks.1.attn", mask=[row * 8 + column])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(expected, plain, atol=1e-5)


@every
def test_a_capture_around_an_intervention_records_the_edited_attention(build: Any, size: Any, layer: str) -> None:
    model, x = build(), tiny.pixels(1, size)
    with torch.no_grad(), visattn.capture(model) as before:
        model(x)
    with torch.no_grad(), visattn.capture(model) as after, visattn.intervene(model, layer, drop=[3]):
        model(x)
    assert [record.layer for record in after] == [record.layer for record in before]
    plain, edited = (next(record for record in recording if record.layer == layer) for recording in (before, after))
    assert (edited.queries, edited.keys) == (plain.queries, plain.keys)
    expected = plain.operator.dense()
    expected[..., 3] = 0
    torch.testing.assert_close(edited.operator.dense(), expected, rtol=0, atol=1e-5)


def test_rollout_of_an_intervention_multiplies_the_edited_weights() -> None:
    """Check that the rollout of an intervention is the product of the edited weights, each averaged with the identity."""
    model, x = tiny.vit(), tiny.pixels()
    with torch.no_grad(), visattn.capture(model) as recording, visattn.intervene(model, mask=[3]):
        model(x)
    assert not recording.unseen
    expected = torch.eye(len(recording[0].keys))
    for record in recording:
        weights = record.operator.dense()[0].mean(0)
        assert weights[:, 3].abs().max() == 0
        expected = (weights + torch.eye(len(weights))) / 2 @ expected
    found = visattn.methods.rollout(recording).values[0].flatten()
    torch.testing.assert_close(found, expected[0, len(recording[0].keys.prefix) :], rtol=1e-5, atol=1e-6)


def test_rows_are_permuted_within_a_window() -> None:
    model, x = tiny.vit(), tiny.pixels()
    order = [6, 0, 1, 2, 3, 4, 5]
    with torch.no_grad(), visattn.capture(model) as before:
        model(x)
    with torch.no_grad(), visattn.capture(model) as after, visattn.intervene(model, "blocks.0.attn", edit=permuted(order)):
        model(x)
    torch.testing.assert_close(after[0].operator.dense(), before[0].operator.dense()[:, :, order], rtol=0, atol=1e-5)


def test_an_edit_receives_the_attention_call_of_its_weights() -> None:
    model, seen = swin(), []

    def edit(weights: Tensor, attended: AttentionCall) -> Tensor:
        seen.append((attended.layer, attended.call, attended.keys.grid, tuple(weights.shape), tuple(attended.key_index.shape)))
        return weights

    logits(model, tiny.pixels(2, (32, 32)), layer="layers.0.*", edit=edit)
    assert seen == [(f"layers.0.blocks.{i}.attn", 0, (8, 8), (2, 2, 4, 16, 16), (4, 16)) for i in range(2)]


@every
def test_gradients_flow_through_an_intervention(build: Any, size: Any, layer: str) -> None:
    model, x = build(), tiny.pixels(1, size).requires_grad_()
    with visattn.intervene(model, layer, mask=[2]):
        model(x)[0, 0].backward()
    assert x.grad is not None
    assert bool((x.grad != 0).any())


@every
def test_the_model_is_unchanged_afterward(build: Any, size: Any, layer: str) -> None:
    model, x = build(), tiny.pixels(1, size)
    before = model(x)
    logits(model, x, layer=layer, scale=0.0)
    assert torch.equal(model(x), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_what_does_not_exist_is_refused() -> None:
    model, x = tiny.vit(), tiny.pixels()
    with pytest.raises(
        OptionError, match=r"no attention layer matches 'block'\. The model's attention layers: blocks\.0\.attn, blocks\.1\.attn"
    ):
        logits(model, x, layer="block")
    with pytest.raises(OptionError, match=r"head must lie in \[-2, 1\], got 2"):
        logits(model, x, head=2, scale=0)
    with pytest.raises(OptionError, match=r"tokens must lie in \[0, 6\], got 7"):
        logits(model, x, mask=[7])
    with pytest.raises(OptionError, match="order must list each of the 7 queries of a window once, got 2"):
        logits(model, x, edit=permuted([1, 0]))
    with pytest.raises(ShapeError, match=r"an edit must return weights of shape \(1, 2, 1, 7, 7\), got \(1, 2, 1, 7\)"):
        logits(model, x, edit=lambda weights, _: weights.sum(-1))
    with pytest.raises(CaptureError, match="was not run inside the intervention"), visattn.intervene(model):
        pass
    sorted_tokens = tiny.vit()
    sorted_tokens.get_submodule("patch_embed").register_forward_hook(lambda _, __, tokens: tokens.sort(1).values)
    with pytest.raises(LayoutError, match=r"beyond sort.*so its tokens cannot be located"):
        logits(sorted_tokens, x, mask=[1])
