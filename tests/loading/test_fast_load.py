"""Networks built without initial values: after loading, every parameter and every buffer equals that of an ordinary load."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from timm.models import list_modules
from torch import Tensor, nn
from torchvision import models

import visattn
from tests.samples import sampled
from visattn.errors import WeightsError

SMALL = re.compile(
    r"atto|femto|pico|nano|xxs|xx_small|xxtiny|tiny|_t\b|xs|_s0|_b0|_m0|lite0|050|035|18|26|mini|small|_s\b|_s_|12s"
)
QUICK = ("vision_transformer", "swin_transformer", "eva", "levit", "resnet", "maxxvit", "beit", "convnext", "hiera")


def smallest(module: str) -> Any:
    """Return the model of a file of timm that is small by its name."""
    names = timm.list_models(module=module)
    few = [name for name in names if SMALL.search(name)] or names
    rank = ("atto|femto|pico|xx|nano|lite0|035", "tiny|18|xs")  # a model that fits an earlier pattern is smaller
    return min(few, key=lambda name: (*(not re.search(pattern, name) for pattern in rank), len(name)))


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, buffers of both kinds, and tensors that are plain attributes."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor):
                yield f"{name}.{key}", value


def same(one: nn.Module, other: nn.Module) -> None:
    left, right = dict(tensors(one)), dict(tensors(other))
    assert list(left) == list(right)
    assert not [name for name, value in left.items() if not torch.equal(value, right[name])]


def saved(model: nn.Module, folder: Path) -> Path:
    """Save weights in which every number differs from any initial value."""
    state = {
        name: torch.randn_like(value) if value.is_floating_point() else value.clone()
        for name, value in model.state_dict().items()
    }
    file = folder / "weights.safetensors"
    safetensors.torch.save_file({name: value.contiguous() for name, value in state.items()}, file)
    return file


@pytest.mark.parametrize(
    "module",
    [*QUICK, *sampled([pytest.param(name, marks=pytest.mark.full) for name in list_modules() if name not in QUICK], 4)],
)
def test_every_tensor_equals_that_of_an_ordinary_load(module: str, tmp_path: Path) -> None:
    name = smallest(module)
    ordinary = timm.create_model(name)
    file = saved(ordinary, tmp_path)
    fast = visattn.load_model(name, weights=file)
    if getattr(fast, "dynamic_img_size", False):
        ordinary = timm.create_model(name, dynamic_img_size=True)
    ordinary.load_state_dict(safetensors.torch.load_file(file))
    same(fast, ordinary.eval())


@pytest.mark.parametrize("name", ["resnet18", "vit_b_32", "swin_t", "regnet_y_400mf", "maxvit_t"])
def test_every_tensor_of_torchvision_equals_that_of_an_ordinary_load(name: str, tmp_path: Path) -> None:
    ordinary = models.get_model(name)
    file = saved(ordinary, tmp_path)
    ordinary.load_state_dict(safetensors.torch.load_file(file))
    same(visattn.load_model(f"tv:{name}", weights=file), ordinary.eval())


def test_another_number_of_classes_and_channels_is_built(tmp_path: Path) -> None:
    ordinary = timm.create_model("vit_tiny_patch16_224", num_classes=7, in_chans=5, dynamic_img_size=True)
    file = saved(ordinary, tmp_path)
    ordinary.load_state_dict(safetensors.torch.load_file(file))
    same(visattn.load_model("vit_tiny_patch16_224", weights=file), ordinary.eval())


def test_an_incomplete_checkpoint_never_leaves_a_network_without_values(tmp_path: Path) -> None:
    state = timm.create_model("resnet18").state_dict()
    del state["layer1.0.conv1.weight"]
    safetensors.torch.save_file(state, tmp_path / "weights.safetensors")
    with pytest.raises(WeightsError, match=r"1 missing: layer1\.0\.conv1\.weight"):
        visattn.load_model("resnet18", weights=tmp_path / "weights.safetensors")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(value: float, tmp_path: Path) -> None:
    state = timm.create_model("resnet18").state_dict()
    state["layer1.0.conv1.weight"][0, 0, 0, 0] = value
    safetensors.torch.save_file(state, tmp_path / "weights.safetensors")
    with pytest.raises(WeightsError, match=r"layer1\.0\.conv1\.weight has 1 NaN or infinite values"):
        visattn.load_model("resnet18", weights=tmp_path / "weights.safetensors")


def test_finite_weights_whose_sum_overflows_are_loaded(tmp_path: Path) -> None:
    state = timm.create_model("resnet18").state_dict()
    state["layer1.0.conv1.weight"].fill_(3e38)
    safetensors.torch.save_file(state, tmp_path / "weights.safetensors")
    model = visattn.load_model("resnet18", weights=tmp_path / "weights.safetensors")
    assert float(model.state_dict()["layer1.0.conv1.weight"].min()) == pytest.approx(3e38)
