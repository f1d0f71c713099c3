"""What a network costs: the numbers that it learns, and the multiplications of one forward pass."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from visattn.errors import UnsupportedModel


@dataclass(frozen=True)
class Cost:
    """Parameters, and multiply-accumulates of the forward pass of one image."""

    parameters: int
    macs: int


def cost(model: nn.Module, shape: tuple[int, int, int]) -> Cost:
    """Count a network on a copy without values, so that nothing is computed and the network is left alone.

    Multiply-accumulates of every convolution, matrix product and attention that runs in evaluation mode, fixed ones like those of a
    shortcut that subsamples among them: half of PyTorch's count of operations. Norms, activations, pools, gates' products with the
    map and other elementwise work are not counted, as in the figures of papers.

    Args:
        model: A network of images.
        shape: `(channels, height, width)` of an image.

    Returns:
        Parameters, each once where modules share it, and multiply-accumulates of one image.

    Raises:
        UnsupportedModel: If the network cannot run without values.
    """
    bare = copy.deepcopy(model).to("meta").eval()
    precision = next((parameter.dtype for parameter in bare.parameters()), torch.float32)
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            bare(torch.empty(1, *shape, device="meta", dtype=precision))
    except Exception as error:
        raise UnsupportedModel(
            f"counting needs a network that takes images of {shape} and runs on PyTorch's meta device, got {type(model).__name__}: "
            f"{error}. Give the size it was built for, and let no branch depend on values."
        ) from error
    return Cost(sum(parameter.numel() for parameter in model.parameters()), counter.get_total_flops() // 2)
