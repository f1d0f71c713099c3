"""torchvision classifiers: preprocessing, class names, and the token that represents the image."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torchvision import models, transforms
from torchvision.models.swin_transformer import SwinTransformerBlock
from torchvision.models.vision_transformer import EncoderBlock, VisionTransformer
from torchvision.transforms._presets import ImageClassification

from visattn._support.language import option, worded
from visattn._support.parts import Parts, parts_of
from visattn._support.reprs import in_pixels
from visattn.core.capturing import ModelDescription
from visattn.core.families.feature_maps import last_feature_map
from visattn.core.families.published import of_torchvision
from visattn.core.families.spec import InputSpec, per_channel, sources
from visattn.core.families.weight_facts import CHANGED, facts_of, state, why_unknown
from visattn.core.provenance import Provenance
from visattn.errors import OptionError

_HEADS = ("fc", "classifier", "head", "heads")
_PRESET = "crop_size", "resize_size", "mean", "std", "antialias"


def remember(model: nn.Module, preset: Any, classes: Sequence[str] | None = None) -> None:  # noqa: ANN401 - an ImageClassification
    """Store the preprocessing that a model was built for, and the classes of published weights; None: the weights are others."""
    facts = {"family": "torchvision", "published": classes is not None, "interpolation": preset.interpolation.value}
    state(model, input=facts | {name: getattr(preset, name) for name in _PRESET}, classes=classes)


def describe(model: nn.Module, provenance: Provenance) -> ModelDescription:
    """Describe a torchvision model for `capture`; the positions of its tokens are traced from the pixels."""
    parts = parts_of(model)
    blocks = {parts.names[number]: parts.modules[number] for number in parts.fact(_blocks, _blocks)}
    tokens: dict[str, nn.Module] = dict(blocks)
    tokens |= {"encoder.ln": model.get_submodule("encoder.ln")} if blocks else _stages(parts)
    adds = {part.self_attention: name for name, part in blocks.items()}

    def output_weight(owner: Any) -> Tensor | None:  # noqa: ANN401
        weight: Tensor | None = owner.out_proj.weight.detach() if owner in adds else None
        return weight

    return ModelDescription(tokens, "cls" if blocks else "mean", provenance, output_weight, adds.get)


def _blocks(parts: Parts) -> list[int]:
    """Return the numbers of the blocks of a vision transformer."""
    return [number for number, part in enumerate(parts.modules) if isinstance(part, EncoderBlock)]


def _stages(parts: Parts) -> dict[str, nn.Module]:
    """Return the stages of a Swin transformer, each with all of its blocks, and the norm after them."""
    stages = {parts.names[number]: parts.modules[number] for number in parts.fact(_stages, _numbers_of_stages)}
    return {**stages, "norm": parts.modules[0].get_submodule("norm")} if stages else {}


def _numbers_of_stages(parts: Parts) -> list[int]:
    stages = [(number, part) for number, part in enumerate(parts.modules) if isinstance(part, nn.Sequential)]
    return [number for number, part in stages if any(isinstance(child, SwinTransformerBlock) for child in part)]


def input_spec(model: nn.Module, asked: tuple[int, int] | None = None) -> InputSpec:
    """Return the preprocessing of a torchvision model: the one with which its published weights were evaluated.

    Raises:
        OptionError: If the model takes one size only, and `asked` differs from it.
    """
    facts = facts_of(model)
    if facts is not None and facts.input is not None:
        preset, its_own = _stored(facts.input), facts.input["published"] and not facts.changed
    else:
        match = of_torchvision(model, head_of(model)[0])
        preset, its_own = match.source.transforms() if match.body else _usual(model), match.body
    side = preset.crop_size[0]
    size = asked or (side, side)
    if size != (side, side) and isinstance(model, (VisionTransformer, models.MaxVit)):
        sized = worded(f"load_model(img_size={size[0]}) or image_size={size[0]}", f"--img-size {size[0]}")
        wanted = sized if size[0] == size[1] else f"a square {option('img_size')}"
        raise OptionError(
            f"{type(model).__name__} takes only {side} x {side} pixels, got {in_pixels(size)}. Build it with {wanted}."
        )
    scale = min(size) / side  # the crop keeps its share of the resized image
    step: Any = getattr(model, "patch_size", 1)
    channels = next((module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)), 3)
    return InputSpec(
        size=size,
        dynamic=False,
        stride=(step, step),
        mean=per_channel(preset.mean, channels),
        std=per_channel(preset.std, channels),
        interpolation=preset.interpolation.value,
        classifier=head_of(model)[1] > 0,
        channels=channels,
        transform=(
            transforms.Resize(
                [round(shorter * scale) for shorter in preset.resize_size], preset.interpolation, antialias=preset.antialias
            ),
            transforms.CenterCrop(list(size)),
            transforms.ToTensor(),
        ),
        sources=sources(
            vars(preset) if its_own else {},
            "given" if asked else "model" if its_own or hasattr(model, "image_size") else "assumed",
            channels,
        ),
        why=CHANGED if facts is not None and facts.changed else why_unknown(facts),
    )


def _stored(told: Mapping[str, Any]) -> ImageClassification:
    """Return the preprocessing that lies on a model."""
    return ImageClassification(
        crop_size=told["crop_size"][0],
        resize_size=told["resize_size"][0],
        mean=tuple(told["mean"]),
        std=tuple(told["std"]),
        antialias=told["antialias"],
        interpolation=transforms.InterpolationMode(told["interpolation"]),
    )


def _usual(model: nn.Module) -> Any:  # noqa: ANN401
    """Return the preprocessing of a model that was not loaded here: its fixed size, else torchvision's usual size."""
    size = getattr(model, "image_size", 299 if isinstance(model, models.Inception3) else 224)
    return ImageClassification(crop_size=size, resize_size=math.ceil(size * 256 / 224))


def head_of(model: nn.Module) -> tuple[str, int]:
    """Return the name of the layer that outputs the logits, and their number; the number is 0 if there is no such layer."""
    for name in _HEADS:
        part = getattr(model, name, None)
        layers = [] if part is None else [item for item in part.named_modules(prefix=name) if _classifies(item[1])]
        if layers:
            layer_name, layer = layers[-1]
            return layer_name, int(layer.weight.shape[0])
    return "fc", 0


def _classifies(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, nn.Conv2d))


def labels(model: nn.Module) -> tuple[str, ...] | None:
    """Return the names of the classes of published weights; None if the weights are others."""
    facts = facts_of(model)
    if facts is not None and facts.input is not None:
        return None if facts.changed else facts.classes
    match = of_torchvision(model, head_of(model)[0])
    return tuple(match.source.meta["categories"]) if match.head else None


def head(model: Any) -> Callable[[Tensor], Tensor] | None:  # noqa: ANN401 - attributes differ by class
    """Return a function from the output of a block to the model's output for a vision transformer, else None."""
    if not isinstance(model, VisionTransformer):
        return None
    return lambda tokens: model.heads(model.encoder.ln(tokens)[:, 0])


def cam_layer(model: nn.Module) -> str | None:
    """Return the input of the last attention of a vision transformer; for other models, the last feature map before pooling."""
    parts = parts_of(model)
    blocks = [parts.names[number] for number in parts.fact(_blocks, _blocks)]
    if blocks:
        return f"{blocks[-1]}.ln_1"
    spec = input_spec(model)
    return last_feature_map(model, spec.channels, spec.size)
