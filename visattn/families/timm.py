"""timm: loading by name, how pixels are prepared, and where the tokens of its flat vision transformers lie."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import timm
import timm.data
import torch
from timm.layers import AttentionPoolLatent
from timm.models import _builder
from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torch import Tensor, nn

from visattn._capture import Anatomy, Placement
from visattn._checks import printable, suggest
from visattn.errors import LayoutError, OptionError, UnsupportedModel
from visattn.families._checkpoint import Translate, as_float32, channels_in, classes_in, fill, shapes_of, unwrap
from visattn.families._spec import InputSpec
from visattn.families._weights import check_finite, digest, hub_file, read_checkpoint
from visattn.geometry import Box
from visattn.provenance import Provenance
from visattn.records import TokenLayout

_FLAT = (VisionTransformer, Eva, Beit, VisionTransformerRelPos)
_MODULES = (
    "vision_transformer",
    "vision_transformer_hybrid",
    "vitamin",
    "deit",
    "eva",
    "beit",
    "vision_transformer_relpos",
)  # the files of timm that define them
_UNKNOWN_PARTS = (
    "DiffAttention",
    "DiffParallelScalingBlock",
    "ParallelThingsBlock",
    "AttentionPoolPrr",
)  # not one attention a block


def owns(model: nn.Module) -> bool:
    """Whether `model` is one of timm's."""
    return type(model).__module__.startswith("timm.") or isinstance(model, _FLAT)


def load(name: str, weights: str | Path, seed: int, img_size: int | None) -> tuple[nn.Module, Provenance]:
    """Build a model of timm in evaluation mode.

    Args:
        name: Name with or without a tag.
        weights: `auto`, `none` or a checkpoint file.
        seed: Seed of random weights.
        img_size: Input side to build for, where the model does not take any size.

    Returns:
        The model, and where its weights came from.

    Raises:
        UnsupportedModel: If timm has no such model.
        WeightsError: If weights are unreachable, damaged or of another model.
    """
    if not timm.is_model(name):
        known = timm.list_models() + timm.list_models(pretrained=True)
        near = ", ".join(suggest(name, known)) or "none is near; see visattn list"
        raise UnsupportedModel(f"unknown model '{printable(name)}'; did you mean: {near}?")
    if weights == "none":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _build(name, img_size)
        warning = "the weights are random; the picture shows nothing about a trained model"
        return model.eval(), Provenance(model=name, weights=f"random, seed {seed}", random=True, warnings=(warning,))
    config = timm.get_pretrained_cfg(name)
    tag = f"{config.architecture}.{config.tag}" if config is not None and config.tag else name
    file = _published(tag, config) if weights == "auto" else Path(weights)
    shown = printable(str(file))
    outline, translate, lenient = _outline(name)
    shapes = shapes_of(outline)
    tensors, notes = unwrap(read_checkpoint(file), shapes, shown)
    tensors, cast = as_float32(tensors, shown)
    check_finite(tensors, shown)
    options, adapted = ({}, ()) if weights == "auto" else _like(tensors, shapes, config)
    model = _build(name, img_size, **options)
    changed = fill(model, tensors, shown, translate, lenient)
    source = tag if weights == "auto" else printable(file.name)
    notes += cast + adapted + changed
    return model.eval(), Provenance(model=name, weights=source, weights_sha256=digest(file), notes=notes)


def _like(tensors: dict[str, Tensor], shapes: dict[str, torch.Size], config: Any) -> tuple[dict[str, int], tuple[str, ...]]:  # noqa: ANN401
    """How a model is built for the head and the stem of a checkpoint, and notes where that is not as published."""
    if config is None or not any(key in shapes for key in tensors):  # another library's names: timm translates them for its own
        return {}, ()
    classes, channels = classes_in(tensors, config.classifier), channels_in(tensors, config.first_conv)
    options, notes = {"num_classes": classes}, []
    if not classes and config.num_classes > 0:
        notes.append("the checkpoint has no classification head; the model is built without one")
    if channels != 3:
        options["in_chans"] = channels
        notes.append(f"the model takes {channels} channel{'s' * (channels > 1)}, as the checkpoint's first layer does")
    return options, tuple(notes)


def _build(name: str, img_size: int | None, **options: int) -> Any:  # noqa: ANN401 - its attributes differ
    """A model that takes any input size where its class can, else one built for `img_size`."""
    try:
        return timm.create_model(name, dynamic_img_size=True, **options)
    except TypeError:
        size = {} if img_size is None else {"img_size": img_size}
        return timm.create_model(name, **size, **options)


_taking = threading.Lock()


def _outline(name: str) -> tuple[nn.Module, Translate | None, bool]:
    """A model without values, timm's translation of older checkpoints for it, and whether timm allows tensors too many.

    The translation is known only to the function that builds the model, which hands it to `load_pretrained`; there it is taken, and
    nothing is loaded. What other threads load meanwhile is loaded.
    """
    taken: dict[str, Any] = {}
    mine = threading.get_ident()
    with _taking:
        original: Callable[..., None] = _builder.load_pretrained

        def take(*given: Any, **facts: Any) -> None:  # noqa: ANN401
            if threading.get_ident() == mine:
                taken.update(facts)
            else:
                original(*given, **facts)

        _builder.load_pretrained = take
        try:
            model: nn.Module = _without_values(name)
        finally:
            _builder.load_pretrained = original
    return model, taken.get("filter_fn"), not taken.get("strict", True)


def _without_values(name: str) -> Any:  # noqa: ANN401
    try:
        with torch.device("meta"):
            return timm.create_model(name, pretrained=True)
    except RuntimeError:  # older versions of timm compute with values while they build
        return timm.create_model(name, pretrained=True)


def anatomy(model: nn.Module, provenance: Provenance) -> Anatomy:
    """Facts for `capture` about a flat vision transformer of timm.

    Raises:
        UnsupportedModel: If the model is not one, or mixes several attentions in a block.
    """
    if not isinstance(model, _FLAT):
        raise UnsupportedModel(_refusal(model))
    parts = [*model.blocks, *(getattr(block, "attn", None) for block in model.blocks), getattr(model, "attn_pool", None)]
    odd = next((type(part).__name__ for part in parts if type(part).__name__ in _UNKNOWN_PARTS), None)
    if odd:
        raise UnsupportedModel(f"{type(model).__name__} with {odd}: how its attentions mix is not known yet.")
    prefix = _prefix(model)

    @cache
    def layout(input_size: tuple[int, int]) -> TokenLayout:
        stem: Any = model.patch_embed
        rows, columns = stem.dynamic_feat_size(input_size)
        stride = stem.feat_ratio(as_scalar=False)
        box = Box(0, 0, rows * stride[0], columns * stride[1])
        return TokenLayout("tokens", prefix, (rows, columns), box)

    def place(owner: nn.Module, queries: int, keys: int, input_size: tuple[int, int]) -> Placement:
        tokens = layout(input_size)
        if isinstance(owner, AttentionPoolLatent):
            if keys == tokens.cells:  # pools the patches only
                tokens = replace(tokens, space="patches", prefix=())
            learned = tuple(f"query{i}" for i in range(queries))
            return "pool", TokenLayout("pool", learned, (), tokens.box), tokens
        if not queries == keys == len(tokens):
            raise LayoutError(
                f"{type(owner).__name__} attends from {queries} to {keys} tokens, but an input of {input_size[0]} x "
                f"{input_size[1]} gives {len(prefix)} prefix tokens and a grid of {tokens.grid[0]} x {tokens.grid[1]}. "
                "Tokens were dropped or merged; a map would be shifted."
            )
        return "self", tokens, tokens

    tokens = {f"blocks.{i}": block for i, block in enumerate(model.blocks)} | {"norm": model.norm}
    return Anatomy(model.patch_embed, tokens, place, layout, _output_weight, _readout(model, prefix), provenance)


def input_spec(model: nn.Module, img_size: int | None = None) -> InputSpec:
    """How pixels are prepared for a model of timm; `img_size` is another side for one that takes any.

    Raises:
        OptionError: If the model takes one size only and it is another.
    """
    config = timm.data.resolve_model_data_config(model)
    stem: Any = getattr(model, "patch_embed", None)
    dynamic = bool(getattr(model, "dynamic_img_size", False))
    fixed = getattr(stem, "img_size", None)
    size = tuple(fixed) if fixed is not None else tuple(config["input_size"][1:])
    if img_size is not None and dynamic:
        stride = stem.feat_ratio(as_scalar=False)
        size = tuple(max(1, round(img_size / side)) * side for side in stride)
    elif img_size is not None and size != (img_size, img_size):
        raise OptionError(
            f"{type(model).__name__} takes {size[0]} x {size[1]} pixels only, got {img_size}. Load it with load_model(img_size={img_size})."
        )
    config["input_size"] = (3, *size)
    channels = next((module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)), 3)
    return InputSpec(
        size=size,
        dynamic=dynamic,
        stride=tuple(stem.feat_ratio(as_scalar=False)) if hasattr(stem, "feat_ratio") else (1, 1),
        mean=_per_channel(config["mean"], channels),
        std=_per_channel(config["std"], channels),
        interpolation=config["interpolation"],
        classifier=int(getattr(model, "num_classes", 0) or 0) > 0,
        channels=channels,
        transform=timm.data.create_transform(**config, is_training=False).transforms,
    )


def _per_channel(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """One value for each channel; their mean where the configuration is for another number of channels."""
    return tuple(values) if len(values) == channels else (sum(values) / len(values),) * channels


def _prefix(model: Any) -> tuple[str, ...]:  # noqa: ANN401 - attributes differ by class
    """Names of the tokens before the patches, in timm's order: class, distillation, registers."""
    names = ["cls"] if getattr(model, "cls_token", None) is not None else []
    names += ["distillation"] if getattr(model, "dist_token", None) is not None else []
    registers = int(model.num_prefix_tokens) - len(names)
    stored = getattr(model, "reg_token", None)
    if registers != (0 if stored is None else stored.shape[1]):
        raise LayoutError(
            f"{type(model).__name__} has {model.num_prefix_tokens} prefix tokens, of which only {names} are known by name."
        )
    return tuple(names + [f"register{i}" for i in range(registers)])


def _readout(model: Any, prefix: tuple[str, ...]) -> str:  # noqa: ANN401
    if getattr(model, "attn_pool", None) is not None:
        return "pool"
    if "distillation" in prefix:
        return "cls+distillation"
    headless = not getattr(model, "num_classes", 0)  # then how it would pool says nothing: the class token stands for the image
    return "cls" if "cls" in prefix and (headless or model.global_pool in ("token", "")) else "mean"


def _output_weight(owner: Any) -> Tensor | None:  # noqa: ANN401
    direct = isinstance(getattr(owner, "norm", None), nn.Identity) and getattr(owner, "gate", None) is None
    return owner.proj.weight.detach() if direct and isinstance(getattr(owner, "proj", None), nn.Linear) else None


def _refusal(model: nn.Module) -> str:
    name = type(model).__name__
    attentive = [n for n, module in model.named_modules() if "attn" in n.lower() or "attention" in type(module).__name__.lower()]
    if not attentive:
        return f"{name} has no attention layers. Choose a vision transformer (visattn list 'vit*')."
    return f"{name}: where its tokens lie on the image is not known yet; flat vision transformers are (visattn list)."


def names(pattern: str = "*") -> list[str]:
    """Models with published weights whose tokens can be put back on the image, by name pattern."""
    found = [name for module in _MODULES for name in timm.list_models(pattern, module=module, pretrained=True)]
    return [name for name in found if not name.startswith(("vit_dwee", "vit_dpwee"))]  # differential attention


def reach_hub(name: str) -> str:
    """Where the weights of a model come from today.

    Raises:
        WeightsError: If they are not cached and the hub cannot be reached.
    """
    return f"{name}: {_published(name, timm.get_pretrained_cfg(name), download=False)}"


def _published(name: str, config: Any, download: bool = True) -> Path:  # noqa: ANN401 - timm's PretrainedCfg
    return hub_file(name, config and config.hf_hub_id, config and config.hf_hub_filename, download=download)
