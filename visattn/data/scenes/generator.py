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
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import Dataset

from visattn._support.checks import one_of
from visattn._support.reprs import brief
from visattn._support.whole_files import building_folder
from visattn.data.scenes.outlines import DISTRACTORS, LABELS
from visattn.data.scenes.painting import (
    COLORS,
    TEXTURES,
    SceneObject,
    arranged,
    background,
    draw,
    mark_box,
    stamp,
    to_bytes,
)
from visattn.errors import OptionError

VERSION = 1
CLASSES = tuple(LABELS)
GROUND, WATERMARK = 0, 255  # values in written masks; the target is 1, distractors follow

NEW = frozenset(  # held-out pairs of color and shape, an eighth of all pairs; `pairs="known"` excludes them
    (list(COLORS)[3 * number % len(COLORS)], shape) for number, shape in enumerate((*LABELS, *DISTRACTORS))
)

Mark = Literal["none", "label", "random"]
Pairs = Literal["all", "known", "new"]


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

        `CAPTION = THING {", " THING}`, `THING = ARTICLE COLOR SHAPE PLACE`: `a red star top left, an orange disk center`.
        """
        order = sorted(self.things, key=lambda thing: (min(int(3 * thing.center[0]), 2), thing.center[1]))
        return ", ".join(thing.phrase for thing in order)

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
            ground = background(random, self.size)
            things = tuple(
                SceneObject(
                    shape,
                    list(COLORS)[random.randint(len(COLORS))],
                    TEXTURES[random.randint(len(TEXTURES))],
                    center,
                    area,
                    angle,
                )
                for shape, (center, area, angle) in zip(shapes, arranged(random, len(shapes), self.size, corner), strict=True)
            )
            if self._wanted(things):
                break
        image, masks = ground.copy(), np.zeros((len(things), *self.size), bool)
        for thing, mask in zip(things, masks, strict=True):
            draw(random, image, mask, thing)
        where = mark_box(self.size, corner)
        if self.watermark != "none":
            stamp(image, where, label if self.watermark == "label" else marked)
        watermark = np.zeros(self.size, bool)
        watermark[where] = True
        return Scene(to_bytes(image), to_bytes(ground), label, things, masks, watermark)

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
