"""Patches of images that come in one sequence, `(N, channels x pixels)`, with the grid of each image."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from visattn.capturing.trace.tape import Tape

Grid = tuple[int, ...]  # (frames, rows, columns)


def packed_size(shape: Sequence[int], grids: Sequence[Grid]) -> tuple[int, int]:
    """Return the height and width in pixels of the first image; each patch has one or two frames of three channels."""
    if len(shape) == 4:
        side = shape[-1]
    else:
        side = next(
            (root for frames in (1, 2) if 3 * frames * (root := math.isqrt(shape[1] // (3 * frames))) ** 2 == shape[1]), 1
        )
    return grids[0][1] * side, grids[0][2] * side


def cells_of(tape: Tape) -> Tensor | None:
    """Return the cell of each patch, `(N,)`, in raster order of its image, image by image; None if the model does not show it.

    The grids that the caller gives must agree with the places that the model computes for its position embedding.
    """
    frames, rows, columns = tape.packed[0]
    if any(grid != tape.packed[0] for grid in tape.packed):
        return None
    count = len(tape.packed) * frames
    for positions in tape.positions:
        row, column = positions[:, -2].view(count, -1), positions[:, -1].view(count, -1)
        cell = row * columns + column
        whole = torch.arange(rows * columns, device=cell.device)
        if bool((cell.sort(1).values == whole).all()) and bool((column < columns).all()):
            return (cell + torch.arange(count, device=cell.device)[:, None] * (rows * columns)).flatten()
    return None
