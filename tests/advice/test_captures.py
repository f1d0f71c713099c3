# mypy: disable-error-code="no-untyped-call"
"""Captures and interventions: what is wrong with them is true, and what the message says to do works."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import visattn
from tests import tiny
from tests.advice.packing import PHOTO
from tests.capturing import own
from tests.capturing.test_gradients import Partly
from tests.capturing.test_sampled_points import Deformable, WithTokens, photo as points_photo
from visattn.errors import CaptureError, LayoutError, ModelError, NoAttentionCaptured, UnsupportedModel


class NoEval(nn.Sequential):
    """Model whose `eval` fails."""

    def eval(self) -> NoEval:
        raise NotImplementedError("only for training")


def cnn(kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    return kind(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def test_a_model_that_contains_itself_or_fails_in_eval() -> None:
    looped = cnn()
    looped[0].whole = looped
    with pytest.raises(ModelError, match=r"Sequential: model\.eval\(\) fails: RecursionError: .* no module may contain itself"):
        visattn.explain(looped, PHOTO, method="gradcam", layer=1, img_size=32)
    del looped[0].whole
    assert visattn.explain(looped, PHOTO, method="gradcam", layer=1, img_size=32).map.values.shape == (30, 30)
    broken = cnn(NoEval)
    with pytest.raises(
        ModelError, match=r"NoEval: model\.eval\(\) fails: NotImplementedError: only for .* Call it yourself to debug"
    ):
        visattn.explain(broken, PHOTO, method="gradcam", img_size=32)
    with pytest.raises(NotImplementedError):  # the call itself shows the same error, with its frames
        broken.eval()


def captured(model: nn.Module, pixels: Tensor, **options: Any) -> visattn.Recording:
    with torch.no_grad(), visattn.capture(model, **options) as recording:
        model(pixels)
    return recording


def test_finite_weights_and_input_are_recorded() -> None:
    model = tiny.vit()
    weight = model.get_parameter("blocks.0.attn.qkv.weight")
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[3, 5] = torch.nan
    with pytest.raises(
        CaptureError, match=r"query values are NaN or infinite\. Check the weights, the input and the precision\.$"
    ):
        captured(model, tiny.pixels())
    with torch.no_grad():
        weight.copy_(kept)
    with pytest.raises(CaptureError, match=r"are NaN or infinite\. Check the weights, the input and the precision\.$"):
        captured(model, tiny.pixels() * torch.inf)
    assert len(captured(model, tiny.pixels())) == 2


class Sides(nn.Module):
    """Model that attends within two copies of its tokens, which are another axis of its operands; then within their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.each, self.both = nn.Conv2d(3, 8, 16, 16), Attend(), Attend()

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).mT[:, None]  # (B, 1, 6, 8)
        each = self.each(torch.stack((tokens, 2 * tokens), 1))
        return self.both(each.sum(1)).mean((1, 2))  # type: ignore[no-any-return]


class Attend(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


def test_without_a_grid_or_without_the_layer_the_rest_is_recorded() -> None:
    model = Sides()
    with pytest.raises(
        LayoutError, match=r"operands must be \(B, heads, tokens, d\) .* got \(1, 2, 1, 6\).* Omit grid, .* or exclude the layer"
    ):
        captured(model, tiny.pixels(), grid=tiny.GRID)
    assert captured(model, tiny.pixels()).layers == ["each", "both"]
    (record,) = captured(model, tiny.pixels(), grid=tiny.GRID, layers="both")
    assert record.keys.grid == tiny.GRID


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_without_its_score_mod_a_flex_attention_is_recorded() -> None:
    def capped(score: Tensor, _b: Tensor, _h: Tensor, _q: Tensor, _k: Tensor) -> Tensor:
        return 3 * torch.tanh(score / 3)

    model = own.vit(lambda q, k, v: flex_attention(q, k, v, score_mod=capped))
    with pytest.raises(UnsupportedModel, match=r"score_mod must add a bias .* Remove it for the recording\.$"):
        captured(model, tiny.pixels())
    for layer in own.LAYERS:
        attention = model.get_submodule(layer)
        assert isinstance(attention, own.Attention)
        attention.attend = flex_attention
    assert captured(model, tiny.pixels()).layers == own.LAYERS


def test_the_whole_model_is_called_with_pixels_inside_the_block() -> None:
    model = tiny.vit()
    blocks = model.get_submodule("blocks")
    for block, name in ((visattn.intervene(model, scale=0.0), "intervention"), (visattn.capture(model), "capture")):
        with (
            pytest.raises(
                CaptureError, match=rf"not run inside the {name} by this thread\. Call model\(pixels\) inside the with block\.$"
            ),
            block,
        ):
            pass
    with (
        pytest.raises(
            CaptureError, match=r"blocks\.0\.attn ran before .* Call the whole model with floating-point pixels \(B, C, H, W\)"
        ),
        visattn.capture(model),
    ):
        blocks(torch.zeros(1, 7, 32))
    with visattn.capture(model) as recording, visattn.intervene(model, scale=0.0):
        changed = model(tiny.pixels())
    assert len(recording) == 2
    assert not torch.allclose(changed, model(tiny.pixels()))


def test_an_intervention_that_gets_pixels() -> None:
    model = nn.Sequential(nn.Linear(48, 4))
    with (
        pytest.raises(
            CaptureError,
            match=r"the model was given no floating-point tensor of shape \(B, C, H, W\) as argument\. Pass such pixels",
        ),
        visattn.intervene(model),
    ):
        model(torch.zeros(1, 48))
    with visattn.intervene(vit := tiny.vit(), scale=0.0):
        assert vit(tiny.pixels()).shape == (1, 4)


class Mixing(WithTokens):
    """Model whose attention among the patches is a layer of its own, before the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = Attend()

    def attend(self, queries: Tensor, maps: list[Tensor]) -> Tensor:
        mixed = self.mix(maps[0].flatten(2).mT[:, None])[:, 0].mT.view(maps[0].shape)
        return Deformable.attend(self, queries, [mixed, *maps[1:]])


def edited(model: nn.Module, pixels: Tensor, layer: str) -> Tensor:
    with torch.no_grad(), visattn.intervene(model, layer, scale=0.0):
        out: Tensor = model(pixels)
    return out


def test_another_layer_than_one_that_samples_can_be_edited() -> None:
    model, pixels = Mixing().eval(), points_photo()
    with pytest.raises(LayoutError, match=r"weights points that it computes, .* cannot be edited\. Choose another layer\.$"):
        edited(model, pixels, "*")
    assert not torch.allclose(edited(model, pixels, "mix"), model(pixels))


def test_another_layer_than_one_that_cannot_be_located_can_be_edited() -> None:
    model = tiny.vit()
    model.get_submodule("blocks.0").register_forward_hook(lambda _, __, tokens: tokens.sort(1).values)
    with pytest.raises(LayoutError, match=r"blocks\.1\.attn: .* so its tokens cannot be located\. Choose another layer, or pass"):
        edited(model, tiny.pixels(), "blocks.1.attn")
    assert not torch.allclose(edited(model, tiny.pixels(), "blocks.0.attn"), model(tiny.pixels()))


def test_a_part_without_a_graph_is_changed_or_recorded_without_gradients() -> None:
    model = Partly("no_grad")
    with (
        pytest.raises(CaptureError, match=r"vit\.blocks\.0\.attn runs where .* Avoid that, or capture without gradients\.$"),
        visattn.capture(model, gradients=True),
    ):
        model(tiny.pixels())
    with visattn.capture(model) as recording:
        model(tiny.pixels())
    assert len(recording) == 2
    model.way = "detach"  # not under no_grad any more
    with visattn.capture(model, gradients=True) as recording:
        out = model(tiny.pixels())
    assert len(recording.gradients(out[0, 0])) == 2


def test_gradients_are_recorded_with_autograd_enabled() -> None:
    model = tiny.vit()
    with (
        pytest.raises(CaptureError, match=r"runs under no_grad or inference_mode\. Run it with autograd enabled\.$"),
        torch.no_grad(),
        visattn.capture(model, gradients=True),
    ):
        model(tiny.pixels())
    with visattn.capture(model, gradients=True) as recording:
        out = model(tiny.pixels())
    assert len(recording.gradients(out[0, 0])) == 2


def test_gradcam_and_eigencam_of_models_without_attention() -> None:
    with pytest.raises(NoAttentionCaptured, match=r"no layer of Sequential multiplied .* Use method 'gradcam', or 'eigencam'"):
        visattn.explain(cnn().eval(), PHOTO, method="attention", img_size=32)
    assert visattn.explain(cnn().eval(), PHOTO, method="gradcam", img_size=32).map.values.shape == (30, 30)
    classless = cnn()[:2].eval()
    with pytest.raises(NoAttentionCaptured, match=r"or 'eigencam' where there is no class; "):
        visattn.explain(classless, PHOTO, method="rollout", img_size=32)
    assert visattn.explain(classless, PHOTO, method="eigencam", img_size=32).map.values.shape == (30, 30)


@pytest.mark.filterwarnings("ignore:.*deprecated", "ignore::torch.jit.TracerWarning")
def test_the_original_of_a_script_and_the_module_of_a_program_are_recorded() -> None:
    model, tools = tiny.vit(), torch.jit
    with pytest.raises(UnsupportedModel, match=r"a TorchScript model runs outside Python, .* Use the original module\.$"):
        captured(tools.trace(model, tiny.pixels()), tiny.pixels())
    assert len(captured(model, tiny.pixels())) == 2
    program: Any = torch.export.export(own.vit(), (tiny.pixels(),))
    with pytest.raises(UnsupportedModel, match=r"got ExportedProgram\. Pass its \.module\(\)\.$"):
        captured(program, tiny.pixels())
    assert len(captured(program.module(), tiny.pixels())) == 2


class FromBytes(nn.Module):
    """Model that takes pixels of any type, or an object that holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = tiny.vit()

    def forward(self, x: Any) -> Tensor:
        return self.vit((x.pixels if isinstance(x, SimpleNamespace) else x).float())  # type: ignore[no-any-return]


@pytest.mark.parametrize("given", [lambda pixels: pixels.to(torch.uint8), lambda pixels: SimpleNamespace(pixels=pixels)])
def test_floating_point_pixels_are_given_as_an_argument(given: Callable[[Tensor], Any]) -> None:
    model, pixels = FromBytes(), tiny.pixels()
    advice = r"was given no floating-point tensor of shape \(B, C, H, W\) as argument\. Call the whole model with floating-point"
    with pytest.raises(CaptureError, match=advice):
        captured(model, given(pixels))
    with pytest.raises(
        LayoutError, match=r"received no floating-point image in this forward pass, .* or pass grid and prefix\.$"
    ):
        edited(model, given(pixels), "*")
    assert len(captured(model, pixels)) == 2
    assert edited(model, pixels, "*").shape == (1, 4)


def test_a_grid_is_passed_where_no_layer_can_be_located() -> None:
    model = tiny.vit()
    model.get_submodule("patch_embed").register_forward_hook(lambda _, __, tokens: tokens.sort(1).values)
    for layer in ("blocks.0.attn", "blocks.1.attn"):
        with pytest.raises(LayoutError, match=r"cannot be located\. Choose another layer, or pass grid and prefix\.$"):
            edited(model, tiny.pixels(), layer)
    with torch.no_grad(), visattn.intervene(model, scale=0.0, grid=tiny.GRID, prefix=1):
        changed = model(tiny.pixels())
    assert not torch.allclose(changed, model(tiny.pixels()))


def test_a_forward_pass_that_failed_inside_the_block_is_told() -> None:
    model = tiny.vit()
    handle = model.get_submodule("head").register_forward_hook(lambda *_: [][1])
    told = r"no forward pass inside the capture returned an output\. Mend the error that the model raises, or let it return"
    with pytest.raises(CaptureError, match=told), visattn.capture(model), contextlib.suppress(IndexError):
        model(tiny.pixels())
    handle.remove()
    assert len(captured(model, tiny.pixels())) == 2


def test_gradients_of_the_pixels_of_a_model_without_feature_maps() -> None:
    pytest.importorskip("captum")
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 3)).eval()
    with pytest.raises(NoAttentionCaptured, match=r"without feature maps, 'captum\.saliency'\.$"):
        visattn.explain(model, PHOTO, method="attention", img_size=32)
    assert visattn.explain(model, PHOTO, method="captum.saliency", img_size=32).map.values.shape == (32, 32)
