"""A sample of the values of a model's weights, which tells whether they were changed."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn

from visattn._support.modes import own_modes
from visattn._support.parts import parts_of

_OF_HEAD = 64  # values of the last two parameters, those of a classifier's head; of all other tensors one
_PLAIN = Tensor, nn.Parameter  # classes of tensors whose memory is that of their values


def sampled_weights(model: nn.Module) -> dict[str, list[float]]:
    """Return some values of each tensor of the weights, by name."""
    parameters, buffers = parts_of(model).tensors()
    head = [*parameters][-2:]
    with own_modes(), torch.no_grad():
        values: dict[str, Tensor] = {}
        for name, tensor in chain(parameters.items(), buffers.items()):
            if tensor.is_floating_point() and not tensor.is_meta and (size := tensor.numel()):
                values[name] = _some(tensor, size, _OF_HEAD if name in head else 1)
        flat = list(values.values())
        if len({(value.dtype, value.device) for value in flat}) > 1:
            flat = [value.double().cpu() for value in flat]
        every = torch.cat(flat).double().tolist() if flat else []  # read together, so that a GPU is waited for once
    sampled, start = dict[str, list[float]](), 0
    for name, value in values.items():
        sampled[name] = every[start : (start := start + value.numel())]
    return sampled


def _some(tensor: Tensor, size: int, count: int) -> Tensor:
    """Return values of a tensor at places that are even over it, around its middle; no other value is read or copied."""
    step = max(size // count, 1)
    first = step // 2
    if tensor.layout is torch.strided and type(tensor) in _PLAIN and tensor.is_contiguous():
        return tensor.as_strided((min(count, -((first - size) // step)),), (step,), tensor.storage_offset() + first)
    places = torch.arange(first, size, step, device=tensor.device)[:count]
    return tensor.detach()[torch.unravel_index(places, tensor.shape)]
