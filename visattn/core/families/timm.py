"""timm models: preprocessing, class names, and the token that represents the image."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import timm.data
from torch import Tensor, nn

from visattn._support.faces import Later
from visattn._support.language import worded
from visattn._support.memory import OfStructure
from visattn._support.parts import Parts, parts_of
from visattn._support.reprs import in_pixels
from visattn.core.capturing import ModelDescription
from visattn.core.families.published import of_timm
from visattn.core.families.spec import InputSpec, per_channel, sources
from visattn.core.families.weight_facts import CHANGED, facts_of, state, why_unknown
from visattn.core.provenance import Provenance
from visattn.errors import OptionError

if TYPE_CHECKING:
    from visattn.core.families import feature_maps, sizes
else:
    feature_maps, sizes = Later(f"{__package__}.feature_maps"), Later(f"{__package__}.sizes")

_stems: OfStructure[bool | None] = OfStructure()


def describe(model: nn.Module, provenance: Provenance) -> ModelDescription:
    """Describe a timm model for `capture`; the positions of its tokens are traced from the pixels."""
    named = dict(model.named_children())
    parts = next((named[name] for name in ("blocks", "stages", "layers", "levels") if name in named), None)
    tokens: dict[str, nn.Module] = {}
    if isinstance(parts, (nn.Sequential, nn.ModuleList)):
        where = next(name for name, part in named.items() if part is parts)
        tokens = {f"{where}.{i}": part for i, part in enumerate(parts)}
    if isinstance(named.get("norm"), nn.Module) and not isinstance(named["norm"], nn.Identity):
        tokens["norm"] = named["norm"]

    @cache
    def blocks() -> dict[nn.Module, tuple[str, nn.Module]]:
        every = parts_of(model)
        adding: list[tuple[str, Any]] = [(every.names[number], every.modules[number]) for number in every.fact(_adding, _adding)]
        return {block.attn: (name, block) for name, block in adding}

    def output_weight(owner: nn.Module) -> Tensor | None:
        weight = _projection(owner, owner in blocks())
        scale = _layer_scale(blocks()[owner][1]) if owner in blocks() else None
        return weight if weight is None or scale is None else weight * scale[:, None]

    return ModelDescription(
        tokens,
        _readout(model),
        provenance,
        output_weight,
        lambda owner: blocks()[owner][0] if owner in blocks() else None,
        _answers_at_keys,
    )


def _answers_at_keys(owner: nn.Module) -> bool:
    """Check for GCViT's global attention: all windows share one set of queries, but each output row belongs to a token of the window."""
    return type(owner).__name__ == "WindowAttentionGlobal"


def input_spec(model: nn.Module, asked: tuple[int, int] | None = None) -> InputSpec:
    """Return the preprocessing of a timm model; `asked` is another `(height, width)`, for a model that takes any size.

    Raises:
        OptionError: If the model takes only one size, and `asked` differs from it.
    """
    config = timm.data.resolve_model_data_config(model)
    stem: Any = getattr(model, "patch_embed", None)
    fixed = getattr(stem, "img_size", None)
    stride: Any = tuple(stem.feat_ratio(as_scalar=False)) if hasattr(stem, "feat_ratio") else (1, 1)
    pretrained: Any = getattr(model, "pretrained_cfg", None) or {}
    convolutional = stem is None and pretrained.get("fixed_input_size") is False
    dynamic = bool(getattr(model, "dynamic_img_size", False)) or convolutional
    size = tuple(fixed or config["input_size"][1:])
    if asked is not None and dynamic:
        size = tuple(max(1, round(side / step)) * step for side, step in zip(asked, stride, strict=True))
    elif asked is not None and size != asked:
        side = asked[0] if asked[0] == asked[1] else asked
        raise OptionError(
            f"{type(model).__name__} takes only {in_pixels(size)} pixels, got {in_pixels(asked)}. "
            + worded(f"Build it for this size: load_model or timm.create_model with img_size={side}.", "Leave --img-size out.")
        )
    config["input_size"] = (3, *size)
    facts = facts_of(model)
    if facts is not None and facts.input is not None:
        published, why = not facts.changed, CHANGED
    else:
        published, why = of_timm(model, pretrained).body, why_unknown(facts)
    own = pretrained if published else {}
    channels = _channels(model, size)
    return InputSpec(
        size=size,
        dynamic=dynamic,
        stride=stride,
        mean=per_channel(config["mean"], channels),
        std=per_channel(config["std"], channels),
        interpolation=config["interpolation"],
        classifier=int(getattr(model, "num_classes", 0) or 0) > 0,
        channels=channels,
        transform=timm.data.create_transform(**config, is_training=False).transforms,
        sources=sources(own, "given" if asked else "model" if fixed or own.get("input_size") else "assumed", channels),
        why=why,
    )


def remember(model: nn.Module) -> nn.Module:
    """State that a model has its published weights, so that the preprocessing and the classes that timm has published are its own."""
    return state(model, input={"family": "timm"}, classes=_published_classes(model))


def _channels(model: nn.Module, size: tuple[int, int]) -> int:
    """Return the number of channels of a model's input."""
    channels = next((module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)), 3)
    return 3 if channels not in (1, 3) and _rearranges(model, size) else channels


def _rearranges(model: nn.Module, size: tuple[int, int]) -> bool:
    """Check whether a model takes three channels and rearranges them into more before its first convolution, as TResNet does."""
    return bool(_stems.of(model, size, lambda: sizes.takes(model, 3, size) or None))


def _readout(model: Any) -> str:  # noqa: ANN401 - attributes differ by class
    if getattr(model, "attn_pool", None) is not None:
        return "pool"
    if getattr(model, "dist_token", None) is not None:
        return "cls+distillation"
    headless = not getattr(model, "num_classes", 0)  # without a head, its pooling is unused: the class token represents the image
    pooled = getattr(model, "global_pool", "token")
    return "cls" if headless or pooled in ("token", "") else "mean"


_PRE_NORM = frozenset(
    {
        ("timm.models.vision_transformer", "Block"),
        ("timm.models.vision_transformer_relpos", "RelPosBlock"),
        ("timm.models.beit", "Block"),
        ("timm.models.eva", "EvaBlock"),
        ("timm.models.cait", "LayerScaleBlock"),
    }
)


def _adding(parts: Parts) -> list[int]:
    """Return the numbers of the blocks `x + scale * attn(norm1(x))` that are of a class whose source we have verified."""
    kinds = [(type(part).__module__, type(part).__name__) for part in parts.modules]
    return [number for number, kind in enumerate(kinds) if kind in _PRE_NORM]


def _layer_scale(block: Any) -> Tensor | None:  # noqa: ANN401
    scale = getattr(block, "gamma_1", None)
    if scale is None:
        scale = getattr(getattr(block, "ls1", None), "gamma", None)
    return None if scale is None else scale.detach()


def _projection(owner: Any, read: bool) -> Tensor | None:  # noqa: ANN401
    """Return the weight of the output projection if it directly follows the heads, else None.

    An attention module without a `norm` attribute qualifies only if its class was `read`, that is, verified in timm's source.
    """
    norm = getattr(owner, "norm", None)
    direct = (isinstance(norm, nn.Identity) or (norm is None and read)) and getattr(owner, "gate", None) is None
    return owner.proj.weight.detach() if direct and isinstance(getattr(owner, "proj", None), nn.Linear) else None


def labels(model: nn.Module) -> tuple[str, ...] | None:
    """Return the names of the classes of published weights; None if the weights are others, or timm does not know them."""
    facts = facts_of(model)
    if facts is not None and facts.input is not None:
        return None if facts.changed else facts.classes
    return _published_classes(model) if of_timm(model, getattr(model, "pretrained_cfg", None) or {}).head else None


def imagenet_classes() -> tuple[str, ...]:
    """Return the names of the 1000 classes of ImageNet."""
    info = timm.data.ImageNetInfo("imagenet-1k")
    return tuple(info.index_to_description(index) for index in range(info.num_classes()))


def _published_classes(model: nn.Module) -> tuple[str, ...] | None:
    subset = timm.data.infer_imagenet_subset(model)
    if not subset:
        return None
    info = timm.data.ImageNetInfo(subset)
    return tuple(info.index_to_description(index) for index in range(info.num_classes()))


def head(model: Any) -> Callable[[Tensor], Tensor] | None:  # noqa: ANN401
    """Return a function from the output of a block to the model's output, if only one norm and the head follow; else None."""
    blocks, norm = getattr(model, "blocks", None), getattr(model, "norm", None)
    if blocks is None or norm is None or not hasattr(model, "forward_head"):
        return None
    return lambda tokens: model.forward_head(norm(tokens))


def cam_layer(model: Any) -> str | None:  # noqa: ANN401
    """Return the module that Grad-CAM reads.

    For transformers, this is the input of the last attention: the last layer in which every patch has a gradient, whichever token the head
    uses. For other models, it is the last feature map before pooling.
    """
    blocks = getattr(model, "blocks", None)
    if isinstance(blocks, (nn.Sequential, nn.ModuleList)) and hasattr(blocks[-1], "norm1"):
        return f"blocks.{len(blocks) - 1}.norm1"
    fixed = getattr(getattr(model, "patch_embed", None), "img_size", None)
    size = tuple(fixed or timm.data.resolve_model_data_config(model)["input_size"][1:])
    return feature_maps.last_feature_map(model, _channels(model, size), size)
