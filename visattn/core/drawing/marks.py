"""Marks drawn on pictures: outlines, rings, windows, boxes, glimpses. Lines have a dark edge, so they are visible on any photo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from visattn._support.opencv import cv2
from visattn.core.drawing.pictures import carried, carrying
from visattn.core.geometry import Box
from visattn.core.images.sources import as_image
from visattn.core.maps import Heatmap
from visattn.errors import ShapeError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["spotlight"]

WHITE, _BLACK = (255, 255, 255), (0, 0, 0)
_MARK = (0, 230, 255)  # cyan, which differs from the warm colors of inferno
_FAINT = 0.4  # opacity of coarse glimpse boxes
_LEGIBLE = 9  # smallest readable digit in pixels
_SHIFT = 4  # fractional bits of OpenCV's pixel coordinates


def outline(picture: Image.Image, mask: Heatmap | NDArray[np.bool_], *, smallest: int = 3) -> Image.Image:
    """Draw the border of a mask as a white line with a dark edge, which is visible on any photo.

    Args:
        picture: RGB picture.
        mask: `(height, width)` booleans, or a heatmap whose values are at least 0.5 inside the mask.
        smallest: Number of patches of the smallest region that is outlined, and of the smallest gap in one; for heatmaps only. If all
            regions are smaller, all are outlined.

    Returns:
        A new picture.

    Raises:
        ShapeError: If the mask and the picture differ in size.
    """
    inside = mask.values >= 0.5 if isinstance(mask, Heatmap) else np.asarray(mask, bool)
    if inside.shape != picture.size[::-1]:
        raise ShapeError(f"a mask must be (height, width) = {picture.size[::-1]} like the picture, got {inside.shape}.")
    if isinstance(mask, Heatmap):
        patch = mask.seen.height * mask.seen.width / mask.grid.size
        inside = ~_without_specks(~_without_specks(inside, smallest * patch), smallest * patch)
    lines, _ = cv2.findContours(inside.astype(np.uint8), cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)
    array = np.array(picture)
    width = _stroke(picture)
    cv2.drawContours(array, lines, -1, _BLACK, 3 * width, cv2.LINE_AA)
    cv2.drawContours(array, lines, -1, WHITE, width, cv2.LINE_AA)
    seen = mask.seen if isinstance(mask, Heatmap) else Box(0, 0, picture.height, picture.width)
    return carried(inside_only(seen, Image.fromarray(array), picture), picture)


def spotlight(photo: Any, mask: Heatmap | NDArray[np.bool_]) -> Image.Image:  # noqa: ANN401
    """Draw the photo darkened and gray outside a mask, with the mask's border.

    Args:
        photo: The photo: a PIL image, or any array that `visattn.overlay` accepts.
        mask: See `outline`.

    Returns:
        A new picture of the photo's size.

    Raises:
        ShapeError: If the mask and the photo differ in size.
    """
    picture = as_image(photo)
    gray = np.asarray(picture.convert("L").convert("RGB"))
    framed = outline(Image.fromarray((gray * 0.3).astype(np.uint8)), mask)  # also checks the size
    inside = mask.values >= 0.5 if isinstance(mask, Heatmap) else np.asarray(mask, bool)
    core = cv2.erode(inside.astype(np.uint8), np.ones((3, 3), np.uint8), iterations=_stroke(picture)) > 0
    lit = Image.fromarray(np.where(core[..., None], np.asarray(picture), np.asarray(framed)))
    return carrying(lit, mask.provenance) if isinstance(mask, Heatmap) else lit


def ring(picture: Image.Image, points: Sequence[tuple[float, float]], color: tuple[int, int, int] = _MARK) -> Image.Image:
    """Draw a ring around each point `(y, x)` of a picture; attention sinks are marked this way."""
    if not points:
        return picture
    array = np.array(picture)
    width = _stroke(picture)
    radius = max(4, round(_size(picture) / 60))
    for y, x in points:
        cv2.circle(array, (int(x), int(y)), radius, _BLACK, 3 * width, cv2.LINE_AA)
        cv2.circle(array, (int(x), int(y)), radius, color, width, cv2.LINE_AA)
    return carried(Image.fromarray(array), picture)


def draw_window(picture: Image.Image, corners: Sequence[tuple[float, float]]) -> Image.Image:
    """Draw a quadrilateral of points `(y, x)` with a dot at the first, which shows its orientation. It may extend beyond the picture."""
    array = np.array(picture)
    width = _stroke(picture)
    points = np.asarray([(x, y) for y, x in corners], float).round().astype(np.int32)
    for color, thick in ((_BLACK, 3 * width), (WHITE, width)):
        cv2.polylines(array, [points], True, color, thick, cv2.LINE_AA)
        cv2.circle(array, points[0].tolist(), 2 * width + thick, color, -1, cv2.LINE_AA)
    return carried(Image.fromarray(array), picture)


def draw_box(
    picture: Image.Image, box: Box, label: str = "", seen: Box | None = None, color: tuple[int, int, int] = WHITE
) -> Image.Image:
    """Draw a box in pixels of the picture with a label at its upper left corner.

    Args:
        picture: RGB picture.
        box: The box, which may extend beyond the picture.
        label: Text; none if empty.
        seen: Box to draw in; the whole picture by default.
        color: Red, green and blue of the line, 0 to 255; its edges are black.

    Returns:
        A new picture.
    """
    seen = seen or Box(0, 0, picture.height, picture.width)
    array, width = np.array(picture), _stroke(picture)
    for paint, thick in ((_BLACK, 3 * width), (color, width)):
        cv2.rectangle(array, *_corners(box), paint, thick)
    drawn = Image.fromarray(array)
    if label:
        draw, font = ImageDraw.Draw(drawn), ImageFont.load_default(max(12, _size(picture) // 40))
        left, top = max(box.left, seen.left) + 2 * width, max(box.top, seen.top) + 2 * width
        draw.text((left, top), label, WHITE, font, anchor="lt", stroke_width=2 * width, stroke_fill=_BLACK)
    return carried(inside_only(seen, drawn, picture), picture)


def draw_glimpses(picture: Image.Image, glimpses: Sequence[Sequence[Box]], seen: Box | None = None) -> Image.Image:
    """Draw glimpses in order: a box for each patch, lines from center to center, and numbers from 1.

    A box is drawn along the outermost pixels whose centers it contains. If the finest patch is too small for a number, a dot is drawn.

    Args:
        picture: RGB picture.
        glimpses: For each glimpse the boxes of its patches in pixels of the picture, the finest first; coarser boxes are faint. Boxes
            may extend beyond the picture.
        seen: Box to draw in; the whole picture by default.

    Returns:
        A new picture.
    """
    seen = seen or Box(0, 0, picture.height, picture.width)
    if not glimpses or min(seen.height, seen.width) < 1:
        return picture.copy()
    width = _stroke(picture)
    before = np.array(picture)
    behind = before.copy()
    for _, *coarse in glimpses:
        for box in coarse:
            cv2.rectangle(behind, *_corners(box), WHITE, width)
    array = cv2.addWeighted(behind, _FAINT, before, 1 - _FAINT, 0)
    finest = [boxes[0] for boxes in glimpses]
    points = [((box.left + box.right) / 2, (box.top + box.bottom) / 2) for box in finest]
    line = ((np.array([points]) - 0.5) * 2**_SHIFT).round().astype(np.int32)  # OpenCV's integer points are pixel centers
    for color, thick in ((_BLACK, 3 * width), (WHITE, width)):
        for box in finest:
            cv2.rectangle(array, *_corners(box), color, thick)
        cv2.polylines(array, line, False, _BLACK if color == _BLACK else _MARK, thick, cv2.LINE_AA, _SHIFT)
    digit = min(max(12, _size(picture) // 30), int(min(min(box.height, box.width) for box in finest) / 3))
    radius = round(0.8 * digit) if digit >= _LEGIBLE else width
    drawn = Image.fromarray(array)
    draw = ImageDraw.Draw(drawn)
    for number, (x, y) in enumerate(points, start=1):
        x = min(max(x, seen.left + radius), max(seen.right - 1 - radius, seen.left))
        y = min(max(y, seen.top + radius), max(seen.bottom - 1 - radius, seen.top))
        draw.circle((int(x), int(y)), radius, _MARK, _BLACK)
        if digit >= _LEGIBLE:
            draw.text((int(x), int(y)), str(number), _BLACK, ImageFont.load_default(digit), anchor="mm")
    return carried(inside_only(seen, drawn, picture), picture)


def inside_only(seen: Box, drawn: Image.Image, before: Image.Image) -> Image.Image:
    """Restore `before` outside the model's input box, since wide lines would cross its edge."""
    if seen == Box(0, 0, before.height, before.width):
        return drawn
    corner = int(seen.left), int(seen.top)
    whole = before.copy()
    whole.paste(drawn.crop((*corner, int(seen.right), int(seen.bottom))), corner)
    return whole


def _without_specks(inside: NDArray[np.bool_], pixels: float) -> NDArray[np.bool_]:
    """Return a mask without its connected regions of fewer pixels; unchanged if all are smaller."""
    _, labels, facts, _ = cv2.connectedComponentsWithStats(inside.astype(np.uint8), connectivity=4)
    kept = facts[:, cv2.CC_STAT_AREA] >= 0.9 * pixels  # patches at the border of the photo may be cut
    kept[0] = False
    return kept[labels] if kept.any() else inside


def _corners(box: Box) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the first and the last pixel (x, y) whose centers lie in a box."""
    top, left, bottom, right = (int(np.ceil(side - 0.5)) for side in box)
    return (left, top), (right - 1, bottom - 1)


def _stroke(picture: Image.Image) -> int:
    return max(1, round(_size(picture) / 500))


def _size(picture: Image.Image) -> int:
    """Return the side by which marks grow: the long one, up to one and a half of the short one, so that they fit a panorama."""
    return min(max(picture.size), min(picture.size) * 3 // 2)
