"""Outputs that are logits and their probabilities."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_EXPONENTIAL = 128 * torch.finfo(torch.float32).eps  # relative error of exp(x) for |x| up to some hundreds


def logits_of(first: Any, second: Any) -> Tensor | None:  # noqa: ANN401
    """Return the logits of two tensors of which the other holds their probabilities; None if there are none."""
    pair = first, second
    if (
        not all(isinstance(one, Tensor) and one.ndim == 2 and one.is_floating_point() for one in pair)
        or first.shape != second.shape
    ):
        return None
    for logits, others in (pair, pair[::-1]):
        seen = logits.detach().double()
        shares = [seen.sigmoid(), *([seen.softmax(1)] if seen.shape[1] > 1 else [])]
        kind = torch.finfo(others.dtype)
        relative = _EXPONENTIAL + 4 * kind.eps  # of many classes all probabilities are small
        if any(torch.allclose(others.detach().double(), share, relative, kind.tiny) for share in shares):
            return logits  # type: ignore[no-any-return]
    return None
