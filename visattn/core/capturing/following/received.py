"""Images that a model receives, and the places of their pixels: single images, clips, and patches that come in sequences.

The patches of all images are one sequence `(N, channels x pixels)`, or each image has one that is padded,
`(B, N, channels x pixels)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from visattn.core.capturing.placing.places import Places, whole
from visattn.core.capturing.tokens.planes import PADDING, Planes
from visattn.core.capturing.trace.call_tensors import lead_of
from visattn.core.capturing.trace.tape import Tape

Grid = tuple[int, ...]  # (frames, rows, columns)


class Images:
    """Images that a forward pass received.

    Attributes:
        planes: Planes of the forward pass.
        given: Whether there are any.
    """

    def __init__(self, tape: Tape) -> None:
        """Find the images among the tensors of a tape."""
        images = ((slot, outside) for slot, outside in tape.outside.items() if outside.kind == "pixels")
        slot, pixels = next(images, (-1, None))
        self.given, self._tape = pixels is not None, tape
        shape = (1, 1, 1, 1) if pixels is None else pixels.shape
        if tape.packed:  # the patches of all images in sequences
            batch, grids = batch_of(shape), sum(grid[0] for grid in tape.packed)
            size, self._colors = packed_size(shape, tape.packed), 1
            frames = grids if batch == 1 and grids > 1 else 0
        else:
            users = (entry.operation.name for entry in tape.entries if any(ref.slot == slot for ref in entry.refs))
            self._colors = color_axis(shape, next(users, ""))
            batch, size = int(shape[0]), (int(shape[-2]), int(shape[-1]))
            frames = int(shape[3 - self._colors]) if len(shape) == 5 else 0
        self.planes = Planes(batch, size, tape.device, frames)

    def places(self, shape: torch.Size) -> Places:
        """Return where the numbers of the model's input lie in the image: each pixel is a cell, for all of its colors.

        The input has the shape `(B, C, H, W)`, or for clips `(B, T, C, H, W)` or `(B, C, T, H, W)`, or it holds packed patches.
        """
        planes = self.planes
        if self._tape.packed:
            return self._of_patches(shape)
        plane = planes.grid(int(planes.input.height), int(planes.input.width), planes.input, max(planes.frames, 1))
        return Places("placed", planes.codes(plane).unsqueeze(self._colors).expand(shape))

    def _of_patches(self, shape: torch.Size) -> Places:
        """Return where patches lie that the model receives in one sequence `(N, ...)`, or in one for each image `(B, N, ...)`."""
        planes, (_, rows, columns) = self.planes, self._tape.packed[0]
        if len(set(self._tape.packed)) > 1:
            return whole("lost", shape, planes.device, "packed patches of images with different grids")
        cells = cells_of(self._tape)
        if cells is None:
            return whole("lost", shape, planes.device, "packed patches whose places the model does not compute")
        plane = planes.grid(rows, columns, planes.input, max(planes.frames, 1))
        first_codes = plane.base + torch.arange(planes.images, device=cells.device)[:, None] * plane.cells  # of each image
        codes = torch.where(cells < 0, PADDING, first_codes + cells).to(torch.int32)
        lead = lead_of(shape)
        return Places("placed", codes.view(*lead, *(1,) * (len(shape) - len(lead))).expand(shape))


def color_axis(shape: Sequence[int], first: str = "") -> int:
    """Return the channel axis of images `(B, C, H, W)`, or of clips: the second or third, whichever has 3 entries, else 1.

    If both qualify, it is the third, unless the `first` operation on the clip is a convolution over time, which has channels
    second.
    """
    if len(shape) < 5:
        return 1
    _, second, third, *_ = shape
    if second == 3 and third != 3:
        return 1
    if second == third and first == "conv3d":
        return 1
    return 2 if third == 3 or second != 1 else 1


def batch_of(shape: Sequence[int]) -> int:
    """Return the size of the batch."""
    return shape[0] if len(shape) == 3 else 1


def packed_size(shape: Sequence[int], grids: Sequence[Grid]) -> tuple[int, int]:
    """Return the height and width in pixels of the first image; each patch has one or two frames of three channels."""
    if len(shape) == 4:
        side = shape[-1]
    else:
        numbers, side = shape[-1], 1
        for channels in (3, 6):  # of one or two frames
            root = math.isqrt(numbers // channels)
            if channels * root**2 == numbers:
                side = root
                break
    rows, columns = grids[0][1], grids[0][2]
    return rows * side, columns * side


def cells_of(tape: Tape) -> Tensor | None:
    """Return the cell of each patch, `(N,)`, in raster order of its image; None if the model does not show it.

    In one sequence the cells of an image come after those of the image before; in padded sequences all images must have the same,
    and padding is -1.

    The grids that the caller gives must agree with the places that the model computes for its position embedding.
    """
    frames, rows, columns = tape.packed[0]
    if any(grid != tape.packed[0] for grid in tape.packed):
        return None
    patches = rows * columns
    for positions in tape.positions:
        if positions.ndim == 3:  # a padded sequence for each image
            cells = _in_raster(positions[:, :patches], rows, columns)
            if cells is not None and bool((cells == cells[0]).all()):
                return torch.nn.functional.pad(cells[0], (0, positions.shape[1] - patches), value=-1)
            continue
        count = len(tape.packed) * frames
        cells = _in_raster(positions.view(count, -1, positions.shape[1]), rows, columns)
        if cells is not None:
            cells_before = torch.arange(count, device=cells.device)[:, None] * patches
            return (cells + cells_before).flatten()
    return None


def _in_raster(positions: Tensor, rows: int, columns: int) -> Tensor | None:
    """Return the cells `(images, N)` at these rows and columns `(images, N, ...)`; None unless they are all cells, each once."""
    row, column = positions[..., -2], positions[..., -1]
    cells = (row * columns + column).long()
    every_cell = torch.arange(rows * columns, device=cells.device)
    if cells.shape[1] != len(every_cell):
        return None
    is_each_once = bool((cells.sort(1).values == every_cell).all())
    return cells if is_each_once and bool((column < columns).all()) else None
