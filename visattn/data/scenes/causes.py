"""Scenes in which one known thing decides the label: the background, a color, the border, a fine pattern, a position, or another object.

Each scene shows a background and several objects. One of seven *causes* takes one of four values, and the label is that value. All else is
drawn independently of it. A network with a high accuracy on these scenes therefore uses the cause, and a map that says where the evidence
lies should show the cause. With `shown="random"` the cause takes a value that has nothing to do with the label, and the accuracy must fall
to chance.

A scene depends only on the version, the seed, the index, the cause and what it shows; numpy guarantees that the stream of `RandomState`
never changes. A frame, a pattern and a mark can be left out; nothing else in the scene then differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, pi, sin
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from visattn._support.checks import one_of
from visattn._support.reprs import brief
from visattn.data.scenes.generator import VERSION, Mark
from visattn.data.scenes.outlines import AREAS, DISTRACTORS, LABELS
from visattn.data.scenes.painting import (
    COLORS,
    TEXTURES,
    SceneObject,
    arranged,
    background,
    draw,
    grid_of,
    mark_box,
    stamp,
    to_bytes,
    unit_of,
)
from visattn.errors import OptionError

Cause = Literal["ground", "color", "border", "pattern", "position", "companion", "mark"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
VALUES = 4  # of each cause, and classes
LEFT_OUT: tuple[Cause, ...] = "border", "pattern", "mark"  # those that can be left out
TITLES: dict[Cause, str] = {
    "ground": "direction of the waves of the background",
    "color": "color of the object with a label shape",
    "border": "color of the frame",
    "pattern": "period of a fine pattern in a disk somewhere",
    "position": "quarter in which the object with a label shape lies",
    "companion": "shape of the only object without a label shape",
    "mark": "black and white mark in a corner",
}
_QUARTERS = "top left", "top right", "bottom left", "bottom right"

_FRAME = 0.035  # width of the frame, as a fraction of the side of a square with the image's area
_DISK = 0.2  # radius of the disk with a pattern, likewise
_PLACES = 30  # random places of the disk that are tried
_PERIODS = (3.0, 4.0, 5.5, 8.0)  # pixels at a side of 64
_STRENGTH = 26  # largest change of brightness by a pattern
_WAVE = 20  # the same by a wave of the background
_HUES = ("red", "yellow", "green", "blue")
_AROUND = 2, 4  # fewest and most other objects
_APART = 0.06  # smallest distance of a center from the lines between quarters, as a fraction of a side


@dataclass(frozen=True, eq=False)
class CausedScene:
    """An image, its label and the cause.

    Attributes:
        image: `(H, W, 3)`, uint8.
        label: Label, from 0 to 3.
        value: Value that the cause shows, from 0 to 3, or would show.
        ground: Background without objects, border, pattern or mark.
        masks: `(1 + things, H, W)`: first the pixels of the cause, then those of each object; an object has a pixel if it covers at least
            half of it.
        things: The objects.
    """

    image: NDArray[np.uint8]
    label: int
    value: int
    ground: NDArray[np.uint8]
    masks: NDArray[np.bool_]
    things: tuple[SceneObject, ...]
    caption: str = ""

    __repr__ = brief

    @property
    def watermark(self) -> NDArray[np.bool_]:
        """Pixels of the cause, under the name that they have in `Scene`."""
        found: NDArray[np.bool_] = self.masks[0]
        return found


class CausedScenes:
    """Dataset of `count` scenes with one cause: item `i` is `(image, label)`; `scene(i)` returns the full ground truth."""

    classes = tuple(map(str, range(VALUES)))

    def __init__(
        self, cause: Cause, count: int, size: tuple[int, int] = (64, 64), *, seed: int = 0, shown: Mark = "label"
    ) -> None:
        """Validate the settings; scenes are drawn on access.

        Args:
            cause: What decides the label, see `TITLES`.
            count: Number of scenes.
            size: `(height, width)` in pixels, 48 or more each, the longer at most twice the shorter.
            seed: Seed; scenes of different seeds are independent.
            shown: What the cause shows: the `label`, a `random` value drawn independently of it, or `none`: it is left out, which is
                possible for those that are drawn over the scene, `LEFT_OUT`.

        Raises:
            OptionError: If a value is out of range, or the cause cannot be left out.
        """
        one_of(cause, CAUSES, "cause")
        one_of(shown, get_args(Mark), "shown")
        if shown == "none" and cause not in LEFT_OUT:
            raise OptionError(f"only {', '.join(LEFT_OUT)} can be left out, got {cause}.")
        if count < 1 or min(size) < 48 or max(size) > 2 * min(size) or not 0 <= seed < 2**32:
            raise OptionError(
                f"count must be 1 or more, sides 48 or more with a ratio of at most 2, and seed below 2**32; got {count}, {size}, {seed}."
            )
        self.cause, self.count, self.size, self.seed, self.shown = cause, count, size, seed, shown

    def __len__(self) -> int:
        """Return the number of scenes."""
        return self.count

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        """Return an image and its label."""
        scene = self.scene(index)
        return Image.fromarray(scene.image), scene.label

    def scene(self, index: int) -> CausedScene:
        """Draw one scene with its ground truth.

        Raises:
            IndexError: If `index` is out of range.
        """
        if not 0 <= index < self.count:
            raise IndexError(f"scene {index} of {self.count}")
        random = np.random.RandomState([VERSION, self.seed, index, CAUSES.index(self.cause)])
        label, other = random.randint(VALUES), random.randint(VALUES)
        value = int(other if self.shown == "random" else label)
        ground = background(random, self.size) if self.cause != "ground" else _waves(random, self.size, value)
        corner = random.randint(4)  # left free of objects, for a mark
        things = self._things(random, value, corner)
        image, masks = ground.copy(), np.zeros((1 + len(things), *self.size), bool)
        evidence, strength = masks[0], float(self.shown != "none")
        if self.cause == "pattern":
            _pattern(random, image, evidence, value, things, strength)
        for thing, mask in zip(things, masks[1:], strict=True):
            draw(random, image, mask, thing)
        if self.cause == "pattern":
            evidence &= ~masks[1:].any(0)
        elif self.cause == "ground":
            evidence |= ~masks[1:].any(0)
        elif self.cause == "border":
            evidence |= _frame(self.size)
            image[evidence] = COLORS[_HUES[value]] if strength else image[evidence]
        elif self.cause == "mark":
            where = mark_box(self.size, corner)
            evidence[where] = True
            if strength:
                stamp(image, where, value)
        else:
            evidence |= masks[1]
        return CausedScene(to_bytes(image), int(label), value, to_bytes(ground), masks, things)

    def _things(self, random: np.random.RandomState, value: int, corner: int) -> tuple[SceneObject, ...]:
        """Draw the objects. The first one shows the cause if an object does."""
        while True:
            labels, others = list(LABELS), list(DISTRACTORS)
            fewest, most = _AROUND
            around = random.randint(fewest, most + 1)
            first = others[value] if self.cause == "companion" else labels[random.randint(len(labels))]
            rest = labels if self.cause == "companion" else others
            shapes = [first, *(rest[i] for i in random.randint(len(rest), size=around))]
            things = tuple(
                SceneObject(
                    shape,
                    _HUES[value] if self.cause == "color" and number == 0 else list(COLORS)[random.randint(len(COLORS))],
                    TEXTURES[random.randint(len(TEXTURES))],
                    center,
                    area,
                    angle,
                )
                for number, (shape, (center, area, angle)) in enumerate(
                    zip(shapes, arranged(random, len(shapes), self.size, corner), strict=True)
                )
            )
            if self.cause != "position" or _in_quarter(things[0].center, value):
                return things


def class_meaning(cause: Cause) -> str:
    """Return what the classes of scenes with this cause are, as a sentence."""
    values: dict[Cause, Sequence[str]] = {
        "ground": [f"{180 * value // VALUES} degrees" for value in range(VALUES)],
        "color": _HUES,
        "border": _HUES,
        "pattern": [f"{period:g} pixels" for period in _PERIODS],
        "position": _QUARTERS,
        "companion": list(DISTRACTORS)[:VALUES],
        "mark": [f"code {value}" for value in range(VALUES)],
    }
    return f"Each class is a value of the {TITLES[cause]}: {', '.join(f'{i} = {text}' for i, text in enumerate(values[cause]))}."


def _in_quarter(center: tuple[float, float], value: int) -> bool:
    """Check that a center lies clearly in a quarter: 0 and 1 are at the top, 0 and 2 on the left."""
    row, column = divmod(value, 2)
    return all(at < 0.5 - _APART if half == 0 else at > 0.5 + _APART for at, half in zip(center, (row, column), strict=True))


def _waves(random: np.random.RandomState, size: tuple[int, int], value: int) -> NDArray[np.float64]:
    """Draw a background whose waves all run in one of four directions, with a random phase, period and tint."""
    y, x = grid_of(size)
    phase, cycles, turned = random.random_sample(3)
    angle = pi * (value + 0.3 * (turned - 0.5)) / VALUES
    picture = np.zeros((*size, 3)) + 118 + 36 * (random.random_sample(3) - 0.5)
    picture += (_WAVE * np.cos(2 * pi * ((4 + 4 * cycles) * (x * cos(angle) + y * sin(angle)) + phase)))[..., None]
    return picture + 22 * (random.random_sample((*size, 3)) - 0.5)


def _pattern(
    random: np.random.RandomState,
    image: NDArray[np.float64],
    evidence: NDArray[np.bool_],
    value: int,
    things: Sequence[SceneObject],
    strength: float,
) -> None:
    """Add a fine pattern with one of four periods to a disk, in a random direction. Of some random places, the disk takes the emptiest."""
    unit = unit_of((image.shape[0], image.shape[1]))
    y, x = (axis * unit for axis in grid_of((image.shape[0], image.shape[1])))
    radius = _DISK * unit
    tried = np.array([radius + (side - 2 * radius) * random.random_sample(_PLACES) for side in image.shape[:2]])
    free = [
        np.hypot(tried[0] - thing.center[0] * image.shape[0], tried[1] - thing.center[1] * image.shape[1])
        - (thing.area / AREAS[thing.shape]) ** 0.5 * unit
        for thing in things
    ]
    top, left = tried[:, np.min(free, axis=0).argmax()]
    evidence |= (y - top) ** 2 + (x - left) ** 2 <= radius**2
    angle, phase = pi * random.random_sample(), 2 * pi * random.random_sample()
    period = _PERIODS[value] * unit / 64
    wave = np.cos(2 * pi / period * (x * cos(angle) + y * sin(angle)) + phase)
    image += strength * _STRENGTH * (wave * evidence)[..., None]


def _frame(size: tuple[int, int]) -> NDArray[np.bool_]:
    """Return the pixels of the frame."""
    width = max(2, round(_FRAME * unit_of(size)))
    frame = np.ones(size, bool)
    frame[width:-width, width:-width] = False
    return frame
