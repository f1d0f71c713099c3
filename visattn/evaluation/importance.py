"""How much each head matters for a score: to first order by its gradient, or by leaving it out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from visattn.methods.selection import graded, one_forward
from visattn.records import Recording


def head_importance(recording: Recording, *, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """`|sum_ij A_ij dA_ij|` of each head: how fast the score moves when the head's output is turned down.

    Args:
        recording: Attention of one forward with the gradient of a score: `recording.gradients(score)`.
        dtype: float64 computes in double precision.

    Returns:
        `(B, heads)` for each record, in the order of the calls, in units of the score. Take the mean over many images before heads
        are ranked; to compare layers, divide by the layer's Euclidean norm.

    Raises:
        OptionError: If there is no gradient, or there are several forwards.

    Reference:
        Michel, Levy & Neubig, "Are Sixteen Heads Really Better than One?", NeurIPS 2019, arXiv:1905.10650 (equation 2, with a score
        in the place of the loss).
    """
    found = []
    for record in graded(one_forward(recording)):
        operator = record.operator.to(dtype)
        total = torch.zeros(operator.shape[:2], dtype=dtype, device=operator.device)
        for tile in operator.pieces():
            assert tile.grad is not None  # noqa: S101 - the recording was checked
            total += (tile.weights * tile.grad).sum((-1, -2))
        found.append(total.abs())
    return found


def head_ablation(recording: Recording, score: Tensor, without: Callable[[str, int], Tensor]) -> list[Tensor]:
    """How much the score falls when a head's weights are set to 0, a forward for each head.

    Args:
        recording: Attention of one forward; only its layers and heads are read.
        score: `(B,)` of the whole model.
        without: `(layer, head) -> (B,)`, the score without that head, for example inside `visattn.intervene(model, layer,
            head=head, scale=0)`.

    Returns:
        `(B, heads)` for each record, in the order of the calls; negative where the score rises.

    Raises:
        OptionError: If there are several forwards.
    """
    return [
        torch.stack([score - without(record.layer, head) for head in range(record.operator.shape[1])], dim=1)
        for record in one_forward(recording)
    ]
