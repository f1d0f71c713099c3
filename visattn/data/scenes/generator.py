"""Scenes whose truth is known: which object decides the label, where it is, and what may not matter.

A scene is a textured ground with one object of a *label shape* among three to six *distractors* of other shapes. Color, texture, size,
place and angle are drawn without looking at the label, so the shape of one object is all there is to learn, and its mask is where a
model should look. With `watermark="label"` a small black and white mark predicts the label too: the *shortcut* twin, on which a model
may look at the wrong thing and still be right. The same seed and index give the same scene with each kind of mark, up to its pixels.

What is drawn is a function of the version, the seed and the index alone; numpy keeps the stream of `RandomState` for ever.
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
MARK_SIDE = 0.14  # of the watermark, in the geometric mean of the picture's sides
GROUND, WATERMARK = 0, 255  # in a mask that is written; the target is 1, distractors follow

_AREA = 0.0235, 0.0775  # share of the picture that one object covers; pixels round it by less than what is left to 2 and 8 %
_TOTAL = 0.165  # most that all objects cover together on average, so that they find places
_REACH = max(area**-0.5 for area in AREAS.values())  # radius of a circle that holds an object of area 1, whatever its shape
_TRIES = 100  # places at random before a scene is arranged anew
_FINE = 3  # samples of a pixel along each side
_CODES = (0b010111010, 0b101010101, 0b110110000, 0b111101111, 0b100010001, 0b001011111)  # 3 x 3 cells of a class's watermark

NEW = frozenset(  # color and shape together, an eighth of all pairs: what `pairs="known"` leaves out
    (list(COLORS)[3 * number % len(COLORS)], shape) for number, shape in enumerate((*LABELS, *DISTRACTORS))
)

Mark = Literal["none", "label", "random"]
Pairs = Literal["all", "known", "new"]


@dataclass(frozen=True)
class Thing:
    """One object: `center` is `(y, x)` from 0 to 1 of height and width, `area` its share of the picture, `angle` in radians."""

    shape: str
    color: str
    texture: str
    center: tuple[float, float]
    area: float
    angle: float

    @property
    def place(self) -> str:
        """Where it is, in words, by thirds of the picture: `top left`, `left`, `center`, ..."""
        row, column = (min(int(3 * at), 2) for at in self.center)
        words = ("top", "", "bottom")[row], ("left", "", "right")[column]
        return " ".join(filter(None, words)) or "center"


@dataclass(frozen=True, eq=False)
class Scene:
    """A picture and its truth; the target is the first of `things`.

    Attributes:
        image: `(H, W, 3)`, uint8.
        ground: The same without any object or mark.
        label: Index of the target's shape in `CLASSES`.
        things: The target, then the distractors.
        masks: `(things, H, W)`: pixels of which at least half belong to the thing.
        watermark: `(H, W)`, where the mark is, or would be.
    """

    image: NDArray[np.uint8]
    ground: NDArray[np.uint8]
    label: int
    things: tuple[Thing, ...]
    masks: NDArray[np.bool_]
    watermark: NDArray[np.bool_]

    @property
    def caption(self) -> str:
        """All things in reading order: by thirds from the top, then from left to right.

        `CAPTION = THING {", " THING}`, `THING = "a" COLOR SHAPE PLACE`: `a red star top left, a blue disk center`.
        """
        order = sorted(self.things, key=lambda thing: (min(int(3 * thing.center[0]), 2), thing.center[1]))
        return ", ".join(f"a {thing.color} {thing.shape} {thing.place}" for thing in order)

    def labeled_mask(self) -> NDArray[np.uint8]:
        """`(H, W)`: `GROUND`, 1 on the target, 2 and above on distractors, `WATERMARK` where the mark is or would be."""
        mask = np.full(self.watermark.shape, GROUND, np.uint8)
        for number, one in enumerate(self.masks, start=1):
            mask[one] = number
        mask[self.watermark] = WATERMARK
        return mask


class Scenes(Dataset[tuple[Any, int]]):
    """`count` scenes for torch's loaders: item `i` is `(picture, label)`; `scene(i)` has the whole truth."""

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
        """Nothing is drawn yet.

        Args:
            count: How many.
            size: `(height, width)` in pixels, 48 or more each, the longer at most twice the shorter.
            seed: Scenes of two seeds have nothing in common; train on one, test on another.
            watermark: `label`: a mark tells the label; `random`: the mark of a class drawn apart from the label; `none`: no mark.
            distractors: Fewest and most, 0 to 6.
            pairs: Of color and shape: `known`: none of `NEW`; `new`: at least one of them in each scene; `all`: as they come.
            margin: Least distance of centers from the lines between thirds, in sides of the picture, 0 to 0.1: with 0 there are things
                whose place only the truth can tell.
            transform: From a picture to what a model takes.

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
                "scenes must be 1 or more, of 48 x 48 pixels or more and at most twice as long as wide, with 0 to 6 distractors and a "
                "seed of 32 bits, all whole numbers, and a margin of 0 to 0.1; "
                f"got count={count}, size={size}, distractors={distractors}, seed={seed}, margin={margin}."
            )
        one_of(watermark, get_args(Mark), "watermark")
        one_of(pairs, get_args(Pairs), "pairs")
        self.count, self.size, self.seed, self.watermark = count, size, seed, watermark
        self.distractors, self.pairs, self.margin, self.transform = distractors, pairs, margin, transform

    def __len__(self) -> int:
        """How many."""
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """Picture, or what `transform` makes of it, and label."""
        scene = self.scene(index)
        picture = Image.fromarray(scene.image)
        return (self.transform(picture) if self.transform else picture), scene.label

    def scene(self, index: int) -> Scene:
        """One scene with its truth.

        Raises:
            IndexError: If there are not so many.
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
                Thing(
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

    def _wanted(self, things: tuple[Thing, ...]) -> bool:
        """Whether pairs and places are those that were asked for."""
        new = any((thing.color, thing.shape) in NEW for thing in things)
        clear = all(abs(at - line / 3) >= self.margin for thing in things for at in thing.center for line in (1, 2))
        return clear and (self.pairs == "all" or new == (self.pairs == "new"))

    def _range(self) -> tuple[int, int]:
        fewest, most = self.distractors
        return fewest, most + 1


def write(scenes: Scenes, folder: Path) -> Path:
    """Write scenes as files that other tools read: `ImageFolder(folder / "images")` has pictures and labels.

    `images/CLASS/00000.png`, `masks/CLASS/00000.png` (see `Scene.labeled_mask`), and `scenes.jsonl`: a line for each scene with its file,
    label, caption and things. Folders of classes of which there is no scene are left out.

    Args:
        scenes: What is written; `transform` is not applied.
        folder: A new folder; it is there when all is written, and not before.

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
    """Muted waves in random directions, a tint, and grain: `(H, W, 3)` from 0 to 255."""
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
    """Center, area and angle of each thing: none on another, on the mark's corner or over the border, whatever its shape.

    All are drawn alike and then shuffled, so that the target's size and place say nothing.
    """
    unit = _unit(size)
    sides = size[0] / unit, size[1] / unit
    box_y, box_x = _mark_box(size, corner)
    mark = (box_y.start + box_y.stop) / 2 / unit, (box_x.start + box_x.stop) / 2 / unit, MARK_SIDE * 0.75
    smallest, largest = _AREA
    widest = min(largest, 2 * _TOTAL / count - smallest)
    placed: list[tuple[float, float, float]] = []
    while len(placed) < count:  # all anew where one finds no place
        areas = sorted(smallest + (widest - smallest) * random.random_sample(count), reverse=True)  # the largest needs most room
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


def _draw(random: np.random.RandomState, image: NDArray[np.float64], mask: NDArray[np.bool_], thing: Thing) -> None:
    """Blend a thing into the picture by how much of each pixel it covers, and fill its mask."""
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
    shade = (inside * light).reshape(pixels).mean((1, 3))  # the part that is covered, by its light
    image[window] = image[window] * (1 - covered[..., None]) + base * shade[..., None]
    mask[window] = covered >= 0.5


def _light(texture: str, x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Factor of the color at each point, whose coordinates are in the picture's unit: 1, and less in the dark parts of a texture."""
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
    """Rows and columns of the watermark in a corner: 0 and 1 are on top, 0 and 2 on the left."""
    side, gap = round(MARK_SIDE * _unit(size)), 1
    ends = [
        (gap, gap + side) if first else (whole - gap - side, whole - gap)
        for whole, first in zip(size, (corner < 2, corner % 2 == 0), strict=True)
    ]
    return slice(*ends[0]), slice(*ends[1])


def _stamp(image: NDArray[np.float64], where: tuple[slice, slice], label: int) -> None:
    """Black and white cells that are a class's own."""
    side = where[0].stop - where[0].start
    cell = 3 * np.arange(side) // side
    bits = np.array([_CODES[label] >> bit & 1 for bit in range(9)]).reshape(3, 3)
    image[where] = 255.0 * bits[cell[:, None], cell[None]][..., None]


def _grid(size: tuple[int, int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Rows and columns of pixel centers, in the picture's unit."""
    unit = _unit(size)
    y, x = (np.arange(side, dtype=np.float64) + 0.5 for side in size)
    return (y / unit)[:, None], (x / unit)[None]


def _unit(size: tuple[int, int]) -> float:
    """The side, in pixels, of a square as large as the picture: shares of its square are shares of the picture."""
    return float((size[0] * size[1]) ** 0.5)


def _bytes(picture: NDArray[np.float64]) -> NDArray[np.uint8]:
    return np.clip(np.rint(picture), 0, 255).astype(np.uint8)
