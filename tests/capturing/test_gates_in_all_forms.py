"""Gates are found by what a forward pass computes, in each form in which people write them; what is no gate is never called one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import visattn
from tests.capturing.gated_blocks import FORMS, C, Channels, Positions
from visattn.core.geometry import Box
from visattn.core.records import FeatureRecord, TokenLayout
from visattn.errors import NoAttentionCaptured

SIDE = 7


def network(block: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, C, 3, padding=1), block).eval()
    for parameter in model.requires_grad_(False).parameters():
        nn.init.normal_(parameter)
    return model


def gates_of(model: nn.Module, *inputs: Tensor, **options: Any) -> list[FeatureRecord]:
    """Return the gates of one forward pass; none if there are none."""
    try:
        with torch.no_grad(), visattn.capture(model, features="none", **options) as recording:
            model(*inputs)
    except NoAttentionCaptured:
        return []
    return [feature for feature in recording.features if "gate" in feature.role]


def pixels(seed: int = 0) -> Tensor:
    return torch.rand(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", list(FORMS))
def test_gate_is_the_factor_of_a_loop_and_the_output_is_the_features_times_it(name: str) -> None:
    form = FORMS[name]
    model = network(form.build())
    for seed in range(3):  # recorded, and twice along a known tape
        x = model[0](pixels(seed)).detach()
        factors = form.factors(model[1], x)
        gates = gates_of(model, pixels(seed))
        assert [(gate.layer, gate.role) for gate in gates] == list(form.gates)
        for gate, factor in zip(gates, factors, strict=True):
            assert torch.allclose(gate.value.reshape(factor.shape), factor.detach(), atol=1e-5)
            if gate.role != "channel_gate":
                assert gate.layout == TokenLayout("tokens", (), (SIDE, SIDE), Box(0, 0, SIDE, SIDE))
        assert torch.allclose(form.result(x, *factors), model[1](x), atol=1e-4)


class Gate(nn.Module):
    """Attention gate of a U-Net; `answer` returns what it computes, in the form of one of the repositories."""

    def __init__(self, answer: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.of_g, self.of_x, self.psi, self.answer = nn.Conv2d(3, 4, 1), nn.Conv2d(C, 4, 1), nn.Conv2d(4, 1, 1), answer

    def weight(self, g: Tensor, x: Tensor) -> Tensor:
        asked = F.interpolate(self.of_g(g), x.shape[2:], mode="nearest")
        return torch.sigmoid(self.psi(F.relu(asked + self.of_x(x))))

    def forward(self, g: Tensor, x: Tensor) -> Any:
        psi = self.weight(g, x)
        self.seen = x * psi
        return self.answer(self.seen, psi)


class Coarse(Gate):
    """Gate of Oktay et al.: it is computed on the coarse grid, then upsampled, and repeated over the channels."""

    def weight(self, g: Tensor, x: Tensor) -> Tensor:
        coarse = torch.sigmoid(self.psi(F.relu(self.of_g(g) + F.max_pool2d(self.of_x(x), 2))))
        return F.interpolate(coarse, x.shape[2:], mode="bilinear").expand_as(x)


class Net(nn.Module):
    """Network with a skip connection behind a gate; `call` calls the gate."""

    def __init__(self, gate: nn.Module, call: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.down, self.gate, self.call = nn.Conv2d(3, C, 1), nn.Conv2d(C, 3, 2, 2), gate, call

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.stem(pixels)
        return self.call(self.gate, self.down(x), x)


def loops(gate: Any, g: Tensor, x: Tensor) -> Tensor:
    """Compute the gate at each position by loops; the coarse map is read at the nearest cell."""
    psi = torch.zeros(len(x), 1, *x.shape[2:])
    for image, row, column in product(range(len(x)), range(x.shape[2]), range(x.shape[3])):
        asked = gate.of_g.weight.flatten(1) @ g[image, :, row // 2, column // 2] + gate.of_g.bias
        own = gate.of_x.weight.flatten(1) @ x[image, :, row, column] + gate.of_x.bias
        total = (gate.psi.weight.flatten() * (asked + own).clamp_min(0)).sum() + gate.psi.bias
        psi[image, 0, row, column] = 1 / (1 + (-total).exp())
    return psi


CALLS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any, Tensor, Tensor], Tensor]]] = {
    "the product": (lambda gated, _: gated, lambda gate, g, x: gate(g, x)),
    "names": (lambda gated, _: gated, lambda gate, g, x: gate(x=x, g=g)),
    "product and gate": (lambda gated, psi: (gated, psi), lambda gate, g, x: gate(g, x)[0]),
    "gate and product": (lambda gated, psi: (psi, gated), lambda gate, g, x: gate(g, x=x)[1]),
    "dictionary": (lambda gated, psi: {"gate": psi, "out": gated}, lambda gate, g, x: gate(g, x)["out"]),
    "attribute": (lambda _, __: None, lambda gate, g, x: (gate(g, x), gate.seen)[1]),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_gate_of_a_skip_connection_is_found_however_it_is_called_and_returned(name: str) -> None:
    answer, call = CALLS[name]
    model = silent(Net(Gate(answer), call))
    for seed in range(2):
        x = model.stem(torch.rand(2, 3, 8, 6, generator=torch.Generator().manual_seed(seed)))
        (gate,) = gates_of(model, torch.rand(2, 3, 8, 6, generator=torch.Generator().manual_seed(seed)))
        expected = loops(model.gate, model.down(x), x)
        assert (gate.layer, gate.role) == ("gate", "spatial_gate")
        assert torch.allclose(gate.value, expected, atol=1e-5)
        assert torch.allclose(x * expected, model.gate.seen, atol=1e-4)


def test_gate_on_a_coarse_grid_is_the_upsampled_factor() -> None:
    model = silent(Net(Coarse(lambda gated, _: gated), lambda gate, g, x: gate(g, x)))
    (gate,) = gates_of(model, pixels := torch.rand(2, 3, 8, 6))
    x = model.stem(pixels)
    part, g = model.gate, model.down(x)
    coarse = torch.zeros(2, 1, 4, 3)
    for image, row, column in product(range(2), range(4), range(3)):
        block = x[image, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].flatten(1)
        own = (part.of_x.weight.flatten(1) @ block).amax(1) + part.of_x.bias
        asked = part.of_g.weight.flatten(1) @ g[image, :, row, column] + part.of_g.bias
        total = (part.psi.weight.flatten() * (asked + own).clamp_min(0)).sum() + part.psi.bias
        coarse[image, 0, row, column] = 1 / (1 + (-total).exp())
    expected = F.interpolate(coarse, (8, 6), mode="bilinear")
    assert (gate.layer, gate.role) == ("gate", "spatial_gate")
    assert torch.allclose(gate.value, expected, atol=1e-5)
    assert torch.allclose(x * expected, part.seen, atol=1e-4)


def silent(model: Any) -> Any:
    """Return a network with known weights, in evaluation mode."""
    torch.manual_seed(2)
    for parameter in model.eval().requires_grad_(False).parameters():
        nn.init.normal_(parameter)
    return model


NO_GATES: dict[str, Callable[[Any, Tensor], Any]] = {
    "layer scale": lambda m, x: x * m.scale,
    "sigmoid of a parameter": lambda m, x: x * m.scale.sigmoid(),
    "batch norm": lambda m, x: m.norm(x),
    "mask of the pixels": lambda m, x: x * (x > 0),
    "thresholded gate": lambda m, x: x * (m.sa(x) > 0.5),
    "dropout": lambda m, x: F.dropout(x, 0.5, training=True),
    "random depth": lambda m, x: x * torch.rand(len(x), 1, 1, 1).floor(),
    "norm": lambda m, x: x / x.norm(dim=1, keepdim=True),
    "root mean square": lambda m, x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1),
    "SiLU": lambda m, x: F.silu(x),
    "SiLU by hand": lambda m, x: x * torch.sigmoid(x),
    "SiLU of a learned factor": lambda m, x: x * torch.sigmoid(m.scale * x),
    "SiLU behind a norm": lambda m, x: x * torch.sigmoid(m.norm(x)),
    "SiLU in place": lambda m, x: x.mul_(x.sigmoid()),
    "hard swish by hand": lambda m, x: x * F.relu6(x + 3) / 6,
    "hard swish, divided first": lambda m, x: x * (F.relu6(x + 3) / 6),
    "GELU by hand": lambda m, x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * x**3))),
    "mish by hand": lambda m, x: x * torch.tanh(F.softplus(x)),
    "GLU": lambda m, x: F.glu(m.halves(x), 1),
    "GLU by hand": lambda m, x: (lambda a, b: a * b.sigmoid())(*m.halves(x).chunk(2, 1)),
    "GLU by slices": lambda m, x: m.halves(x)[:, :C] * m.halves(x)[:, C:].sigmoid(),
    "GLU of two convolutions": lambda m, x: m.fc(x) * torch.sigmoid(m.other(x)),
    "GLU with a convolution of its gate": lambda m, x: (lambda a, b: a * m.fc(b).sigmoid())(*m.halves(x).chunk(2, 1)),
    "SwiGLU": lambda m, x: F.silu(m.fc(x)) * m.other(x),
    "gated tanh": lambda m, x: torch.tanh(m.fc(x)) * torch.sigmoid(m.other(x)),
    "one number for each image": lambda m, x: x * torch.sigmoid(m.fc(x).mean((1, 2, 3), keepdim=True)),
    "mixture": lambda m, x: (lambda w: w[:, :1] * m.fc(x) + w[:, 1:2] * m.other(x))(
        m.fc(x).mean((2, 3), keepdim=True).softmax(1)
    ),
    "softmax over positions": lambda m, x: (x * m.sa(x).flatten(2).softmax(-1).view(len(x), 1, *x.shape[2:])).sum((2, 3)),
    "a gate that multiplies nothing": lambda m, x: m.ca(x) + x,
    "a gate behind a convolution": lambda m, x: x * m.fc(m.ca(x)),
    "a constant": lambda m, x: x * 0.5,
    "one number, spread and scaled": lambda m, x: (
        x * (0.5 + torch.sigmoid(m.sa(x).mean((2, 3), keepdim=True)).expand_as(x) * 0.1)
    ),
    "clamped on one side": lambda m, x: x * (m.ca(x).logit().clamp(min=0) * 0.5),
}


class Other(nn.Module):
    """Block with parts for all that is no gate."""

    def __init__(self, how: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.ca, self.sa, self.fc, self.other, self.how = Channels(), Positions(), nn.Conv2d(C, C, 1), nn.Conv2d(C, C, 1), how
        self.halves, self.norm, self.scale = nn.Conv2d(C, 2 * C, 1), nn.BatchNorm2d(C), nn.Parameter(torch.ones(C, 1, 1))

    def forward(self, x: Tensor) -> Any:
        return self.how(self, x)


@pytest.mark.parametrize("name", list(NO_GATES))
def test_what_is_no_gate_is_never_called_one(name: str) -> None:
    model = network(Other(NO_GATES[name]))
    for seed in range(2):
        assert gates_of(model, pixels(seed)) == []
