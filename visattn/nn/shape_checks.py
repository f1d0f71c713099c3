"""Checks of attention modules: layer widths at construction, input shapes in the forward pass."""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx

from visattn._support.checks import at_least
from visattn.errors import OptionError, ShapeError


def odd(what: str, value: int) -> int:
    """Return `value` if it is an odd number of at least 1: only odd kernels have a center.

    Raises:
        OptionError: If it is not.
    """
    if at_least(what, value) % 2 == 0:
        raise OptionError(f"{what} must be odd, got {value}. An even kernel shifts the gate by half a position.")
    return value


def bottleneck(channels: int, reduction: int, width: int | None = None) -> int:
    """Return the width of a bottleneck: `width` if given, else `channels // reduction`, at least 1.

    `channels // reduction` alone can be 0. The gate would then be constant, and nothing would fail.

    Raises:
        OptionError: If an argument is below 1.
    """
    at_least("channels", channels)
    at_least("reduction", reduction)
    return max(1, channels // reduction) if width is None else at_least("the width of the bottleneck", width)


def check_maps(module: object, x: Tensor, channels: int | None) -> None:
    """Check that `x` is `(B, channels, H, W)`; None allows any number of channels.

    Raises:
        ShapeError: If it is not.
    """
    if is_traced(x):
        return
    if x.ndim != 4 or (channels is not None and x.shape[1] != channels):
        last = x.ndim == 4 and x.shape[-1] == channels
        hint = "Channels come last here: pass x.permute(0, 3, 1, 2)." if last else "Build it for this number of channels."
        hint = hint if x.ndim == 4 else "Pass a batch of feature maps, channels first."
        wanted = "C" if channels is None else channels
        raise ShapeError(f"{type(module).__name__} must be given (B, {wanted}, H, W), got {shape_text(x)}. {hint}")


def check_tokens(module: object, x: Tensor, width: int) -> None:
    """Check that `x` is `(B, N, width)`.

    Raises:
        ShapeError: If it is not.
    """
    if is_traced(x):
        return
    if x.ndim != 3 or x.shape[-1] != width:
        hint = "Pass x.flatten(2).transpose(1, 2) of a feature map." if x.ndim == 4 else "Build it for this width."
        raise ShapeError(f"{type(module).__name__} must be given (B, N, {width}), got {shape_text(x)}. {hint}")


def check_norm(norm: torch.nn.Module, values: Tensor) -> None:
    """Check that a batch norm in training mode gets more than one value per channel: the variance of one value is 0.

    Raises:
        ShapeError: If it gets one value per channel.
    """
    if is_traced(values) or not norm.training:
        return
    if values.shape[0] * math.prod(values.shape[2:]) == 1:
        raise ShapeError(
            f"{type(norm).__name__} cannot train on one value per channel, got {shape_text(values)}. "
            "Use a batch of 2 or more, or put this module into eval mode."
        )


def normed(norm: torch.nn.Module, values: Tensor) -> Tensor:
    """Run `check_norm`, then return `norm(values)`."""
    check_norm(norm, values)
    result: Tensor = norm(values)
    return result


def check_size(module: object, x: Tensor, size: tuple[int, int]) -> None:
    """Check the height and width of feature maps.

    Raises:
        ShapeError: If they are not `size`.
    """
    if not is_traced(x) and tuple(x.shape[2:]) != size:
        raise ShapeError(
            f"{type(module).__name__} must be given (B, C, {size[0]}, {size[1]}), got {shape_text(x)}. Build it for this size."
        )


def is_traced(x: object) -> bool:
    """Check whether `x` is an `fx` proxy, which has no shape."""
    return isinstance(x, fx.Proxy)


def shape_text(x: Tensor) -> str:
    """Format a shape for messages."""
    return f"({', '.join(map(str, x.shape))})"
