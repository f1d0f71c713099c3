"""Where a pixel of the photo lies in the model's input and on its token grid, forward and back.

All sizes are `(height, width)`, all points `(y, x)` in continuous pixels: pixel `i` covers `[i, i + 1)`, its center is
`i + 0.5`. The one fact is the *window*: the part of the photo's plane that fills the model's input. It may lie inside the
photo (a crop), reach outside it (padding) or be squashed (its sides scale apart).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from visattn.errors import OptionError, ShapeError

__all__ = ["Box", "Geometry", "affine_corners"]


class Box(NamedTuple):
    """A rectangle `[top, bottom) x [left, right)` in pixels."""

    top: float
    left: float
    bottom: float
    right: float

    @property
    def height(self) -> float:
        """Height in pixels."""
        return self.bottom - self.top

    @property
    def width(self) -> float:
        """Width in pixels."""
        return self.right - self.left

    def intersect(self, other: Box) -> Box:
        """The common part; of zero height or width where there is none."""
        top, left = max(self.top, other.top), max(self.left, other.left)
        return Box(top, left, max(top, min(self.bottom, other.bottom)), max(left, min(self.right, other.right)))


@dataclass(frozen=True)
class Geometry:
    """The map between an upright photo and a model's input.

    Attributes:
        photo: Size of the photo, `(height, width)`.
        input: Size of the model's input, `(height, width)`.
        window: Part of the photo's plane that fills the input, in photo pixels.
        rule: How the window was chosen, in words.
    """

    photo: tuple[int, int]
    input: tuple[int, int]
    window: Box
    rule: str = ""

    def __post_init__(self) -> None:
        """Refuse empty sizes.

        Raises:
            ShapeError: If a side of photo, input or window is not positive.
        """
        if min(*self.photo, *self.input, self.window.height, self.window.width) <= 0:
            raise ShapeError(f"photo, input and window must have positive sides, got {self}. Check the crop.")

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Geometry:
        """The inverse of `dataclasses.asdict`, after a trip through JSON."""
        return cls(tuple(data["photo"]), tuple(data["input"]), Box(*data["window"]), data["rule"])

    @property
    def scale(self) -> tuple[float, float]:
        """Photo pixels per input pixel, `(vertical, horizontal)`."""
        return self.window.height / self.input[0], self.window.width / self.input[1]

    def resized(self, photo: tuple[int, int]) -> Geometry:
        """The geometry of the same photo scaled to another size `(height, width)`."""
        down, across = photo[0] / self.photo[0], photo[1] / self.photo[1]
        top, left, bottom, right = self.window
        return replace(self, photo=photo, window=Box(top * down, left * across, bottom * down, right * across))

    def to_input(self, y: float, x: float) -> tuple[float, float]:
        """The input point that shows the photo's point `(y, x)`; outside the input where the model did not see it."""
        return (y - self.window.top) / self.scale[0], (x - self.window.left) / self.scale[1]

    def to_photo(self, y: float, x: float) -> tuple[float, float]:
        """The photo point that the input's point `(y, x)` shows."""
        return self.window.top + y * self.scale[0], self.window.left + x * self.scale[1]

    def box_to_photo(self, box: Box) -> Box:
        """A box of input pixels as a box of photo pixels; it may reach outside the photo."""
        return Box(*self.to_photo(box.top, box.left), *self.to_photo(box.bottom, box.right))

    def seen(self, box: Box | None = None) -> Box:
        """The photo's whole pixels whose centers the model saw.

        Args:
            box: The input pixels that became tokens; the whole input by default.

        Returns:
            A box of whole photo pixels inside the photo.
        """
        covered = self.box_to_photo(box or Box(0, 0, *self.input))
        height, width = self.photo
        top, left, bottom, right = (math.ceil(side - 0.5 - 1e-9) for side in covered)
        return Box(top, left, bottom, right).intersect(Box(0, 0, height, width))

    def patch_at(self, y: float, x: float, grid: tuple[int, int], box: Box) -> tuple[int, int]:
        """The grid cell `(row, column)` that covers the photo's point `(y, x)`.

        Args:
            y: Photo pixels from the top.
            x: Photo pixels from the left.
            grid: Cells down and across.
            box: The input pixels that the grid covers.

        Returns:
            Row and column of the cell.

        Raises:
            OptionError: If the point lies outside the photo or the model did not see it.
        """
        height, width = self.photo
        if not (0 <= y < height and 0 <= x < width):
            raise OptionError(f"pixel {x:g},{y:g} lies outside the photo of {width} x {height} pixels (X,Y from the top left).")
        y_input, x_input = self.to_input(y, x)
        row = math.floor((y_input - box.top) / box.height * grid[0])
        column = math.floor((x_input - box.left) / box.width * grid[1])
        if not (0 <= row < grid[0] and 0 <= column < grid[1]):
            top, left, bottom, right = self.seen(box)
            raise OptionError(
                f"pixel {x:g},{y:g} was not seen by the model, which saw x {left:g} to {right:g} and y {top:g} to "
                f"{bottom:g}. Choose a pixel inside, or resize='fit' (--resize fit) to show it the whole photo."
            )
        return row, column

    def patch_box(self, row: int, column: int, grid: tuple[int, int], box: Box) -> Box:
        """The photo pixels under one grid cell; the inverse of `patch_at`."""
        height, width = box.height / grid[0], box.width / grid[1]
        top, left = box.top + row * height, box.left + column * width
        return self.box_to_photo(Box(top, left, top + height, left + width))


def affine_corners(theta: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Where an affine transform from [-1, 1] to [-1, 1] takes the corners of its output on its input.

    Args:
        theta: `(2, 3)`, rows for x and y.

    Returns:
        Four `(y, x)`, of which the input covers `[0, 1]`; in the order top left, top right, bottom right, bottom left of the output.
    """
    (a, b, c), (d, e, f) = theta
    return [((d * x + e * y + f + 1) / 2, (a * x + b * y + c + 1) / 2) for x, y in ((-1, -1), (1, -1), (1, 1), (-1, 1))]
