"""Right gradients of batch and instance normalization of one image.

On the CPU, PyTorch computes wrong gradients of both, without an error, if the batch is one and the gradient lies in memory in another
order than the input, as when patches are flattened to tokens right behind a batch norm. They are right if both lie alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_NORMS = {F.batch_norm, torch.batch_norm, F.instance_norm, torch.instance_norm}
_ORDERED = {F.instance_norm, torch.instance_norm}  # bring their input into the order of its axes


class RightNormGradients(TorchFunctionMode):
    """Function mode in which the gradients of normalizations that run are right; open it around the forward pass."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # noqa: ANN401
        """Run a function of PyTorch; PyTorch calls this method instead of the function."""
        out = func(*args, **kwargs or {})
        if func in _NORMS and isinstance(out, Tensor) and out.requires_grad:
            given = args[0] if args else (kwargs or {})["input"]
            is_ordered = func in _ORDERED or given.is_contiguous()
            out.register_hook(Tensor.contiguous if is_ordered else partial(_laid_out, torch.empty_like(given, device="meta")))
        return out


def _laid_out(like: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient in the order in memory of another tensor."""
    return gradient.new_empty_strided(like.shape, like.stride()).copy_(gradient)
