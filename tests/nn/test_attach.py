"""Attaching to whole models: unchanged outputs, initialization, costs and errors."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import visattn
from tests.conftest import Figures
from tests.nn.attaching import Silence
from tests.nn.small import Net, example
from tests.nn.sweep import BACKBONES, examine, logits
from visattn.errors import ModelError, OptionError, ShapeError, VisattnWarning
from visattn.nn import ATTENTION, CBAM, SqueezeExcite, WithAttention, attach

FEW = """
timm/resnet18 timm/seresnet18 timm/convnext_atto timm/mobilenetv3_small_050 timm/dpn48b timm/densenet121:stage timm/resnet18:layer[34].*.bn1
torchvision/resnet18 torchvision/mnasnet0_5 torchvision/shufflenet_v2_x0_5:depthwise torchvision/squeezenet1_1:stage
torchvision/swin_t:stage torchvision/fasterrcnn_mobilenet_v3_large_320_fpn torchvision/lraspp_mobilenet_v3_large
""".split()  # noqa: SIM905 - a plain list of names reads best


@pytest.mark.full
@pytest.mark.parametrize("name", FEW)
def test_attaching_does_not_change_the_output(name: str, figures: Figures) -> None:
    ran: set[nn.Module] = set()

    def attention_runs(model: nn.Module, pixels: object, handle: visattn.nn.Attachment) -> None:
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


def test_attaching_does_not_change_the_output_in_training_mode(net: Net) -> None:
    plain = copy.deepcopy(net).train()
    handle = attach(net, "cbam", example=example())
    net.train()
    assert torch.equal(net(example()), plain(example()))
    states = zip(handle.base_state_dict().values(), plain.state_dict().values(), strict=True)
    assert all(torch.equal(one, two) for one, two in states), "running statistics differ"


def test_init_paper_changes_the_output(net: Net) -> None:
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
    with pytest.raises(OptionError, match=r"init='two_sigmoid' requires that \w+ returns half its input .* Use init='identity'"):
        attach(net, name, init="two_sigmoid", example=example())
    assert not any(isinstance(module, WithAttention) for module in net.modules())


@pytest.mark.parametrize("name", ["gc", "nl", "sagan"])
def test_zero_last_is_the_identity_without_a_gate(net: Net, name: str) -> None:
    before = net(example())
    handle = attach(net, name, init="zero_last", example=example())
    assert torch.equal(net(example()), before)
    net(example()).square().sum().backward()
    assert any(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in handle.parameters())


def test_zero_last_is_refused_where_it_is_not_the_identity(net: Net) -> None:
    with pytest.raises(OptionError, match="init='zero_last' requires that SqueezeExcite returns its input"):
        attach(net, "se", init="zero_last", example=example())


@pytest.mark.parametrize(("gate", "learns"), [(0.0, False), (1e-3, True)])
def test_with_a_gate_of_zero_only_the_gate_learns_in_the_first_step(net: Net, gate: float, learns: bool) -> None:
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
def test_zero_initialized_branches_delay_learning_by_one_step(library: str, zero: bool, gate: float) -> None:
    torch.manual_seed(0)
    model, pixels = FROM_ZERO[library](zero).train(), torch.randn(4, 3, 64, 64)
    told = r"'layer1\.0\.bn2' and 7 more return only zeros at first, so with init=0\.3 nothing there learns in the first step\. Build"
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


def test_attention_takes_the_device_dtype_and_mode_of_its_site() -> None:
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


def test_parameters_and_macs_equal_the_formula() -> None:
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


def test_macs_count_every_call_of_a_site() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.conv(x).mean(), self.conv(x[:, :, :2]).mean()])

    macs = [attach(Twice(), CBAM, ["conv"], example=torch.randn(1, 3, rows, 5), dry_run=True).sites[0].macs for rows in (2, 6)]
    conv = 2 * 49 * 5  # 2 planes, 7 x 7, 5 columns: for each row
    assert macs == [2 * 2 * 2 * 3 + (2 + 2) * conv, 2 * 2 * 2 * 3 + (6 + 2) * conv]


def test_attention_with_data_dependent_control_flow_has_no_macs() -> None:
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
    with pytest.raises(ModelError, match="nothing is attached: it was already detached, or attach ran with dry_run=True"):
        handle.detach()


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
        r"must return a torch\.nn\.Module for 'layer1\.0\.bn2', got int",
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
        r"must accept \(2, 8, 14, 10\) at 'layer1\.0\.bn2', got: Given groups=1",
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
    "no names": ({"where": []}, OptionError, r"where must name at least one module, got none"),
    "function": ({"where": lambda *_: False}, OptionError, r"where= is a function that returned False for all \d+ modules"),
    "no depthwise": (
        {"where": "depthwise"},
        OptionError,
        r"Net has no depthwise convolution\. Pass names of modules or a pattern",
    ),
    "no maps": ({"where": ["fc"]}, ShapeError, r"'fc' must return maps, \(B, C, H, W\) or \(B, H, W, C\), got \(2, 5\)"),
    "wrong layout": (
        {"layout": "NHWC"},
        ShapeError,
        r"'layer1\.0\.bn2' must return 8 channels, got 10 in \(2, 8, 14, 10\) as NHWC",
    ),
    "init": ({"init": "zero"}, OptionError, r"unknown init 'zero'; did you mean 'zero_last'\? Known: identity, paper"),
    "layout": ({"layout": "NLC"}, OptionError, r"unknown layout 'NLC'\. Known: auto, NCHW, NHWC"),
    "number": ({"init": float("nan")}, OptionError, r"init must be a name or a finite number, got nan"),
    "no number": ({"min_channels": "few"}, OptionError, r"min_channels must be a whole number of at least 1, got 'few'"),
    "narrow": ({"min_channels": 13}, OptionError, r"min_channels must be at most 12, the channels of the widest site, got 13"),
    "example": (
        {"example": torch.randn(1, 4, 8, 8)},
        OptionError,
        r"the model failed on the example: .*Pass example= as the model takes it",
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


def test_attaching_twice_at_one_site_is_refused(net: Net) -> None:
    attach(net, "cbam", example=example())
    with pytest.raises(OptionError, match=r"'layer1\.0\.bn2' already has attention \(CBAM\)\. Detach that first"):
        attach(net, "se", example=example())


def test_a_module_shared_by_two_names_is_refused() -> None:
    act = nn.ReLU()
    model = nn.Sequential(nn.Conv2d(3, 4, 1), act, nn.Conv2d(4, 4, 1), act)
    with pytest.raises(OptionError, match="'1' and '3' are the same module, so both would get attention"):
        attach(model, "se", where=["3"], example=torch.randn(1, 3, 4, 4))


def test_tokens_are_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(2))
    with pytest.raises(ShapeError, match=r"'1' must return maps.*got \(1, 4, 16\)\. Those are tokens"):
        attach(model, "se", where=["1"], example=torch.randn(1, 3, 4, 4))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_torchscript_model_is_refused() -> None:
    with pytest.raises(ModelError, match=r"must be a Python module, got .*ScriptModule, whose code is fixed"):
        attach(torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 1))), "se")


def test_a_model_that_is_not_a_module_is_refused() -> None:
    with pytest.raises(OptionError, match=r"model must be a torch\.nn\.Module, got str"):
        attach("resnet18", "se")  # type: ignore[arg-type]


def test_warns_if_the_model_calls_a_module_through_another_reference() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(3, 4, 3)
            self.order = [self.a]

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.order[0](x)
            return out

    with pytest.warns(VisattnWarning, match="'a' ran before but does not run with attention"):
        visattn.attach(Listed(), "se", ["a"], example=torch.randn(1, 3, 8, 8))
