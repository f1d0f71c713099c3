"""Layout of a token sequence: where each token lies in the model's input."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from visattn._support.reprs import brief
from visattn.core.geometry import Box
from visattn.errors import OptionError

__all__ = ["WORDS"]

WORDS = "words"  # name of a token set: the tokens of a text


@dataclass(frozen=True)
class TokenLayout:
    """Layout of a token sequence: first the named prefix tokens, then the grid tokens in raster order.

    Attributes:
        space: Name of the token set; `unknown` if the tokens could not be located, `apart` if they do not depend on the image either. Two
            layouts of one model describe the same set only if they are equal.
        prefix: Names of the tokens before the grid: `cls`, `distillation`, `register0`, `query0`.
        grid: `()`, `(rows, columns)` or `(frames, rows, columns)`.
        box: The input pixels that the grid covers.
        holes: Grid cells whose token the model dropped, as indices in raster order.
    """

    space: str
    prefix: tuple[str, ...]
    grid: tuple[int, ...]
    box: Box
    holes: tuple[int, ...] = ()

    __repr__ = brief

    @property
    def cells(self) -> int:
        """Number of grid tokens."""
        return (math.prod(self.grid) if self.grid else 0) - len(self.holes)

    @cached_property
    def present(self) -> tuple[int, ...]:
        """Cell of each grid token, as an index in raster order."""
        dropped = set(self.holes)
        return tuple(cell for cell in range(self.cells + len(self.holes)) if cell not in dropped)

    @cached_property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.prefix) + self.cells

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self.tokens

    def on_grid(self, values: Tensor) -> Tensor:
        """Reshape values of the grid tokens from `(..., cells)` to `(..., *grid)`; holes become NaN."""
        lead = values.shape[:-1]
        if not self.holes:
            return values.reshape(*lead, *self.grid)
        whole = values.new_full((*lead, math.prod(self.grid)), math.nan)
        whole[..., list(self.present)] = values
        return whole.view(*lead, *self.grid)

    def on_input(self, boxes: Tensor) -> Tensor:
        """Convert boxes `(..., 4)` (top, left, bottom, right) from cells of the grid to pixels of the model's input, in float64."""
        (top, left), (rows, columns) = self.box[:2], self.grid
        boxes = boxes.to("cpu", torch.float64)
        scale = boxes.new_tensor([self.box.height / rows, self.box.width / columns] * 2)
        return boxes * scale + boxes.new_tensor([top, left] * 2)

    def patch(self, row: int, column: int) -> int:
        """Return the index of the token of a grid cell.

        Raises:
            OptionError: If the cell lies outside the grid or the model dropped its token.
        """
        if len(self.grid) != 2 or not (0 <= row < self.grid[0] and 0 <= column < self.grid[1]):
            raise OptionError(
                f"patch {row},{column} lies outside the grid of {' x '.join(map(str, self.grid))} (ROW,COL from 0)."
            )
        cell = row * self.grid[1] + column
        before = bisect_left(self.holes, cell)
        if cell in self.holes[before : before + 1]:
            raise OptionError(f"patch {row},{column} is a hole: the model dropped its token. Choose another.")
        return len(self.prefix) + cell - before

    def token_at(self, y: float, x: float) -> int:
        """Return the index of the token whose grid cell covers a pixel of the model's input.

        Raises:
            OptionError: If no token covers the pixel.
        """
        rows, columns = self.grid if len(self.grid) == 2 else (0, 0)
        row, column = (y - self.box.top) / self.box.height * rows, (x - self.box.left) / self.box.width * columns
        if not (0 <= row < rows and 0 <= column < columns):
            raise OptionError(f"no token covers the input pixel {y:g},{x:g}; the grid covers {tuple(self.box)}.")
        return self.patch(int(row), int(column))

    def cell(self, token: int) -> tuple[int, int] | None:
        """Return the row and column of a grid token of an image, or None for a prefix token."""
        index = token - len(self.prefix)
        return None if index < 0 else divmod(self.present[index], self.grid[-1])
