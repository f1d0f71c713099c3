"""Patches of images that come in sequences, with the grid of each image.

The patches of all images are one sequence `(N, channels x pixels)`, or each image has one that is padded: `(B, N, channels x pixels)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from visattn.capturing.trace.tape import Tape

Grid = tuple[int, ...]  # (frames, rows, columns)


def batch_of(shape: Sequence[int]) -> int:
    """Return the size of the batch."""
    return shape[0] if len(shape) == 3 else 1


def packed_size(shape: Sequence[int], grids: Sequence[Grid]) -> tuple[int, int]:
    """Return the height and width in pixels of the first image; each patch has one or two frames of three channels."""
    if len(shape) == 4:
        side = shape[-1]
    else:
        side = next(
            (root for frames in (1, 2) if 3 * frames * (root := math.isqrt(shape[-1] // (3 * frames))) ** 2 == shape[-1]), 1
        )
    return grids[0][1] * side, grids[0][2] * side


def cells_of(tape: Tape) -> Tensor | None:
    """Return the cell of each patch, `(N,)`, in raster order of its image; None if the model does not show it.

    In one sequence the cells of an image come after those of the image before; in padded sequences all images must have the same, and
    padding is -1.

    The grids that the caller gives must agree with the places that the model computes for its position embedding.
    """
    frames, rows, columns = tape.packed[0]
    if any(grid != tape.packed[0] for grid in tape.packed):
        return None
    for positions in tape.positions:
        if positions.ndim == 3:
            found = _in_raster(positions[:, : rows * columns], rows, columns)
            if found is not None and bool((found == found[0]).all()):
                return torch.nn.functional.pad(found[0], (0, positions.shape[1] - rows * columns), value=-1)
            continue
        count = len(tape.packed) * frames
        found = _in_raster(positions.view(count, -1, positions.shape[1]), rows, columns)
        if found is not None:
            return (found + torch.arange(count, device=found.device)[:, None] * (rows * columns)).flatten()
    return None


def _in_raster(positions: Tensor, rows: int, columns: int) -> Tensor | None:
    """Return the cells `(images, N)` at these rows and columns `(images, N, ...)`; None if they are not all cells of a grid, each once."""
    row, column = positions[..., -2], positions[..., -1]
    cell = (row * columns + column).long()
    whole = torch.arange(rows * columns, device=cell.device)
    fits = cell.shape[1] == len(whole) and bool((cell.sort(1).values == whole).all()) and bool((column < columns).all())
    return cell if fits else None
