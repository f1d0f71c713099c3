"""Numbers of the copies of one image: copies are passes over it, never heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from visattn.core.capturing.tokens.codes import same_along
from visattn.core.capturing.tokens.planes import compact


def numbered(copies: Tensor | None, shape: Sequence[int], axes: Sequence[int], device: torch.device) -> Tensor:
    """Return the number of the copy for each element of a tensor that repeats its source along `axes`.

    `copies` has the numbers of copies that were made before, if any. Copies of copies get numbers of their own.
    """
    number = torch.zeros((), dtype=torch.int32, device=device).expand(*shape) if copies is None else copies
    for axis in axes:
        count = shape[axis]
        broadcastable = [1] * len(shape)
        broadcastable[axis] = count
        along_axis = torch.arange(count, dtype=torch.int32, device=device).view(broadcastable)
        number = compact(number) * count + along_axis
    return number.expand(*shape)


def occurrences(numbers: Tensor) -> Tensor:
    """Return, for each number, how many equal ones come before it: `[5, 7, 5, 5]` gives `[0, 0, 1, 2]`."""
    flat_numbers = numbers.flatten()
    order = flat_numbers.argsort(stable=True)
    ordered = flat_numbers[order]
    begins_run = torch.ones_like(ordered, dtype=torch.bool)
    begins_run[1:] = ordered[1:] != ordered[:-1]
    index = torch.arange(len(ordered), device=ordered.device)
    run_start = index.where(begins_run, 0).cummax(0).values
    earlier_equals = index - run_start
    return torch.zeros_like(index).scatter(0, order, earlier_equals).view(numbers.shape).to(torch.int32)


def copies_behind(copies: Tensor | None, axes: Sequence[int], shape: Sequence[int]) -> Tensor | None:
    """Return the copy numbers (which of several copies of one image) behind an operation that changes the elements of some axes.

    None if the image was not copied, or if copies are merged.
    """
    if copies is None or not all(same_along(copies, axis) for axis in axes):
        return None
    for axis in axes:
        copies = copies.narrow(axis, 0, 1)
    return copies.expand(*shape)
