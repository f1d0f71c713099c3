"""Default layer of class activation maps: the last features with positions, in timm and torchvision models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import timm
import torch
from torch import Tensor, nn
from torchvision import models

import visattn
from tests import tiny, zoo
from visattn.core import methods
from visattn.core.families import cam_layer
from visattn.core.families.feature_maps import last_feature_map
from visattn.errors import OptionError

SIZE = (64, 96)


def alexnet() -> nn.Module:
    model: Any = models.AlexNet(num_classes=4)
    model.classifier = nn.Linear(256 * 6 * 6, 4)  # the original classifier has 54 million weights
    return cast(nn.Module, model)


_stage = models.convnext.CNBlockConfig


def by_name(name: str) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, num_classes=4)


def of_torchvision(name: str) -> Callable[[], nn.Module]:
    return lambda: models.get_model(name, num_classes=4)


AVERAGED: dict[str, tuple[Callable[[], nn.Module], str]] = {  # models with one linear layer after average pooling
    "timm resnet": (by_name("test_resnet"), "layer4"),
    "timm byobnet": (by_name("test_byobnet"), "stages"),
    "timm efficientnet": (by_name("test_efficientnet"), "bn2"),
    "timm nfnet": (by_name("test_nfnet"), "final_act"),
    "timm regnet": (by_name("regnetx_002"), "s4"),
    "timm resnetv2": (partial(timm.create_model, "resnetv2_50", layers=(1, 1, 1, 1), channels=(8, 8, 16, 16)), "norm"),
    "timm densenet": (partial(timm.create_model, "densenet121", growth_rate=4, block_config=(1, 1, 1)), "features"),
    "timm swin, channels last": (lambda: zoo.FAMILIES["swin"].build(SIZE), "norm"),
    "torchvision resnet": (of_torchvision("resnet18"), "layer4"),
    "torchvision regnet": (of_torchvision("regnet_x_400mf"), "trunk_output"),
    "torchvision shufflenet": (of_torchvision("shufflenet_v2_x0_5"), "conv5"),
    "torchvision squeezenet, classes as channels": (of_torchvision("squeezenet1_1"), "classifier.2"),
    "torchvision mnasnet": (of_torchvision("mnasnet0_5"), "layers"),
    "torchvision mobilenet v2": (of_torchvision("mobilenet_v2"), "features"),
    "torchvision googlenet": (
        lambda: models.GoogLeNet(num_classes=4, aux_logits=False, init_weights=False),
        "inception5b",
    ),
    "torchvision swin": (lambda: zoo.FAMILIES["torchvision swin"].build(SIZE), "permute"),
}
OTHERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "timm mobilenet v3, pooled before its last layer": (by_name("mobilenetv3_small_050"), "blocks"),
    "timm convnext, norm behind the average": (by_name("test_convnext"), "stages"),
    "torchvision convnext": (lambda: models.ConvNeXt([_stage(8, 16, 1), _stage(16, None, 1)], num_classes=4), "features"),
    "torchvision alexnet, pooled to 6 x 6": (alexnet, "features"),
    "torchvision mobilenet v3": (of_torchvision("mobilenet_v3_small"), "features"),
    "torchvision densenet": (lambda: models.DenseNet(4, (1, 1), 8, num_classes=4), "features"),
    "torchvision maxvit": (lambda: models.MaxVit((224, 224), 8, 7, [8, 16], [1, 1], 8, 0.0, num_classes=4), "blocks.1"),
}


def built(make: Callable[[], nn.Module]) -> nn.Module:
    model = make()
    with torch.no_grad():
        model.train()(
            tiny.pixels(4, (224, 224) if isinstance(model, models.MaxVit) else SIZE)
        )  # sets the statistics of batch norm
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize(("make", "layer"), AVERAGED.values(), ids=list(AVERAGED))
def test_last_feature_map_before_average_pooling_is_found(make: Callable[[], nn.Module], layer: str) -> None:
    model = built(make)
    assert cam_layer(model) == layer
    pixels = tiny.pixels(2, SIZE)
    with visattn.capture(model, features=[layer], gradients=True) as made:
        logits = model(pixels)
    best = int(logits.abs().sum(0).argmax())  # after a ReLU other logits may be 0
    graded = made.gradients(logits[:, best])
    whole = methods.cam(graded)
    rows, columns = whole.layout.grid
    assert rows * columns > 1
    assert columns >= rows  # like the input
    positive = whole.values.clamp(min=0) / (rows * columns)
    assert float(whole.values.abs().max()) > 0
    torch.testing.assert_close(methods.gradcam(graded).values, positive, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(methods.hirescam(graded).values, positive, rtol=1e-4, atol=1e-7)
    bias = logits[:, best] - whole.values.mean((1, 2))
    torch.testing.assert_close(bias[0], bias[1], rtol=1e-3, atol=1e-4)  # the remainder is the same for every image


@pytest.mark.parametrize(("make", "layer"), OTHERS.values(), ids=list(OTHERS))
def test_last_feature_map_of_other_heads_is_found(make: Callable[[], nn.Module], layer: str) -> None:
    model = built(make)
    assert cam_layer(model) == layer
    pixels = tiny.pixels(1, (224, 224) if isinstance(model, models.MaxVit) else SIZE)
    with visattn.capture(model, features=[layer], gradients=True) as made:
        logits = model(pixels)
    found = methods.hirescam(made.gradients(logits[:, 1]))
    assert found.values[0].numel() > 1


def test_cam_layer_of_a_transformer_is_the_norm_before_the_last_attention() -> None:
    assert cam_layer(tiny.vit()) == "blocks.1.norm1"
    assert cam_layer(zoo.FAMILIES["torchvision vit"].build(zoo.SQUARE)) == "encoder.layers.encoder_layer_1.ln_1"
    assert cam_layer(zoo.FAMILIES["vit hybrid"].build((64, 64))) == "blocks.1.norm1"


class Own(nn.Module):
    """Feature extractor, and the layers after it."""

    def __init__(self, behind: nn.Module) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.ReLU())
        self.behind = behind

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.behind(self.features(x))
        return out


class Tokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).mT


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


class Refuses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.sum())


class Shared(nn.Module):
    """In-place module, whose output is its input tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


BEHIND: dict[str, tuple[nn.Module, str | None]] = {
    "an average": (Mean(), "features"),
    "identities": (nn.Sequential(nn.Identity(), nn.Dropout(), Mean()), "features"),
    "in place": (nn.Sequential(Shared(), Mean()), "behind.0"),
    "pooling to several cells": (nn.Sequential(nn.AdaptiveAvgPool2d((3, 3)), nn.Flatten()), "features"),
    "one cell": (nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 8, 1), nn.Flatten()), "features"),
    "tokens": (nn.Sequential(Tokens(), nn.Linear(4, 4)), None),
    "data-dependent control flow": (nn.Sequential(Refuses(), Mean()), None),
    "recurrence": (nn.Sequential(Mean(), nn.LSTM(4, 4)), None),
}


@pytest.mark.parametrize("case", list(BEHIND))
def test_last_feature_map_is_the_last_layer_with_a_spatial_grid(case: str) -> None:
    behind, expected = BEHIND[case]
    assert last_feature_map(Own(behind), 3, (24, 32)) == expected


def test_search_does_not_change_the_model_or_run_its_hooks() -> None:
    model: Any = Own(Mean()).train()
    model.features[0].weight.grad = torch.ones_like(model.features[0].weight)
    ran: list[str] = []
    model.features.register_forward_hook(lambda *_: ran.append("hook"))
    model.behind.register_forward_pre_hook(lambda *_: ran.append("hook before"))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    hooks = [dict(module._forward_hooks) for module in model.modules()]
    assert last_feature_map(model, 3, (24, 32)) == "features"
    assert not ran
    assert all(module.training for module in model.modules())
    assert hooks == [dict(module._forward_hooks) for module in model.modules()]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert bool(model.features[0].weight.grad.all())
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_changed_model_is_searched_again() -> None:
    model: Any = Own(Mean())
    assert last_feature_map(model, 3, (24, 32)) == "features"
    model.features = nn.Identity()
    model.behind = nn.Sequential(nn.Conv2d(3, 4, 3, 2), Mean())
    assert last_feature_map(model, 3, (24, 32)) == "behind.0"


class Pooled(nn.Module):
    """Pooling by a function instead of a pooling module."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.adaptive_avg_pool2d(x, 1).flatten(1)


POOLS: dict[str, Callable[[], nn.Module]] = {
    "a module": lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    "a function": Pooled,
    "a mean": Mean,
}


@pytest.mark.parametrize("pool", list(POOLS))
def test_cam_layer_of_a_custom_cnn_is_found_for_any_pooling(pool: str) -> None:
    torch.manual_seed(0)
    model = Own(nn.Sequential(POOLS[pool](), nn.Linear(4, 3)))
    assert cam_layer(model) == "features"
    for method in ("gradcam", "auto"):
        found = visattn.explain(model, photo(), method=method)
        assert (found.provenance.method, found.provenance.parameters["layer"]) == ("gradcam", "features")
    named = visattn.explain(model, photo(), method="gradcam", layer="features")
    assert torch.equal(named.map.values, found.map.values)
    assert bool(found.map.values.any())


@pytest.mark.parametrize("case", [case for case, (_, expected) in BEHIND.items() if expected is None])
def test_custom_model_without_a_detectable_layer_requires_layer(case: str) -> None:
    model = Own(BEHIND[case][0])
    assert cam_layer(model) is None
    with pytest.raises(OptionError, match="Name it: layer="):
        visattn.explain(model, photo(), method="gradcam")


def photo() -> Any:
    return visattn.load_image(visattn.data.photo_path("coffee"))
