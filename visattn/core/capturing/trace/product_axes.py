"""Axes of products of weights and values: how both operands become `(*lead, q, k)` and `(*lead, k, d)`, and the result comes back.

The lead is the axes of images and heads, q the queries, k the keys and d the channels.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor


class Permuted(NamedTuple):
    """Product of matrices whose axes are permuted.

    Attributes:
        weight_axes: Permutation of the weights' axes; None for no permutation.
        value_axes: Permutation of the values' axes; None for no permutation.
        out_axes: Permutation of the model's result that makes it `(*lead, q, d)`.
    """

    weight_axes: tuple[int, ...] | None
    value_axes: tuple[int, ...] | None
    out_axes: tuple[int, ...]

    def weights(self, weights: Tensor) -> Tensor:
        """Return the weights, `(*lead, q, k)`."""
        return weights if self.weight_axes is None else weights.permute(self.weight_axes)

    def values(self, values: Tensor) -> Tensor:
        """Return the values, `(*lead, k, d)`."""
        return values if self.value_axes is None else values.permute(self.value_axes)

    def result(self, made: Tensor) -> Tensor:
        """Return a result `(*lead, q, d)` in the axes of the model's own product."""
        return made.permute([self.out_axes.index(axis) for axis in range(len(self.out_axes))])

    def led(self, out: Tensor) -> Tensor:
        """Return the model's own result as `(*lead, q, d)`."""
        return out.permute(self.out_axes)


class Grouped(NamedTuple):
    """Product with none or several axes of queries, and several axes of keys or channels.

    Attributes:
        weight_shape: Shape in which the weights have all axes.
        weight_axes: Permutation of these axes into lead, queries, keys and the rest.
        value_shape: Shape in which the values have all axes.
        value_axes: Permutation of these axes into lead, keys, channels and the rest.
        lead: Sizes of the axes of images and heads, which both operands have.
        rows: Sizes of the axes that only the weights have.
        keys: Sizes of the axes that are summed over.
        channels: Sizes of the axes that only the values have.
        out_axes: Permutation of lead, queries and channels into the axes of the model's result.
        out_shape: Shape of the model's result.
    """

    weight_shape: tuple[int, ...]
    weight_axes: tuple[int, ...]
    value_shape: tuple[int, ...]
    value_axes: tuple[int, ...]
    lead: tuple[int, ...]
    rows: tuple[int, ...]
    keys: tuple[int, ...]
    channels: tuple[int, ...]
    out_axes: tuple[int, ...]
    out_shape: tuple[int, ...]

    def weights(self, weights: Tensor) -> Tensor:
        """Return the weights, `(*lead, q, k)`."""
        permuted = weights.reshape(self.weight_shape).permute(self.weight_axes)
        return permuted.reshape(*self.lead, math.prod(self.rows), math.prod(self.keys))

    def values(self, values: Tensor) -> Tensor:
        """Return the values, `(*lead, k, d)`."""
        permuted = values.reshape(self.value_shape).permute(self.value_axes)
        return permuted.reshape(*self.lead, math.prod(self.keys), math.prod(self.channels))

    def result(self, made: Tensor) -> Tensor:
        """Return a result `(*lead, q, d)` in the shape of the model's own."""
        split = made.reshape(*self.lead, *self.rows, *self.channels)
        return split.permute(self.out_axes).reshape(self.out_shape)

    def led(self, out: Tensor) -> Tensor:
        """Return the model's own result as `(*lead, q, d)`."""
        sizes = (*self.lead, *self.rows, *self.channels)
        split = out.reshape([sizes[axis] for axis in self.out_axes])
        permuted = split.permute([self.out_axes.index(axis) for axis in range(len(self.out_axes))])
        return permuted.reshape(*self.lead, math.prod(self.rows), math.prod(self.channels))


Axes = Permuted | Grouped
