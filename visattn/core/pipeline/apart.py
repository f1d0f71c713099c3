"""Proof that a model treats the images of a batch apart."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from visattn._support.memory import OfWeights
from visattn._support.modes import callers_autocast

_TRIED: OfWeights[bool] = OfWeights()


def known_apart(model: nn.Module, pixels: Tensor) -> bool | None:
    """Return what `apart` has found for images of this size; None if it was not tried with these weights."""
    return _TRIED.known(model, _about(pixels))


def apart(model: nn.Module, pixels: Tensor, output: Any, alone: Callable[[], Any]) -> bool:  # noqa: ANN401 - a model's own
    """Check that the last image of a batch has the output that it has alone.

    That fails for models that mix images, such as by statistics of the batch, for those that draw in their forward pass, and for those
    whose output is not ordered by image. It is tried once for a model, its weights and an input size.

    Args:
        model: The model.
        pixels: `(B, C, H, W)`, several images.
        output: What the model returned for them.
        alone: Function that returns what the model returns for the last of them.
    """

    def compared() -> bool:
        every = zip(_tensors(output), _tensors(alone()), strict=False)
        pairs = [
            (together.detach()[-1], other.detach()[0])
            for together, other in every
            if len(together) == len(pixels) and len(other) == 1
        ]
        return bool(pairs) and all(_alike(together, other) for together, other in pairs)

    return _TRIED.of(model, _about(pixels), compared)


def _about(pixels: Tensor) -> Hashable:
    """Return what the answer depends on besides the weights: the input size, and the type to which the caller casts."""
    return tuple(pixels.shape[1:]), callers_autocast(pixels.device.type)


def _tensors(output: Any) -> Iterator[Tensor]:  # noqa: ANN401
    """Yield the tensors of numbers in an output, in order."""
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.ndim:
            yield output
    elif isinstance(output, (list, tuple, Mapping)):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(value)


def _alike(one: Tensor, other: Tensor) -> bool:
    """Check that two tensors differ by rounding, which the number of images may change, and no more."""
    if one.shape != other.shape:
        return False
    close, finite = torch.finfo(one.dtype).eps ** 0.5, other[other.isfinite()].abs()
    least = close * float(finite.max()) if len(finite) else 0.0
    return torch.allclose(one, other, rtol=close, atol=least, equal_nan=True)
