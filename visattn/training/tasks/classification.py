"""What is to be learned, apart from how: pictures, the network for them, its loss, its test, and what is kept of it.

The loop knows a `Task` alone. `Classification` is one here, captions are another in `captioning.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from torch import Tensor, nn

from visattn._support.checks import printable
from visattn.data import Labelled, read
from visattn.data.captions.pictures import SCENES
from visattn.data.labelled.readers import PUBLISHED
from visattn.data.pictures import Pictures
from visattn.data.scenes.store import MARKS
from visattn.errors import DataError, ImageError, OptionError, UnsupportedModel, WeightsError
from visattn.families import input_spec, trained
from visattn.families.trained import InputFacts, evaluation_transform
from visattn.loading import folders, load_model
from visattn.loading.blueprints import Blueprint
from visattn.models import ram
from visattn.training.batches import Labels, Targets, moments
from visattn.training.config import Config, Recipe
from visattn.training.report.card import Data, Reached, card
from visattn.training.report.costs import Cost, cost

_USUAL = 224  # pixels, of pictures of many sizes
_SCENES = 64
_RAM = "visattn_ram"
_LICENCES = {"fashion-mnist": "MIT (Zalando SE)"}
_SHOWN = 8  # test pictures whose maps are drawn

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
    def card(self, model: nn.Module, reached: Reached, **facts: Any) -> str:  # noqa: ANN401 - those of `page`
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
            licence="drawn by visattn" if name in (*MARKS, *SCENES) else _LICENCES.get(name, ""),
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


class Classification(Task):
    """Which class a picture is of."""

    def __init__(self, config: Config) -> None:
        """Read the data.

        Raises:
            DataError: If it cannot be learned from.
            OptionError: If pictures are mixed for RAM.
        """
        self.config: Config = config
        self.pictures: Labelled
        self.tests: Labelled
        self.pictures, self.tests = (labelled(config, split) for split in ("train", "test"))
        self.targets = Labels()
        if config.model == _RAM and (config.mixup or config.cutmix or config.smoothing != Config().smoothing):
            raise OptionError(
                f"{_RAM} is rewarded for right classes, which mixed and smoothed labels have not. Leave out mixup (--mixup), "
                "cutmix (--cutmix) and smoothing (--smoothing)."
            )
        self._blueprint = blueprint_of(config, self.pictures)
        self.in_pairs = config.mixup > 0 or config.cutmix > 0
        self.mixup = (
            Mixup(config.mixup, config.cutmix, label_smoothing=config.smoothing, num_classes=len(self._blueprint.classes))
            if self.in_pairs
            else None
        )
        self.criterion = SoftTargetCrossEntropy() if self.in_pairs else nn.CrossEntropyLoss(label_smoothing=config.smoothing)

    @property
    def blueprint(self) -> Blueprint:
        """What the network is built from."""
        return self._blueprint

    def build(self) -> nn.Module:
        """The network, with published weights where they are asked for."""
        model = self.blueprint.build()
        if self.config.weights != "none":
            begin_with(model, self.config)
        return model

    def loss(self, forward: Any, pixels: Tensor, targets: Targeted) -> Tensor:  # noqa: ANN401
        """Cross-entropy; RAM has a loss of its own."""
        (labels,) = targets
        if self.mixup is not None:
            pixels, labels = self.mixup(pixels, labels)
        output = forward(pixels)
        if isinstance(output, ram.Looked):
            return ram.loss(output, labels)
        loss: Tensor = self.criterion(output, labels)
        return loss

    def measure(self, model: nn.Module, pixels: Tensor, targets: Targeted) -> tuple[float, float, float]:
        """Pictures told right, and cross-entropy."""
        (labels,) = targets
        output = model(pixels)
        logits = (output.logits if isinstance(output, ram.Looked) else output).float()
        right = float((logits.argmax(1) == labels).sum())
        return right, float(F.cross_entropy(logits, labels, reduction="sum")), len(labels)

    def maps(self, model: nn.Module, run: Path) -> Draw:
        """Sheets of an `AttentionLogger`."""
        from visattn.training.attention_logger import AttentionLogger

        transform = evaluation_transform(self.blueprint)
        shown = [(transform(picture.convert(self.mode)), label) for picture, label in self.shown()]
        device = next(model.parameters()).device
        return AttentionLogger(
            trained.remember(model, self.blueprint),
            torch.stack([pixels for pixels, _ in shown]).to(device),
            self.config.maps_every,
            to=run / "maps",
            mean=self.blueprint.mean,
            std=self.blueprint.std,
            target=[label for _, label in shown],
            classes=self.blueprint.classes,
        )

    def keep(self, model: nn.Module, folder: Path, facts: Mapping[str, Any]) -> None:
        """For `visattn.load_model`."""
        folders.save(model, self.blueprint, folder, dict(facts))

    @property
    def title(self) -> str:
        """As `resnet18 with se on photos`."""
        inside = "" if self.config.attention == "none" else f" with {self.config.attention}"
        shown = self.config.shared()
        return f"{shown.model}{inside} on {shown.data}"

    def card(self, model: nn.Module, reached: Reached, **facts: Any) -> str:  # noqa: ANN401
        """Multiply-accumulates are told where they can be counted."""
        shape = (self.blueprint.channels, *self.blueprint.size)
        try:
            found = cost(model, shape)
        except UnsupportedModel:
            found = Cost(sum(parameter.numel() for parameter in model.parameters()), 0)
        return card(self.config.shared(), self.data(self.blueprint.classes), reached, found, shape=shape, **facts)


def task_of(config: Recipe) -> Task:
    """The task of a recipe, with its data.

    Raises:
        DataError: If the data cannot be learned from.
        TypeError: If it is no recipe of ours.
    """
    if isinstance(config, Config):
        return Classification(config)
    from visattn.training.tasks.captioning import CaptionConfig, Captioning

    if not isinstance(config, CaptionConfig):
        raise TypeError(f"no task has a {type(config).__name__}")
    return Captioning(config)


def labelled(config: Config, split: Literal["train", "test"]) -> Labelled:
    """The pictures to train or to test on.

    Raises:
        DataError: If they cannot be learned from.
        OptionError: If a root is told that they do not have.
    """
    if config.root and config.data not in PUBLISHED:
        raise OptionError(f"root is for {', '.join(PUBLISHED)} alone, got {printable(config.data)}. Leave root (--root) out.")
    count = config.train_count if split == "train" else config.test_count
    return read(
        config.data, split, root=Path(config.root) if config.root else None, count=count or None, size=scenes_size(config)
    )


def scenes_size(config: Recipe) -> tuple[int, int]:
    """`(height, width)` of scenes."""
    return (config.img_size or _SCENES,) * 2


def blueprint_of(config: Config, pictures: Labelled | None = None, *, like: Blueprint | None = None) -> Blueprint:
    """The network of a configuration for its pictures, or for those of a blueprint that is given."""
    options = config.model_kwargs | ({"widths": config.widths} if config.widths else {})
    if like is not None:
        return replace(like, model=config.model, attention=config.attention, options=options)
    pictures = pictures or labelled(config, "train")
    channels = 3 if config.weights != "none" or config.model.startswith("tv:") else pictures.channels
    mean, std = moments_of(config, pictures, channels)
    return Blueprint(
        config.model, pictures.classes, channels, input_size(config, pictures.size), mean, std, config.attention, options
    )


def input_size(config: Recipe, pictures: tuple[int, int] | None) -> tuple[int, int]:
    """`(height, width)` of the input, for pictures of a size, or of many."""
    return (config.img_size,) * 2 if config.img_size else pictures or (_USUAL, _USUAL)


def moments_of(config: Recipe, pictures: Pictures, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of the pixels: of the pictures, or of those that published weights were trained on."""
    if config.weights == "none":
        return moments(pictures, "L" if channels == 1 else "RGB")
    spec = input_spec(load_model(config.model, weights="none"))
    return spec.mean, spec.std


def begin_with(model: nn.Module, config: Recipe) -> None:
    """Give a network the published weights of its model, but for the layers whose shape the classes and channels decide.

    Raises:
        WeightsError: If weights cannot be had, or more than the first and the last layer differ.
    """
    published = load_model(config.model, weights=config.weights).state_dict()
    own = model.state_dict()
    plain = {name.replace(".base.", "."): name for name in own}  # under attached attention
    fitting = {
        plain[name]: tensor for name, tensor in published.items() if name in plain and own[plain[name]].shape == tensor.shape
    }
    other = sorted({name.rpartition(".")[0] for name in published if plain.get(name) not in fitting})
    if len(other) > 2:
        raise WeightsError(
            f"{config.model}: {len(other)} layers differ from the published ones ({', '.join(other[:4])}, ...); "
            "leave model_kwargs and img_size (--img-size) as they were published, or pass weights='none' (--weights none)."
        )
    model.load_state_dict(fitting, strict=False)
