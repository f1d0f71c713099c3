"""Inputs, parameters and recorded outputs of other code: the authors' repositories, timm and torchvision.

Every parameter tensor, including biases, is filled with evenly spaced numbers from -0.5 to 0.5; norms have weight 1 and bias 0. The
numbers below were printed by the named code, in float64 and evaluation mode, with those parameters and `maps()` or `tokens()`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

TOLERANCE = 1e-7


def maps(columns: int = 7) -> Tensor:
    """Return feature maps `(2, 32, 5, 7)`, or their first columns."""
    return torch.sin(1 + torch.arange(2 * 32 * 5 * 7, dtype=torch.float64)).reshape(2, 32, 5, 7)[..., :columns]


def tokens() -> Tensor:
    """Return tokens `(2, 49, 32)`."""
    return torch.sin(1 + torch.arange(2 * 49 * 32, dtype=torch.float64)).reshape(2, 49, 32)


def filled(module: nn.Module) -> nn.Module:
    """Return the module in float64 and evaluation mode, with the parameters of the table."""
    module = module.double().eval()
    norms = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)
    with torch.no_grad():
        for part in module.modules():
            for parameter in part.parameters(recurse=False):
                if isinstance(part, norms):
                    parameter.fill_(1 if parameter is part.weight else 0)
                elif parameter.numel() == 1:
                    parameter.fill_(0.25)
                else:
                    parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel(), dtype=torch.float64).view_as(parameter))
    return module


def waves(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Fill the tensors of a state dict with numbers that depend on index and shape and roughly keep the scale of feature maps."""
    return {key: _wave(number, key, value) for number, (key, value) in enumerate(state.items())}


def _wave(number: int, key: str, value: Tensor) -> Tensor:
    if not value.is_floating_point():
        return value.clone()
    wave = torch.sin(1 + number + 1.7 * torch.arange(value.numel(), dtype=torch.float64)).view_as(value)
    if value.ndim > 1:
        return wave * math.sqrt(3 / value[0].numel())
    return 1 + wave / 4 if key.endswith(("running_var", "weight")) else wave / 4


def image(side: int) -> Tensor:
    """Return an image `(1, 3, side, side)`."""
    return torch.sin(1 + 0.37 * torch.arange(3 * side * side, dtype=torch.float64)).reshape(1, 3, side, side)


def summary(output: Tensor) -> tuple[float, float, float, float]:
    """Return sum, first, last and sum of squares, as in the table."""
    flat = output.detach().flatten()
    return float(flat.sum()), float(flat[0]), float(flat[-1]), float(flat.square().sum())


def check(output: Tensor, expected: tuple[float, float, float, float]) -> float:
    """Return the largest difference from a row of the table, relative for numbers above 1.

    Raises:
        AssertionError: If it exceeds 1e-7.
    """
    found = summary(output)
    worst = max(abs(a - b) / max(1, abs(b)) for a, b in zip(found, expected, strict=True))
    assert math.isfinite(worst), found
    assert worst <= TOLERANCE, f"{found} against {expected}"
    return worst


def parameters(module: nn.Module) -> int:
    """Count the learned parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())
