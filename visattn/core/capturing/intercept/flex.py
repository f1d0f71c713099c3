"""Calls of `flex_attention`, converted to fused calls: the effect of `score_mod` and `block_mask` becomes a bias.

With `torch.compile` turned off, a function mode intercepts the higher-order operator that `flex_attention` ends in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from visattn.core.capturing.intercept.calls import FusedCall
from visattn.errors import UnsupportedModel

_TOLERANCE = 1e-6  # for a bias that score_mod computes in float32


def flex_call(args: Sequence[Any], kwargs: Mapping[str, Any], layer: str) -> FusedCall:
    """Return the call of `scaled_dot_product_attention` that is equivalent to a call of `flex_attention`.

    The function `score_mod`, which changes scores, and the mask become a bias that is added to the scores. `layer` is the name of
    the module, for the message of an error.

    Raises:
        UnsupportedModel: If `score_mod` does more than add a bias to the scores.
    """

    def converted(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Callable[..., Tensor],
        block_mask: Sequence[Any],
        scale: float,
        _kernel_options: object,
        score_buffers: Sequence[Tensor] = (),
        mask_buffers: Sequence[Tensor] = (),
    ) -> FusedCall:
        """Build the fused call from the arguments of the operator that `flex_attention` ends in."""
        groups = query.shape[1] // key.shape[1]  # query heads per key head
        if groups > 1:
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        with torch.no_grad():
            scores = (query.double() @ key.double().mT * scale).nan_to_num_(0, 0, 0)
            no_scores = torch.zeros_like(scores)
            indices = [torch.arange(size, device=query.device) for size in scores.shape]
            change = _evaluated(score_mod, indices, score_buffers, scores) - scores
            bias = _evaluated(score_mod, indices, score_buffers, no_scores) - no_scores
            if not torch.allclose(change, bias, rtol=_TOLERANCE, atol=_TOLERANCE):
                raise UnsupportedModel(
                    f"{layer}: flex_attention's score_mod must add a bias to the scores to be captured, this one changes them "
                    "in another way. Remove it for the recording."
                )
            mask_function = block_mask[-1]
            is_visible = _evaluated(mask_function, indices, mask_buffers)
            bias = bias.masked_fill_(~is_visible, -torch.inf).to(torch.promote_types(query.dtype, torch.float32))
        call = FusedCall(query, key, value, _shrunk(bias), scale=scale)
        call.groups = groups
        return call

    return converted(*args, **kwargs)


def _evaluated(
    function: Callable[..., Tensor], indices: Sequence[Tensor], buffers: Sequence[Tensor], scores: Tensor | None = None
) -> Tensor:
    """Evaluate a function of the model, such as `mask(batch, head, query, key)`, for all indices; return `(B, heads, Q, K)`.

    If `scores` are given, the function also receives the score at these indices. `buffers` are tensors that it reads as a whole.
    """
    # user code may index a table by a grid index; under vmap this needs the mode that torch's own evaluation uses
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    leading = () if scores is None else (scores,)
    for axis in (3, 2, 1, 0):  # the innermost vmap runs over keys
        mapped_index = [0 if index == axis else None for index in range(4)]
        function = torch.vmap(function, in_dims=(*(0 for _ in leading), *mapped_index, *(None for _ in buffers)))
    with TransformGetItemToIndex():
        return function(*leading, *indices, *buffers)


def _shrunk(bias: Tensor) -> Tensor | None:
    """Return a bias `(B, heads, Q, K)` with size 1 along batch and heads where it is constant there; None if it is zero."""
    for axis in (0, 1):
        first = bias.narrow(axis, 0, 1)
        is_constant = torch.equal(first.expand_as(bias), bias)
        bias = first if is_constant else bias
    return bias if bias.any() else None
