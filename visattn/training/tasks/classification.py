"""Classification task: trains a classifier on labeled images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.nn.functional as F
from timm.data import Mixup
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn

from visattn._support.checks import printable
from visattn._support.language import option
from visattn._support.notes import warn
from visattn._support.types import Split
from visattn.core.families import trained
from visattn.core.families.trained import evaluation_transform
from visattn.core.loading import model_folders as folders
from visattn.core.loading.blueprints import Blueprint
from visattn.core.pipeline.tensors import prepare_tensor
from visattn.data import LabeledDataset, load_labeled
from visattn.data.labeled import PUBLISHED, OwnDataset, held_out
from visattn.errors import OptionError, UnsupportedModel
from visattn.models import ram
from visattn.training.attention_logger import AttentionLogger
from visattn.training.batches import Labels
from visattn.training.config import Config
from visattn.training.optimizing import BACKBONE, freeze, groups_of, head_of
from visattn.training.report.card import Achieved, Origin, card
from visattn.training.report.costs import Cost, cost
from visattn.training.tasks.beginning import beginning_of, fill, going_on, run_of
from visattn.training.tasks.task import Draw, Measured, Targeted, Task, input_size, moments_of, scenes_size

_RAM = "visattn_ram"


class Classification(Task):
    """Image classification task."""

    def __init__(self, config: Config) -> None:
        """Load the data.

        Raises:
            DataError: If the data cannot be used for training.
            OptionError: If mixup, CutMix or label smoothing is set for RAM.
        """
        self.run = run_of(config)
        config = _going_on(config, self.run)
        self.config: Config = config
        self.pictures: LabeledDataset
        self.tests: LabeledDataset
        self.pictures, self.tests = (labeled(config, split) for split in get_args(Split))
        if isinstance(self.pictures, OwnDataset) and isinstance(self.tests, OwnDataset):
            self.pictures.check_apart(self.tests)
        if config.validation:
            self.pictures, self.validation = held_out(self.pictures, config.validation, config.seed)
        self.keeps_best, self.patience = config.keep == "best", config.patience
        self.targets = Labels()
        if config.model == _RAM:
            _check_ram(config)
        self._blueprint = blueprint_of(config, self.pictures, run=self.run)
        self.in_pairs = config.mixup > 0 or config.cutmix > 0
        self.mixup = (
            Mixup(config.mixup, config.cutmix, label_smoothing=config.label_smoothing, num_classes=len(self._blueprint.classes))
            if self.in_pairs
            else None
        )
        self.criterion = _criterion(config, soft=self.in_pairs)

    @property
    def blueprint(self) -> Blueprint:
        """Specification from which the network is built."""
        return self._blueprint

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.blueprint.classes

    def build(self) -> nn.Module:
        """Build the network, and load published weights if requested."""
        model = self.blueprint.build()
        if self.config.weights != "none":
            fill(model, beginning_of(self.config, self.run), self.config, self.classes)
        config = self.config
        head = head_of(model, len(self.blueprint.classes)) if config.head_lr or BACKBONE in config.freeze else ()
        if config.freeze:
            self.still = freeze(model, config.freeze, head)
            if config.weights == "none":
                warn(f"{option('freeze')} keeps random weights. Pass {option('weights')}")
        self.groups = groups_of(config, head)
        return model

    def loss(self, forward: Any, pixels: Tensor, targets: Targeted) -> Tensor:  # noqa: ANN401
        """Compute the loss of the settings. RAM has its own loss."""
        (labels,) = targets
        if self.mixup is not None:
            pixels, labels = self.mixup(pixels, labels)
        output = forward(pixels)
        if isinstance(output, ram.RAMOutput):
            return ram.loss(output, labels)
        loss: Tensor = self.criterion(output, labels)
        return loss

    def measure(self, model: nn.Module, pixels: Tensor, targets: Targeted) -> Measured:
        """Compute the number of correct classes, the sum of cross-entropies, the number of images, and their outcomes."""
        (labels,) = targets
        output = model(pixels)
        logits = (output.logits if isinstance(output, ram.RAMOutput) else output).float()
        found = logits.argmax(1)
        above = (logits > logits.gather(1, labels[:, None])).sum(1)
        outcomes = torch.stack([labels, found, above], 1).cpu()
        return Measured(float((found == labels).sum()), self._told_loss(logits, labels), len(labels), outcomes)

    def _told_loss(self, logits: Tensor, labels: Tensor) -> float:
        """Sum the loss over images, without label smoothing."""
        if self.config.loss == "ce":
            return float(F.cross_entropy(logits, labels, reduction="sum"))
        goal = F.one_hot(labels, logits.shape[1]).to(logits)
        return float(F.binary_cross_entropy_with_logits(logits, goal, reduction="none").mean(1).sum())

    def order(self) -> Iterable[int]:
        """Return the first image of each class, then the second of each, and so on."""
        labels = self.tests.labels
        by_class = np.argsort(labels, kind="stable")
        starts = np.searchsorted(labels[by_class], labels[by_class])  # where the class of each begins
        turns = np.arange(len(labels)) - starts
        return [int(index) for index in by_class[np.lexsort((labels[by_class], turns))]]

    def maps(self, model: nn.Module, run: Path) -> Draw:
        """Return an `AttentionLogger` for some test images."""
        transform = evaluation_transform(self.blueprint)
        shown = [(transform(picture.convert(self.mode)), label) for picture, label in self.shown()]
        pixels = torch.stack([pixels for pixels, _ in shown])
        return AttentionLogger(
            trained.remember(model, self.blueprint, in_training=True),
            prepare_tensor(pixels, model, mean=self.blueprint.mean, std=self.blueprint.std),
            self.config.maps_every,
            to=run / "maps",
            target=[label for _, label in shown],
            labels=self.blueprint.classes,
        )

    def keep(self, model: nn.Module, folder: Path, facts: Mapping[str, Any]) -> None:
        """Save the network for `visattn.load_model`."""
        folders.save(model, self.blueprint, folder, dict(facts))

    @property
    def title(self) -> str:
        """Title, such as `resnet18 with se on photos`."""
        how = "" if self.config.attention_init == "auto" else f" ({self.config.attention_init})"
        inside = "" if self.config.attention == "none" else f" with {self.config.attention}{how}"
        shown = self.config.shared()
        return f"{shown.model}{inside} on {shown.data}"

    def card(self, model: nn.Module, reached: Achieved, origin: Origin) -> str:
        """Return the model card, with multiply-accumulates if they can be counted."""
        shape = (self.blueprint.channels, *self.blueprint.size)
        try:
            found = cost(model, shape)
        except UnsupportedModel:
            found = Cost(sum(parameter.numel() for parameter in model.parameters()), 0)
        return card(self.config.shared(), self.data(self.blueprint.classes), reached, origin, cost=found, shape=shape)


def _criterion(config: Config, *, soft: bool) -> nn.Module:
    """Return the loss; `soft` if the targets are probabilities."""
    if config.loss == "bce":
        made: nn.Module = BinaryCrossEntropy(smoothing=0.0 if soft else config.label_smoothing)
    else:
        made = SoftTargetCrossEntropy() if soft else nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)
    return made


def _check_ram(config: Config) -> None:
    """Check that no setting is given that the loss of RAM ignores.

    Raises:
        OptionError: If one is.
    """
    usual = Config()
    given = [name for name in ("mixup", "cutmix", "label_smoothing", "loss") if getattr(config, name) != getattr(usual, name)]
    if given:
        flags = ", ".join(map(option, given))
        raise OptionError(f"{_RAM} needs hard labels for its reward, and has a loss of its own. Leave out {flags}.")


def labeled(config: Config, split: Split) -> LabeledDataset:
    """Load the training or test images.

    Raises:
        DataError: If the data cannot be used for training.
        OptionError: If `root` is set for a dataset that does not use it.
    """
    if config.root and config.data not in PUBLISHED:
        raise OptionError(
            f"root needs one of the datasets {', '.join(PUBLISHED)}, got {printable(config.data)}. Leave {option('root')} out."
        )
    count = config.train_count if split == "train" else config.test_count
    root = Path(config.root) if config.root else None
    seed = config.seed if config.split else 0
    return load_labeled(
        config.data, split, root=root, count=count or None, size=scenes_size(config), seed=seed, held_out=config.split
    )


def _going_on(config: Config, run: Blueprint | None) -> Config:
    """Return the settings of a training that begins with a run: also its attention, unless another one is given."""
    config = going_on(config, run)
    if run is None or config.attention != "none":
        return config
    return replace(config, attention=run.attention, attention_init=run.attention_init)


def blueprint_of(
    config: Config, pictures: LabeledDataset | None = None, *, like: Blueprint | None = None, run: Blueprint | None = None
) -> Blueprint:
    """Return the blueprint of the network for its images. If `like` is given, take input and classes from it instead.

    `run` is the network that the training begins with, if it is known.
    """
    options = config.model_kwargs | ({"widths": config.widths} if config.widths else {})
    if like is not None:
        return replace(
            like, model=config.model, attention=config.attention, options=options, attention_init=config.attention_init
        )
    pictures = pictures or labeled(config, "train")
    channels = 3 if config.weights != "none" or config.model.startswith("tv:") else pictures.channels
    channels = channels if run is None else run.channels
    mean, std = moments_of(config, pictures, channels, run)
    return Blueprint(
        config.model,
        pictures.classes,
        channels,
        input_size(config, pictures, run),
        mean,
        std,
        config.attention,
        options,
        config.attention_init,
    )
