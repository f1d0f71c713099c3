"""torchvision models by name: classifiers here, detectors and segmentation networks in `torchvision_dense`.

`tv:resnet50` selects torchvision's default weights, `tv:resnet50.IMAGENET1K_V1` specific ones. The prefix `tv:` is required, because timm
has models of the same names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import models
from torchvision.models.vision_transformer import VisionTransformer, interpolate_embeddings

from visattn._support.checks import printable, suggest
from visattn._support.language import option, worded
from visattn.core.families import torchvision as family
from visattn.core.loading import torchvision_dense
from visattn.core.loading.downloads import url_file
from visattn.core.loading.initial_values import without_initial_values
from visattn.core.loading.prefixes import TORCHVISION
from visattn.core.loading.translation import classes_in, fill
from visattn.core.loading.weights import digest, read_tensors
from visattn.core.provenance import Provenance
from visattn.errors import OptionError, UnsupportedModel

_SIZED = {"vit": "image_size", "maxvit": "input_size"}  # name of the argument for a fixed input size


def load(name: str, weights: str | Path, seed: int, img_size: tuple[int, int] | None) -> tuple[nn.Module, Provenance]:
    """Build a torchvision model in evaluation mode.

    Args:
        name: `tv:resnet50`, or with the name of its weights, `tv:resnet50.IMAGENET1K_V1`.
        weights: `auto`, `none` or a checkpoint file.
        seed: Seed of random weights.
        img_size: Input size, if it should differ from that of the weights.

    Returns:
        The model, and the origin of its weights.

    Raises:
        OptionError: If a size is given for a model that takes photos of any size.
        UnsupportedModel: If torchvision has no such model or weights.
        WeightsError: If the weights cannot be reached, are damaged, or belong to another model.
    """
    architecture, entry = _entry(name)
    if architecture in torchvision_dense.architectures():
        if img_size is not None:
            raise OptionError(f"{printable(name)} takes photos of any size. Leave out {option('img_size')} when it is loaded.")
        return torchvision_dense.load(name, entry, weights, seed)
    preset = _resized(entry.transforms(), img_size)
    sized = _sized(architecture, preset.crop_size[0])
    if weights == "none":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _build(architecture, **sized)
        warning = "the weights are random; the map shows nothing about a trained model"
        provenance = Provenance(model=name, weights=f"random, seed {seed}", random=True, warnings=(warning,))
    else:
        tag = f"{TORCHVISION}{architecture}.{entry.name}"
        file = url_file(tag, entry.url) if weights == "auto" else Path(weights)
        shown = printable(str(file))
        with without_initial_values():
            model = _build(architecture, **sized)
        tensors, notes = read_tensors(file, model)
        head, published = family.head_of(model)
        classes = classes_in(tensors, head) or published
        auxiliary = {"aux_logits": any(key.lower().startswith("aux") for key in tensors)} if _inception(architecture) else {}
        if classes != published or any(auxiliary.values()):
            with without_initial_values():
                model = _build(architecture, **sized, **auxiliary, num_classes=classes)
        changed = fill(model, tensors, shown, _translated)
        source = tag if weights == "auto" else printable(file.name)
        provenance = Provenance(model=name, weights=source, weights_sha256=digest(file), notes=notes + changed)
    family.remember(model, preset, entry.meta["categories"] if weights == "auto" else None)
    return model.eval(), provenance


def built(name: str, size: int, **options: Any) -> nn.Module:  # noqa: ANN401
    """Build a classifier with random weights, to be trained.

    Raises:
        UnsupportedModel: If torchvision has no such classifier.
    """
    architecture, _ = _entry(name, models.list_models(module=models))
    plain = {"transform_input": False} if _inception(architecture) else {}
    model: nn.Module = _build(architecture, **plain, **_sized(architecture, size), **options)
    return model


def _architectures() -> list[str]:
    return [*models.list_models(module=models), *torchvision_dense.architectures()]


def _entry(name: str, known: Sequence[str] = ()) -> tuple[str, Any]:
    """Return the architecture and the weights entry for a name, which must be among those that are known: by default all."""
    architecture, _, tag = name.removeprefix(TORCHVISION).partition(".")
    known = known or _architectures()
    if architecture not in known:
        near = ", ".join(f"{TORCHVISION}{one}" for one in suggest(architecture, known)) or worded(
            "none; see visattn.loading.list_models('tv:*')", "none; run `visattn list 'tv:*'`"
        )
        raise UnsupportedModel(f"unknown model '{printable(name)}'. Close matches: {near}.")
    entries: Any = models.get_model_weights(architecture)
    if tag and tag not in entries.__members__:
        tags = ", ".join(entry.name for entry in entries)
        raise UnsupportedModel(f"unknown weights '{printable(tag)}' for {TORCHVISION}{architecture}; available: {tags}.")
    return architecture, entries[tag or "DEFAULT"]


def _resized(preset: Any, img_size: tuple[int, int] | None) -> Any:  # noqa: ANN401 - torchvision's ImageClassification
    """Change a preset to another input side; the resize and crop sizes keep their ratio."""
    if img_size is not None and img_size[0] == img_size[1]:  # other shapes are asked for when a photo is prepared
        preset.resize_size = [round(preset.resize_size[0] * img_size[0] / preset.crop_size[0])]
        preset.crop_size = [img_size[0]]
    return preset


def _sized(architecture: str, size: int) -> dict[str, Any]:
    option = _SIZED.get(architecture.partition("_")[0])
    return {} if option is None else {option: size if option == "image_size" else (size, size)}


def _inception(architecture: str) -> bool:
    return architecture in ("googlenet", "inception_v3")


def _build(architecture: str, **options: Any) -> Any:  # noqa: ANN401 - its attributes differ
    if _inception(architecture):  # the builder's settings for published weights
        options = {"transform_input": True, "aux_logits": False, "init_weights": False} | options
    return models.get_model(architecture, weights=None, **options)


def _translated(tensors: dict[str, Tensor], model: Any) -> dict[str, Tensor]:  # noqa: ANN401
    """Rename the tensors of published checkpoints as torchvision does, and resample position embeddings to the model's size."""
    if isinstance(model, VisionTransformer):
        return dict(interpolate_embeddings(model.image_size, model.patch_size, OrderedDict(tensors)))
    if isinstance(model, models.DenseNet):
        for old in ("norm.1.", "norm.2.", "conv.1.", "conv.2."):
            tensors = {key.replace(f".{old}", f".{old.replace('.', '', 1)}"): value for key, value in tensors.items()}
    if isinstance(model, models.MNASNet):  # MNASNet rejects tensors without a version
        versioned = OrderedDict(tensors)
        versioned._metadata = OrderedDict({"": {"version": 2}})  # type: ignore[attr-defined]
        return versioned
    return tensors


def names(pattern: str = "*") -> list[str]:
    """Return the names of models with published weights, by name pattern with or without `tv:`."""
    every = [f"{name}.{entry.name}" for name in _architectures() for entry in models.get_model_weights(name)]
    return [TORCHVISION + name for name in every if fnmatchcase(name, pattern) or fnmatchcase(TORCHVISION + name, pattern)]
