"""Stages of CNNs: the modules that output the last feature map of each size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import timm
import torch
from torch import Tensor, nn
from torchvision import models

from tests import tiny
from visattn.core.families.feature_maps import stages

SIZE = (64, 96)


class Functional(nn.Module):
    """A CNN that pools with functions, which no module shows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.third = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.first(x).relu(), 2)
        x = self.third(self.second(x))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class Branches(nn.Module):
    """A stage that is reduced within two branches of one module, and gates that pool to one position."""

    class Halved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Conv2d(3, 3, 1)
            self.down = nn.Conv2d(3, 3, 3, stride=2, padding=1)
            self.short = nn.AvgPool2d(2)
            self.pool = nn.AdaptiveAvgPool2d(1)

        def forward(self, x: Tensor) -> Tensor:
            made = self.down(self.wide(x)) + self.short(x)
            return made * self.pool(made).sigmoid()  # type: ignore[no-any-return]

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(inplace=True))
        self.body = nn.Sequential(self.Halved(), self.Halved())
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))  # type: ignore[no-any-return]


NAMES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {  # read from the forward functions of these classes
    "torchvision resnet": (lambda: models.resnet18(num_classes=2), ["relu", "layer1", "layer2", "layer3", "layer4"]),
    "timm resnet with bottlenecks": (
        lambda: timm.create_model("resnet26", num_classes=2),
        ["act1", "layer1", "layer2", "layer3", "layer4"],
    ),
    "timm resnet with gates": (
        lambda: timm.create_model("seresnet18", num_classes=2),
        ["act1", "layer1", "layer2", "layer3", "layer4"],
    ),
    "torchvision densenet": (
        lambda: models.DenseNet(4, (1, 1), 8, num_classes=2),
        ["features.relu0", "features.denseblock1", "features"],
    ),
    "torchvision vgg": (
        lambda: models.VGG(models.vgg11(num_classes=2).features, num_classes=2),
        ["features.1", "features.4", "features.9", "features.14", "features.19", "features"],
    ),
    "timm convnext": (lambda: timm.create_model("test_convnext", num_classes=2), ["stages.0", "stages.1", "stages.2", "stages"]),
    "own CNN that pools with functions": (Functional, ["second", "third"]),
    "own CNN with branches": (Branches, ["stem", "body.0", "body"]),
}


@pytest.mark.parametrize("case", NAMES)
def test_each_stage_ends_before_the_feature_map_gets_smaller(case: str) -> None:
    model = NAMES[case][0]().eval()
    found = stages(model, 3, SIZE)
    assert found == NAMES[case][1]
    sizes = [tuple(output.shape[2:]) for output in outputs(model, found)]
    assert sizes == sorted(set(sizes), reverse=True)


def outputs(model: nn.Module, names: list[str]) -> list[Tensor]:
    made: dict[str, Tensor] = {}
    for name in names:
        model.get_submodule(name).register_forward_hook(lambda _m, _a, output, name=name: made.update({name: output}))
    with torch.no_grad():
        model(tiny.pixels(1, SIZE))
    return [made[name] for name in names]


def test_models_with_tokens_have_no_stages() -> None:
    assert stages(tiny.vit(), 3, (32, 32)) == []
