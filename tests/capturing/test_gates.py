"""Gates in a recording: the features were multiplied by them, and their locations are correct."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from timm.layers import EcaModule, GatherExcite, GlobalContext, SEModule
from timm.layers.cbam import CbamModule
from timm.layers.coord_attn import CoordAttn, EfficientLocalAttn, SimpleCoordAttn, StripAttn
from timm.layers.selective_kernel import SelectiveKernel
from torch import Tensor, nn

import visattn
from visattn import nn as ours
from visattn.core.geometry import Box
from visattn.core.methods import gates
from visattn.core.records import FeatureRecord, Recording, TokenLayout
from visattn.errors import NoAttentionCaptured, OptionError
from visattn.evaluation.statistics_of_gates import gate_statistics


class ChannelGate(nn.Module):
    """Channel gate as in the CBAM authors' code: one bottleneck for two poolings, and no module for the sigmoid."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Flatten(), nn.Linear(channels, 4), nn.ReLU(), nn.Linear(4, channels))

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.mlp(F.avg_pool2d(x, x.shape[2:])) + self.mlp(F.max_pool2d(x, x.shape[2:]))
        return x * torch.sigmoid(total)[:, :, None, None]


class SpatialGate(nn.Module):
    """Spatial gate as in the CBAM authors' code."""

    def __init__(self) -> None:
        super().__init__()
        self.spatial = nn.Conv2d(2, 1, 7, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.spatial(torch.stack([x.amax(1), x.mean(1)], 1)))


class BAM(nn.Module):
    """Gate as in the BAM authors' code."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channel_att, self.spatial_att = nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        channels = self.channel_att(x.mean((2, 3), keepdim=True)).expand_as(x)
        return x * (1 + torch.sigmoid(channels * self.spatial_att(x).expand_as(x)))


class CoordAtt(nn.Module):
    """Gate as in the code of the authors of coordinate attention."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv_h, self.conv_w = nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        columns: Tensor = self.conv_w(x.mean(2, keepdim=True)).sigmoid()
        rows: Tensor = self.conv_h(x.mean(3, keepdim=True)).sigmoid()
        return x * columns * rows


MULTIPLIERS: dict[str, Callable[[], nn.Module]] = {
    "ours: SE": lambda: ours.SqueezeExcite(16),
    "ours: CBAM": lambda: ours.CBAM(16),
    "ours: CBAM of the paper": lambda: ours.CBAM(16, variant="paper"),
    "timm: SE": lambda: SEModule(16),
    "timm: ECA": lambda: EcaModule(16),
    "timm: CBAM": lambda: CbamModule(16),
    "timm: coordinate": lambda: CoordAttn(16),
    "timm: simple coordinate": lambda: SimpleCoordAttn(16),
    "timm: local": lambda: EfficientLocalAttn(16),
    "timm: strips": lambda: StripAttn(16),
    "timm: global context": lambda: GlobalContext(16, fuse_add=False, fuse_scale=True),
    "timm: EfficientNet": lambda: timm.models._efficientnet_blocks.SqueezeExcite(16),
    "torchvision: SE": lambda: torchvision.ops.SqueezeExcitation(16, 4),
    "official: CBAM": lambda: nn.Sequential(ChannelGate(16), SpatialGate()),
    "official: BAM": lambda: BAM(16),
    "official: coordinate": lambda: CoordAtt(16),
}


def seen(module: nn.Module, x: Tensor, **options: object) -> Recording:
    model = nn.Sequential(nn.Identity(), module).eval()
    with torch.no_grad(), visattn.capture(model, **options) as recording:  # type: ignore[arg-type]
        model(x)
    return recording


def product(recording: Recording) -> Tensor:
    """Multiply all gates of a recording, each along the axes of its role."""
    whole = torch.ones(())
    for feature in recording.features:
        whole = whole * (feature.value[:, :, None, None] if feature.role == "channel_gate" else feature.value)
    return whole


@pytest.mark.parametrize("name", list(MULTIPLIERS))
def test_features_are_multiplied_by_the_recorded_gates(name: str) -> None:
    torch.manual_seed(0)
    module, x = MULTIPLIERS[name]().eval(), torch.randn(2, 16, 6, 9)
    for _ in range(3):  # traced first, then compared with a known tape
        recording = seen(module, x)
        with torch.no_grad():
            assert torch.allclose(x * product(recording), module(x), atol=1e-6)
    for feature in recording.features:
        if feature.role in ("spatial_gate", "gate"):
            assert feature.layout == TokenLayout("tokens", (), (6, 9), Box(0, 0, 6, 9))


def test_gate_of_gather_excite_is_kept() -> None:
    torch.manual_seed(0)
    module, x = GatherExcite(16, feat_size=(6, 9), extra_params=False, extent=2, use_mlp=False).eval(), torch.randn(1, 16, 6, 9)
    with torch.no_grad():
        assert torch.allclose(x * product(seen(module, x)), module(x), atol=1e-6)


def test_branches_of_selective_kernels_sum_to_one() -> None:
    recording = seen(SelectiveKernel(16, split_input=False), torch.randn(2, 16, 8, 8))
    (feature,) = (feature for feature in recording.features if feature.role == "branch_gate")
    assert feature.value.shape == (2, 2, 16)
    assert torch.allclose(feature.value.sum(1), torch.ones(2, 16))


def test_layout_of_a_deep_gate_covers_the_image() -> None:
    model = timm.create_model("resnet18", block_args={"attn_layer": "cbam"}).eval()
    with torch.no_grad(), visattn.capture(model) as recording:
        model(torch.randn(2, 3, 64, 96))
    layouts = {feature.layer: feature.layout for feature in recording.features if feature.role == "spatial_gate"}
    assert len(layouts) == 8
    assert layouts["layer3.1.se.spatial"] == TokenLayout("tokens", (), (4, 6), Box(0, 0, 64, 96))


def test_class_of_the_same_name_with_other_submodules_is_ignored() -> None:
    class SpatialGate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(NoAttentionCaptured):
        seen(SpatialGate(), torch.randn(1, 3, 8, 8))


def test_gates_of_another_model_are_not_recorded() -> None:
    model, other = nn.Sequential(nn.Conv2d(3, 8, 3), ours.SqueezeExcite(8)).eval(), ours.SqueezeExcite(4).eval()
    with torch.no_grad(), visattn.capture(model) as recording:
        model(torch.randn(1, 3, 8, 8))
        other(torch.randn(1, 4, 8, 8))
    assert [feature.layer for feature in recording.features] == ["1"]


def test_nothing_stays_on_the_model() -> None:
    model = nn.Sequential(ChannelGate(3), ours.SqueezeExcite(3)).eval()
    with torch.no_grad(), visattn.capture(model):
        model(torch.randn(1, 3, 8, 8))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_gates_get_no_gradient_but_activations_do() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), ours.CBAM(8)).eval()
    with visattn.capture(model, features=["0"], gradients=True) as recording:
        out = model(torch.randn(1, 3, 8, 8))
    graded = recording.gradients(out.square().sum())
    assert {feature.role: feature.gradient is None for feature in graded.features} == {
        "activation": False,
        "channel_gate": True,
        "spatial_gate": True,
    }
    activation = next(feature for feature in graded.features if feature.role == "activation")
    x = activation.value.requires_grad_()
    (expected,) = torch.autograd.grad(model[1](x).square().sum(), x)
    assert activation.gradient is not None
    assert torch.allclose(activation.gradient, expected, rtol=1e-4, atol=1e-5)


def test_maps_are_kept_channels_first() -> None:
    model = torchvision.models.convnext_tiny(weights=None).eval()  # its blocks are channels last inside
    with torch.no_grad(), visattn.capture(model, features=["features.1.0.block.2", "features.1.0"]) as recording:
        model(torch.randn(1, 3, 32, 64))
    inside, outside = recording.features
    assert inside.value.shape == outside.value.shape == (1, 96, 8, 16)
    assert inside.layout == outside.layout == TokenLayout("tokens", (), (8, 16), Box(0, 0, 32, 64))


def test_method_gates_is_the_mean_over_channels() -> None:
    layout = TokenLayout("tokens", (), (2, 3), Box(0, 0, 8, 12))
    value = torch.arange(24.0).reshape(1, 4, 2, 3)
    recording = Recording(features=[FeatureRecord("a", 0, "gate", value, layout=layout)])
    assert gates(recording).values.tolist() == [[[9, 10, 11], [12, 13, 14]]]


def test_method_gates_chooses_a_layer() -> None:
    recording = seen(nn.Sequential(ours.CBAM(3), ours.CBAM(3)), torch.randn(2, 3, 6, 9))
    assert gates(recording).provenance.parameters["layer"] == "1.1"
    assert gates(recording, layer=0).provenance.parameters["layer"] == "1.0"
    assert gates(recording, layer="1.0").values.shape == (2, 6, 9)
    with pytest.raises(OptionError, match=r"layer must be one of the modules with such gates, 1\.0, 1\.1, got 2"):
        gates(recording, layer=2)


def test_method_gates_refuses_gates_of_channels() -> None:
    with pytest.raises(
        OptionError,
        match=r"gate only channels, which cannot be drawn on the image\. Use visattn\.evaluation\.gate_statistics\.",
    ):
        gates(seen(ours.SqueezeExcite(3), torch.randn(1, 3, 6, 9)))
    with pytest.raises(OptionError, match="the network has no gates"):
        gates(Recording())


def test_gate_whose_position_could_not_be_traced_is_refused() -> None:
    record = FeatureRecord("a", 0, "spatial_gate", torch.rand(1, 1, 2, 3))
    with pytest.raises(OptionError, match="the position of its gate on the image could not be traced"):
        gates(Recording(features=[record]))


def test_gate_statistics_of_known_values() -> None:
    record = FeatureRecord("a", 0, "channel_gate", torch.tensor([[0.01, 0.5, 0.99, 0.98]]))
    (found,) = gate_statistics(Recording(features=[record]))
    numbers = {name: float(value[0]) for name, value in found.numbers().items()}
    assert numbers == pytest.approx(
        {"mean": 0.62, "deviation": 0.4040, "least": 0.01, "largest": 0.99, "closed": 0.25, "open": 0.5}, abs=1e-4
    )


@pytest.mark.parametrize("many", [tuple, list])
def test_gradient_of_a_layer_that_returns_several_results_and_is_overwritten(many: type) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)

        def forward(self, x: Tensor) -> object:
            y = self.conv(x)
            return many((y, y.mean()))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.two, self.head = Two(), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            y, _ = self.two(x)
            out: Tensor = self.head(torch.relu_(y).mean((2, 3)))
            return out

    torch.manual_seed(0)
    model, pixels = Net().eval().requires_grad_(False), torch.randn(1, 3, 8, 8)
    before = model.two.conv(pixels).requires_grad_()
    (expected,) = torch.autograd.grad(model.head(before.relu().mean((2, 3)))[0, 1], before)
    for _ in range(3):
        with visattn.capture(model, features=["two"], gradients=True) as recording:
            logits = model(pixels)
        (feature,) = recording.gradients(logits[0, 1]).features
        assert feature.gradient is not None
        assert torch.equal(feature.value, before)
        assert torch.allclose(feature.gradient, expected)


@pytest.mark.parametrize("name", ["cbam", "bam"])
def test_small_reference_networks_are_traced_to_the_last_layer(name: str) -> None:
    model = visattn.models.resnet20(attention=name).eval()
    with torch.no_grad(), visattn.capture(model, features=["layer3"]) as recording:
        model(torch.randn(1, 3, 32, 32))
    places = [feature for feature in recording.features if feature.role != "channel_gate"]
    assert len(places) == {"cbam": 10, "bam": 3}[name]
    assert all(feature.layout is not None and feature.layout.box == Box(0, 0, 32, 32) for feature in places)
