"""Drawing of scenes: backgrounds, objects that do not overlap, and marks. Random numbers are drawn in a fixed order."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi, sin

import numpy as np
from numpy.typing import NDArray

from visattn.data.scenes.outlines import AREAS, DISTRACTORS, LABELS

COLORS = {
    "red": (222, 44, 44),
    "orange": (240, 140, 30),
    "yellow": (235, 220, 50),
    "green": (50, 170, 60),
    "cyan": (60, 200, 215),
    "blue": (50, 80, 220),
    "purple": (150, 60, 200),
    "pink": (245, 130, 190),
}
TEXTURES = ("plain", "striped", "dotted", "checked")
MARK_SIDE = 0.14  # side of the watermark, as a fraction of sqrt(height * width)

_AREA = 0.0235, 0.0775  # fraction of the image that one object covers; after rounding to pixels it stays within 2 % to 8 %
_TOTAL = 0.165  # largest mean total area of all objects, so that they fit
_REACH = max(area**-0.5 for area in AREAS.values())  # radius of a circle that holds an object of area 1 of any shape
_TRIES = 100  # random locations to try before the whole scene is arranged again
_FINE = 3  # supersampling: samples per pixel along each side
_CODES = (0b010111010, 0b101010101, 0b110110000, 0b111101111, 0b100010001, 0b001011111)  # 3 x 3 cells of each class's watermark


@dataclass(frozen=True)
class SceneObject:
    """One object of a scene.

    `center` is `(y, x)` as fractions of height and width, `area` the fraction of the image that the object covers, `angle` in radians.
    """

    shape: str
    color: str
    texture: str
    center: tuple[float, float]
    area: float
    angle: float

    @property
    def place(self) -> str:
        """Location in words, by thirds of the image: `top left`, `left`, `center`, ..."""
        row, column = (min(int(3 * at), 2) for at in self.center)
        words = ("top", "", "bottom")[row], ("left", "", "right")[column]
        return " ".join(filter(None, words)) or "center"

    @property
    def phrase(self) -> str:
        """Description in a caption: `a red star top left`, `an orange disk center`."""
        return f"{'an' if self.color[0] in 'aeiou' else 'a'} {self.color} {self.shape} {self.place}"


def background(random: np.random.RandomState, size: tuple[int, int]) -> NDArray[np.float64]:
    """Draw a background of muted waves in random directions, a tint and grain: `(H, W, 3)`, 0 to 255."""
    y, x = grid_of(size)
    picture = np.zeros((*size, 3)) + 118 + 36 * (random.random_sample(3) - 0.5)
    for _ in range(4):
        angle, phase, cycles, strength = random.random_sample(4)
        wave = np.cos(2 * pi * ((1 + 9 * cycles) * (x * cos(pi * angle) + y * sin(pi * angle)) + phase))
        picture += wave[..., None] * (6 + 10 * strength) * (0.6 + 0.4 * random.random_sample(3))
    return picture + 22 * (random.random_sample((*size, 3)) - 0.5)


def arranged(
    random: np.random.RandomState, count: int, size: tuple[int, int], corner: int
) -> list[tuple[tuple[float, float], float, float]]:
    """Draw center, area and angle of each thing, without overlap of things, mark or border for any shape.

    All things are drawn from the same distribution and then shuffled, so the target's size and location reveal nothing.
    """
    unit = unit_of(size)
    sides = size[0] / unit, size[1] / unit
    box_y, box_x = mark_box(size, corner)
    mark = (box_y.start + box_y.stop) / 2 / unit, (box_x.start + box_x.stop) / 2 / unit, MARK_SIDE * 0.75
    smallest, largest = _AREA
    widest = min(largest, 2 * _TOTAL / count - smallest)
    placed: list[tuple[float, float, float]] = []
    while len(placed) < count:  # start over if one does not fit
        areas = sorted(
            smallest + (widest - smallest) * random.random_sample(count), reverse=True
        )  # the largest first: it is the hardest to place
        placed = []
        for area in areas:
            radius = _REACH * area**0.5 + 0.5 / unit
            tried = np.array([radius + (side - 2 * radius) * random.random_sample(_TRIES) for side in sides])
            free = np.ones(_TRIES, bool)
            for y, x, taken in (mark, *placed):
                free &= (tried[0] - y) ** 2 + (tried[1] - x) ** 2 >= (radius + taken) ** 2
            if 2 * radius > min(sides) or not free.any():
                break
            placed.append((*map(float, tried[:, free.argmax()]), radius))
    order = random.permutation(count)
    angles = 2 * pi * random.random_sample(count)
    return [((placed[i][0] / sides[0], placed[i][1] / sides[1]), areas[i], float(angles[i])) for i in order]


def draw(random: np.random.RandomState, image: NDArray[np.float64], mask: NDArray[np.bool_], thing: SceneObject) -> None:
    """Blend a thing into the image in proportion to the part of each pixel it covers, and fill its mask."""
    size = mask.shape
    unit = unit_of((size[0], size[1]))
    radius = (thing.area / AREAS[thing.shape]) ** 0.5 * unit
    center = thing.center[0] * size[0], thing.center[1] * size[1]
    window = tuple(
        slice(max(int(at - radius) - 1, 0), min(int(at + radius) + 2, side)) for at, side in zip(center, size, strict=True)
    )
    fine = [(np.arange(part.start * _FINE, part.stop * _FINE) + 0.5) / _FINE for part in window]
    dy, dx = (fine[0] - center[0])[:, None] / radius, (fine[1] - center[1])[None] / radius
    x, y = dx * cos(thing.angle) + dy * sin(thing.angle), dy * cos(thing.angle) - dx * sin(thing.angle)
    inside = (LABELS | DISTRACTORS)[thing.shape](x, y)
    base = np.array(COLORS[thing.color]) + 30 * (random.random_sample(3) - 0.5)
    light = _light(thing.texture, x * radius / unit, y * radius / unit)
    rows, columns = (part.stop - part.start for part in window)
    pixels = (rows, _FINE, columns, _FINE)
    covered = inside.reshape(pixels).mean((1, 3))
    shade = (inside * light).reshape(pixels).mean((1, 3))  # light times coverage, averaged per pixel
    image[window] = image[window] * (1 - covered[..., None]) + base * shade[..., None]
    mask[window] = covered >= 0.5


def _light(texture: str, x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the brightness factor at each point: 1, less in the dark parts of a texture. Coordinates are in multiples of `unit_of`."""
    u, v = 20 * x, 20 * y  # a period of 1
    dark = np.zeros(x.shape, bool)
    if texture == "striped":
        dark = u % 1 < 0.5
    elif texture == "dotted":
        dark = (u % 1 - 0.5) ** 2 + (v % 1 - 0.5) ** 2 < 0.1
    elif texture == "checked":
        dark = (u % 1 < 0.5) ^ (v % 1 < 0.5)
    return np.where(dark, 0.55, 1.0)


def mark_box(size: tuple[int, int], corner: int) -> tuple[slice, slice]:
    """Return rows and columns of the watermark in a corner: 0 and 1 are at the top, 0 and 2 on the left."""
    side, gap = round(MARK_SIDE * unit_of(size)), 1
    ends = [
        (gap, gap + side) if first else (whole - gap - side, whole - gap)
        for whole, first in zip(size, (corner < 2, corner % 2 == 0), strict=True)
    ]
    return slice(*ends[0]), slice(*ends[1])


def stamp(image: NDArray[np.float64], where: tuple[slice, slice], label: int) -> None:
    """Draw the black and white cells of a class's watermark."""
    side = where[0].stop - where[0].start
    cell = 3 * np.arange(side) // side
    bits = np.array([_CODES[label] >> bit & 1 for bit in range(9)]).reshape(3, 3)
    image[where] = 255.0 * bits[cell[:, None], cell[None]][..., None]


def grid_of(size: tuple[int, int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return rows and columns of pixel centers, in multiples of `unit_of`."""
    unit = unit_of(size)
    y, x = (np.arange(side, dtype=np.float64) + 0.5 for side in size)
    return (y / unit)[:, None], (x / unit)[None]


def unit_of(size: tuple[int, int]) -> float:
    """Return the side in pixels of a square with the area of the image, so that areas become fractions of the image."""
    return float((size[0] * size[1]) ** 0.5)


def to_bytes(picture: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Round a picture to the values of a file."""
    return np.clip(np.rint(picture), 0, 255).astype(np.uint8)
