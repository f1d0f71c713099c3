"""A sample of the values of a model's weights, which tells whether they were changed."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn

from visattn._support.modes import own_modes

_OF_HEAD = 64  # values of the last two parameters, those of a classifier's head; of all other tensors one


def sampled_weights(model: nn.Module) -> dict[str, list[float]]:
    """Return some values of each tensor of the weights, by name."""
    named = {name: tensor for name, tensor in chain(model.named_parameters(), model.named_buffers()) if _has_values(tensor)}
    last = [name for name, _ in model.named_parameters()][-2:]
    with own_modes(), torch.no_grad():
        values = {name: _some(tensor, _OF_HEAD if name in last else 1) for name, tensor in named.items()}
        every = torch.cat([value.double().cpu() for value in values.values()]).tolist() if values else []
    numbers = iter(every)
    return {name: [next(numbers) for _ in range(len(value))] for name, value in values.items()}


def _has_values(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0 and tensor.device.type != "meta"


def _some(tensor: Tensor, count: int) -> Tensor:
    """Return values of a tensor at places that are even over it, around its middle; no other value is read or copied."""
    step = max(tensor.numel() // count, 1)
    if tensor.is_contiguous():
        return tensor.detach().flatten()[step // 2 :: step][:count]
    places = torch.arange(step // 2, tensor.numel(), step, device=tensor.device)[:count]
    return tensor.detach()[torch.unravel_index(places, tensor.shape)]
