"""Axes of products of weights and values: how both operands become `(*lead, q, k)` and `(*lead, k, d)`, and the result comes back.

The lead is the axes of images and heads, q the queries, k the keys and d the channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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


def axes_of_sum(weights: Tensor, values: Tensor, dims: Sequence[int], *, keepdim: bool) -> Grouped | None:
    """Return which axes of `(weights * values).sum(dims, keepdim)` are images and heads, queries, keys and channels.

    The keys are the axes that are summed over. Weights have size 1 along the channels, and values along the queries. Return None if
    each value has a weight of its own, since then the sum is no attention.
    """
    count = max(weights.ndim, values.ndim)
    weight_shape, value_shape = ((1,) * (count - operand.ndim) + tuple(operand.shape) for operand in (weights, values))
    sizes = tuple(max(pair) for pair in zip(weight_shape, value_shape, strict=True))
    keys = sorted({dim % count for dim in dims})
    has_all_keys = all(weight_shape[axis] == value_shape[axis] for axis in keys)
    if not has_all_keys or math.prod(_picked(sizes, keys)) < 2:
        return None
    remaining = [axis for axis in range(count) if axis not in keys]
    lead = [axis for axis in remaining if weight_shape[axis] == value_shape[axis]]
    queries = [axis for axis in remaining if weight_shape[axis] > value_shape[axis]]
    channels = [axis for axis in remaining if weight_shape[axis] < value_shape[axis]]
    if not channels:
        return None
    result_order = [*lead, *queries, *channels]
    result_axes = range(count) if keepdim else remaining
    return Grouped(
        weight_shape=weight_shape,
        weight_axes=(*lead, *queries, *keys, *channels),
        value_shape=value_shape,
        value_axes=(*lead, *keys, *channels, *queries),
        lead=_picked(sizes, lead),
        rows=_picked(sizes, queries),
        keys=_picked(sizes, keys),
        channels=_picked(sizes, channels),
        out_axes=tuple(result_order.index(axis) for axis in remaining),
        out_shape=tuple(1 if axis in keys else sizes[axis] for axis in result_axes),
    )


def axes_of_letters(weights: tuple[str, Tensor], values: tuple[str, Tensor], result: str) -> Axes | None:
    """Return which axes of an einsum such as `bhqk,bhkd->bhqd` are images and heads, queries, keys and channels.

    Weights and values are given with the letters of their axes, and `result` is the letters of the result. The keys are the letters
    of both operands that the result lacks. Return None if the einsum is no weighted mean of values.
    """
    (weight_letters, weight), (value_letters, value) = weights, values
    lead = [letter for letter in weight_letters if letter in value_letters and letter in result]
    queries = [letter for letter in weight_letters if letter not in value_letters]
    keys = [letter for letter in weight_letters if letter in value_letters and letter not in result]
    channels = [letter for letter in value_letters if letter not in weight_letters]
    value_sizes = dict(zip(value_letters, value.shape, strict=True))
    sizes = value_sizes | dict(zip(weight_letters, weight.shape, strict=True))
    is_weighted_mean = bool(keys and channels) and all(letter in result for letter in queries + channels)
    if not is_weighted_mean:
        return None
    weight_axes = _permutation(weight_letters, lead + queries + keys)
    value_axes = _permutation(value_letters, lead + keys + channels)
    if len(queries) == len(keys) == len(channels) == 1:
        return Permuted(weight_axes, value_axes, _permutation(result, lead + queries + channels))
    if any(sizes[letter] != size for letter, size in value_sizes.items()):  # an axis of size 1 is repeated
        return None
    return Grouped(
        weight_shape=tuple(weight.shape),
        weight_axes=weight_axes,
        value_shape=tuple(value.shape),
        value_axes=value_axes,
        lead=_picked(sizes, lead),
        rows=_picked(sizes, queries),
        keys=_picked(sizes, keys),
        channels=_picked(sizes, channels),
        out_axes=_permutation(lead + queries + channels, list(result)),
        out_shape=_picked(sizes, result),
    )


def _picked(sizes: Sequence[int] | Mapping[str, int], axes: Sequence[Any]) -> tuple[int, ...]:
    """Return the sizes of some axes, which are given by number or by letter."""
    return tuple(sizes[axis] for axis in axes)


def _permutation(letters: Sequence[str], wanted: Sequence[str]) -> tuple[int, ...]:
    """Return the permutation that brings axes with these letters into the wanted order."""
    return tuple(letters.index(letter) for letter in wanted)
