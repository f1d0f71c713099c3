"""Gradients of a score with respect to attention weights, block by block."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Gradient(ABC):
    """Gradient `dA` of a score with respect to the weights of an operator's blocks."""

    @abstractmethod
    def part(self, block: int, rows: slice | Tensor, columns: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """Return `(B, heads, rows, columns)` gradients of one block in the given type, padding included."""


class OuterGradient(Gradient):
    """Gradient `dA = dO V^T`, rebuilt from the gradient of the output of a fused call, which never forms the weights."""

    def __init__(self, out: Tensor, value: Tensor) -> None:
        """Store `dO`, `(B, heads, [blocks,] q, d)`, and `V`, `(B, heads, [blocks,] k, d)`."""
        self.out, self.value = (x[:, :, None] if x.ndim == 4 else x for x in (out, value))

    def part(self, block: int, rows: slice | Tensor, columns: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """See `Gradient.part`."""
        return self.out[:, :, block, rows].to(dtype) @ self.value[:, :, block, columns].to(dtype).mT


class MatrixGradient(Gradient):
    """Gradient stored as a whole matrix."""

    def __init__(self, gradient: Tensor) -> None:
        """Store the gradient, `(B, heads, [blocks,] q, k)`."""
        self._gradient = gradient[:, :, None] if gradient.ndim == 4 else gradient

    def part(self, block: int, rows: slice | Tensor, columns: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """See `Gradient.part`."""
        return self._gradient[:, :, block, rows][..., columns].to(dtype)
