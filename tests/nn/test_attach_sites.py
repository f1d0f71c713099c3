"""Sites of attention: residual branches, stages, depthwise convolutions and names; traced channels and sizes."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from tests.nn import small
from tests.nn.attaching import Silence, names
from tests.nn.small import Net, example
from tests.nn.sweep import difference, logits
from visattn.errors import OptionError
from visattn.nn import WithAttention, attach

RESIDUAL: dict[str, tuple[Callable[[], nn.Module], str, int]] = {
    "torchvision ResNet-18": (torchvision.models.resnet18, r"layer\d\.\d\.bn2", 8),
    "torchvision ResNet-50": (torchvision.models.resnet50, r"layer\d\.\d\.bn3", 16),
    "torchvision ConvNeXt-T": (torchvision.models.convnext_tiny, r"features\.[1357]\.\d\.block", 18),
    "torchvision MobileNetV2": (torchvision.models.mobilenet_v2, r"features\.\d+\.conv", 10),
    "timm SE-ResNet-18": (partial(timm.create_model, "seresnet18"), r"layer\d\.\d\.se", 8),
    "timm ResNetV2-18": (partial(timm.create_model, "resnetv2_18"), r"stages\.\d\.blocks\.\d\.conv2", 8),
    "timm DLA-34": (partial(timm.create_model, "dla34"), r"level\d(\.tree\d)+\.bn2", 12),
    "timm Res2Net-50": (partial(timm.create_model, "res2net50_26w_4s"), r"layer\d\.\d\.bn3", 16),
    "timm HRNet": (partial(timm.create_model, "hrnet_w18_small"), r".+\.bn[23]", 1 + 18 + 4),
    "timm EdgeNeXt": (partial(timm.create_model, "edgenext_xx_small"), r"stages\.\d\.blocks\.\d\.mlp", 12),
}


@pytest.mark.parametrize("name", list(RESIDUAL))
def test_residual_finds_the_end_of_every_branch(name: str) -> None:
    make, pattern, count = RESIDUAL[name]
    model = make().to("meta")
    sites = attach(model, "se", example=torch.empty(1, 3, 96, 96), dry_run=True).sites
    assert len(sites) == count
    assert all(re.fullmatch(pattern, site.name) for site in sites), sites
    assert {site.layout for site in sites} == {"NHWC" if name == "timm EdgeNeXt" else "NCHW"}


SILENCED: dict[str, tuple[Callable[[], nn.Module], str, Callable[[Tensor], Tensor]]] = {
    "torchvision ResNet-18": (torchvision.models.resnet18, r"layer\d\.\d", torch.relu),
    "torchvision EfficientNet-B0": (torchvision.models.efficientnet_b0, r"features\.\d\.\d", lambda x: x),
    "timm ConvNeXt": (partial(timm.create_model, "convnext_atto", ls_init_value=1.0), r"stages\.\d\.blocks\.\d", lambda x: x),
    "timm ResNet-26d": (partial(timm.create_model, "resnet26d", zero_init_last=False), r"layer\d\.\d", torch.relu),
    "timm MobileNetV3": (partial(timm.create_model, "mobilenetv3_small_050"), r"blocks\.\d\.\d", lambda x: x),
    "timm CSP": (partial(timm.create_model, "cs3darknet_s"), r"stages\.\d\.blocks\.\d", lambda x: x),
}


@pytest.mark.parametrize("name", list(SILENCED))
def test_a_zeroed_branch_leaves_only_its_shortcut(name: str) -> None:
    make, blocks, after = SILENCED[name]
    model = make().eval()
    handle = attach(model, Silence, init="paper", example=torch.randn(1, 3, 64, 64))
    passed: list[str] = []

    def compare(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            projects = getattr(module, "downsample", None) is not None
            if any(f"{name}." in site or site == name for site in names(handle)) and not projects:
                assert torch.equal(output, after(args[0])), name
                passed.append(name)

        return hook

    inputs: dict[str, Tensor] = {}
    for block, module in model.named_modules():
        if re.fullmatch(blocks, block):
            module.register_forward_pre_hook(lambda _, args, block=block: inputs.update({block: args[0].clone()}))
            module.register_forward_hook(lambda module, _, output, block=block: compare(block)(module, (inputs[block],), output))
    one, two = (logits(model, torch.randn(1, 3, 64, 64))[0] for _ in range(2))
    assert len(passed) >= 8
    assert not torch.equal(one, two), "attention is on the trunk, where silence silences the model"


def test_a_branch_that_ends_in_functions_is_attached_at_its_drop_path() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.drop_path = nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(8, 8, 1), nn.Dropout2d(0.1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.drop_path(self.one(x) * self.two(x).sigmoid())  # type: ignore[no-any-return]

    model = small.around(Gated())
    model(example())
    assert names(attach(model, "se", example=example())) == ["1.drop_path"]


SMALL: dict[str, tuple[type[nn.Module], list[tuple[str, str, int]]]] = {
    "projected from its norm": (small.PreActivation, [("1.conv2", "NCHW", 12)]),
    "shortcut without a module": (small.Padded, [("1.conv2", "NCHW", 12)]),
    "scaled and turned": (small.ScaledLast, [("1.mlp", "NHWC", 8)]),
    "additions of pieces": (small.Pieces, [("1.end", "NCHW", 8)]),
    "side by side": (small.SideBySide, []),
    "norm beside a layer": (small.Normed, []),
    "two equal branches": (small.Twins, []),
    "two scales": (small.Pyramid, []),
    "one activation for all": (small.OneActivation, []),
}


@pytest.mark.parametrize("name", list(SMALL))
def test_residual_branches_are_distinguished_from_other_additions(name: str) -> None:
    kind, expected = SMALL[name]
    model = small.around(kind())
    model(example())
    if not expected:
        with pytest.raises(OptionError, match="has no residual branch that ends in a module"):
            attach(model, "se", example=example())
        return
    handle = attach(model, "se", example=example())
    assert [(site.name, site.layout, site.channels) for site in handle.sites] == expected


STAGES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "torchvision ResNet-18": (torchvision.models.resnet18, ["layer1", "layer2", "layer3", "layer4"]),
    "torchvision EfficientNet-B0": (torchvision.models.efficientnet_b0, [f"features.{i}" for i in (1, 2, 3, 5, 7)]),
    "torchvision VGG-11": (torchvision.models.vgg11, [f"features.{i}" for i in (1, 4, 9, 14, 19)]),
    "torchvision DenseNet-121": (torchvision.models.densenet121, [f"features.denseblock{i}" for i in (1, 2, 3, 4)]),
    "torchvision RegNet": (torchvision.models.regnet_y_400mf, [f"trunk_output.block{i}" for i in (1, 2, 3, 4)]),
    "timm RegNet": (partial(timm.create_model, "regnetx_002"), ["s1", "s2", "s3", "s4"]),
    "timm ConvNeXt": (partial(timm.create_model, "convnext_atto"), [f"stages.{i}" for i in range(4)]),
    "timm MobileNetV3": (partial(timm.create_model, "mobilenetv3_small_050"), [f"blocks.{i}" for i in (0, 1, 3, 4)]),
    "timm DLA-34": (partial(timm.create_model, "dla34"), [f"level{i}" for i in (1, 2, 3, 4, 5)]),
}


@pytest.mark.parametrize("name", list(STAGES))
def test_stages_are_found(name: str) -> None:
    make, expected = STAGES[name]
    assert names(attach(make().to("meta"), "se", where="stage", example=torch.empty(1, 3, 128, 128), dry_run=True)) == expected


def test_depthwise_is_after_the_norm_that_follows() -> None:
    model = torchvision.models.mobilenet_v2().to("meta")
    found = names(attach(model, "se", where="depthwise", example=torch.empty(1, 3, 64, 64), dry_run=True))
    assert found[:2] == ["features.1.conv.0.1", "features.2.conv.1.1"]
    assert len(found) == 17
    bare = small.around(small.ScaledLast())
    bare(example())
    assert names(attach(bare, "se", where="depthwise", example=example())) == ["1.depthwise"]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("layer1.*.bn2", ["layer1.0.bn2", "layer1.1.bn2"]),
        ("layer?", ["layer1", "layer2"]),
        ("layer[2-9]", ["layer2"]),
        ("layer[!2-9].0.conv1", ["layer1.0.conv1"]),
        ("**.conv2", ["layer1.0.conv2", "layer1.1.conv2", "layer2.0.conv2"]),
        ("**stem", ["stem"]),
        (["layer2.0.bn1", "stem"], ["stem", "layer2.0.bn1"]),
        (lambda name, module: isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1), ["layer2.0.downsample.0"]),
    ],
    ids=["star", "question mark", "range", "not in range", "any depth", "top", "list", "function"],
)
def test_sites_are_chosen_by_name(net: Net, where: Any, expected: list[str]) -> None:
    assert names(attach(net, "se", where=where, example=example())) == expected


def test_site_names_ignore_attention_attached_before(net: Net) -> None:
    before = net(example())
    stages = attach(net, "se", where="stage", example=example())
    inside = attach(net, "cbam", where="layer1.*.bn2", example=example())
    assert names(inside) == ["layer1.0.bn2", "layer1.1.bn2"]
    assert torch.equal(net(example()), before)
    stages.detach()
    assert torch.equal(net(example()), before)
    inside.detach()
    assert not any(isinstance(module, WithAttention) for module in net.modules())


def test_sites_below_min_channels_are_left_out(net: Net) -> None:
    assert names(attach(net, "se", example=example(), min_channels=12)) == ["layer2.0.bn2"]


def test_channels_and_sizes_are_taken_from_the_example(net: Net) -> None:
    handle = attach(net, "se", example=example())
    assert [(site.channels, site.size, site.layout) for site in handle.sites] == [
        (8, (14, 10), "NCHW"),
        (8, (14, 10), "NCHW"),
        (12, (7, 5), "NCHW"),
    ]


def test_the_dry_run_leaves_modes_state_and_hooks_unchanged() -> None:
    model = Net().train()
    model.layer1[0].eval()
    flags = [module.training for module in model.modules()]
    state = copy.deepcopy(model.state_dict())
    pixels = example()
    attach(model, "se", example=pixels, dry_run=True)
    assert [module.training for module in model.modules()] == flags
    assert all(torch.equal(one, two) for one, two in zip(state.values(), model.state_dict().values(), strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_with_in_place_operations_does_not_change_the_example() -> None:
    pixels = example()
    attach(nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 4, 1)), "se", where=["1"], example=pixels)
    assert torch.equal(pixels, example())


def test_the_models_input_size_is_used_without_an_example() -> None:
    handle = attach(timm.create_model("test_resnet", in_chans=1), "se", dry_run=True)
    assert handle.sites[0].size == (40, 40)  # of 160


@pytest.mark.parametrize("given", ["tuple", "dict"])
def test_an_example_may_be_a_tuple_or_a_dictionary_of_arguments(net: Net, given: str) -> None:
    pixels = (example(),) if given == "tuple" else {"x": example()}
    assert len(attach(net, "se", example=pixels).sites) == 3


def test_a_model_that_cannot_be_run_is_attached_by_what_its_layers_declare(net: Net) -> None:
    model = nn.Sequential(net.stem, nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 6 * 5, 2))
    handle = attach(model, "se", where=["0", "1"])
    assert [(site.channels, site.size, site.macs) for site in handle.sites] == [(8, None, None)] * 2
    assert handle.rows()[-1]["macs"] is None
    with pytest.raises(
        OptionError, match=r"where='stage' requires a forward pass, but the model failed on an input of 224 x 224"
    ):
        attach(model, "se", where="stage")
    with pytest.raises(OptionError, match=r"the channels of '2' are unknown: the model failed"):
        attach(model, "se", where=["2"])


def test_channels_last_layout_of_swin_is_detected() -> None:
    model = torchvision.models.swin_t().eval()
    x = torch.randn(1, 3, 64, 64)
    before = logits(model, x)
    handle = attach(model, "se", where="stage", example=x, init=1.0)
    first = handle.sites[0]
    assert (first.layout, first.channels, first.size) == ("NHWC", 96, (16, 16))
    assert difference(before, logits(model, x)) > 0


def test_an_ambiguous_layout_is_refused_until_it_is_given() -> None:
    class Opaque(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(x.shape) * 2

    model = nn.Sequential(Opaque())
    with pytest.raises(OptionError, match=r"layout='auto' is ambiguous for '0': in \(1, 4, 5, 4\).*Pass layout='NCHW' or"):
        attach(model, "se", where=["0"], example=torch.randn(1, 4, 5, 4))
    assert attach(model, "se", where=["0"], example=torch.randn(1, 4, 5, 4), layout="NHWC").sites[0].size == (4, 5)
