"""Parts of single images in tensors of a batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def of_image(values: Any, number: int, batch: int) -> Any:  # noqa: ANN401 - a tensor, or something that has no batch
    """Return the part of one image of a tensor whose first axis is the batch; anything else is returned as it is."""
    return values[number : number + 1] if isinstance(values, Tensor) and values.ndim and len(values) == batch else values
