"""Blocks that gate feature maps, in the forms that people paste into their networks, with what a slow loop computes for each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

C = 6


class Form(NamedTuple):
    """A block, and what must be found in it.

    Attributes:
        build: Function that builds the block.
        gates: Layer and role of each gate, in order.
        factors: Function of block and features to the factors, by loops.
        result: Function of features and factors to the output of the block.
    """

    build: Callable[[], nn.Module]
    gates: tuple[tuple[str, str], ...]
    factors: Callable[[Any, Tensor], list[Tensor]]
    result: Callable[..., Tensor]


def sigmoid(number: float) -> float:
    return 1 / (1 + math.exp(-number))


class Channels(nn.Module):
    """Factor of each channel `(B, C, 1, 1)`; it does not multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.fc, self.squash = nn.AdaptiveAvgPool2d(1), nn.Conv2d(C, C, 1), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return self.squash(self.fc(self.pool(x)))  # type: ignore[no-any-return]


class Positions(nn.Module):
    """Factor of each position `(B, 1, H, W)`; it does not multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        mean, largest = torch.mean(x, dim=1, keepdim=True), torch.max(x, dim=1, keepdim=True)[0]
        return torch.sigmoid(self.conv(torch.cat([mean, largest], dim=1)))


def of_channels(fc: Any, x: Tensor) -> Tensor:
    """Compute the factor of each channel by loops."""
    gate = torch.zeros(len(x), C, 1, 1)
    for image in range(len(x)):
        pooled = [float(x[image, channel].sum()) / x[image, channel].numel() for channel in range(C)]
        for channel in range(C):
            total = float(fc.bias[channel]) + sum(
                float(fc.weight[channel].flatten()[other]) * pooled[other] for other in range(C)
            )
            gate[image, channel] = sigmoid(total)
    return gate


def of_positions(conv: Any, x: Tensor) -> Tensor:
    """Compute the factor of each position by loops."""
    gate = torch.zeros(len(x), 1, *x.shape[2:])
    mean_weight, max_weight = conv.weight.flatten().tolist()
    for image in range(len(x)):
        for row in range(x.shape[2]):
            for column in range(x.shape[3]):
                values = x[image, :, row, column].tolist()
                total = mean_weight * sum(values) / C + max_weight * max(values) + float(conv.bias)
                gate[image, 0, row, column] = sigmoid(total)
    return gate


class Parent(nn.Module):
    """Block whose own forward multiplies by what its parts return; `how` is its forward."""

    def __init__(self, how: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.ca, self.sa, self.fc, self.how = Channels(), Positions(), nn.Conv2d(C, C, 1), how

    def forward(self, x: Tensor) -> Any:
        return self.how(self, x)


def parent(how: Callable[[Any, Tensor], Any]) -> Callable[[], nn.Module]:
    return lambda: Parent(how)


def cbam(block: Any, x: Tensor) -> Tensor:
    x = block.ca(x) * x
    return block.sa(x) * x  # type: ignore[no-any-return]


def cbam_factors(block: Any, x: Tensor) -> list[Tensor]:
    channels = of_channels(block.ca.fc, x)
    return [channels, of_positions(block.sa.conv, x * channels)]


def with_identity(block: Any, x: Tensor) -> Tensor:
    out = block.ca(x) * x
    out = block.sa(out) * out
    out += x
    return out  # type: ignore[no-any-return]


def in_place(block: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y.mul_(torch.sigmoid(block.fc(F.adaptive_avg_pool2d(y, 1))))
    return y


def expanded(block: Any, x: Tensor) -> Tensor:
    w = torch.sigmoid(block.fc(x.mean((2, 3), keepdim=True)))
    return x * w.expand_as(x)


def repeated(block: Any, x: Tensor) -> Tensor:
    return block.sa(x).repeat(1, C, 1, 1) * x  # type: ignore[no-any-return]


def by_einsum(block: Any, x: Tensor) -> Tensor:
    w = block.fc(F.adaptive_avg_pool2d(x, 1)).flatten(1).sigmoid()
    return torch.einsum("bchw,bc->bchw", x, w)


def positions_by_einsum(block: Any, x: Tensor) -> Tensor:
    return torch.einsum("...hw,...chw->...chw", block.sa(x).squeeze(1), x)


def by_name(block: Any, x: Tensor) -> Tensor:
    return torch.mul(other=x, input=block.ca(x))


def channels_of(block: Any, x: Tensor) -> list[Tensor]:
    return [of_channels(block.ca.fc, x)]


def own_of(block: Any, x: Tensor) -> list[Tensor]:
    return [of_channels(block.fc, x)]


def places_of(block: Any, x: Tensor) -> list[Tensor]:
    return [of_positions(block.sa.conv, x)]


def both_of(block: Any, x: Tensor) -> list[Tensor]:
    return [*channels_of(block, x), *places_of(block, x)]


def times(x: Tensor, gate: Tensor) -> Tensor:
    return x * gate


ONE, TWO = (("1.ca", "channel_gate"),), (("1.ca", "channel_gate"), ("1.sa", "spatial_gate"))

FORMS: dict[str, Form] = {
    "CBAM": Form(parent(cbam), TWO, cbam_factors, lambda x, c, s: x * c * s),
    "CBAM and the identity": Form(parent(with_identity), TWO, cbam_factors, lambda x, c, s: x * c * s + x),
    "gated plus itself": Form(parent(lambda m, x: x + x * m.ca(x)), ONE, channels_of, lambda x, c: x + x * c),
    "one plus the gate": Form(parent(lambda m, x: x * (1 + m.ca(x))), ONE, lambda m, x: [1 + channels_of(m, x)[0]], times),
    "one minus the gate": Form(
        parent(lambda m, x: (1 - m.sa(x)) * x), (("1.sa", "spatial_gate"),), lambda m, x: [1 - places_of(m, x)[0]], times
    ),
    "scSE, summed": Form(parent(lambda m, x: x * m.ca(x) + x * m.sa(x)), TWO, both_of, lambda x, c, s: x * c + x * s),
    "scSE, larger": Form(
        parent(lambda m, x: torch.max(x * m.ca(x), x * m.sa(x))), TWO, both_of, lambda x, c, s: torch.maximum(x * c, x * s)
    ),
    "own operations": Form(
        parent(lambda m, x: x * torch.sigmoid(m.fc(F.adaptive_avg_pool2d(x, 1)))), (("1", "channel_gate"),), own_of, times
    ),
    "in place": Form(parent(in_place), (("1", "channel_gate"),), own_of, times),
    "expanded": Form(parent(expanded), (("1", "channel_gate"),), own_of, times),
    "repeated": Form(parent(repeated), (("1.sa", "spatial_gate"),), places_of, times),
    "einsum": Form(parent(by_einsum), (("1", "channel_gate"),), own_of, times),
    "einsum of positions": Form(parent(positions_by_einsum), (("1.sa", "spatial_gate"),), places_of, times),
    "named arguments": Form(parent(by_name), ONE, channels_of, times),
    "hard sigmoid": Form(
        parent(lambda m, x: x * (F.relu6(m.fc(F.adaptive_avg_pool2d(x, 1)) + 3) / 6)),
        (("1", "channel_gate"),),
        lambda m, x: [((own_of(m, x)[0].logit() + 3) / 6).clamp(0, 1)],
        times,
    ),
    "rows and columns": Form(
        parent(lambda m, x: x * m.fc(x.mean(3, keepdim=True)).sigmoid() * m.fc(x.mean(2, keepdim=True)).sigmoid()),
        (("1", "gate"),),
        lambda m, x: [strips(m.fc, x)],
        times,
    ),
}


def strips(fc: Any, x: Tensor) -> Tensor:
    """Compute the product of the factor of each row and that of each column, for each channel, by loops."""
    gate = torch.zeros_like(x)
    weight = fc.weight.flatten(1)
    for image in range(len(x)):
        for row in range(x.shape[2]):
            for column in range(x.shape[3]):
                along_row, along_column = x[image, :, row].sum(1) / x.shape[3], x[image, :, :, column].sum(1) / x.shape[2]
                for channel in range(C):
                    totals = [float((weight[channel] * mean).sum() + fc.bias[channel]) for mean in (along_row, along_column)]
                    gate[image, channel, row, column] = sigmoid(totals[0]) * sigmoid(totals[1])
    return gate
