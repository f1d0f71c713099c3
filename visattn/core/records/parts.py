"""Parts of results of attention that are replaced."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Part"]


class Part(NamedTuple):
    """A part of the result of an attention call, and what replaces it.

    Attributes:
        layer: Name of the layer.
        call: Index of the call among those of the layer.
        values: `(1, heads, [blocks,] q, d)` result that the part is taken from; None: zero.
        head: Number of the head; None: all.
        token: Index of the query token; None: all.
    """

    layer: str
    call: int
    values: Tensor | None = None
    head: int | None = None
    token: int | None = None
