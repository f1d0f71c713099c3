"""Calls of `flex_attention`, converted to fused calls: the effect of `score_mod` and `block_mask` becomes a bias.

With `torch.compile` turned off, a function mode intercepts the higher-order operator that `flex_attention` ends in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from visattn.capturing.intercept.calls import FusedCall
from visattn.errors import UnsupportedModel

_TOLERANCE = 1e-6  # for a bias that score_mod computes in float32


def flex_call(args: Sequence[Any], kwargs: Mapping[str, Any], layer: str) -> FusedCall:
    """Return the fused call that is equivalent to a call of `flex_attention`.

    Raises:
        UnsupportedModel: If `score_mod` does more than add a bias to the scores.
    """

    def named(
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
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, -3) if groups > 1 else x for x in (key, value))
        with torch.no_grad():
            scores = (query.double() @ key.double().mT * scale).nan_to_num_(0, 0, 0)
            grid = [torch.arange(side, device=query.device) for side in scores.shape]
            added, bias = (_over_grid(score_mod, grid, score_buffers, at) - at for at in (scores, torch.zeros_like(scores)))
            if not torch.allclose(added, bias, rtol=_TOLERANCE, atol=_TOLERANCE):
                raise UnsupportedModel(
                    f"{layer}: flex_attention's score_mod must add a bias to the scores to be captured, this one changes them "
                    "in another way. Remove it for the recording."
                )
            seen = _over_grid(block_mask[-1], grid, mask_buffers)
            bias = bias.masked_fill_(~seen, -torch.inf).to(torch.promote_types(query.dtype, torch.float32))
        call = FusedCall(query, key, value, _alike(bias), scale=scale)
        call.groups = groups
        return call

    return named(*args, **kwargs)


def _over_grid(
    function: Callable[..., Tensor], grid: Sequence[Tensor], buffers: Sequence[Tensor], scores: Tensor | None = None
) -> Tensor:
    """Evaluate a mask or score function at each batch, head, query and key index; return `(B, heads, Q, K)`."""
    # user code may index a table by a grid index; under vmap this needs the mode that torch's own evaluation uses
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    first = () if scores is None else (scores,)
    for axis in (3, 2, 1, 0):  # the innermost vmap runs over keys
        along = [0 if other == axis else None for other in range(4)]
        function = torch.vmap(function, in_dims=(*(0 for _ in first), *along, *(None for _ in buffers)))
    with TransformGetItemToIndex():
        return function(*first, *grid, *buffers)


def _alike(bias: Tensor) -> Tensor | None:
    """Shrink the batch and head axes along which the bias is constant to size 1; return None if the bias is zero."""
    for axis in (0, 1):
        one = bias.narrow(axis, 0, 1)
        bias = one if torch.equal(one.expand_as(bias), bias) else bias
    return bias if bias.any() else None
