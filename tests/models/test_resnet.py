"""Residual networks: torchvision's outputs, attention placed as in the papers, and published parameter counts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, fx, nn

from tests.conftest import Figures
from visattn import models
from visattn._support.publish import listening
from visattn.errors import OptionError
from visattn.models.resnet import BasicBlock, Bottleneck
from visattn.nn import BAM, CBAM, ECA, SqueezeExcite

Build = Callable[..., models.ResNet]
GATES = ["se", "cbam", "eca"]
PAIRS = [(models.resnet18, torchvision.models.resnet18), (models.resnet50, torchvision.models.resnet50)]


def shaken(model: nn.Module) -> Any:
    """Return the model in float64 with effective norms: no weight 1, bias 0 or fresh running statistics."""
    for norm in model.modules():
        if isinstance(norm, (nn.BatchNorm1d, nn.BatchNorm2d)):
            for values in (norm.weight.data, norm.running_var):
                assert values is not None
                values.uniform_(0.5, 1.5)
            for values in (norm.bias.data, norm.running_mean):
                assert values is not None
                values.normal_(std=0.2)
    return model.double()


def photos(channels: int = 3, size: tuple[int, int] = (65, 43)) -> Tensor:
    return torch.randn(2, channels, *size, dtype=torch.float64)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def outlined(build: Build, attention: str | None) -> models.ResNet:
    """Return the model's shapes without values."""
    with torch.device("meta"):
        return build(attention=attention)


def blocks(model: nn.Module) -> dict[str, Any]:
    return {name: part for name, part in model.named_modules() if isinstance(part, (BasicBlock, Bottleneck))}


# torchvision's outputs


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(("build", "theirs"), PAIRS, ids=["resnet18", "resnet50"])
def test_checkpoints_of_torchvision_load_strictly_and_give_the_same_output(
    build: Build, theirs: Callable[[], nn.Module], training: bool, figures: Figures
) -> None:
    reference = shaken(theirs()).train(training)
    ours = build().double().train(training)
    ours.load_state_dict(reference.state_dict(), strict=True)
    image = photos()
    expected, got = reference(image), ours(image)
    worst = ((got - expected).abs().max() / expected.abs().max()).item()
    figures(f"{build.__name__} against torchvision, {'training' if training else 'evaluation'}", worst, "<= 1e-6")
    assert worst <= 1e-6
    for name, buffer in reference.named_buffers():  # running statistics as after training
        torch.testing.assert_close(ours.get_buffer(name), buffer, msg=name)


def recomposed(base: Any, ours: nn.Module, attention: str, image: Tensor) -> Tensor:
    """Run torchvision's network with a rewritten forward pass: attention before the addition, or between the stages."""
    x = base.maxpool(F.relu(base.bn1(base.conv1(image))))
    for stage in range(1, 5):
        for number, block in enumerate(getattr(base, f"layer{stage}")):
            out = F.relu(block.bn1(block.conv1(x)))
            out = block.bn2(block.conv2(out))
            if hasattr(block, "conv3"):
                out = block.bn3(block.conv3(F.relu(out)))
            if attention != "bam":
                out = copy.deepcopy(ours.get_submodule(f"layer{stage}.{number}.attention"))(out)
            x = F.relu(out + (x if block.downsample is None else block.downsample(x)))
        if attention == "bam" and stage < 4:
            x = copy.deepcopy(ours.get_submodule(f"bam{stage}"))(x)
    out = base.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
    assert isinstance(out, Tensor)
    return out


@pytest.mark.full
@pytest.mark.parametrize("attention", [*GATES, "bam"])
@pytest.mark.parametrize(("build", "theirs"), PAIRS, ids=["resnet18", "resnet50"])
def test_attention_is_at_the_position_of_its_paper(
    build: Build, theirs: Callable[[], nn.Module], attention: str, figures: Figures
) -> None:
    base, ours = shaken(theirs()).eval(), shaken(build(attention=attention)).eval()
    missing, unexpected = ours.load_state_dict(base.state_dict(), strict=False)
    assert not unexpected
    assert missing
    assert all(".attention." in name or name.startswith("bam") for name in missing)
    image = photos()
    expected, plain = recomposed(base, ours, attention, image), base(image)
    worst = ((ours(image) - expected).abs().max() / expected.abs().max()).item()
    figures(f"{attention} in {build.__name__} against torchvision's forward with it", worst, "<= 1e-12")
    assert worst <= 1e-12
    assert (expected - plain).abs().max() > 1e-3 * plain.abs().max()  # the attention has an effect


# architecture


@pytest.mark.parametrize(
    ("build", "attention", "published"),
    [
        (models.resnet18, None, 11.69),
        (models.resnet18, "se", 11.78),
        (models.resnet18, "cbam", 11.78),
        (models.resnet50, None, 25.56),
        (models.resnet50, "se", 28.09),
        (models.resnet50, "cbam", 28.09),
        (models.resnet50, "bam", 25.92),
        (models.resnet50, "eca", 25.56),
        (models.resnet20, None, 0.27),
        (models.resnet56, None, 0.85),
    ],
)
def test_parameter_counts_equal_the_published_counts(build: Build, attention: str | None, published: float) -> None:
    assert round(count(outlined(build, attention)) / 1e6, 2) == published


def test_eca_parameter_count_equals_its_paper_in_units_of_2_to_the_20() -> None:
    assert round(count(outlined(models.resnet50, "eca")) / 2**20, 2) == 24.37  # "million" is 2^20 there


def added(attention: str, channels: int) -> int:
    """Compute the parameter count of one module from the papers' formulas."""
    width = channels // 16
    gate = 2 * channels * width + width + channels
    if attention == "bam":
        dilated = 2 * (9 * width**2 + width + 2 * width)
        return gate + 2 * width + channels * width + width + 2 * width + dilated + width + 1
    kernel = {16: 3, 32: 3, 64: 3, 128: 5, 256: 5, 512: 5, 1024: 5, 2048: 7}[channels]
    return {"se": gate, "cbam": gate + 2 * 7**2 + 2, "eca": kernel}[attention]


@pytest.mark.parametrize("attention", [*GATES, "bam"])
@pytest.mark.parametrize("build", [models.resnet18, models.resnet50, models.resnet20])
def test_every_module_adds_the_parameters_of_its_formula(build: Build, attention: str) -> None:
    plain, ours = outlined(build, None), outlined(build, attention)
    stages = [list(getattr(plain, name)) for name in plain.stages]
    expansion = stages[0][0].expansion
    widths = [stage[0].bn1.num_features * expansion for stage in stages]
    where = widths[:-1] if attention == "bam" else [width for width, stage in zip(widths, stages, strict=True) for _ in stage]
    assert count(ours) - count(plain) == sum(added(attention, channels) for channels in where)


def test_gates_receive_all_channels_of_a_bottleneck() -> None:
    channels = [block.attention.channels for block in blocks(outlined(models.resnet50, "cbam")).values()]
    assert channels == [256] * 3 + [512] * 4 + [1024] * 6 + [2048] * 3


@pytest.mark.parametrize(("build", "between"), [(models.resnet18, ["bam1", "bam2", "bam3"]), (models.resnet20, ["bam1", "bam2"])])
def test_bam_is_placed_only_between_the_stages(build: Build, between: list[str]) -> None:
    assert [name for name, part in outlined(build, "bam").named_modules() if isinstance(part, BAM)] == between


def test_eca_kernels_follow_the_rule_of_the_paper() -> None:
    sides = [block.attention.conv.kernel_size[0] for block in blocks(outlined(models.resnet50, "eca")).values()]
    assert sides == [5] * 13 + [7] * 3


@pytest.mark.parametrize(("build", "layers"), [(models.resnet20, 20), (models.resnet56, 56)])
def test_cifar_networks_have_their_layers_and_no_projection(build: Build, layers: int) -> None:
    weighted = [part for part in outlined(build, None).modules() if isinstance(part, (nn.Conv2d, nn.Linear))]
    assert len(weighted) == layers
    assert all(part.kernel_size == (3, 3) for part in weighted if isinstance(part, nn.Conv2d))


def test_option_a_subsamples_by_two_and_pads_channels_with_zeros() -> None:
    shortcut = blocks(models.resnet20())["layer2.0"].downsample
    x = torch.randn(2, 16, 5, 8)
    expected = torch.zeros(2, 32, 3, 4)
    for image in range(2):
        for channel in range(16):
            for row in range(3):
                for column in range(4):
                    expected[image, channel, row, column] = x[image, channel, 2 * row, 2 * column]
    assert torch.equal(shortcut(x), expected)


def test_a_cifar_network_equals_explicit_layers() -> None:
    model = shaken(models.resnet20(attention="se")).eval()
    values = dict(model.state_dict())

    def convolved(x: Tensor, name: str, norm: str, stride: int = 1) -> Tensor:
        x = F.conv2d(x, values[f"{name}.weight"], stride=stride, padding=1)
        mean, var, weight, bias = (
            values[f"{norm}.{part}"].view(1, -1, 1, 1) for part in ("running_mean", "running_var", "weight", "bias")
        )
        out: Tensor = (x - mean) / (var + 1e-5).sqrt() * weight + bias
        return out

    image = photos(size=(32, 32))
    x = convolved(image, "conv1", "bn1").relu()
    for stage in (1, 2, 3):
        for block in (0, 1, 2):
            name, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            out = convolved(x, f"{name}.conv1", f"{name}.bn1", stride).relu()
            out = convolved(out, f"{name}.conv2", f"{name}.bn2")
            mean = out.mean((2, 3))
            hidden = (mean @ values[f"{name}.attention.fc1.weight"][..., 0, 0].T + values[f"{name}.attention.fc1.bias"]).relu()
            gate = (hidden @ values[f"{name}.attention.fc2.weight"][..., 0, 0].T + values[f"{name}.attention.fc2.bias"]).sigmoid()
            if stride == 2:
                x = torch.cat([x[:, :, ::2, ::2], torch.zeros_like(x[:, :, ::2, ::2])], 1)
            x = (out * gate[:, :, None, None] + x).relu()
    assert x.shape == (2, 64, 8, 8)
    torch.testing.assert_close(model.forward_features(image), x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model(image), x.mean((2, 3)) @ values["fc.weight"].T + values["fc.bias"], rtol=1e-12, atol=1e-12)


# initialization


def test_convolutions_start_normal_over_their_fan_out() -> None:
    for name, part in models.resnet18(attention="se").named_modules():
        if isinstance(part, nn.Conv2d) and "attention" not in name:
            fan = part.out_channels * part.kernel_size[0] * part.kernel_size[1]
            assert part.weight.std().item() == pytest.approx((2 / fan) ** 0.5, rel=0.05), name


def test_spatial_gates_of_cbam_start_at_one_half_as_in_the_authors_network() -> None:
    seen: dict[str, list[Tensor]] = {}
    model = models.resnet20(attention="cbam").eval()
    with torch.no_grad(), listening(lambda _, role, gate, *rest: seen.setdefault(role, []).append(gate)):
        model(torch.randn(1, 3, 32, 32))
    assert len(seen["spatial_gate"]) == len(seen["channel_gate"]) == 9
    assert all(bool((gate == 0.5).all()) for gate in seen["spatial_gate"])
    assert any(float(gate.std()) > 0 for gate in seen["channel_gate"])  # these take the image as input


@pytest.mark.parametrize("attention", ["cbam", "bam"])
def test_biases_of_cbam_and_bam_start_at_zero(attention: str) -> None:
    inside = [
        part
        for name, part in models.resnet18(attention=attention).named_modules()
        if name.startswith("bam") or ".attention" in name
    ]
    biases = [part.bias for part in inside if isinstance(part, (nn.Conv2d, nn.Linear)) and part.bias is not None]
    assert len(biases) == (16 if attention == "cbam" else 18)
    assert not any(bool(bias.any()) for bias in biases)


def test_convolutions_of_both_spatial_gates_start_by_their_fan_out() -> None:
    plain, dilated = CBAM(512).conv, models.resnet50(attention="bam").get_submodule("bam3")
    ours = blocks(models.resnet18(attention="cbam"))["layer1.0"].attention.conv
    assert ours.weight.std().item() == pytest.approx((2 / 49) ** 0.5, rel=0.25)  # 98 numbers
    assert plain.weight.std().item() < 0.6 * (2 / 49) ** 0.5  # the module's default initialization differs
    spread = [
        part.weight.std().item() for part in dilated.modules() if isinstance(part, nn.Conv2d) and part.kernel_size == (3, 3)
    ]
    assert spread == pytest.approx([(2 / (9 * 64)) ** 0.5] * 2, rel=0.03)


# usage


@pytest.mark.parametrize("attention", [None, *GATES, "bam"])
def test_every_parameter_gets_a_gradient(attention: str | None) -> None:
    model = models.resnet20(attention=attention)
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, CBAM):
                part.norm.weight.fill_(1)  # at 0 the spatial convolution gets no gradient
    F.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.tensor([0, 1, 2, 3])).backward()  # type: ignore[no-untyped-call]
    assert [
        name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.isfinite().all()
    ] == []


def test_attention_may_be_a_function_of_the_channels() -> None:
    model = models.resnet18(attention=lambda channels: SqueezeExcite(channels, 4))
    assert [block.attention.fc1.out_channels for block in blocks(model).values()] == [16, 16, 32, 32, 64, 64, 128, 128]


def test_eca_takes_the_kernels_of_a_released_checkpoint() -> None:
    sides = {64: 3, 128: 5, 256: 7, 512: 7}
    model = models.resnet18(attention=lambda channels: ECA(channels, kernel_size=sides[channels]))
    assert [block.attention.conv.kernel_size[0] for block in blocks(model).values()] == [3, 3, 5, 5, 7, 7, 7, 7]


@pytest.mark.parametrize("attention", [BAM, partial(BAM, reduction=8)], ids=["class", "partial"])
def test_bam_with_options_is_also_placed_between_the_stages(attention: Callable[[int], nn.Module]) -> None:
    model = models.resnet20(attention=attention)
    assert model.stages == ["layer1", "bam1", "layer2", "bam2", "layer3"]
    assert all(isinstance(block.attention, nn.Identity) for block in blocks(model).values())


def test_an_unknown_attention_is_refused_with_the_known_names() -> None:
    with pytest.raises(OptionError, match=r"unknown attention 'cbm'; did you mean 'cbam'\? Known: .*se"):
        models.resnet18(attention="cbm")


def test_the_head_can_be_taken_off_and_put_on() -> None:
    model = models.resnet20(num_classes=7, in_channels=1).eval()
    image = torch.randn(2, 1, 20, 33)
    features = model.forward_features(image)
    assert features.shape == (2, model.num_features, 5, 9)
    assert torch.equal(model.forward_head(features), model(image))
    assert model(image).shape == (2, 7)
    pooled = model.forward_head(features, pre_logits=True)
    torch.testing.assert_close(pooled, features.flatten(2).mean(2))
    model.double().reset_classifier(0)
    assert isinstance(model.get_classifier(), nn.Identity)
    torch.testing.assert_close(model(image.double()).float(), pooled, rtol=1e-4, atol=1e-5)
    model.reset_classifier(3)
    assert model.num_classes == 3
    assert model(image.double()).shape == (2, 3)


@pytest.mark.parametrize("build", [models.resnet18, models.resnet20])
def test_feature_info_equals_the_shapes_of_module_outputs(build: Build) -> None:
    model = build(attention="bam").eval()
    seen: dict[object, torch.Size] = {}
    for info in model.feature_info:
        keep = partial(lambda name, _module, _given, out: seen.__setitem__(name, out.shape), info["module"])
        model.get_submodule(str(info["module"])).register_forward_hook(keep)
    model(torch.randn(1, 3, 64, 96))
    for info in model.feature_info:
        assert seen[info["module"]] == (1, info["num_chs"], 64 // int(info["reduction"]), 96 // int(info["reduction"]))


@pytest.mark.parametrize("attention", [*GATES, "bam"])
def test_a_traced_graph_keeps_the_attention(attention: str) -> None:
    model = shaken(models.resnet20(attention=attention)).eval()
    image = photos(size=(16, 24))
    torch.testing.assert_close(fx.symbolic_trace(model)(image), model(image), rtol=0, atol=0)


def test_a_replaced_stage_is_run() -> None:
    model = models.resnet20().eval()
    model.layer3 = nn.Sequential(nn.Conv2d(32, 64, 1))
    assert model.forward_features(torch.randn(1, 3, 32, 32)).shape == (1, 64, 16, 16)
