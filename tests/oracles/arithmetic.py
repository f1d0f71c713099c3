"""Plain arithmetic on lists of numbers, for oracles, and modules whose parameters all differ from their initial values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)
Vector = list[float]
Grid = list[list[Vector]]  # rows, columns, channels


def ready(module: Module) -> Module:
    """Return the module in float64 and evaluation mode, with no parameter at its initial value."""
    numbers = torch.Generator().manual_seed(0)
    module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=numbers, dtype=torch.float64) * 0.7)
        for name, buffer in module.named_buffers():
            if "running" in name:
                buffer.copy_(torch.rand(buffer.shape, generator=numbers, dtype=torch.float64) + 0.5)
    return module


def example(channels: int, rows: int = 3, columns: int = 4, batch: int = 2) -> Tensor:
    return torch.randn(batch, channels, rows, columns, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def listed(image: Tensor) -> Grid:
    return image.permute(1, 2, 0).tolist()


def tensor(grids: Sequence[Grid]) -> Tensor:
    return torch.tensor(grids, dtype=torch.float64).permute(0, 3, 1, 2)


def dense(layer: nn.Module, vector: Vector) -> Vector:
    """Apply a 1 x 1 convolution or linear layer at one location."""
    if isinstance(layer, nn.Identity):
        return vector
    weight = layer.weight.flatten(1).tolist()  # type: ignore[operator]
    bias = [0.0] * len(weight) if layer.bias is None else layer.bias.tolist()  # type: ignore[operator]
    return [sum(w * v for w, v in zip(row, vector, strict=True)) + b for row, b in zip(weight, bias, strict=True)]


def everywhere(layer: nn.Module, image: Grid) -> Grid:
    return [[dense(layer, place) for place in row] for row in image]


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def softmax(scores: Vector) -> Vector:
    powers = [math.exp(score - max(scores)) for score in scores]
    return [power / sum(powers) for power in powers]


def mean(weights: Vector, vectors: Sequence[Vector]) -> Vector:
    return [sum(w * v[c] for w, v in zip(weights, vectors, strict=True)) for c in range(len(vectors[0]))]


def plus(a: Vector, b: Vector, by: float = 1) -> Vector:
    return [x + by * y for x, y in zip(a, b, strict=True)]


def pooled(image: Grid) -> Grid:
    def largest(i: int, j: int) -> Vector:
        return [max(image[2 * i + a][2 * j + b][c] for a in (0, 1) for b in (0, 1)) for c in range(len(image[0][0]))]

    return [[largest(i, j) for j in range(len(image[0]) // 2)] for i in range(len(image) // 2)]


def flat(image: Grid) -> list[Vector]:
    return [place for row in image for place in row]


def normalized(norm: nn.BatchNorm2d, vector: Vector) -> Vector:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    parts = (part.tolist() for part in (norm.running_mean, norm.running_var, norm.weight, norm.bias))
    return [(v - m) / math.sqrt(s + norm.eps) * w + b for v, m, s, w, b in zip(vector, *parts, strict=True)]
