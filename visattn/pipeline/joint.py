"""One forward pass over several images, and the proof that each gets what it gets alone."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from visattn._support.modes import evaluating
from visattn.pipeline.inputs import Prepared
from visattn.pipeline.run import Pass, answer_of, as_the_model

_TRIED: WeakKeyDictionary[nn.Module, tuple[Hashable, dict[Hashable, bool]]] = WeakKeyDictionary()  # weights; sizes


def joined(prepared: Sequence[Prepared]) -> Prepared:
    """Return photos of one size as a batch."""
    return replace(
        prepared[0],
        pixels=torch.cat([one.pixels for one in prepared]),
        photos=tuple(one.photo for one in prepared),
        geometries=tuple(one.geometry for one in prepared),
    )


def keeps_apart(model: nn.Module, prepared: Sequence[Prepared], passed: Pass) -> bool:
    """Check that a pass over several images gave each what it gets alone.

    It did if all attention could be placed, which the images of a batch may prevent, and if the last image alone has the output that it
    has among the others. That fails for models that mix images, such as by statistics of the batch, and for those that draw in their
    forward pass. It is tried once for a model, its weights and an input size.

    Args:
        model: The model.
        prepared: The photos, of one size.
        passed: The pass over all of them.
    """
    count, recording = len(prepared), passed.recording
    if any(record.reason is not None or record.operator.shape[0] != count for record in recording):
        return False
    state, size = _state(model), tuple(prepared[0].pixels.shape)
    if _TRIED.get(model, (None,))[0] != state:
        _TRIED[model] = state, {}
    tried = _TRIED[model][1]
    if size not in tried:
        tried[size] = _last_is_alike(model, prepared, passed.output)
    return tried[size]


def _state(model: nn.Module) -> tuple[Hashable, ...]:
    """Return what tells that the weights have changed."""
    tensors = chain(model.named_parameters(), model.named_buffers())
    return tuple((name, id(tensor), 0 if tensor.is_inference() else tensor._version) for name, tensor in tensors)


def _last_is_alike(model: nn.Module, prepared: Sequence[Prepared], output: Any) -> bool:  # noqa: ANN401 - a model's own
    last, count = prepared[-1], len(prepared)
    with evaluating(model), torch.no_grad():
        alone = answer_of(model, as_the_model(model, last.pixels), last)
    every = zip(_tensors(output), _tensors(alone), strict=False)
    pairs = [(one.detach()[-1], other[0]) for one, other in every if len(one) == count and len(other) == 1]
    return bool(pairs) and all(_alike(one, other) for one, other in pairs)


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
