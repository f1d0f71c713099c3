"""Interface of a training task: data, network, loss, test metric, and the saved model.

The training loop uses a task only through `Task`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from PIL import Image
from torch import Tensor, nn

from visattn.core.families import input_spec
from visattn.core.families.trained import InputFacts
from visattn.core.loading import load_model
from visattn.core.loading.blueprints import Blueprint
from visattn.data import ImageDataset
from visattn.data.captions import SCENES
from visattn.data.scenes import CAUSE_OF, DRAWN, class_meaning
from visattn.errors import DataError, ImageError
from visattn.training.batches import Targets, moments
from visattn.training.config import Recipe
from visattn.training.optimizing import Groups
from visattn.training.report.card import Achieved, Data, Origin

_LICENSES = {"fashion-mnist": "MIT (Zalando SE)"}
_SHOWN = 8  # number of test images whose maps are drawn
_USUAL = 224  # input side in pixels of larger images
_SCENES = 64
Targeted = tuple[Tensor, ...]
Draw = Callable[[int], object]  # argument: the step


class Measured(NamedTuple):
    """Answers in test images: the number of correct ones, the sum of losses, the number of all, and for classifiers `outcomes`.

    `outcomes` is `(B, 3)`, integers: the class, the predicted class, and the number of classes with a higher logit than the true one.
    """

    right: float
    loss: float
    total: float
    outcomes: Tensor | None = None

    @property
    def accuracy(self) -> float:
        """Share of correct answers."""
        return self.right / self.total

    @property
    def mean_loss(self) -> float:
        """Mean of the losses."""
        return self.loss / self.total


class Task(ABC):
    """Training task.

    Attributes:
        config: Settings.
        pictures: Training images.
        tests: Test images.
        blueprint: Specification from which the network is built.
        targets: Conversion of annotations to targets.
        in_pairs: Whether the images of a batch are mixed in pairs.
        validation: Images tested after each epoch; None: the test images.
        keeps_best: Whether the weights of the best epoch on the validation images are tested and saved.
        patience: Number of epochs without a better one after which a run stops; 0: none.
        still: Names of modules that stay in evaluation mode.
        groups: Function that makes parameter groups with learning rates of their own; None: all have the same.
    """

    config: Recipe
    pictures: ImageDataset
    tests: ImageDataset
    targets: Targets
    in_pairs: bool = False
    validation: ImageDataset | None = None
    keeps_best: bool = False
    patience: int = 0
    still: Sequence[str] = ()
    groups: Groups | None = None

    @property
    @abstractmethod
    def blueprint(self) -> InputFacts:
        """Specification from which the network is built."""

    @abstractmethod
    def build(self) -> nn.Module:
        """Build the network with its initial weights."""

    @abstractmethod
    def loss(self, forward: Any, pixels: Tensor, targets: Targeted) -> Tensor:  # noqa: ANN401 - a module, wrapped or compiled
        """Compute the loss of a batch."""

    @abstractmethod
    def measure(self, model: nn.Module, pixels: Tensor, targets: Targeted) -> Measured:
        """Measure the answers in a test batch."""

    @abstractmethod
    def maps(self, model: nn.Module, run: Path) -> Draw:
        """Return a function that draws attention maps of some test images into `run/maps`."""

    @abstractmethod
    def keep(self, model: nn.Module, folder: Path, facts: Mapping[str, Any]) -> None:
        """Save the finished network."""

    @property
    @abstractmethod
    def title(self) -> str:
        """Title for cards and plots: the model and its dataset."""

    @abstractmethod
    def card(self, model: nn.Module, reached: Achieved, origin: Origin) -> str:
        """Return the model card."""

    @property
    def classes(self) -> Sequence[str]:
        """Names of the classes; none for captioners."""
        return ()

    @property
    def mode(self) -> Literal["L", "RGB"]:
        """PIL mode to which images are converted."""
        return "L" if self.blueprint.channels == 1 else "RGB"

    def data(self, classes: Sequence[str] = ()) -> Data:
        """Describe the dataset for the model card."""
        name = self.config.data
        return Data(
            name=self.config.shared().data,
            classes=classes,
            train=len(self.pictures),
            test=len(self.tests),
            fingerprints={split: part.fingerprint() for split, part in (("train", self.pictures), ("test", self.tests))},
            license="drawn by visattn" if name in (*DRAWN, *SCENES) else _LICENSES.get(name, ""),
            meaning=class_meaning(CAUSE_OF[name]) if name in CAUSE_OF else "",
        )

    def order(self) -> Iterable[int]:
        """Return the indices of the test images in the order in which they are shown."""
        return range(len(self.tests))

    def shown(self, count: int = _SHOWN) -> list[tuple[Image.Image, Any]]:
        """Load the first readable test images in the order of `order`, with their annotations.

        Raises:
            DataError: If no test image can be read.
        """
        found: list[tuple[Image.Image, Any]] = []
        for index in self.order():
            if len(found) == count:
                break
            with suppress(ImageError):
                found.append(self.tests[index])
        if not found:
            raise DataError(f"{self.config.data}: no test image can be read.")
        return found


def scenes_size(config: Recipe) -> tuple[int, int]:
    """Return the `(height, width)` of generated scenes."""
    return (config.img_size or _SCENES,) * 2


def input_size(config: Recipe, pictures: ImageDataset, run: Blueprint | None) -> tuple[int, int]:
    """Return the `(height, width)` of the input: as given, of the run or the published weights that are used, else of small images."""
    if config.img_size:
        return config.img_size, config.img_size
    if run is not None:
        return run.size
    if config.weights != "none":
        return input_spec(load_model(config.model, weights="none")).size
    size = pictures.size
    return size if size and max(size) <= _USUAL else (_USUAL, _USUAL)


def moments_of(
    config: Recipe, pictures: ImageDataset, channels: int, run: Blueprint | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation for normalization: of the run or the published weights that are used, else of the images."""
    if run is not None:
        return run.mean, run.std
    if config.weights == "none":
        return moments(pictures, "L" if channels == 1 else "RGB")
    spec = input_spec(load_model(config.model, weights="none"))
    return spec.mean, spec.std
