"""Proof that a model treats the images of a batch apart."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

_TRIED: WeakKeyDictionary[nn.Module, tuple[Hashable, dict[Hashable, bool]]] = WeakKeyDictionary()  # weights; sizes


def known_apart(model: nn.Module, pixels: Tensor) -> bool | None:
    """Return what `apart` has found for images of this size; None if it was not tried with these weights."""
    state, tried = _TRIED.get(model, (None, {}))
    return tried.get(tuple(pixels.shape[1:])) if state == _state(model) else None


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
    known = known_apart(model, pixels)
    if known is not None:
        return known
    every = zip(_tensors(output), _tensors(alone()), strict=False)
    pairs = [(one.detach()[-1], other.detach()[0]) for one, other in every if len(one) == len(pixels) and len(other) == 1]
    found = bool(pairs) and all(_alike(one, other) for one, other in pairs)
    state, (before, tried) = _state(model), _TRIED.get(model, (None, {}))
    _TRIED[model] = state, {**(tried if before == state else {}), tuple(pixels.shape[1:]): found}
    return found


def _state(model: nn.Module) -> tuple[Hashable, ...]:
    """Return what tells that the weights have changed."""
    tensors = chain(model.named_parameters(), model.named_buffers())
    return tuple((name, id(tensor), tensor.dtype, 0 if tensor.is_inference() else tensor._version) for name, tensor in tensors)


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
