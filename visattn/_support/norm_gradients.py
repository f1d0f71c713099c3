"""Right gradients of batch and instance normalization of one image.

On the CPU, PyTorch computes wrong gradients of both, without an error, if the batch is one and the gradient lies in memory in another
order than the input, as when patches are flattened to tokens right behind a batch norm. They are right if both lie alike.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import Node

_NORM = "NativeBatchNormBackward0"  # of instance norms too
_DONE = "visattn.norm_gradients"


def set_right(*scores: Tensor) -> None:
    """Let backward passes from scores lay out each gradient of a normalization of one image as its input."""
    waiting = [score.grad_fn for score in scores if score.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node.name() == _NORM:
            _lay_out(node)
        found = [following for following, _ in node.next_functions if following is not None and following not in seen]
        seen.update(found)
        waiting += found


def _lay_out(node: Node) -> None:
    given: Tensor = node._saved_input  # type: ignore[attr-defined]
    noted: dict[str, object] = node.metadata  # type: ignore[assignment]
    if len(given) == 1 and _DONE not in noted:
        noted[_DONE] = True
        lay: Callable[[Tensor], Tensor] = Tensor.contiguous
        if not given.is_contiguous():
            lay = partial(_like, torch.empty_like(given, device="meta"))
        node.register_prehook(lambda gradients: (lay(gradients[0]), *gradients[1:]))


def _like(like: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient in the order in memory of another tensor."""
    return gradient.new_empty_strided(like.shape, like.stride()).copy_(gradient)
