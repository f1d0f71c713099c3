"""Axes of products that are written as an einsum, or as an elementwise product that is summed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from visattn.core.capturing.trace.product_axes import Axes, Grouped, Permuted


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
