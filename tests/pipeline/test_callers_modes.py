# mypy: disable-error-code="no-untyped-call"
"""Explanations inside the caller's modes: the same numbers as outside, true refusals, and everything left as it was."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import visattn
from tests.samples import sampled
from visattn.errors import ModelError, OptionError, UnsupportedModel

PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
OF_CNN = "gradcam", "hirescam", "layercam", "xgradcam", "eigencam", "captum.saliency", "captum.input_x_gradient", "scorecam"
OF_VIT = (
    *("attention", "rollout", "norm_attention", "relevance", "legrad", "attention_gradient", "gradient_rollout"),
    *("transition_attention", "gradcam", "captum.saliency"),
)


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("resnet10t", num_classes=5, channels=(32, 64, 64, 128)).eval()  # type: ignore[no-any-return]


def vit() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=5, depth=6).eval()  # type: ignore[no-any-return]


def explain(model: nn.Module, method: str, **options: Any) -> visattn.Explanation:
    return visattn.explain(model, PHOTO, method=method, **options)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "set_grad_enabled": partial(torch.set_grad_enabled, False),
}
CASES = [(cnn, name) for name in OF_CNN] + [(vit, name) for name in OF_VIT]


@pytest.mark.parametrize("mode", sampled(MODES, 3))
@pytest.mark.parametrize(("make", "method"), CASES, ids=[f"{make.__name__}-{name}" for make, name in CASES])
def test_modes_without_gradients_change_no_answer_and_leave_nothing_behind(
    make: Callable[[], nn.Module], method: str, mode: str
) -> None:
    size: dict[str, Any] = {"img_size": 64} if make is cnn else {}
    plain = explain(make(), method, **size)
    model = make()
    with MODES[mode]():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        inside = explain(model, method, **size)
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
    behind = explain(model, method, **size)
    for found in (inside, behind):
        torch.testing.assert_close(found.map.values, plain.map.values, rtol=0, atol=1e-6)
        assert found.provenance == plain.provenance
        assert not found.map.values.is_inference()


@pytest.mark.parametrize(("make", "method"), sampled(CASES, 3))
def test_under_autocast_the_model_runs_in_bfloat16_and_the_method_in_full_precision(
    make: Callable[[], nn.Module], method: str
) -> None:
    size: dict[str, Any] = {"img_size": 64} if make is cnn else {}
    model, plain = make(), explain(make(), method, **size)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = explain(model, method, **size)
        again = explain(model, method, **size)
        assert torch.is_autocast_enabled("cpu")
    assert cast.map.values.dtype == plain.map.values.dtype
    assert torch.equal(cast.map.values, again.map.values)
    largest = float(plain.map.values.abs().max())
    assert float((cast.map.values - plain.map.values).abs().max()) <= 0.3 * largest, "bfloat16 has three digits"
    assert torch.equal(explain(model, method, **size).map.values, plain.map.values)
    assert any("bfloat16" in note for note in cast.provenance.notes)
    assert not any("bfloat16" in note for note in plain.provenance.notes)


@pytest.mark.parametrize("make", [cnn, vit])
def test_weights_of_inference_mode_are_refused_where_gradients_are_needed_and_a_copy_works(make: Callable[[], nn.Module]) -> None:
    with torch.inference_mode():
        model = make()
    with pytest.raises(
        ModelError, match=r"made under torch.inference_mode, .* Copy the model outside of it: copy.deepcopy\(model\)"
    ):
        explain(model, "gradcam", img_size=64)
    assert bool(explain(model, "captum.occlusion", img_size=64).map.values.isfinite().all())
    found = explain(copy.deepcopy(model), "gradcam", img_size=64)
    assert torch.equal(found.map.values, explain(make(), "gradcam", img_size=64).map.values)
    assert all(parameter.requires_grad for parameter in model.parameters())


class Checkpointed(nn.Module):
    """CNN whose stages run under activation checkpointing."""

    def __init__(self, run: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.net, self.run = cnn(), [run]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        net: Any = self.net
        x = net.maxpool(net.act1(net.bn1(net.conv1(x))))
        for stage in (net.layer1, net.layer2, net.layer3, net.layer4):
            x = self.run[0](stage, x)
        return net.fc(net.global_pool(x))  # type: ignore[no-any-return]


RUNS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "not": lambda stage, x: stage(x),
    "without reentry": lambda stage, x: checkpoint(stage, x, use_reentrant=False),
    "reentrant": lambda stage, x: checkpoint(stage, x, use_reentrant=True),
}


@pytest.mark.parametrize("layer", [-1, "net.layer1", "net.layer4"])
@pytest.mark.parametrize("how", list(RUNS)[1:])
def test_activation_checkpointing_changes_no_answer(how: str, layer: Any) -> None:
    plain = explain(Checkpointed(RUNS["not"]).eval(), "gradcam", img_size=64, layer=layer)
    found = explain(Checkpointed(RUNS[how]).eval(), "gradcam", img_size=64, layer=layer)
    assert torch.equal(found.map.values, plain.map.values)
    assert found.provenance.parameters == plain.provenance.parameters


@pytest.mark.parametrize("layer", [-1, "layer1", "layer4"])
def test_checkpointing_of_timm_changes_no_answer_and_stays_on(layer: Any) -> None:
    plain, model = explain(cnn(), "gradcam", img_size=64, layer=layer), cnn()
    model.set_grad_checkpointing(True)  # type: ignore[operator]
    found = explain(model, "gradcam", img_size=64, layer=layer)
    assert torch.equal(found.map.values, plain.map.values)
    assert found.provenance.parameters == plain.provenance.parameters
    assert vars(model)["grad_checkpointing"] is True


def test_a_module_that_did_not_run_is_named_with_its_parts() -> None:
    model = Checkpointed(lambda stage, x: checkpoint_sequential(stage, 1, x, use_reentrant=False)).eval()
    with pytest.raises(OptionError, match=r"net.layer1 has no output in this forward pass, .*; its parts are net.layer1.0\."):
        explain(model, "gradcam", img_size=64, layer="net.layer1")
    assert explain(model, "gradcam", img_size=64, layer="net.layer1.0").map.layout.grid == (16, 16)


def test_a_scripted_model_is_refused_by_that_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(torchvision.models.resnet18(num_classes=5).eval())
    with pytest.raises(UnsupportedModel, match="a TorchScript model runs outside Python, so nothing inside it can be captured"):
        explain(scripted, "gradcam", img_size=64)


def traced(model: nn.Module) -> nn.Module:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(model, torch.zeros(1, 3, 64, 64), check_trace=False)  # type: ignore[no-any-return]


def test_a_traced_model_that_takes_one_image_at_a_time_is_explained_by_its_pixels() -> None:
    model, pixels = vit(), torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0)).clip(-0.9, 0.9)
    one, other = (
        visattn.explain(each, None, method="captum.saliency", pixels=pixels).map.values for each in (traced(model), model)
    )
    assert torch.allclose(one, other, rtol=1e-3, atol=1e-5)


def test_a_traced_operation_without_a_gradient_is_named_so() -> None:
    model = traced(torchvision.models.VisionTransformer(64, 16, 1, 2, 16, 16, num_classes=3).eval())
    with pytest.raises(OptionError, match=r"no gradient of the score with respect to the pixels.*'captum.occlusion'"):
        explain(model, "captum.saliency", img_size=64)


def test_layers_without_a_gradient_are_named_so() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(vit(), {nn.Linear}, dtype=torch.qint8)
        for method, what in (("relevance", "its layers"), ("captum.saliency", "the pixels")):
            with pytest.raises(
                OptionError, match=f"PyTorch has no gradient of the score with respect to {what}.*'captum.occlusion'"
            ):
                explain(model, method)
        assert bool(explain(model, "captum.occlusion").map.values.any())


@pytest.mark.parametrize("training", [False, True])
def test_training_mode_is_named_and_put_back(training: bool) -> None:
    model = cnn().train(training)
    found = explain(model, "gradcam", img_size=64)
    assert any("in training mode" in note for note in found.provenance.notes) is training
    assert model.training is training
    assert torch.equal(found.map.values, explain(cnn(), "gradcam", img_size=64).map.values)


def test_the_random_state_is_as_it_was() -> None:
    models = cnn(), vit()
    before = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
    explain(models[0], "captum.smoothgrad", img_size=64, samples=2)
    explain(models[0], "gradcam", img_size=64)
    explain(models[1], "relevance")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert str(np.random.get_state()) == str(before[1])  # noqa: NPY002
