"""Gates in other layouts, modes and orders: what they are named by, when they are read, and where they are refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import visattn
from tests.capturing.gated_blocks import C, Parent, cbam, of_channels, of_positions
from tests.capturing.test_gates_in_all_forms import SIDE, gates_of, network, pixels
from visattn.core.capturing.gating import finder
from visattn.core.methods import gates
from visattn.errors import OptionError
from visattn.evaluation import gate_statistics
from visattn.nn import SqueezeExcite, publish

TWO = [("1.ca", "channel_gate"), ("1.sa", "spatial_gate")]


def named(model: Any, **options: Any) -> list[tuple[str, str]]:
    return [(gate.layer, gate.role) for gate in gates_of(model, pixels(), **options)]


class Mixed(nn.Module):
    """Block with an SE module beside a factor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.se, self.inner = SqueezeExcite(C), Parent(lambda m, x: m.ca(x) * x)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.se(x))  # type: ignore[no-any-return]


class Told(Parent):
    """Block that tells its gate itself."""

    def forward(self, x: Tensor) -> Tensor:
        gate = self.ca(x)
        out = x * gate
        publish(self, "channel_gate", gate)
        return out  # type: ignore[no-any-return]


def test_gate_that_a_module_tells_is_recorded_once() -> None:
    told, mixed = network(Told(cbam)), network(Mixed())
    for _ in range(3):
        assert named(told) == [("1", "channel_gate")]
        assert named(mixed) == [("1.se", "channel_gate"), ("1.inner.ca", "channel_gate")]


class Partly(Parent):
    """Block that tells one of its gates, and computes another in a part."""

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.fc(x.mean((2, 3), keepdim=True)))
        publish(self, "channel_gate", gate)
        out = x * gate
        return self.sa(out) * out  # type: ignore[no-any-return]


def test_a_module_that_tells_one_gate_hides_no_other() -> None:
    model = network(Partly(cbam))
    attached = network(Parent(cbam))
    visattn.attach(attached, "se", ["1"], init=0.5)
    for _ in range(2):
        assert named(model) == [("1", "channel_gate"), ("1.sa", "spatial_gate")]
        assert [gate for gate in named(attached) if gate[0] != "1.attention"] == [
            ("1.base.ca", "channel_gate"),
            ("1.base.sa", "spatial_gate"),
        ]


def last(model: Any, x: Tensor) -> Tensor:
    """Gate a map with channels last."""
    features = x.permute(0, 2, 3, 1)
    weight = model.fc.weight.flatten(1)
    gated = features * torch.sigmoid(features.mean((1, 2), keepdim=True) @ weight.T + model.fc.bias)
    return (gated * torch.sigmoid((gated @ weight.T).mean(-1, keepdim=True))).permute(0, 3, 1, 2)


def test_axes_of_a_map_with_channels_last_are_those_of_its_tape() -> None:
    model: Any = network(Parent(last))
    channels, positions = gates_of(model, pixels())
    x = model[0](pixels())
    assert (channels.role, positions.role) == ("channel_gate", "spatial_gate")
    expected = of_channels(model[1].fc, x)
    assert torch.allclose(channels.value[..., None, None], expected, atol=1e-5)
    gated = torch.einsum("oc,bchw->bohw", model[1].fc.weight.flatten(1), x * expected).mean(1, keepdim=True)
    assert torch.allclose(positions.value, gated.sigmoid(), atol=1e-5)
    assert positions.layout is not None


def test_factors_for_parts_of_a_batch_are_refused() -> None:
    def grouped(model: Parent, x: Tensor) -> Tensor:
        halves = x.reshape(len(x) * 2, C // 2, SIDE, SIDE)
        return (halves * halves.mean((2, 3), keepdim=True).sigmoid()).reshape(x.shape)

    assert named(network(Parent(grouped))) == []


def test_sum_of_the_factors_of_two_modules_is_named_by_the_module_around_both() -> None:
    model: Any = network(Parent(lambda m, x: x * (m.ca(x) + m.sa(x))))
    (gate,) = gates_of(model, pixels())
    x = model[0](pixels())
    assert (gate.layer, gate.role) == ("1", "gate")
    assert torch.allclose(gate.value, of_channels(model[1].ca.fc, x) + of_positions(model[1].sa.conv, x), atol=1e-5)


def test_gate_of_a_signal_alone_is_named_by_the_part_that_computed_it() -> None:
    assert named(network(Parent(lambda m, x: m.fc(x) * m.ca(2 * x)))) == TWO[:1]
    assert named(network(Parent(lambda m, x: m.fc(x) * m.sa(x.detach())))) == TWO[1:]


def test_several_gates_of_one_module_are_named_apart() -> None:
    model: Any = network(Parent(lambda m, x: m.sa(x) * x + m.sa(-x) * m.fc(x)))
    with torch.no_grad(), visattn.capture(model, features="none") as recording:
        model(pixels())
    x = model[0](pixels())
    for number, features in enumerate((x, -x)):
        chosen = gates(recording, layer=f"1.sa #{number}")
        assert torch.allclose(chosen.values, of_positions(model[1].sa.conv, features)[:, 0], atol=1e-5)
    assert gates(recording).provenance.parameters["layer"] == "1.sa #1"
    with pytest.raises(OptionError, match=r"1\.sa #0, 1\.sa #1, got 1\.sa\."):
        gates(recording, layer="1.sa")
    assert len(gate_statistics(recording)) == 2


def test_module_that_gates_twice_has_two_gates() -> None:
    twice = network(Parent(lambda m, x: (lambda y: m.ca(y) * y)(m.ca(x) * x)))
    assert named(twice) == [TWO[0], TWO[0]]


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "none": nullcontext,
}


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("training", [True, False])
def test_gates_are_found_in_each_mode(mode: str, training: bool) -> None:
    model: Any = network(Parent(cbam)).train(training)
    with MODES[mode]():
        assert [named(model), named(model), named(model, remember=False)] == [TWO] * 3
    assert named(network(Parent(cbam)).bfloat16().float()) == TWO
    with visattn.capture(model, gradients=True, features="none") as recording:
        model(pixels())
    assert [(gate.layer, gate.role) for gate in recording.features] == TWO


def test_forward_passes_without_and_with_gates_may_alternate() -> None:
    model: Any = network(Parent(cbam))
    assert [named(model, gates=wanted) for wanted in (False, True, False, True, True)] == [[], TWO, [], TWO, TWO]


def test_a_forward_pass_that_goes_another_way_has_other_gates() -> None:
    model: Any = network(Parent(lambda m, x: cbam(m, x) if m.opened else m.sa(x) * x))
    found = []
    for opened in (True, False, True, False):
        model[1].opened = opened
        found.append(named(model))
    assert found == [TWO, TWO[1:], TWO, TWO[1:]]


def test_an_explanation_looks_for_gates_only_if_its_method_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []

    class Counted(finder.GateFinder):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            begun.append(self)

    monkeypatch.setattr(finder, "GateFinder", Counted)
    model = nn.Sequential(*network(Parent(cbam)), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    visattn.explain(model, pixels=pixels()[:1], method="gradcam", target=1)
    assert not begun
    visattn.explain(model, pixels=pixels()[:1], method="gates")
    assert len(begun) == 1


def test_gates_of_segmentation_models_pytorch() -> None:
    smp = pytest.importorskip("segmentation_models_pytorch", reason="segmentation_models_pytorch is not installed")
    torch.manual_seed(0)
    model = smp.Unet("resnet18", encoder_weights=None, decoder_attention_type="scse").eval()
    part = model.decoder.blocks[2].attention2.attention
    seen: dict[str, Any] = {}
    part.register_forward_hook(lambda _module, args, out: seen.update(x=args[0], out=out))
    found = {(gate.layer, gate.role): gate for gate in gates_of(model, torch.rand(1, 3, 64, 64))}
    channels = found["decoder.blocks.2.attention2.attention.cSE", "channel_gate"].value[..., None, None]
    positions = found["decoder.blocks.2.attention2.attention.sSE", "spatial_gate"]
    assert torch.allclose(seen["x"] * channels + seen["x"] * positions.value, seen["out"], atol=1e-5)
    assert positions.layout is not None


def test_gates_of_the_attention_unet_of_monai() -> None:
    nets = pytest.importorskip("monai.networks.nets", reason="MONAI is not installed")
    torch.manual_seed(0)
    model = nets.AttentionUnet(2, 3, 2, channels=(8, 16, 32), strides=(2, 2)).eval()
    seen: dict[str, Any] = {}
    for name in ("model.1.submodule.1.attention", "model.1.attention"):
        part = model.get_submodule(name)
        part.register_forward_hook(
            lambda _module, args, kwargs, out, name=name: seen.update({name: (kwargs.get("x", args[-1] if args else None), out)}),
            with_kwargs=True,
        )
    found = gates_of(model, torch.rand(1, 3, 64, 64))
    assert [(gate.layer, gate.role) for gate in found] == [(name, "spatial_gate") for name in seen]
    for gate in found:
        x, out = seen[gate.layer]
        assert torch.allclose(x * gate.value, out, atol=1e-6)
        assert gate.layout is not None
