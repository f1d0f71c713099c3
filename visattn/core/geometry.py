"""Coordinates: conversion between photo pixels, input pixels of the model and cells of its token grid.

All sizes are `(height, width)`. All points are `(y, x)` in continuous pixels: pixel `i` covers `[i, i + 1)` and has its center at
`i + 0.5`. Everything follows from the *window*, the part of the photo's plane that fills the model's input. It may lie inside the
photo (a crop), reach outside it (padding) or be squashed (both sides scaled by different factors).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from visattn._support.language import option
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
        """Return the intersection of two boxes; its height or width is 0 if they do not overlap."""
        top, left = max(self.top, other.top), max(self.left, other.left)
        return Box(top, left, max(top, min(self.bottom, other.bottom)), max(left, min(self.right, other.right)))


@dataclass(frozen=True)
class Geometry:
    """Mapping between an upright photo and a model's input.

    Attributes:
        photo: Size of the photo, `(height, width)`.
        input: Size of the model's input, `(height, width)`.
        window: Part of the photo's plane that fills the input, in photo pixels.
        rule: Description of how the window was chosen.
    """

    photo: tuple[int, int]
    input: tuple[int, int]
    window: Box
    rule: str = ""

    def __post_init__(self) -> None:
        """Check that no size is empty.

        Raises:
            ShapeError: If a side of photo, input or window is not positive.
        """
        if min(*self.photo, *self.input, self.window.height, self.window.width) <= 0:
            raise ShapeError(f"sides of photo, input and window must be positive, got {self}. Check the crop.")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Geometry:
        """Build a geometry from the dictionary of `dataclasses.asdict`, which may have been stored as JSON."""
        return cls(tuple(data["photo"]), tuple(data["input"]), Box(*data["window"]), data["rule"])

    @property
    def share(self) -> float:
        """Share of the photo that the model received."""
        top, left, bottom, right = self.window
        height = min(bottom, self.photo[0]) - max(top, 0)
        width = min(right, self.photo[1]) - max(left, 0)
        return max(height, 0) * max(width, 0) / (self.photo[0] * self.photo[1])

    @property
    def scale(self) -> tuple[float, float]:
        """Photo pixels per input pixel, `(vertical, horizontal)`."""
        return self.window.height / self.input[0], self.window.width / self.input[1]

    def resized(self, photo: tuple[int, int]) -> Geometry:
        """Return the geometry for the same photo scaled to another size `(height, width)`."""
        down, across = photo[0] / self.photo[0], photo[1] / self.photo[1]
        top, left, bottom, right = self.window
        return replace(self, photo=photo, window=Box(top * down, left * across, bottom * down, right * across))

    def to_input(self, y: float, x: float) -> tuple[float, float]:
        """Convert a photo point `(y, x)` to input pixels; the result lies outside the input if the model does not receive it."""
        return (y - self.window.top) / self.scale[0], (x - self.window.left) / self.scale[1]

    def to_photo(self, y: float, x: float) -> tuple[float, float]:
        """Convert an input point `(y, x)` to photo pixels."""
        return self.window.top + y * self.scale[0], self.window.left + x * self.scale[1]

    def box_to_photo(self, box: Box) -> Box:
        """Convert a box from input pixels to photo pixels; it may reach outside the photo."""
        return Box(*self.to_photo(box.top, box.left), *self.to_photo(box.bottom, box.right))

    def seen(self, box: Box | None = None) -> Box:
        """Return the photo pixels that the model received, counting a pixel by its center.

        Args:
            box: Input pixels that became tokens; the whole input by default.

        Returns:
            A box of whole photo pixels inside the photo.
        """
        covered = self.box_to_photo(box or Box(0, 0, *self.input))
        height, width = self.photo
        top, left, bottom, right = (math.ceil(side - 0.5 - 1e-9) for side in covered)
        return Box(top, left, bottom, right).intersect(Box(0, 0, height, width))

    def patch_at(self, y: float, x: float, grid: tuple[int, int], box: Box) -> tuple[int, int]:
        """Return the grid cell `(row, column)` that covers a photo point `(y, x)`.

        Args:
            y: Photo pixels from the top.
            x: Photo pixels from the left.
            grid: Number of rows and columns.
            box: Input pixels that the grid covers.

        Returns:
            Row and column of the cell.

        Raises:
            OptionError: If the point lies outside the photo or outside the part that the model received.
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
                f"pixel {x:g},{y:g} was cropped away: the model received x {left:g} to {right:g} and y {top:g} to "
                f"{bottom:g}. Choose a pixel inside, or pass the whole photo with {option('resize', 'fit')}."
            )
        return row, column

    def patch_box(self, row: int, column: int, grid: tuple[int, int], box: Box) -> Box:
        """Return the box of photo pixels under a grid cell; the inverse of `patch_at`."""
        height, width = box.height / grid[0], box.width / grid[1]
        top, left = box.top + row * height, box.left + column * width
        return self.box_to_photo(Box(top, left, top + height, left + width))


def affine_corners(theta: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Return the input points from which an affine transform samples the corners of its output.

    Args:
        theta: `(2, 3)` affine matrix in coordinates from -1 to 1, with rows for x and y, as in `torch.nn.functional.affine_grid`.

    Returns:
        Four points `(y, x)`, in which the input covers `[0, 1]`. They are the top left, top right, bottom right and bottom left
        corner of the output.
    """
    (a, b, c), (d, e, f) = theta
    return [((d * x + e * y + f + 1) / 2, (a * x + b * y + c + 1) / 2) for x, y in ((-1, -1), (1, -1), (1, 1), (-1, 1))]
