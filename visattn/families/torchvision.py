"""torchvision's classifiers: how pixels are prepared, and what stands for the whole image."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torchvision import models, transforms
from torchvision.models.swin_transformer import SwinTransformerBlock
from torchvision.models.vision_transformer import EncoderBlock, VisionTransformer
from torchvision.transforms._presets import ImageClassification

from visattn.capturing import Anatomy
from visattn.errors import OptionError
from visattn.families.feature_maps import last_feature_map
from visattn.families.spec import InputSpec, per_channel, sources
from visattn.provenance import Provenance

_IMAGENET = 1000  # classes; then their names are known
_HEADS = ("fc", "classifier", "head", "heads")
_presets: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()  # how the weights of loaded models want their pixels


def owns(model: nn.Module) -> bool:
    """Whether `model` is one of torchvision's classifiers; those of detection, segmentation and video lie deeper."""
    return any(kind.__module__.rpartition(".")[0] == "torchvision.models" for kind in type(model).__mro__)


def remember(model: nn.Module, preset: Any) -> None:  # noqa: ANN401 - torchvision's ImageClassification
    """Keep how the weights of a loaded model want their pixels."""
    _presets[model] = preset


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
        classifier=head_of(model)[1] > 0,
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


def head_of(model: nn.Module) -> tuple[str, int]:
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
    if head_of(model)[1] != _IMAGENET:
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
