"""Encoders: output shape, tensors kept from the classifier, and receptive field of a cell."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from visattn.captioning.encoders import FeatureMap, encoder, receptive_field
from visattn.core.loading.blueprints import Blueprint
from visattn.errors import OptionError, UnsupportedModel
from visattn.models import LocalFeatures

OWN = """
import torch
from torch import nn

class Flat(nn.Sequential):
    def __init__(self, num_classes, in_channels):
        super().__init__(nn.Flatten(), nn.Linear(in_channels * 32 * 32, num_classes))

class Last(nn.Module):  # channels last
    def __init__(self, num_classes, in_channels):
        super().__init__()
        self.first = nn.Conv2d(in_channels, 24, 4, 4)
        self.turn = Turn()
        self.head = nn.Linear(24, num_classes)
    def forward(self, x):
        return self.head(self.turn(self.first(x)).mean((1, 2)))

class Turn(nn.Module):
    def forward(self, x):
        return x.permute(0, 2, 3, 1)

class Asks(nn.Module):  # which way it goes depends on the picture
    def __init__(self, num_classes, in_channels):
        super().__init__()
        self.first = nn.Conv2d(in_channels, 4, 3)
    def forward(self, x):
        return self.first(x if x.sum() > 0 else -x).mean((2, 3))

class Fails(nn.Module):
    def __init__(self, num_classes, in_channels):
        super().__init__()
        self.first = nn.Conv2d(in_channels, 4, 40)
    def forward(self, x):
        return self.first(x).mean((2, 3))

class Scores(nn.Module):  # of each place, before they are pooled
    def __init__(self, num_classes, in_channels):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(in_channels, 4, 4, 4), nn.ReLU())
        self.last = nn.Conv2d(4, num_classes, 1)
    def forward(self, x):
        return self.last(self.first(x)).mean((2, 3))

class Spare(nn.Module):  # of the interface of timm, with weights that reach no map
    def __init__(self, num_classes, in_channels):
        super().__init__()
        self.first, self.aside = nn.Conv2d(in_channels, 4, 4, 4), nn.Conv2d(4, 4, 1)
        self.known = nn.Parameter(torch.zeros(()), requires_grad=False)
    def forward(self, x):
        return self.aside(self.first(x)).mean((2, 3))
    def prune_intermediate_layers(self, indices, prune_norm, prune_head):
        return [0]
    def forward_intermediates(self, x, indices, norm, output_fmt, intermediates_only):
        return [self.first(x) + self.known]
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return str(path)


def plan(model: str, size: tuple[int, int] = (32, 32), **options: Any) -> Blueprint:
    return Blueprint(model, (), 3, size, (0.5,) * 3, (0.25,) * 3, options=options)


def local() -> LocalFeatures:
    """Train for one step, so that branches that start at 0 take effect."""
    model = LocalFeatures(width=16).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.randn(4, 3, 16, 16)).square().mean().backward()
    optimizer.step()
    model.zero_grad()
    return model


@torch.no_grad()
def changes(made: nn.Module, channels: int, size: tuple[int, int], pictures: int = 2) -> list[tuple[int, int]]:
    """Mark the pixels that change the middle cell, each tested alone in a few images."""
    made, found = copy.deepcopy(made).double(), set()  # floating-point sums depend on the batch
    for _ in range(pictures):
        picture = 2 * torch.randn(1, channels, *size, dtype=torch.double)
        whole = made(picture)[0]
        row, column = whole.shape[1] // 2, whole.shape[2] // 2
        for y in range(size[0]):
            other = picture.repeat(size[1], 1, 1, 1)
            for x in range(size[1]):
                other[x, :, y, x] += 5
            moved = ((made(other)[:, :, row, column] - whole[:, row, column]).abs() > 1e-9).any(1)
            found |= {(y, x) for x in range(size[1]) if moved[x]}
    return sorted(found)


def test_a_copy_of_an_evaluated_encoder_stays_so() -> None:
    blueprint = Blueprint("visattn_local_features", (), 3, (64, 64), (0.5,) * 3, (0.25,) * 3)
    made = encoder(blueprint)[0].eval()
    pixels = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    copied = copy.deepcopy(made)
    assert not any(part.training for part in copied.modules())
    with torch.no_grad():
        assert torch.equal(copied(pixels), made(pixels))
    assert copied.state_dict().keys() == made.state_dict().keys()
    assert copy.deepcopy(made.train()).model.training


def test_receptive_field_of_local_features_is_centered_on_its_cell() -> None:
    made, size = local().eval(), (40, 32)
    assert all(float(made.get_parameter(f"features.{place}.branch.4.weight").detach().abs().max()) > 0 for place in (15, 16))
    found = changes(made.features, 3, size)
    rows, columns = {y for y, _ in found}, {x for _, x in found}
    assert found == [(y, x) for y in sorted(rows) for x in sorted(columns)]
    cell = 2 * 8, 2 * 8  # the middle of 5 x 4 cells
    assert (min(rows) + max(rows) + 1) / 2 == cell[0] + 4
    assert (min(columns) + max(columns) + 1) / 2 == cell[1] + 4
    assert receptive_field(made.features, 3, size) == (len(rows), len(columns)) == (20, 20)


def test_receptive_field_of_local_features_at_64_pixels_is_20() -> None:
    assert receptive_field(local().features, 3, (64, 64)) == (20, 20)


def test_receptive_field_of_a_stack_matches_a_count() -> None:
    stack = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 5, (5, 2), stride=2), nn.MaxPool2d(2))
    field = 3 + (5 - 1) + 2, 3 + (2 - 1) + 2
    found = changes(stack, 2, (24, 20), pictures=6)
    assert (len({y for y, _ in found}), len({x for _, x in found})) == field
    assert receptive_field(stack, 2, (24, 20)) == field


def test_receptive_field_is_found_behind_inactive_relus() -> None:
    made = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU(), nn.Conv2d(1, 1, 6, stride=6))
    with torch.no_grad():
        made[0].weight.fill_(1)  # type: ignore[operator]
        made[0].bias.fill_(-1)  # type: ignore[operator]
    assert receptive_field(made, 1, (24, 24)) == (6, 6)


def test_feature_map_independent_of_the_input_has_no_receptive_field() -> None:
    made = nn.Conv2d(1, 2, 3)
    nn.init.zeros_(made.weight)
    assert receptive_field(made, 1, (8, 8)) == (0, 0)


def test_receptive_field_of_a_vision_transformer_is_the_full_image() -> None:
    made, shape = encoder(plan("test_vit", (64, 64)))
    assert (shape.channels, shape.grid) == (64, (4, 4))
    assert receptive_field(made, 3, (64, 64)) == (64, 64)


def test_receptive_field_leaves_the_model_unchanged() -> None:
    made = local().features.train()
    made[1].eval()
    modes = [part.training for part in made.modules()]
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    random = torch.get_rng_state()
    receptive_field(made, 3, (32, 32))
    assert [part.training for part in made.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.state_dict().items())
    assert all(parameter.grad is None for parameter in made.parameters())
    assert torch.equal(torch.get_rng_state(), random)


def watched(model: nn.Module, layer: str, images: Tensor) -> Tensor:
    """Return the output of a module of the complete model."""
    seen: list[Tensor] = []
    handle = model.get_submodule(layer).register_forward_hook(lambda _module, _arguments, output: seen.append(output))
    with torch.no_grad():
        model(images)
    handle.remove()
    return seen[0]


def convolutions(name: str) -> nn.Module:
    if name == "torchvision":
        model: nn.Module = torchvision.models.squeezenet1_1(num_classes=3)
    elif name == "timm":
        model = timm.create_model("test_resnet", num_classes=3)
    else:
        model = LocalFeatures(width=8)
    return model.eval()


CUTS = [
    ("torchvision", "features.5", "features.5"),
    ("torchvision", "", "classifier"),
    ("timm", "layer2.0", "layer2.0"),
    ("timm", "-1", "layer4"),
    ("timm", "", "layer4"),
    ("timm", "1", "layer1"),
    ("ours", "features.8", "features.8"),
    ("ours", "", "features"),
]


@pytest.mark.parametrize(("library", "layer", "same"), CUTS)
def test_truncated_model_matches_the_layer_of_the_full_model(library: str, layer: str, same: str) -> None:
    model, images = convolutions(library), torch.randn(2, 3, 64, 64)
    if library == "torchvision" and not layer:
        same = "classifier.2"  # the map of class scores, before pooling
    expected = watched(model, same, images)
    with torch.no_grad():
        found = FeatureMap(model, layer, 3, (64, 64)).eval()(images)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("library", "layer", "same"), CUTS)
def test_published_weights_load_under_their_original_names(library: str, layer: str, same: str) -> None:
    made = FeatureMap(convolutions(library), layer, 3, (64, 64)).eval()
    other, images = convolutions(library), torch.randn(2, 3, 64, 64)
    published = other.state_dict()
    own = made.model.state_dict()
    assert set(own) <= set(published)
    made.model.load_state_dict({name: published[name] for name in own}, strict=True)
    same = "classifier.2" if same == "classifier" else same
    with torch.no_grad():
        assert torch.equal(made(images), watched(other, same, images))


def test_locations_of_a_vision_transformer_are_its_patches_after_the_norm() -> None:
    model, images = timm.create_model("test_vit", img_size=(64, 48), num_classes=3).eval(), torch.randn(2, 3, 64, 48)
    with torch.no_grad():
        tokens = model.forward_features(images)[:, model.num_prefix_tokens :]
    names = set(model.state_dict())
    made = FeatureMap(model, "-1", 3, (64, 48)).eval()
    with torch.no_grad():
        maps = made(images)
    assert maps.shape == (2, 64, 4, 3)
    for row in range(4):
        for column in range(3):
            assert torch.equal(maps[:, :, row, column], tokens[:, 3 * row + column])
    assert set(made.model.state_dict()) <= names


REFUSED = {
    "no-layer": ("visattn_local_features", "layer9", OptionError, "has no layer 'layer9'"),
    "minus-sign": ("test_resnet", "-", OptionError, "has no layer '-'"),
    "a-number-too-large": ("test_resnet", "99", OptionError, "has no intermediate map 99"),
    "a-number-too-low": ("test_resnet", "-99", OptionError, "has no intermediate map -99"),
    "two-minus-signs": ("test_resnet", "--1", OptionError, "has no layer '--1'"),
    "one-cell": ("test_resnet", "", UnsupportedModel, r"two cells or more, got \(1, 96, 1, 1\)"),
    "classes": ("OWN:Scores", "", UnsupportedModel, r"two channels .* or more, got \(1, 1, 8, 8\)"),
    "a-vector": ("visattn_local_features", "fc", UnsupportedModel, r"two cells or more, got \(1, 1\)"),
    "no-map": ("OWN:Flat", "", UnsupportedModel, "Flat: no feature map was found in it"),
    "channels-last": (
        "OWN:Last",
        "turn",
        UnsupportedModel,
        r"got \(1, 8, 8, 24\), whose cells are closer to square with channels last",
    ),
    "data-dependent-branch": ("OWN:Asks", "first", UnsupportedModel, "Asks: cannot be cut at 'first'"),
    "failing-forward": ("OWN:Fails", "first", UnsupportedModel, "gives no map at 32 x 32 pixels"),
    "no-model": ("resnet_of_nobody", "", UnsupportedModel, "unknown model"),
}


@pytest.mark.parametrize(("model", "layer", "kind", "message"), REFUSED.values(), ids=list(REFUSED))
def test_layer_without_a_feature_map_is_refused(own: str, model: str, layer: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as told:
        encoder(plan(model.replace("OWN", own)), layer)
    assert "\n" not in str(told.value)


def test_channels_first_layer_of_the_same_model_is_accepted(own: str) -> None:
    made, shape = encoder(plan(f"{own}:Last", (32, 48)), "first")
    assert (shape.channels, shape.grid) == (24, (8, 12))
    assert made.training


def test_unused_and_frozen_parameters_require_no_gradient(own: str) -> None:
    made, _ = encoder(plan(f"{own}:Spare"))
    learned = {name for name, parameter in made.named_parameters() if parameter.requires_grad}
    assert learned == {"model.first.weight", "model.first.bias"}
    assert len(list(made.named_parameters())) == 5
