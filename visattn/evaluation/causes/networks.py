"""Shipped networks that decide by one known thing, and scenes in which its pixels are known."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from visattn._support.files import is_file
from visattn.core.families import input_spec
from visattn.core.loading import load_model
from visattn.core.loading.networks import cause_folder, network_path
from visattn.core.loading.weights import FACTS, state_digest
from visattn.core.pipeline.inputs import prepare
from visattn.data.scenes import CAUSES, CausedScenes, Scenes
from visattn.errors import OptionError

PATCH = "patch"  # cause of networks of objects that an adversarial patch turns to one class
PATCHED = {"cnn": "scenes_cnn", "vit": "scenes_vit"}
PATCH_CLASS = 0  # that the patches were trained for
SEED = 2  # of the scenes; networks were trained on odd seeds


class Case(NamedTuple):
    """A scene whose cause is known.

    Attributes:
        number: Number of the scene.
        image: The scene.
        label: Class that the cause decides, and that methods explain.
        mask: `(H, W)` pixels of the cause.
        without: The scene without the cause, if it is a patch.
    """

    number: int
    image: Image.Image
    label: int
    mask: NDArray[np.bool_]
    without: Image.Image | None = None


@dataclass(frozen=True)
class CauseNetwork:
    """A shipped network that decides by one known cause.

    Attributes:
        cause: One of `visattn.data.scenes.CAUSES`, or `patch`.
        kind: `cnn` or `vit`.
        seed: Seed of its training.
    """

    cause: str
    kind: str
    seed: int

    @property
    def name(self) -> str:
        """Name, such as `mark_cnn_0`."""
        return f"{self.cause}_{self.kind}_{self.seed}"

    @property
    def folder(self) -> Path:
        """Folder that `visattn.load_model` loads."""
        return network_path(PATCHED[self.kind]) if self.cause == PATCH else cause_folder() / self.name

    @cached_property
    def model(self) -> nn.Module:
        """The network."""
        return load_model(str(self.folder))

    @cached_property
    def digest(self) -> str:
        """Digest of its weights, and of the patch."""
        patch = self._patch.read_bytes() if self.cause == PATCH else b""
        return state_digest(self.model) + hashlib.sha256(patch).hexdigest()

    @property
    def _patch(self) -> Path:
        return cause_folder().parent / "patches" / f"{PATCHED[self.kind]}.png"

    def cases(self, count: int, seed: int = SEED) -> Iterator[Case]:
        """Yield scenes of the cause; of a patch those that it turns, so there may be fewer.

        Raises:
            OptionError: If the count is less than 1.
        """
        if count < 1:
            raise OptionError(f"scenes must be at least 1, got {count}.")
        if self.cause == PATCH:
            yield from self._turned(count, seed)
            return
        scenes = CausedScenes(self.cause, count, seed=seed)  # type: ignore[arg-type]
        for number in range(count):
            scene = scenes.scene(number)
            yield Case(number, Image.fromarray(scene.image), scene.label, scene.masks[0])

    def _turned(self, count: int, seed: int) -> Iterator[Case]:
        """Yield scenes of other classes that the patch, at a random place, turns to its class."""
        with Image.open(self._patch) as picture:
            patch = np.asarray(picture.convert("RGB"))
        most, side, found = 4 * count, len(patch), 0
        scenes = Scenes(most, input_spec(self.model).size, seed=seed)
        for number in range(most):
            scene = scenes.scene(number)
            if scene.label == PATCH_CLASS:
                continue
            random = np.random.default_rng((seed, number))
            top, left = (int(random.integers(length - side + 1)) for length in scene.image.shape[:2])
            covered, mask = scene.image.copy(), np.zeros(scene.image.shape[:2], bool)
            covered[top : top + side, left : left + side] = patch
            mask[top : top + side, left : left + side] = True
            image = Image.fromarray(covered)
            if _predicted(self.model, image) == PATCH_CLASS:
                yield Case(number, image, PATCH_CLASS, mask, Image.fromarray(scene.image))
                found += 1
            if found == count:
                return


def cause_networks() -> list[CauseNetwork]:
    """Return the shipped networks, in the order of causes, kinds and seeds.

    Raises:
        MissingExtra: If the package with the networks is not installed.
    """
    folders = (path.name.split("_") for path in cause_folder().iterdir() if is_file(path / FACTS))
    networks = [CauseNetwork(cause, kind, int(seed)) for cause, kind, seed in folders]
    networks += [CauseNetwork(PATCH, kind, 0) for kind in PATCHED]
    order = [*CAUSES, PATCH]
    return sorted(networks, key=lambda network: (order.index(network.cause), network.kind, network.seed))


def another(network: CauseNetwork, networks: list[CauseNetwork]) -> CauseNetwork:
    """Return a network of the same kind that decides by another cause, of the same seed if there is one."""
    causes = list(dict.fromkeys(one.cause for one in networks if one.kind == network.kind and one.cause != PATCH))
    cause = causes[(causes.index(network.cause) + 1) % len(causes)]
    several = [one for one in networks if (one.cause, one.kind) == (cause, network.kind)]
    return next((one for one in several if one.seed == network.seed), several[0])


def _predicted(model: nn.Module, image: Image.Image) -> int:
    with torch.no_grad():
        return int(model(prepare(image, model).pixels).argmax())
