"""torchvision's classifiers: loading by name, how pixels are prepared, and what stands for the whole image.

A name is `tv:resnet50`, with torchvision's own default weights, or `tv:resnet50.IMAGENET1K_V1`. `tv:` may not be left out: timm has
models of the same names.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torchvision import models, transforms
from torchvision.models.swin_transformer import SwinTransformerBlock
from torchvision.models.vision_transformer import EncoderBlock, VisionTransformer, interpolate_embeddings
from torchvision.transforms._presets import ImageClassification

from visattn._support.checks import printable, suggest
from visattn.capturing import Anatomy
from visattn.errors import OptionError, UnsupportedModel
from visattn.families._checkpoint import as_float32, classes_in, fill, shapes_of, unwrap
from visattn.families._feature_map import last_feature_map
from visattn.families._spec import InputSpec, per_channel, sources
from visattn.families._weights import check_finite, digest, read_checkpoint, url_file
from visattn.provenance import Provenance

PREFIX = "tv:"
_IMAGENET = 1000  # classes; then their names are known
_HEADS = ("fc", "classifier", "head", "heads")
_SIZED = {"vit": "image_size", "maxvit": "input_size"}  # what a builder calls its one size

_presets: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()  # how the weights of loaded models want their pixels


def owns(model: nn.Module) -> bool:
    """Whether `model` is one of torchvision's classifiers; those of detection, segmentation and video lie deeper."""
    return any(kind.__module__.rpartition(".")[0] == "torchvision.models" for kind in type(model).__mro__)


def load(name: str, weights: str | Path, seed: int, img_size: int | None) -> tuple[nn.Module, Provenance]:
    """Build a classifier of torchvision in evaluation mode.

    Args:
        name: `tv:resnet50`, or with the name of its weights, `tv:resnet50.IMAGENET1K_V1`.
        weights: `auto`, `none` or a checkpoint file.
        seed: Seed of random weights.
        img_size: Another input side.

    Returns:
        The model, and where its weights came from.

    Raises:
        UnsupportedModel: If torchvision has no such classifier or weights.
        WeightsError: If weights are unreachable, damaged or of another model.
    """
    architecture, entry = _entry(name)
    preset = _resized(entry.transforms(), img_size)
    sized = _sized(architecture, preset.crop_size[0])
    if weights == "none":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _build(architecture, **sized)
        warning = "the weights are random; the picture shows nothing about a trained model"
        provenance = Provenance(model=name, weights=f"random, seed {seed}", random=True, warnings=(warning,))
    else:
        tag = f"{PREFIX}{architecture}.{entry.name}"
        file = url_file(tag, entry.url) if weights == "auto" else Path(weights)
        shown = printable(str(file))
        outline = _outline(architecture, **sized)
        tensors, notes = unwrap(read_checkpoint(file), shapes_of(outline), shown)
        tensors, cast = as_float32(tensors, shown)
        check_finite(tensors, shown)
        classes = classes_in(tensors, _head(outline)[0])
        auxiliary = {"aux_logits": any(key.lower().startswith("aux") for key in tensors)} if _inception(architecture) else {}
        model = _build(architecture, **sized, **auxiliary, **({"num_classes": classes} if classes else {}))
        changed = fill(model, tensors, shown, _translated)
        source = tag if weights == "auto" else printable(file.name)
        provenance = Provenance(model=name, weights=source, weights_sha256=digest(file), notes=notes + cast + changed)
    _presets[model] = preset
    return model.eval(), provenance


def built(name: str, size: int, **options: Any) -> nn.Module:  # noqa: ANN401
    """A classifier with random weights, to be trained.

    Raises:
        UnsupportedModel: If torchvision has no such classifier.
    """
    architecture, _ = _entry(name)
    plain = {"transform_input": False} if _inception(architecture) else {}
    model: nn.Module = _build(architecture, **plain, **_sized(architecture, size), **options)
    return model


def _entry(name: str) -> tuple[str, Any]:
    """The architecture and the weights that a name means."""
    architecture, _, tag = name.removeprefix(PREFIX).partition(".")
    known = models.list_models(module=models)
    if architecture not in known:
        near = ", ".join(f"{PREFIX}{one}" for one in suggest(architecture, known)) or "none is near; see visattn list 'tv:*'"
        raise UnsupportedModel(f"unknown model '{printable(name)}'; did you mean: {near}?")
    entries: Any = models.get_model_weights(architecture)
    if tag and tag not in entries.__members__:
        tags = ", ".join(entry.name for entry in entries)
        raise UnsupportedModel(f"unknown weights '{printable(tag)}' of {PREFIX}{architecture}; it has: {tags}.")
    return architecture, entries[tag or "DEFAULT"]


def _resized(preset: Any, img_size: int | None) -> Any:  # noqa: ANN401 - torchvision's ImageClassification
    """The same for another side; what is cut off at the edges stays in proportion."""
    if img_size is not None:
        preset.resize_size = [round(preset.resize_size[0] * img_size / preset.crop_size[0])]
        preset.crop_size = [img_size]
    return preset


def _sized(architecture: str, size: int) -> dict[str, Any]:
    option = _SIZED.get(architecture.partition("_")[0])
    return {} if option is None else {option: size if option == "image_size" else (size, size)}


def _inception(architecture: str) -> bool:
    return architecture in ("googlenet", "inception_v3")


def _build(architecture: str, **options: Any) -> Any:  # noqa: ANN401 - its attributes differ
    if _inception(architecture):  # what the builder sets for published weights
        options = {"transform_input": True, "aux_logits": False, "init_weights": False} | options
    return models.get_model(architecture, weights=None, **options)


def _outline(architecture: str, **options: Any) -> nn.Module:  # noqa: ANN401
    try:
        with torch.device("meta"):
            model: nn.Module = _build(architecture, **options)
    except RuntimeError:  # RegNet computes with values while it is built
        model = _build(architecture, **options)
    return model


def _translated(tensors: dict[str, Tensor], model: Any) -> dict[str, Tensor]:  # noqa: ANN401
    """Published checkpoints under today's names, position embeddings for the model's size."""
    if isinstance(model, VisionTransformer):
        return dict(interpolate_embeddings(model.image_size, model.patch_size, OrderedDict(tensors)))
    if isinstance(model, models.DenseNet):
        for old in ("norm.1.", "norm.2.", "conv.1.", "conv.2."):
            tensors = {key.replace(f".{old}", f".{old.replace('.', '', 1)}"): value for key, value in tensors.items()}
    if isinstance(model, models.MNASNet):  # refuses tensors without a version
        versioned = OrderedDict(tensors)
        versioned._metadata = OrderedDict({"": {"version": 2}})  # type: ignore[attr-defined]
        return versioned
    return tensors


def anatomy(model: nn.Module, provenance: Provenance) -> Anatomy:
    """Facts for `capture` about a model of torchvision; where its tokens lie is followed from the pixels."""
    blocks = {name: part for name, part in model.named_modules() if isinstance(part, EncoderBlock)}
    tokens: dict[str, nn.Module] = dict(blocks)
    tokens |= {"encoder.ln": model.get_submodule("encoder.ln")} if blocks else _stages(model)
    adds = {part.self_attention: name for name, part in blocks.items()}

    def output_weight(owner: Any) -> Tensor | None:  # noqa: ANN401
        weight: Tensor | None = owner.out_proj.weight.detach() if owner in adds else None
        return weight

    return Anatomy(tokens, "cls" if blocks else "mean", provenance, output_weight, adds.get)


def _stages(model: nn.Module) -> dict[str, nn.Module]:
    """The stages of Swin, each with all of its blocks, and the norm behind them."""
    found = {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, nn.Sequential) and any(isinstance(child, SwinTransformerBlock) for child in part)
    }
    return {**found, "norm": model.get_submodule("norm")} if found else {}


def input_spec(model: nn.Module, img_size: int | None = None) -> InputSpec:
    """How pixels are prepared for a model of torchvision: as its published weights were evaluated.

    Raises:
        OptionError: If the model was loaded for another size.
    """
    preset = _presets.get(model) or _usual(model)
    size = preset.crop_size[0]
    if img_size not in (None, size):
        raise OptionError(
            f"{type(model).__name__} takes {size} x {size} pixels, got {img_size}. Load it with load_model(img_size={img_size})."
        )
    side: Any = getattr(model, "patch_size", 1)
    channels = next((module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)), 3)
    return InputSpec(
        size=(size, size),
        dynamic=False,
        stride=(side, side),
        mean=per_channel(preset.mean, channels),
        std=per_channel(preset.std, channels),
        interpolation=preset.interpolation.value,
        classifier=_head(model)[1] > 0,
        channels=channels,
        transform=(
            transforms.Resize(preset.resize_size, preset.interpolation, antialias=preset.antialias),
            transforms.CenterCrop(preset.crop_size),
            transforms.ToTensor(),
        ),
        sources=sources(
            vars(preset) if model in _presets else {},
            "given" if img_size else "model" if model in _presets or hasattr(model, "image_size") else "assumed",
            channels,
        ),
    )


def _usual(model: nn.Module) -> Any:  # noqa: ANN401
    """For a model that was not loaded here: the size it is fixed to, else torchvision's usual one."""
    size = getattr(model, "image_size", 299 if isinstance(model, models.Inception3) else 224)
    return ImageClassification(crop_size=size, resize_size=math.ceil(size * 256 / 224))


def _head(model: nn.Module) -> tuple[str, int]:
    """Name of the layer that gives the logits, and their number; 0 of a model without one."""
    for name in _HEADS:
        part = getattr(model, name, None)
        layers = [] if part is None else [item for item in part.named_modules(prefix=name) if _classifies(item[1])]
        if layers:
            found, layer = layers[-1]
            return found, int(layer.weight.shape[0])
    return "fc", 0


def _classifies(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, nn.Conv2d))


def labels(model: nn.Module) -> tuple[str, ...] | None:
    """Names of the classes, of a model with the ImageNet head."""
    if _head(model)[1] != _IMAGENET:
        return None
    return tuple(models.ResNet18_Weights.DEFAULT.meta["categories"])


def head(model: Any) -> Callable[[Tensor], Tensor] | None:  # noqa: ANN401 - attributes differ by class
    """From what a block gives to the model's output, of a vision transformer."""
    if not isinstance(model, VisionTransformer):
        return None
    return lambda tokens: model.heads(model.encoder.ln(tokens)[:, 0])


def cam_layer(model: nn.Module) -> str | None:
    """What the last attention of a vision transformer reads; of other models the last feature map before pooling."""
    blocks = [name for name, part in model.named_modules() if isinstance(part, EncoderBlock)]
    if blocks:
        return f"{blocks[-1]}.ln_1"
    spec = input_spec(model)
    return last_feature_map(model, spec.channels, spec.size)


def names(pattern: str = "*") -> list[str]:
    """Classifiers with published weights, by name pattern, with or without `tv:`."""
    every = [f"{name}.{entry.name}" for name in models.list_models(module=models) for entry in models.get_model_weights(name)]
    return [PREFIX + name for name in every if fnmatchcase(name, pattern) or fnmatchcase(PREFIX + name, pattern)]
