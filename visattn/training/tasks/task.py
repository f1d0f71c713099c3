"""What is to be learned, apart from how: pictures, the network for them, its loss, its test, and what is kept of it.

The loop knows a `Task` alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from PIL import Image
from torch import Tensor, nn

from visattn.data.captions.pictures import SCENES
from visattn.data.pictures import Pictures
from visattn.data.scenes.store import MARKS
from visattn.errors import DataError, ImageError
from visattn.families import input_spec
from visattn.families.trained import InputFacts
from visattn.loading import load_model
from visattn.training.batches import Targets, moments
from visattn.training.config import Recipe
from visattn.training.report.card import Data, Origin, Reached

_LICENSES = {"fashion-mnist": "MIT (Zalando SE)"}
_SHOWN = 8  # test pictures whose maps are drawn
_USUAL = 224  # pixels, of pictures of many sizes
_SCENES = 64
Targeted = tuple[Tensor, ...]
Draw = Callable[[int], object]  # of a step


class Task(ABC):
    """One thing to learn.

    Attributes:
        config: The recipe.
        pictures: To train on.
        tests: To test on.
        blueprint: What the network is built from.
        targets: What is learned of a picture.
        in_pairs: Whether pictures of a batch are mixed in pairs.
    """

    config: Recipe
    pictures: Pictures
    tests: Pictures
    targets: Targets
    in_pairs: bool = False

    @property
    @abstractmethod
    def blueprint(self) -> InputFacts:
        """What the network is built from."""

    @abstractmethod
    def build(self) -> nn.Module:
        """The network, as training begins with it."""

    @abstractmethod
    def loss(self, forward: Any, pixels: Tensor, targets: Targeted) -> Tensor:  # noqa: ANN401 - a module, wrapped or compiled
        """The loss of a batch."""

    @abstractmethod
    def measure(self, model: nn.Module, pixels: Tensor, targets: Targeted) -> tuple[float, float, float]:
        """Of a batch of tests: right answers, the sum of losses, and of how many."""

    @abstractmethod
    def maps(self, model: nn.Module, run: Path) -> Draw:
        """What draws where a model looks in some test pictures, into `run/maps`."""

    @abstractmethod
    def keep(self, model: nn.Module, folder: Path, facts: Mapping[str, Any]) -> None:
        """Write the finished network."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What is learned from what, in words."""

    @abstractmethod
    def card(self, model: nn.Module, reached: Reached, origin: Origin) -> str:
        """The model card."""

    @property
    def mode(self) -> Literal["L", "RGB"]:
        """What pictures are converted to."""
        return "L" if self.blueprint.channels == 1 else "RGB"

    def data(self, classes: Sequence[str] = ()) -> Data:
        """What the card tells of the pictures."""
        name = self.config.data
        return Data(
            name=self.config.shared().data,
            classes=classes,
            train=len(self.pictures),
            test=len(self.tests),
            fingerprints={split: part.fingerprint() for split, part in (("train", self.pictures), ("test", self.tests))},
            license="drawn by visattn" if name in (*MARKS, *SCENES) else _LICENSES.get(name, ""),
        )

    def shown(self, count: int = _SHOWN) -> list[tuple[Image.Image, Any]]:
        """The first test pictures that can be read.

        Raises:
            DataError: If there is none.
        """
        found: list[tuple[Image.Image, Any]] = []
        for index in range(len(self.tests)):
            if len(found) == count:
                break
            with suppress(ImageError):
                found.append(self.tests[index])
        if not found:
            raise DataError(f"{self.config.data}: no test picture can be read.")
        return found


def scenes_size(config: Recipe) -> tuple[int, int]:
    """`(height, width)` of scenes."""
    return (config.img_size or _SCENES,) * 2


def input_size(config: Recipe, pictures: tuple[int, int] | None) -> tuple[int, int]:
    """`(height, width)` of the input, for pictures of a size, or of many."""
    return (config.img_size,) * 2 if config.img_size else pictures or (_USUAL, _USUAL)


def moments_of(config: Recipe, pictures: Pictures, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of the pixels: of the pictures, or of those that published weights were trained on."""
    if config.weights == "none":
        return moments(pictures, "L" if channels == 1 else "RGB")
    spec = input_spec(load_model(config.model, weights="none"))
    return spec.mean, spec.std
