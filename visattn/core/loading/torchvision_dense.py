"""torchvision detectors and segmentation networks by name, such as `tv:fasterrcnn_resnet50_fpn`; see `torchvision_models`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import models

from visattn._support.checks import printable
from visattn.core.families.weight_facts import state
from visattn.core.loading.downloads import url_file
from visattn.core.loading.initial_values import without_initial_values
from visattn.core.loading.prefixes import TORCHVISION
from visattn.core.loading.translation import fill
from visattn.core.loading.weights import digest, read_tensors
from visattn.core.provenance import Provenance

__all__ = ["architectures", "load"]

_SCORES = (  # layers that score the classes
    "roi_heads.box_predictor.cls_score.weight",
    "head.classification_head.cls_logits.weight",  # for each anchor of a position
    "classifier.4.weight",
    "classifier.low_classifier.weight",
)


def architectures() -> list[str]:
    """Return the names of torchvision's detectors and segmentation networks."""
    return [*models.list_models(module=models.detection), *models.list_models(module=models.segmentation)]


def load(name: str, entry: models.WeightsEnum, weights: str | Path, seed: int) -> tuple[nn.Module, Provenance]:
    """Build a detector or a segmentation network in evaluation mode; a checkpoint may have another number of classes.

    Args:
        name: Name as it was given.
        entry: Entry of its published weights.
        weights: `auto`, `none` or a checkpoint file.
        seed: Seed of random weights.

    Returns:
        The model, and the origin of its weights.

    Raises:
        WeightsError: If the weights cannot be reached, are damaged, or belong to another model.
    """
    architecture = name.removeprefix(TORCHVISION).partition(".")[0]
    if weights == "none":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _build(architecture)
        warning = "the weights are random; the map shows nothing about a trained model"
        return model.eval(), Provenance(model=name, weights=f"random, seed {seed}", random=True, warnings=(warning,))
    tag = f"{TORCHVISION}{architecture}.{entry.name}"
    file = url_file(tag, entry.url) if weights == "auto" else Path(weights)
    with without_initial_values():
        bare = _build(architecture)
    tensors, notes = read_tensors(file, bare)
    with without_initial_values():
        model = _build(architecture, **_settings(tensors, bare))
    changed = fill(model, tensors, printable(str(file)))
    if weights == "auto":
        state(model, classes=entry.meta["categories"])
    source = tag if weights == "auto" else printable(file.name)
    return model.eval(), Provenance(model=name, weights=source, weights_sha256=digest(file), notes=notes + changed)


def _build(architecture: str, **options: Any) -> nn.Module:  # noqa: ANN401
    model: nn.Module = models.get_model(architecture, weights=None, weights_backbone=None, **options)
    return model


def _settings(tensors: Mapping[str, Tensor], bare: nn.Module) -> dict[str, Any]:
    """Return the settings of a builder that a checkpoint tells: its number of classes, and whether it has an auxiliary classifier."""
    own = bare.state_dict()
    settings: dict[str, Any] = {"aux_loss": True} if any(key.startswith("aux_classifier.") for key in tensors) else {}
    for key in _SCORES:
        if key in tensors and key in own and tensors[key].shape != own[key].shape:
            anchors = getattr(getattr(getattr(bare, "head", None), "classification_head", None), "num_anchors", 1)
            settings["num_classes"] = len(tensors[key]) // anchors
    return settings
