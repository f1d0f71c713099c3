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

    @abstractmethod
    def image(self, number: int) -> Gradient:
        """Return the gradient of one image of the batch, on the same memory."""


class OuterGradient(Gradient):
    """Gradient `dA = dO V^T`, rebuilt from the gradient of the output of a fused call, which never forms the weights."""

    def __init__(self, out: Tensor, value: Tensor) -> None:
        """Store `dO`, `(B, heads, [blocks,] q, d)`, and `V`, `(B, heads, [blocks,] k, d)`."""
        self.out, self.value = (x[:, :, None] if x.ndim == 4 else x for x in (out, value))

    def part(self, block: int, rows: slice | Tensor, columns: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """See `Gradient.part`."""
        return self.out[:, :, block, rows].to(dtype) @ self.value[:, :, block, columns].to(dtype).mT

    def image(self, number: int) -> OuterGradient:
        """See `Gradient.image`."""
        return OuterGradient(self.out[number : number + 1], self.value[number : number + 1])


class MatrixGradient(Gradient):
    """Gradient stored as a whole matrix."""

    def __init__(self, gradient: Tensor) -> None:
        """Store the gradient, `(B, heads, [blocks,] q, k)`."""
        self._gradient = gradient[:, :, None] if gradient.ndim == 4 else gradient

    def part(self, block: int, rows: slice | Tensor, columns: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """See `Gradient.part`."""
        return self._gradient[:, :, block, rows][..., columns].to(dtype)

    def image(self, number: int) -> MatrixGradient:
        """See `Gradient.image`."""
        return MatrixGradient(self._gradient[number : number + 1])
