"""Cost of a network: parameters, and multiply-accumulates of one forward pass."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from visattn._support.checks import first_line
from visattn.errors import UnsupportedModel


@dataclass(frozen=True)
class Cost:
    """Number of parameters, and multiply-accumulates (MACs) of the forward pass of one image."""

    parameters: int
    macs: int


def cost(model: nn.Module, shape: tuple[int, int, int]) -> Cost:
    """Count parameters and multiply-accumulates, on a copy on the meta device. The network itself is not run or changed.

    Multiply-accumulates are half of the operations that PyTorch counts. They include every convolution, matrix product and attention
    call in evaluation mode, also those with fixed weights, such as a subsampling shortcut. As in papers, norms, activations, pooling,
    the product of a gate with its feature map and other elementwise operations are not counted.

    Args:
        model: Network for images.
        shape: `(channels, height, width)` of an image.

    Returns:
        Parameters (shared ones are counted once) and multiply-accumulates for one image.

    Raises:
        UnsupportedModel: If the network cannot run on the meta device.
    """
    bare = copy.deepcopy(model).to("meta").eval()
    precision = next((parameter.dtype for parameter in bare.parameters()), torch.float32)
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            bare(torch.empty(1, *shape, device="meta", dtype=precision))
    except Exception as error:
        raise UnsupportedModel(
            f"counting needs a network that takes images of {shape} and runs on PyTorch's meta device, got {type(model).__name__}: "
            f"{first_line(error).rstrip('.')}. Give the image size of the network. Its control flow must not depend on tensor values."
        ) from error
    return Cost(sum(parameter.numel() for parameter in model.parameters()), counter.get_total_flops() // 2)
