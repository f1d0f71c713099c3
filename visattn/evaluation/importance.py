"""Importance of each head for a score, by its gradient (first order) or by ablation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from visattn._support.modes import in_own_modes
from visattn.core.methods.selection import graded, one_forward
from visattn.core.records import Recording


@in_own_modes
def head_importance(recording: Recording, *, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Compute the importance `|sum_ij A_ij dA_ij|` of each head.

    This is the magnitude of the score's gradient with respect to a gate on the head's output. Head rankings depend on the image:
    average over many images before ranking heads. To compare layers, divide by each layer's Euclidean norm.

    Args:
        recording: Attention of one forward pass with the gradient of a score: `recording.gradients(score)`.
        dtype: Compute type; float64 for double precision.

    Returns:
        `(B, heads)` for each record, in call order, in units of the score.

    Raises:
        OptionError: If there is no gradient, or there are several forward passes.

    Reference:
        Michel, Levy & Neubig, "Are Sixteen Heads Really Better than One?", NeurIPS 2019, arXiv:1905.10650 (equation 2, with a score
        instead of the loss).
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
    """Compute how much the score drops when a head's weights are set to 0, with one forward pass per head.

    Args:
        recording: Attention of one forward pass; only its layers and numbers of heads are read.
        score: `(B,)` score of the whole model.
        without: Function `(layer, head) -> (B,)` that returns the score without that head, for example computed inside
            `visattn.intervene(model, layer, head=head, scale=0)`.

    Returns:
        `(B, heads)` for each record, in call order; negative if the score rises without the head.

    Raises:
        OptionError: If there are several forward passes.
    """
    return [
        torch.stack([score - without(record.layer, head) for head in range(record.operator.shape[1])], dim=1)
        for record in one_forward(recording)
    ]
