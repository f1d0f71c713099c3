"""Generated scenes with known ground truth: the object that decides the label, its location, and everything that must not matter.

A scene shows a textured background, one object of a *label shape*, and three to six *distractors* of other shapes. Color, texture, size,
location and angle are drawn independently of the label. The shape of one object is therefore all there is to learn, and the mask of that
object is where a model should look. With `watermark="label"`, a small black and white mark predicts the label too. On this *shortcut*
variant a model may rely on the wrong thing and still be right. For the same seed and index, scenes differ only in the pixels of the mark.

A scene depends only on the version, the seed and the index; numpy guarantees that the stream of `RandomState` never changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import cos, pi, sin
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import Dataset

from visattn._support.checks import one_of
from visattn._support.files import building_folder
from visattn._support.reprs import brief
from visattn.data.scenes.shapes import AREAS, DISTRACTORS, LABELS
from visattn.errors import OptionError

VERSION = 1
CLASSES = tuple(LABELS)
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
GROUND, WATERMARK = 0, 255  # values in written masks; the target is 1, distractors follow

_AREA = 0.0235, 0.0775  # fraction of the image that one object covers; after rounding to pixels it stays within 2 % to 8 %
_TOTAL = 0.165  # largest mean total area of all objects, so that they fit
_REACH = max(area**-0.5 for area in AREAS.values())  # radius of a circle that holds an object of area 1 of any shape
_TRIES = 100  # random locations to try before the whole scene is arranged again
_FINE = 3  # supersampling: samples per pixel along each side
_CODES = (0b010111010, 0b101010101, 0b110110000, 0b111101111, 0b100010001, 0b001011111)  # 3 x 3 cells of each class's watermark

NEW = frozenset(  # held-out pairs of color and shape, an eighth of all pairs; `pairs="known"` excludes them
    (list(COLORS)[3 * number % len(COLORS)], shape) for number, shape in enumerate((*LABELS, *DISTRACTORS))
)

Mark = Literal["none", "label", "random"]
Pairs = Literal["all", "known", "new"]


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


@dataclass(frozen=True, eq=False)
class Scene:
    """An image and its ground truth; the target is the first of `things`.

    Attributes:
        image: `(H, W, 3)`, uint8.
        ground: The same background without any object or mark.
        label: Index of the target's shape in `CLASSES`.
        things: The target, then the distractors.
        masks: `(things, H, W)`; a pixel belongs to a thing if the thing covers at least half of it.
        watermark: `(H, W)`, mask of the mark; set even if no mark is drawn.
    """

    image: NDArray[np.uint8]
    ground: NDArray[np.uint8]
    label: int
    things: tuple[SceneObject, ...]
    masks: NDArray[np.bool_]
    watermark: NDArray[np.bool_]

    __repr__ = brief

    @property
    def caption(self) -> str:
        """Caption that names all things in reading order: by thirds from the top, then from left to right.

        `CAPTION = THING {", " THING}`, `THING = "a" COLOR SHAPE PLACE`: `a red star top left, a blue disk center`.
        """
        order = sorted(self.things, key=lambda thing: (min(int(3 * thing.center[0]), 2), thing.center[1]))
        return ", ".join(f"a {thing.color} {thing.shape} {thing.place}" for thing in order)

    def labeled_mask(self) -> NDArray[np.uint8]:
        """Return a mask `(H, W)`: `GROUND`, 1 on the target, 2 and above on distractors, `WATERMARK` where the mark is or would be."""
        mask = np.full(self.watermark.shape, GROUND, np.uint8)
        for number, one in enumerate(self.masks, start=1):
            mask[one] = number
        mask[self.watermark] = WATERMARK
        return mask


class Scenes(Dataset[tuple[Any, int]]):
    """Dataset of `count` generated scenes: item `i` is `(image, label)`; `scene(i)` returns the full ground truth."""

    classes = CLASSES

    def __init__(
        self,
        count: int,
        size: tuple[int, int] = (64, 64),
        *,
        seed: int = 0,
        watermark: Mark = "none",
        distractors: tuple[int, int] = (3, 6),
        pairs: Pairs = "all",
        margin: float = 0.0,
        transform: Callable[[Image.Image], Any] | None = None,
    ) -> None:
        """Validate the settings; scenes are drawn on access.

        Args:
            count: Number of scenes.
            size: `(height, width)` in pixels, 48 or more each, the longer at most twice the shorter.
            seed: Seed; scenes of different seeds are independent, so train on one seed and test on another.
            watermark: `label`: the mark shows the label. `random`: the mark shows a class drawn independently. `none`: no mark.
            distractors: Smallest and largest number of distractors, 0 to 6.
            pairs: Allowed pairs of color and shape. `known`: none of `NEW`. `new`: at least one of `NEW` in each scene. `all`: any pair.
            margin: Smallest distance of centers from the lines between thirds, as a fraction of the image's sides, 0 to 0.1. With 0, the
                third of some things is ambiguous to the eye.
            transform: Function from an image to the input of a model.

        Raises:
            OptionError: If a value is out of range.
        """
        whole = all(
            isinstance(pair, tuple) and len(pair) == 2 and all(type(one) is int for one in pair) for pair in (size, distractors)
        )
        if not (
            whole
            and type(count) is type(seed) is int
            and count >= 1
            and min(size) >= 48
            and max(size) <= 2 * min(size)
            and 0 <= distractors[0] <= distractors[1] <= 6
            and 0 <= seed < 2**32
            and 0 <= margin <= 0.1
        ):
            raise OptionError(
                "count must be 1 or more, sides 48 or more with a ratio of at most 2, distractors 0 to 6, seed below 2**32, all whole "
                "numbers, and margin 0 to 0.1; "
                f"got count={count}, size={size}, distractors={distractors}, seed={seed}, margin={margin}."
            )
        one_of(watermark, get_args(Mark), "watermark")
        one_of(pairs, get_args(Pairs), "pairs")
        self.count, self.size, self.seed, self.watermark = count, size, seed, watermark
        self.distractors, self.pairs, self.margin, self.transform = distractors, pairs, margin, transform

    def __len__(self) -> int:
        """Return the number of scenes."""
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """Return an image, transformed if there is a `transform`, and its label."""
        scene = self.scene(index)
        picture = Image.fromarray(scene.image)
        return (self.transform(picture) if self.transform else picture), scene.label

    def scene(self, index: int) -> Scene:
        """Draw one scene with its ground truth.

        Raises:
            IndexError: If `index` is out of range.
        """
        if not 0 <= index < self.count:
            raise IndexError(f"scene {index} of {self.count}")
        random = np.random.RandomState([VERSION, self.seed, index])
        while True:
            label = random.randint(len(CLASSES))
            shapes = [CLASSES[label]]
            shapes += [list(DISTRACTORS)[i] for i in random.randint(len(DISTRACTORS), size=random.randint(*self._range()))]
            corner, marked = random.randint(4), random.randint(len(CLASSES))
            ground = _ground(random, self.size)
            things = tuple(
                SceneObject(
                    shape,
                    list(COLORS)[random.randint(len(COLORS))],
                    TEXTURES[random.randint(len(TEXTURES))],
                    center,
                    area,
                    angle,
                )
                for shape, (center, area, angle) in zip(shapes, _arranged(random, len(shapes), self.size, corner), strict=True)
            )
            if self._wanted(things):
                break
        image, masks = ground.copy(), np.zeros((len(things), *self.size), bool)
        for thing, mask in zip(things, masks, strict=True):
            _draw(random, image, mask, thing)
        where = _mark_box(self.size, corner)
        if self.watermark != "none":
            _stamp(image, where, label if self.watermark == "label" else marked)
        watermark = np.zeros(self.size, bool)
        watermark[where] = True
        return Scene(_bytes(image), _bytes(ground), label, things, masks, watermark)

    def _wanted(self, things: tuple[SceneObject, ...]) -> bool:
        """Check that the pairs of color and shape and the margins are as requested."""
        new = any((thing.color, thing.shape) in NEW for thing in things)
        clear = all(abs(at - line / 3) >= self.margin for thing in things for at in thing.center for line in (1, 2))
        return clear and (self.pairs == "all" or new == (self.pairs == "new"))

    def _range(self) -> tuple[int, int]:
        fewest, most = self.distractors
        return fewest, most + 1


def write(scenes: Scenes, folder: Path) -> Path:
    """Write scenes as files for other tools: `ImageFolder(folder / "images")` reads images and labels.

    Writes `images/CLASS/00000.png`, `masks/CLASS/00000.png` (see `Scene.labeled_mask`) and `scenes.jsonl`, which has one line per scene
    with its file, label, caption and things. Classes without a scene get no folder.

    Args:
        scenes: Scenes to write; `transform` is not applied.
        folder: Folder to create; it appears only when everything is written.

    Returns:
        `folder`.

    Raises:
        OutputError: If the folder exists or cannot be written.
        ResourceError: If the disk is full.
    """
    with building_folder(folder) as place, (place / "scenes.jsonl").open("w") as lines:
        for index in range(len(scenes)):
            scene = scenes.scene(index)
            name = f"{CLASSES[scene.label]}/{index:05d}.png"
            for kind, pixels in (("images", scene.image), ("masks", scene.labeled_mask())):
                file = place / kind / name
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(file, "PNG")
            facts = {"file": name, "label": CLASSES[scene.label], "caption": scene.caption}
            lines.write(json.dumps(facts | {"things": [asdict(thing) for thing in scene.things]}) + "\n")
    return folder


def _ground(random: np.random.RandomState, size: tuple[int, int]) -> NDArray[np.float64]:
    """Draw a background of muted waves in random directions, a tint and grain: `(H, W, 3)`, 0 to 255."""
    y, x = _grid(size)
    picture = np.zeros((*size, 3)) + 118 + 36 * (random.random_sample(3) - 0.5)
    for _ in range(4):
        angle, phase, cycles, strength = random.random_sample(4)
        wave = np.cos(2 * pi * ((1 + 9 * cycles) * (x * cos(pi * angle) + y * sin(pi * angle)) + phase))
        picture += wave[..., None] * (6 + 10 * strength) * (0.6 + 0.4 * random.random_sample(3))
    return picture + 22 * (random.random_sample((*size, 3)) - 0.5)


def _arranged(
    random: np.random.RandomState, count: int, size: tuple[int, int], corner: int
) -> list[tuple[tuple[float, float], float, float]]:
    """Draw center, area and angle of each thing, without overlap of things, mark or border for any shape.

    All things are drawn from the same distribution and then shuffled, so the target's size and location reveal nothing.
    """
    unit = _unit(size)
    sides = size[0] / unit, size[1] / unit
    box_y, box_x = _mark_box(size, corner)
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


def _draw(random: np.random.RandomState, image: NDArray[np.float64], mask: NDArray[np.bool_], thing: SceneObject) -> None:
    """Blend a thing into the image in proportion to the part of each pixel it covers, and fill its mask."""
    size = mask.shape
    unit = _unit((size[0], size[1]))
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
    """Compute the brightness factor at each point: 1, less in the dark parts of a texture. Coordinates are in multiples of `_unit`."""
    u, v = 20 * x, 20 * y  # a period of 1
    dark = np.zeros(x.shape, bool)
    if texture == "striped":
        dark = u % 1 < 0.5
    elif texture == "dotted":
        dark = (u % 1 - 0.5) ** 2 + (v % 1 - 0.5) ** 2 < 0.1
    elif texture == "checked":
        dark = (u % 1 < 0.5) ^ (v % 1 < 0.5)
    return np.where(dark, 0.55, 1.0)


def _mark_box(size: tuple[int, int], corner: int) -> tuple[slice, slice]:
    """Return rows and columns of the watermark in a corner: 0 and 1 are at the top, 0 and 2 on the left."""
    side, gap = round(MARK_SIDE * _unit(size)), 1
    ends = [
        (gap, gap + side) if first else (whole - gap - side, whole - gap)
        for whole, first in zip(size, (corner < 2, corner % 2 == 0), strict=True)
    ]
    return slice(*ends[0]), slice(*ends[1])


def _stamp(image: NDArray[np.float64], where: tuple[slice, slice], label: int) -> None:
    """Draw the black and white cells of a class's watermark."""
    side = where[0].stop - where[0].start
    cell = 3 * np.arange(side) // side
    bits = np.array([_CODES[label] >> bit & 1 for bit in range(9)]).reshape(3, 3)
    image[where] = 255.0 * bits[cell[:, None], cell[None]][..., None]


def _grid(size: tuple[int, int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return rows and columns of pixel centers, in multiples of `_unit`."""
    unit = _unit(size)
    y, x = (np.arange(side, dtype=np.float64) + 0.5 for side in size)
    return (y / unit)[:, None], (x / unit)[None]


def _unit(size: tuple[int, int]) -> float:
    """Return the side in pixels of a square with the area of the image, so that areas become fractions of the image."""
    return float((size[0] * size[1]) ** 0.5)


def _bytes(picture: NDArray[np.float64]) -> NDArray[np.uint8]:
    return np.clip(np.rint(picture), 0, 255).astype(np.uint8)
