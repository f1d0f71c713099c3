"""The gradient of a score with respect to attention weights, block by block."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Gradient(ABC):
    """`dA`, of the shape of the weights of an operator's blocks."""

    @abstractmethod
    def part(self, block: int, rows: slice | Tensor, columns: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """`(B, heads, rows, columns)` of one block in this type, padding included."""


class OuterGradient(Gradient):
    """`dA = dO V^T`: what the weights of a fused call would have had, from the gradient of its result."""

    def __init__(self, out: Tensor, value: Tensor) -> None:
        """Keep `dO` `(B, heads, [blocks,] q, d)` and `V` `(B, heads, [blocks,] k, d)`."""
        self.out, self.value = (x[:, :, None] if x.ndim == 4 else x for x in (out, value))

    def part(self, block: int, rows: slice | Tensor, columns: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """See `Gradient.part`."""
        return self.out[:, :, block, rows].to(dtype) @ self.value[:, :, block, columns].to(dtype).mT


class MatrixGradient(Gradient):
    """A gradient that is there in full."""

    def __init__(self, gradient: Tensor) -> None:
        """Keep it, `(B, heads, [blocks,] q, k)`."""
        self._gradient = gradient[:, :, None] if gradient.ndim == 4 else gradient

    def part(self, block: int, rows: slice | Tensor, columns: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """See `Gradient.part`."""
        return self._gradient[:, :, block, rows][..., columns].to(dtype)
