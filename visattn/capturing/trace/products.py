"""Axes of products of weights and values: how both operands become `(*lead, q, k)` and `(*lead, k, d)`, and the result comes back."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
        moved = weights.reshape(self.weight_shape).permute(self.weight_axes)
        return moved.reshape(*self.lead, math.prod(self.rows), math.prod(self.keys))

    def values(self, values: Tensor) -> Tensor:
        """Return the values, `(*lead, k, d)`."""
        moved = values.reshape(self.value_shape).permute(self.value_axes)
        return moved.reshape(*self.lead, math.prod(self.keys), math.prod(self.channels))

    def result(self, made: Tensor) -> Tensor:
        """Return a result `(*lead, q, d)` in the shape of the model's own."""
        split = made.reshape(*self.lead, *self.rows, *self.channels)
        return split.permute(self.out_axes).reshape(self.out_shape)


Axes = Permuted | Grouped


def axes_of_sum(weights: Tensor, values: Tensor, dims: Sequence[int], *, keepdim: bool) -> Grouped | None:
    """Return the axes of `(weights * values).sum(dims, keepdim)`; None if each value has a weight of its own."""
    count = max(weights.ndim, values.ndim)
    own, other = ((1,) * (count - x.ndim) + tuple(x.shape) for x in (weights, values))
    sizes = tuple(max(pair) for pair in zip(own, other, strict=True))
    keys = sorted({dim % count for dim in dims})
    if any(own[axis] != other[axis] for axis in keys) or math.prod(sizes[axis] for axis in keys) < 2:
        return None
    rest = [axis for axis in range(count) if axis not in keys]
    lead = [axis for axis in rest if own[axis] == other[axis]]
    rows = [axis for axis in rest if own[axis] > other[axis]]
    channels = [axis for axis in rest if own[axis] < other[axis]]
    if not channels:
        return None
    order = [*lead, *rows, *channels]

    def of(axes: Sequence[int]) -> tuple[int, ...]:
        return tuple(sizes[axis] for axis in axes)

    return Grouped(
        own,
        (*lead, *rows, *keys, *channels),
        other,
        (*lead, *keys, *channels, *rows),
        of(lead),
        of(rows),
        of(keys),
        of(channels),
        tuple(order.index(axis) for axis in rest),
        tuple(1 if axis in keys else sizes[axis] for axis in (range(count) if keepdim else rest)),
    )


def axes_of_letters(weights: tuple[str, Tensor], values: tuple[str, Tensor], result: str) -> Axes | None:
    """Return the axes of an einsum of weights and values, each given with the letters of its axes; None if it is no weighted mean."""
    (w, weight), (v, value) = weights, values
    lead = [letter for letter in w if letter in v and letter in result]
    rows = [letter for letter in w if letter not in v]
    keys = [letter for letter in w if letter in v and letter not in result]
    channels = [letter for letter in v if letter not in w]
    sizes = dict(zip(v, value.shape, strict=True)) | dict(zip(w, weight.shape, strict=True))
    if not (keys and channels) or any(letter not in result for letter in rows + channels):
        return None

    def order(have: Sequence[str], want: list[str]) -> tuple[int, ...]:
        return tuple(have.index(letter) for letter in want)

    def of(letters: Sequence[str]) -> tuple[int, ...]:
        return tuple(sizes[letter] for letter in letters)

    if len(rows) == len(keys) == len(channels) == 1:
        return Permuted(order(w, lead + rows + keys), order(v, lead + keys + channels), order(result, lead + rows + channels))
    if any(sizes[letter] != size for letter, size in zip(v, value.shape, strict=True)):  # an axis of size 1 is repeated
        return None
    return Grouped(
        tuple(weight.shape),
        order(w, lead + rows + keys),
        tuple(value.shape),
        order(v, lead + keys + channels),
        of(lead),
        of(rows),
        of(keys),
        of(channels),
        order(lead + rows + channels, list(result)),
        of(result),
    )
