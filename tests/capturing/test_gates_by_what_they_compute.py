"""Gates of users' own modules: recognized by what the module computes, whatever its class is called."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import visattn
from visattn.nn import SqueezeExcite

C, SIDE = 12, 10


class Squeeze(nn.Module):
    """Squeeze and excitation, as tutorials write it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(C, 4), nn.ReLU(), nn.Linear(4, C), nn.Sigmoid())

    def gate(self, x: Tensor) -> Tensor:
        made: Tensor = self.body(x.mean((2, 3)))
        return made[..., None, None]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x).expand_as(x)


class WithFunction(Squeeze):
    """Squeeze and excitation with convolutions and the sigmoid as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(C, 4, 1), nn.ReLU(), nn.Conv2d(4, C, 1))

    def gate(self, x: Tensor) -> Tensor:
        made: Tensor = self.body(x.mean((2, 3), keepdim=True))
        return made.sigmoid()


class TwoPools(WithFunction):
    """The channel part of CBAM: one network for two pooled vectors."""

    def gate(self, x: Tensor) -> Tensor:
        made: Tensor = self.body(x.mean((2, 3), keepdim=True)) + self.body(x.amax((2, 3), keepdim=True))
        return made.sigmoid()


class Neighbors(nn.Module):
    """ECA: a convolution over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Conv1d(1, 1, 3, padding=1, bias=False)

    def gate(self, x: Tensor) -> Tensor:
        made: Tensor = self.near(x.mean((2, 3))[:, None])
        return made.sigmoid().mT[..., None]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x)


class Where(nn.Module):
    """The spatial part of CBAM."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.squash = nn.Conv2d(2, 1, 7, padding=3), nn.Hardsigmoid()

    def gate(self, x: Tensor) -> Tensor:
        made: Tensor = self.squash(self.conv(torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)))
        return made

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x)


class Wrapped(nn.Module):
    """A module that only calls another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return found


class Scaled(nn.Module):
    """One factor for everything."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Sequential(nn.Linear(C, C), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.factor(x.mean((2, 3)))
        return x * made.mean()


class Same(nn.Module):
    """A module that returns its input and computes a gate for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        self.part(x.mean((2, 3)))
        return x


def network(part: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, C, 3, padding=1), nn.ReLU(), part, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(C, 3))


def gates_of(model: nn.Module, dtype: torch.dtype = torch.float32) -> tuple[list[visattn.FeatureRecord], Tensor]:
    """Return the recorded gates, and the features that the gated part receives."""
    pixels = torch.rand(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad(), visattn.capture(model.to(dtype).eval(), features=["0"]) as recording:
        model(pixels)
    return [one for one in recording.features if "gate" in one.role], model[:2](pixels)  # type: ignore[index]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [Squeeze, WithFunction, TwoPools, Neighbors, Where])
def test_gate_is_recorded_as_the_module_computes_it(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    part = make()
    (found,), x = gates_of(network(part), dtype)
    assert found.role == ("spatial_gate" if make is Where else "channel_gate")
    assert found.layer == "2"
    expected = part.gate(x).detach()  # type: ignore[operator]
    assert torch.equal(found.value.reshape(expected.shape), expected)


def test_wrapper_does_not_tell_a_gate_twice() -> None:
    assert [one.layer for one in gates_of(network(Wrapped(Wrapped(Squeeze()))))[0]] == ["2.inner.inner"]
    assert [one.layer for one in gates_of(network(Wrapped(SqueezeExcite(C))))[0]] == ["2.inner"]


@pytest.mark.parametrize("make", [Scaled, Same, lambda: nn.BatchNorm2d(C), lambda: Wrapped(nn.Conv2d(C, C, 1))])
def test_what_is_no_gate_is_not_recorded(make: Callable[[], nn.Module]) -> None:
    assert gates_of(network(make()))[0] == []


def test_gates_of_an_own_network_are_drawn() -> None:
    model = network(Where())
    found = visattn.explain(model, pixels=torch.rand(1, 3, 64, 64), method="gates")
    assert found.map.layout.grid == (64, 64)
