"""Attaching to whole models: where it goes, that nothing changes, that everything can be undone, and what is refused."""

from __future__ import annotations

import copy
import io
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import visattn
from tests.conftest import Figures
from tests.nn import small
from tests.nn.small import Net, example
from tests.nn.sweep import BACKBONES, difference, examine, logits
from visattn.errors import ModelError, OptionError, ShapeError, VisattnWarning
from visattn.nn import ATTENTION, CBAM, Plugged, SqueezeExcite, attach


class Silence(nn.Module):
    """Attention that lets nothing through."""

    def __init__(self, channels: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x * 0


@pytest.fixture
def net() -> Net:
    model = Net().eval()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.normal_(part.weight)
            nn.init.normal_(part.running_mean)  # type: ignore[arg-type]
    return model


def names(handle: visattn.nn.Attached) -> list[str]:
    return [site.name for site in handle.sites]


# nothing changes


FEW = """
timm/resnet18 timm/seresnet18 timm/convnext_atto timm/mobilenetv3_small_050 timm/dpn48b timm/densenet121:stage timm/resnet18:layer[34].*.bn1
torchvision/resnet18 torchvision/mnasnet0_5 torchvision/shufflenet_v2_x0_5:depthwise torchvision/squeezenet1_1:stage
torchvision/swin_t:stage torchvision/fasterrcnn_mobilenet_v3_large_320_fpn torchvision/lraspp_mobilenet_v3_large
""".split()  # noqa: SIM905 - one name after another reads best


@pytest.mark.full
@pytest.mark.parametrize("name", FEW)
def test_attached_model_is_the_model(name: str, figures: Figures) -> None:
    ran: set[nn.Module] = set()

    def attention_runs(model: nn.Module, pixels: object, handle: visattn.nn.Attached) -> None:
        for site in handle.sites:
            site.module.register_forward_hook(lambda module, *_: ran.add(module))
        logits(model, pixels)
        assert len(ran) == len(handle.sites)

    seen = examine(name, attention_runs)
    figures(f"change of outputs by attach, {name}", seen.change, "0")
    assert seen.kept, seen


def test_the_sweep_names_models_of_both_libraries() -> None:
    assert len(BACKBONES) == len(set(BACKBONES)) > 50
    assert {name.split("/")[0] for name in BACKBONES} == {"timm", "torchvision"}


def test_training_forward_is_the_same_too(net: Net) -> None:
    plain = copy.deepcopy(net).train()
    handle = attach(net, "cbam", example=example())
    net.train()
    assert torch.equal(net(example()), plain(example()))
    states = zip(handle.base_state_dict().values(), plain.state_dict().values(), strict=True)
    assert all(torch.equal(one, two) for one, two in states), "running statistics differ"


def test_paper_changes_the_model_and_identity_is_why_it_is_not_the_default(net: Net) -> None:
    before = net(example())
    handle = attach(net, "se", init="paper", example=example())
    assert not torch.allclose(net(example()), before, atol=1e-3)
    assert sum(1 for _ in handle.parameters()) == 4 * len(handle.sites)


@pytest.mark.parametrize("name", sorted(ATTENTION))
def test_every_attention_attaches_and_changes_nothing(net: Net, name: str) -> None:
    before = net(example())
    handle = attach(net, name, where="stage", example=example())
    assert torch.equal(net(example()), before)
    assert len(handle.sites) == 2


# where


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
def test_a_silent_branch_leaves_its_shortcut(name: str) -> None:
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


def test_a_branch_that_functions_end_is_attached_at_what_drops_it() -> None:
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
    "two alike": (small.Twins, []),
    "two scales": (small.Pyramid, []),
    "one activation for all": (small.OneActivation, []),
}


@pytest.mark.parametrize("name", list(SMALL))
def test_residual_is_told_from_other_additions(name: str) -> None:
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
def test_places_are_chosen_by_name(net: Net, where: Any, expected: list[str]) -> None:
    assert names(attach(net, "se", where=where, example=example())) == expected


def test_names_stay_those_of_the_model_before(net: Net) -> None:
    before = net(example())
    stages = attach(net, "se", where="stage", example=example())
    inside = attach(net, "cbam", where="layer1.*.bn2", example=example())
    assert names(inside) == ["layer1.0.bn2", "layer1.1.bn2"]
    assert torch.equal(net(example()), before)
    stages.detach()
    assert torch.equal(net(example()), before)
    inside.detach()
    assert not any(isinstance(module, Plugged) for module in net.modules())


def test_narrow_places_are_left_out(net: Net) -> None:
    assert names(attach(net, "se", example=example(), min_channels=12)) == ["layer2.0.bn2"]


def test_channels_and_sizes_are_seen(net: Net) -> None:
    handle = attach(net, "se", example=example())
    assert [(site.channels, site.size, site.layout) for site in handle.sites] == [
        (8, (14, 10), "NCHW"),
        (8, (14, 10), "NCHW"),
        (12, (7, 5), "NCHW"),
    ]


def test_the_model_is_left_as_it_was_by_the_forward() -> None:
    model = Net().train()
    model.layer1[0].eval()
    flags = [module.training for module in model.modules()]
    state = copy.deepcopy(model.state_dict())
    pixels = example()
    attach(model, "se", example=pixels, dry_run=True)
    assert [module.training for module in model.modules()] == flags
    assert all(torch.equal(one, two) for one, two in zip(state.values(), model.state_dict().values(), strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_that_writes_into_its_input_leaves_the_example_alone() -> None:
    pixels = example()
    attach(nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 4, 1)), "se", where=["1"], example=pixels)
    assert torch.equal(pixels, example())


def test_an_own_size_is_used_when_there_is_no_example() -> None:
    handle = attach(timm.create_model("test_resnet", in_chans=1), "se", dry_run=True)
    assert handle.sites[0].size == (40, 40)  # of 160


@pytest.mark.parametrize("given", ["tuple", "dict"])
def test_an_example_may_be_what_the_model_is_called_with(net: Net, given: str) -> None:
    pixels = (example(),) if given == "tuple" else {"x": example()}
    assert len(attach(net, "se", example=pixels).sites) == 3


def test_a_model_that_cannot_be_run_is_attached_by_what_its_layers_declare(net: Net) -> None:
    model = nn.Sequential(net.stem, nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 6 * 5, 2))
    handle = attach(model, "se", where=["0", "1"])
    assert [(site.channels, site.size, site.macs) for site in handle.sites] == [(8, None, None)] * 2
    assert handle.rows()[-1]["macs"] is None
    with pytest.raises(OptionError, match=r"where='stage' must see a forward, and the model refused an input of 224 x 224"):
        attach(model, "se", where="stage")
    with pytest.raises(OptionError, match=r"maps of '2' must be seen to tell their channels, and the model refused"):
        attach(model, "se", where=["2"])


def test_channels_last_are_seen_in_swin() -> None:
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
    with pytest.raises(OptionError, match=r"layout must be given for '0', got 'auto' and \(1, 4, 5, 4\).*Pass layout='NCHW' or"):
        attach(model, "se", where=["0"], example=torch.randn(1, 4, 5, 4))
    assert attach(model, "se", where=["0"], example=torch.randn(1, 4, 5, 4), layout="NHWC").sites[0].size == (4, 5)


# initial values


@pytest.mark.parametrize("name", ["se", "eca"])
def test_two_sigmoids_are_the_identity_without_a_gate(net: Net, name: str) -> None:
    before = net(example())
    handle = attach(net, name, init="two_sigmoid", example=example())
    assert torch.equal(net(example()), before)
    assert not [key for key, _ in handle.named_parameters() if key.endswith("gate")]
    net(example()).square().sum().backward()
    assert any(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in handle.parameters())


@pytest.mark.parametrize("name", ["cbam", "simam"])
def test_two_sigmoids_are_refused_where_they_are_not_the_identity(net: Net, name: str) -> None:
    with pytest.raises(OptionError, match=r"init='two_sigmoid' must make \w+ give half of it .* Use init='identity'"):
        attach(net, name, init="two_sigmoid", example=example())
    assert not any(isinstance(module, Plugged) for module in net.modules())


@pytest.mark.parametrize("name", ["gc", "nl", "sagan"])
def test_zero_last_is_the_identity_without_a_gate(net: Net, name: str) -> None:
    before = net(example())
    handle = attach(net, name, init="zero_last", example=example())
    assert torch.equal(net(example()), before)
    net(example()).square().sum().backward()
    assert any(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in handle.parameters())


def test_zero_last_is_refused_where_it_is_not_the_identity(net: Net) -> None:
    with pytest.raises(OptionError, match="init='zero_last' must make SqueezeExcite give what it is given"):
        attach(net, "se", init="zero_last", example=example())


@pytest.mark.parametrize(("gate", "learns"), [(0.0, False), (1e-3, True)])
def test_a_gate_of_zero_learns_first_alone(net: Net, gate: float, learns: bool) -> None:
    handle = attach(net, "se", init=gate, example=example())
    net(example()).square().sum().backward()
    gradients = {key: parameter.grad for key, parameter in handle.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    assert any(gradient.abs().sum() > 0 for key, gradient in gradients.items() if key.endswith("gate"))  # type: ignore[union-attr]
    assert any(gradient.abs().sum() > 0 for key, gradient in gradients.items() if not key.endswith("gate")) is learns  # type: ignore[union-attr]


FROM_ZERO: dict[str, Callable[[bool], nn.Module]] = {
    "timm": lambda zero: timm.create_model("resnet18", zero_init_last=zero, num_classes=5),
    "torchvision": lambda zero: torchvision.models.resnet18(zero_init_residual=zero, num_classes=5),
}


@pytest.mark.full
@pytest.mark.parametrize("gate", [0.0, 0.3])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("library", list(FROM_ZERO))
def test_learning_begins_a_step_later_where_branches_begin_at_zero(library: str, zero: bool, gate: float) -> None:
    torch.manual_seed(0)
    model, pixels = FROM_ZERO[library](zero).train(), torch.randn(4, 3, 64, 64)
    told = (
        r"'layer1\.0\.bn2' and 7 more give only zeros at first, so init=0\.3 lets nothing learn there in the first step\. Build"
    )
    with pytest.warns(VisattnWarning, match=told) if zero and gate else _no_warning():
        handle = attach(model, "se", init=gate, example=pixels)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    learned: list[tuple[bool, bool]] = []
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(pixels), torch.arange(4)).backward()  # type: ignore[no-untyped-call]
        reached = {key: bool(one.grad.any()) for key, one in handle.named_parameters() if one.grad is not None}
        parts = [{told for key, told in reached.items() if key.endswith("gate") is gates} for gates in (True, False)]
        assert all(len(part) == 1 for part in parts), "sites differ"
        learned.append((parts[0] == {True}, parts[1] == {True}))
        optimizer.step()
    gates, attention = zip(*learned, strict=True)
    assert gates == (not zero, True, True)
    assert attention == (not zero and gate > 0, gate > 0 or not zero, True)


def test_device_dtype_and_training_are_those_of_the_place() -> None:
    model = Net().to(torch.bfloat16).eval()
    model.layer1.train()
    with pytest.warns(VisattnWarning, match=r"'layer2.0.bn2' stay in evaluation") if model.training else _no_warning():
        handle = attach(model, "cbam", example=example())
    assert {parameter.dtype for parameter in handle.parameters()} == {torch.bfloat16}
    assert [site.module.training for site in handle.sites] == [True, True, False]
    assert {parameter.device.type for parameter in attach(Net().to("meta"), "se", example=example()).parameters()} == {"meta"}


@contextmanager
def _no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_autocast_runs_and_keeps_the_output(net: Net) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = net(example())
        attach(net, "cbam", example=example())
        assert torch.equal(net(example()), before)


# what it costs


def test_costs_are_those_of_the_formula() -> None:
    model = torchvision.models.resnet50()
    plain = sum(parameter.numel() for parameter in model.parameters())
    handle = attach(model.to("meta"), "se", init="paper", dry_run=True)
    widths = [256] * 3 + [512] * 4 + [1024] * 6 + [2048] * 3
    assert [site.parameters for site in handle.sites] == [2 * c * (c // 16) + c // 16 + c for c in widths]
    assert [site.macs for site in handle.sites] == [2 * c * (c // 16) for c in widths]
    assert f"{handle.rows()[-1]['parameters'] / plain:.2%}" == "9.90%"


def test_summary_is_a_table_with_a_total(net: Net) -> None:
    handle = attach(net, "se", example=example())
    lines = handle.summary().splitlines()
    assert lines[0].split() == ["site", "attention", "channels", "size", "parameters", "macs"]
    assert lines[1].split() == ["layer1.0.bn2", "SqueezeExcite", "8", "14", "x", "10", "26", "32"]  # 2 * 8 + 1 + 8 + 1; 2 * 2 * 8
    assert lines[-1].split() == ["total", "90", "112"]
    assert sum(parameter.numel() for parameter in handle.parameters()) == 90


def test_every_run_of_a_place_is_counted() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.conv(x).mean(), self.conv(x[:, :, :2]).mean()])

    macs = [attach(Twice(), CBAM, ["conv"], example=torch.randn(1, 3, rows, 5), dry_run=True).sites[0].macs for rows in (2, 6)]
    conv = 2 * 49 * 5  # 2 planes, 7 x 7, 5 columns: for each row
    assert macs == [2 * 2 * 2 * 3 + (2 + 2) * conv, 2 * 2 * 2 * 3 + (6 + 2) * conv]


def test_attention_that_must_see_numbers_has_no_count() -> None:
    class Peeks(Silence):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.max().item() > 0 else -x

    handle = attach(Net(), Peeks, example=example())
    assert [site.macs for site in handle.sites] == [None] * 3
    assert handle.rows()[-1]["macs"] is None


def test_a_dry_run_changes_nothing_and_draws_no_random_number(net: Net) -> None:
    objects, state = list(net.modules()), torch.random.get_rng_state()
    handle = attach(net, "cbam", example=example(), dry_run=True)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(one is two for one, two in zip(objects, net.modules(), strict=True))
    assert handle.rows()[-1]["parameters"] > 0
    with pytest.raises(ModelError, match="nothing is attached: it was detached before, or attach was told dry_run=True"):
        handle.detach()


# checkpoints and undoing


def test_plain_checkpoint_loads_and_what_it_lacks_is_told(net: Net) -> None:
    state = {key: torch.randn_like(value) if value.is_floating_point() else value for key, value in net.state_dict().items()}
    handle = attach(net, "cbam", example=example(), init=0.5)
    kept = {key: value.clone() for key, value in handle.state_dict().items()}
    net.load_state_dict(state, strict=True)
    assert list(handle.supplied) == list(handle.state_dict())
    assert all(torch.equal(value, state[key]) for key, value in handle.base_state_dict().items())
    assert list(handle.base_state_dict()) == list(state)
    assert all(torch.equal(value, kept[key]) for key, value in handle.state_dict().items())


def test_a_checkpoint_of_the_attached_model_loads_into_one_freshly_attached(net: Net) -> None:
    handle = attach(net, "cbam", example=example(), init=0.5)
    state, expected = net.state_dict(), net(example())
    other = Net().eval()
    fresh = attach(other, "cbam", example=example(), strict_attention=True)
    other.load_state_dict(state, strict=True)
    assert torch.equal(other(example()), expected)
    assert fresh.supplied == () == handle.supplied
    alone = Net().eval()
    alone.load_state_dict(handle.base_state_dict(), strict=True)
    attach(alone, "cbam", example=example())
    assert alone.load_state_dict(handle.state_dict(), strict=False).unexpected_keys == []
    assert torch.equal(alone(example()), expected)


def test_versions_of_the_state_are_those_of_the_model_before(net: Net) -> None:
    plain = net.state_dict()._metadata  # type: ignore[attr-defined]
    state: Any = attach(net, "se", example=example()).base_state_dict()
    assert state._metadata == plain


def test_strict_attention_refuses_a_plain_checkpoint(net: Net) -> None:
    state = net.state_dict()
    attach(net, "se", example=example(), strict_attention=True)
    with pytest.raises(RuntimeError, match=r"Missing key.*layer1\.0\.bn2\.attention\.fc1\.weight"):
        net.load_state_dict(state, strict=True)


@pytest.mark.parametrize("lost", [0, 1, 2, [0, 1], [1, 2]], ids=str)
def test_a_checkpoint_that_lacks_some_of_the_sites_is_incomplete(net: Net, lost: int | list[int]) -> None:
    handle = attach(net, "cbam", example=example())
    gone = [names(handle)[index] for index in ([lost] if isinstance(lost, int) else lost)]
    state = {key: value for key, value in net.state_dict().items() if not any(f"{name}.attention" in key for name in gone)}
    state = {key: value for key, value in state.items() if key not in {f"{name}.gate" for name in gone}}
    expected = [key for key in handle.state_dict() if any(key.startswith(f"{name}.") for name in gone)]
    with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{re.escape(expected[0])}"'):
        net.load_state_dict(state, strict=True)
    assert sorted(net.load_state_dict(state, strict=False).missing_keys) == sorted(expected)
    assert list(handle.supplied) == expected
    outer = nn.ModuleDict({"backbone": net})
    told = outer.load_state_dict({f"backbone.{key}": value for key, value in state.items()}, strict=False)
    assert sorted(told.missing_keys) == sorted(f"backbone.{key}" for key in expected)


def test_loads_that_follow_each_other_are_judged_one_by_one(net: Net) -> None:
    plain = copy.deepcopy(net.state_dict())
    handle = attach(net, "se", example=example())
    whole, copied = copy.deepcopy(net.state_dict()), copy.deepcopy(net)
    for model in (net, copied, pickle.loads(pickle.dumps(net))):
        for state in (whole, plain, whole, handle.base_state_dict()):
            model.load_state_dict(state, strict=True)
    inner = attach(net, "eca", where=["stem"], example=example())
    net.load_state_dict(whole, strict=True)  # which is plain to what was attached later
    assert handle.supplied == ()
    assert list(inner.supplied) == [key for key in inner.state_dict() if key.startswith("stem.")]


def test_nested_attention_loads_a_plain_checkpoint(net: Net) -> None:
    state = copy.deepcopy(net.state_dict())
    expected = net(example())
    attach(net, "se", where="stage", example=example())
    inner = attach(net, "se", example=example())
    for parameter in net.parameters():
        parameter.data.add_(1)
    net.load_state_dict(state, strict=True)
    for key, parameter in net.named_parameters():
        if key.endswith("gate"):
            parameter.data.zero_()
    assert torch.equal(net(example()), expected)
    assert list(inner.base_state_dict()) == list(state)


def test_detaching_gives_the_same_objects_back(net: Net) -> None:
    objects, before = list(net.named_modules()), net(example())
    handle = attach(net, "cbam", example=example(), init=0.5)
    assert not torch.equal(net(example()), before)
    assert handle.detach() is net
    assert [name for name, _ in objects] == [name for name, _ in net.named_modules()]
    assert all(one is two for (_, one), two in zip(objects, net.modules(), strict=True))
    assert torch.equal(net(example()), before)
    with pytest.raises(ModelError, match="nothing is attached: it was detached before"):
        handle.detach()


def test_nothing_is_detached_from_a_model_that_was_changed(net: Net) -> None:
    handle = attach(net, "se", example=example())
    net.layer1[0].bn2 = nn.BatchNorm2d(8)
    with pytest.raises(ModelError, match=r"'layer1\.0\.bn2' is no longer what attach put there, so nothing was detached"):
        handle.detach()
    assert isinstance(net.layer2[0].bn2, Plugged)


# training


def test_a_step_trains_the_attention(net: Net) -> None:
    handle = attach(net, "cbam", example=example())
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    before = {key: value.clone() for key, value in handle.named_parameters()}
    for _ in range(2):  # the gate learns in the first step, the attention from the second on
        optimizer.zero_grad()
        net(example()).square().sum().backward()
        optimizer.step()
    moved = {key.rsplit(".", 1)[-1] for key, value in handle.named_parameters() if not torch.equal(value, before[key])}
    assert {"gate", "weight"} <= moved


def test_an_optimizer_gets_the_attention_once_and_loses_it_again(net: Net) -> None:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    groups = len(optimizer.param_groups)
    handle = attach(net, "se", example=example())
    handle.join(optimizer)
    handle.check(optimizer)
    handle.join(optimizer)
    assert len(optimizer.param_groups) == groups + 1
    assert len(optimizer.param_groups[-1]["params"]) == 5 * len(handle.sites)
    net(example()).sum().backward()
    optimizer.step()
    handle.detach()
    assert len(optimizer.param_groups) == groups
    assert set(optimizer.state) <= set(net.parameters())


def test_an_optimizer_that_lacks_the_attention_is_told(net: Net) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    handle = attach(net, "se", example=example())
    with pytest.raises(
        OptionError, match=r"SGD must be given all parameters of the attention, got all but 15, such as 'layer1\.0\.bn2\.gate'"
    ):
        handle.check(optimizer)
    handle.check(torch.optim.SGD(net.parameters(), lr=0.1))


def test_what_is_no_optimizer_is_refused(net: Net) -> None:
    handle = attach(net, "se", example=example())
    with pytest.raises(OptionError, match=r"optimizer must be a torch\.optim\.Optimizer, got str"):
        handle.join("sgd")  # type: ignore[arg-type]


def test_an_optimizer_with_a_scheduler_is_refused(net: Net) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    handle = attach(net, "se", example=example())
    with pytest.raises(OptionError, match="optimizer must have no scheduler yet"):
        handle.join(optimizer)


def test_norms_that_would_never_learn_their_statistics_are_told(net: Net) -> None:
    net.train()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    with pytest.warns(VisattnWarning, match=r"'layer1\.0\.bn2' and 2 more stay in evaluation mode in a model that trains"):
        attach(net, "cbam", example=example())


def test_attention_that_does_not_run_is_told() -> None:
    class Helped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.helper = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.body(x)
            return x + self.helper(x).mean() if self.training else x

    with pytest.warns(VisattnWarning, match="'helper' did not run in the forward, so attention there may never run"):
        handle = attach(Helped(), "se", where=["helper"], example=torch.randn(1, 3, 4, 4))
    assert handle.sites[0].channels == 2


def test_distributed_training_takes_it(net: Net, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        handle = attach(net, "cbam", example=example())
        parallel = nn.parallel.DistributedDataParallel(net.train())
        for _ in range(2):  # a second forward fails if a parameter got no gradient in the first
            parallel(example()).square().sum().backward()
        assert all(parameter.grad is not None for parameter in handle.parameters())
        with pytest.raises(ModelError, match=r"must not be wrapped or compiled yet, got DistributedDataParallel"):
            attach(parallel, "se", example=example())
    finally:
        torch.distributed.destroy_process_group()


# what rewrites models


def opened(net: Net) -> tuple[Net, visattn.nn.Attached, Tensor]:
    """With gates of a half, so that losing the attention shows."""
    before = net(example())
    handle = attach(net, "cbam", example=example(), init=0.5)
    after = net(example()).detach()
    assert not torch.allclose(before, after, atol=1e-3)
    return net, handle, after


def test_fusing_convolutions_with_norms_keeps_the_attention(net: Net, figures: Figures) -> None:
    from torch.fx.experimental.optimization import fuse

    model, _, expected = opened(net)
    fused = fuse(model)
    assert not any(isinstance(module, nn.BatchNorm2d) and module.num_features > 1 for module in fused.modules())
    worst = difference([expected], logits(fused, example()))
    figures("conv-norm fusion of an attached model", worst, "1e-5")
    assert worst <= 1e-5


def test_fusing_keeps_the_attention_of_resnet() -> None:
    from torch.fx.experimental.optimization import fuse

    model = torchvision.models.resnet18().eval()
    x = torch.randn(1, 3, 64, 64)
    plain = logits(model, x)
    attach(model, "se", example=x, init="paper")
    attached = logits(model, x)
    fused = logits(fuse(model), x)
    assert difference(attached, fused) <= 1e-5 * float(attached[0].abs().max())
    assert difference(plain, fused) > 1e-2 * float(plain[0].abs().max())


def test_compiled_in_one_graph(net: Net) -> None:
    model, _, expected = opened(net)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(example()), expected)
    with pytest.raises(ModelError, match=r"must not be wrapped or compiled yet, got OptimizedModule"):
        attach(compiled, "se", example=example())


def test_exported(net: Net) -> None:
    model, _, expected = opened(net)
    assert torch.equal(torch.export.export(model, (example(),)).module()(example()), expected)


def test_traced_by_fx_with_its_attention(net: Net) -> None:
    model, _, expected = opened(net)
    graph = torch.fx.symbolic_trace(model)
    assert any(".attention" in str(node.target) for node in graph.graph.nodes)
    assert torch.equal(graph(example()), expected)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copied_and_saved_whole(net: Net, how: str) -> None:
    model, _, expected = opened(net)
    if how == "save":
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)  # our own bytes
    else:
        other = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert torch.equal(other(example()), expected)
    assert not {id(parameter) for parameter in other.parameters()} & {id(parameter) for parameter in model.parameters()}


def test_norms_are_synchronised_after_attaching(net: Net) -> None:
    _, handle, _ = opened(net)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(net)  # type: ignore[no-untyped-call]
    assert isinstance(converted.layer1[0].bn2.base, nn.SyncBatchNorm)
    handle.detach()
    assert isinstance(converted.layer1[0].bn2, nn.SyncBatchNorm)


def test_timm_finds_the_last_norm_of_a_block() -> None:
    model = timm.create_model("resnet18", zero_init_last=False)
    handle = attach(model, "se", example=torch.randn(1, 3, 64, 64))
    model.init_weights(zero_init_last=True)
    assert all((model.get_submodule(name).base.weight == 0).all() for name in names(handle))


def test_features_of_timm_and_torchvision_pass_through_the_attention() -> None:
    x = torch.randn(1, 3, 64, 64)
    stages = timm.create_model("resnet18", features_only=True, zero_init_last=False).eval()
    plain = logits(stages, x)
    assert len(attach(stages, "se", example=x, init=0.5).sites) == 8
    assert difference(plain, logits(stages, x)) > 0
    model = torchvision.models.resnet18().eval()
    attach(model, "se", example=x, init=0.5)
    extractor = torchvision.models.feature_extraction.create_feature_extractor(model, ["layer4"])
    assert any(".attention" in name for name, _ in extractor.named_modules())


def test_gates_of_attached_attention_are_published(net: Net) -> None:
    from visattn._support.publish import listening

    handle = attach(net, "cbam", example=example())
    heard: list[tuple[nn.Module, str]] = []
    with listening(lambda module, role, *_: heard.append((module, role))):
        net(example())
    assert [module for module, role in heard if role == "channel_gate"] == [site.module for site in handle.sites]


# what is refused


def broken(channels: int) -> nn.Module:
    return SqueezeExcite(channels + 1)


def halving(channels: int) -> nn.Module:
    return nn.Conv2d(channels, channels // 2, 1)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "attention": ({"attention": "cbma"}, OptionError, r"unknown attention 'cbma'; did you mean 'cbam'\? Known: "),
    "instance": (
        {"attention": SqueezeExcite(8)},
        OptionError,
        r"a name, a class or a function.*got SqueezeExcite.*share its weights",
    ),
    "no module": (
        {"attention": lambda channels: channels},
        OptionError,
        r"must give a torch\.nn\.Module for 'layer1\.0\.bn2', got int",
    ),
    "option": (
        {"reducton": 4},
        OptionError,
        r"se has no option 'reducton'; did you mean 'reduction'\? Known: reduction, width, bias\.",
    ),
    "option's value": ({"reduction": 0}, OptionError, r"reduction must be a whole number of at least 1, got 0"),
    "other channels": ({"attention": broken}, ShapeError, r"SqueezeExcite must be given \(B, 9, H, W\), got \(2, 8, 14, 10\)"),
    "other shape": ({"attention": halving}, ShapeError, r"must keep \(2, 8, 14, 10\) at 'layer1\.0\.bn2', got \(2, 4, 14, 10\)"),
    "fails": (
        {"attention": lambda c: nn.Conv2d(c + 1, c, 1)},
        ShapeError,
        r"must take \(2, 8, 14, 10\) at 'layer1\.0\.bn2', got: Given groups=1",
    ),
    "pattern": ({"where": "layer9.*.bn2"}, OptionError, r"no module matches 'layer9\.\*\.bn2'\. Nearest: layer\d"),
    "arguments": ({"attention": lambda channels, width: None}, OptionError, r"cannot be built from channels: missing .*'width'"),
    "brackets": (
        {"where": "layer[9-1]"},
        OptionError,
        r"where must be a pattern of names, got 'layer\[9-1\]': bad character range",
    ),
    "where": ({"where": 3}, OptionError, r"where must be a preset, a pattern, a list of names or a function, got int"),
    "preset": ({"where": "residul"}, OptionError, r"no module matches 'residul'\. Nearest: residual\."),
    "name": ({"where": ["layer1.0.bn3"]}, OptionError, r"no module is called 'layer1\.0\.bn3'\. Nearest: layer1\.0\.bn2"),
    "no names": ({"where": []}, OptionError, r"where must name a module, got none"),
    "function": ({"where": lambda *_: False}, OptionError, r"the function says no to all \d+ modules"),
    "no depthwise": ({"where": "depthwise"}, OptionError, r"Net has no depthwise convolution\. Name modules or a pattern"),
    "no maps": ({"where": ["fc"]}, ShapeError, r"'fc' must give maps, \(B, C, H, W\) or \(B, H, W, C\), got \(2, 5\)"),
    "wrong layout": (
        {"layout": "NHWC"},
        ShapeError,
        r"'layer1\.0\.bn2' must give 8 channels, got 10 in \(2, 8, 14, 10\) as NHWC",
    ),
    "init": ({"init": "zero"}, OptionError, r"unknown init 'zero'; did you mean 'zero_last'\? Known: identity, paper"),
    "layout": ({"layout": "NLC"}, OptionError, r"unknown layout 'NLC'\. Known: auto, NCHW, NHWC"),
    "number": ({"init": float("nan")}, OptionError, r"init must be a name or a finite number, got nan"),
    "no number": ({"min_channels": "few"}, OptionError, r"min_channels must be a whole number of at least 1, got 'few'"),
    "narrow": ({"min_channels": 13}, OptionError, r"min_channels must leave a place, got 13 where the widest has 12"),
    "example": (
        {"example": torch.randn(1, 4, 8, 8)},
        OptionError,
        r"the model refuses the example: .*Pass example= as the model takes it",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_be_attached_is_refused_and_nothing_is_changed(net: Net, name: str) -> None:
    changed, error, message = REFUSED[name]
    objects = list(net.modules())
    with pytest.raises(error, match=message) as caught:
        attach(net, **{"attention": "se", "example": example(), **changed})
    assert "\n" not in str(caught.value)
    assert all(one is two for one, two in zip(objects, net.modules(), strict=True))
    assert not any(module._forward_hooks for module in net.modules())


def test_a_place_takes_attention_once(net: Net) -> None:
    attach(net, "cbam", example=example())
    with pytest.raises(OptionError, match=r"'layer1\.0\.bn2' has attention already \(CBAM\)\. Detach that first"):
        attach(net, "se", example=example())


def test_a_module_in_two_places_is_refused() -> None:
    act = nn.ReLU()
    model = nn.Sequential(nn.Conv2d(3, 4, 1), act, nn.Conv2d(4, 4, 1), act)
    with pytest.raises(OptionError, match="'1' and '3' are one module, which would have attention in both places"):
        attach(model, "se", where=["3"], example=torch.randn(1, 3, 4, 4))


def test_tokens_are_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(2))
    with pytest.raises(ShapeError, match=r"'1' must give maps.*got \(1, 4, 16\)\. Those are tokens"):
        attach(model, "se", where=["1"], example=torch.randn(1, 3, 4, 4))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_script_is_refused() -> None:
    with pytest.raises(ModelError, match=r"must be a Python module, got .*ScriptModule, whose code is fixed"):
        attach(torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 1))), "se")


def test_no_module_is_refused() -> None:
    with pytest.raises(OptionError, match=r"model must be a torch\.nn\.Module, got str"):
        attach("resnet18", "se")  # type: ignore[arg-type]


def test_module_that_the_model_reaches_by_another_way_is_told() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(3, 4, 3)
            self.order = [self.a]

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.order[0](x)
            return out

    with pytest.warns(VisattnWarning, match="'a' ran before and does not run with attention"):
        visattn.attach(Listed(), "se", ["a"], example=torch.randn(1, 3, 8, 8))
