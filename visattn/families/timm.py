"""timm: loading by name, how pixels are prepared, and what stands for the whole image."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import timm
import timm.data
import torch
from timm.models import PretrainedCfg, _builder
from torch import Tensor, nn

import visattn.models  # noqa: F401 - tells timm the names of ours
from visattn._support.checks import printable, suggest
from visattn.capturing import Anatomy, module_names
from visattn.errors import OptionError, UnsupportedModel
from visattn.families._checkpoint import Translate, as_float32, channels_in, classes_in, fill, shapes_of, unwrap
from visattn.families._feature_map import last_feature_map, takes
from visattn.families._spec import InputSpec, per_channel, sources
from visattn.families._weights import check_finite, digest, hub_file, read_checkpoint
from visattn.provenance import Provenance

# the files of timm whose models put attention over the image (docs/coverage.md)
_MODULES = """
    beit byoanet cait convit cpubone crossvit csatv2 davit deepseek_vit deit efficientformer efficientformer_v2 efficientvit_msra eva
    fastvit gcvit gemma4_vit hiera hieradet_sam2 iformer levit lowformer maxxvit metaformer mobilenetv5 mobilevit mvitv2 naflexvit nest
    nextvit pit pvt_v2 qwen3_vit shvit swin_transformer swin_transformer_v2 swin_transformer_v2_cr tiny_vit tnt twins visformer
    vision_transformer vision_transformer_hybrid vision_transformer_relpos vision_transformer_sam vitamin volo xcit
"""

_stems: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def owns(model: nn.Module) -> bool:
    """Whether `model` is one of timm's, or was built by it."""
    built = isinstance(getattr(model, "pretrained_cfg", None), (Mapping, PretrainedCfg))
    return built or any(kind.__module__.startswith("timm.") for kind in type(model).__mro__)


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
    _check_name(name)
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


def built(name: str, size: tuple[int, int], **options: Any) -> nn.Module:  # noqa: ANN401
    """A model of timm with random weights for one input size, to be trained.

    Raises:
        UnsupportedModel: If timm has no such model.
    """
    _check_name(name)
    config = timm.get_pretrained_cfg(name)
    sized = {"img_size": size} if config is None or config.fixed_input_size else {}
    model: nn.Module = timm.create_model(name, **sized, **options)
    return model


def _check_name(name: str) -> None:
    if not timm.is_model(name):
        known = timm.list_models() + timm.list_models(pretrained=True)
        near = ", ".join(suggest(name, known)) or "none is near; see visattn list"
        raise UnsupportedModel(f"unknown model '{printable(name)}'; did you mean: {near}?")


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
        config = timm.get_pretrained_cfg(name)
        fixed = config is None or config.fixed_input_size
        size = {"img_size": img_size} if img_size is not None and fixed else {}
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
    translate = taken.get("filter_fn")
    if translate is not None and len(inspect.signature(translate).parameters) == 1:  # some do without the model
        return model, lambda tensors, _: translate(tensors), not taken.get("strict", True)
    return model, translate, not taken.get("strict", True)


def _without_values(name: str) -> Any:  # noqa: ANN401
    try:
        with torch.device("meta"):
            return timm.create_model(name, pretrained=True)
    except RuntimeError:  # older versions of timm compute with values while they build
        return timm.create_model(name, pretrained=True)


def anatomy(model: nn.Module, provenance: Provenance) -> Anatomy:
    """Facts for `capture` about a model of timm; where its tokens lie is followed from the pixels."""
    named = dict(model.named_children())
    parts = next((named[name] for name in ("blocks", "stages", "layers", "levels") if name in named), None)
    tokens: dict[str, nn.Module] = {}
    if isinstance(parts, (nn.Sequential, nn.ModuleList)):
        where = next(name for name, part in named.items() if part is parts)
        tokens = {f"{where}.{i}": part for i, part in enumerate(parts)}
    if isinstance(named.get("norm"), nn.Module) and not isinstance(named["norm"], nn.Identity):
        tokens["norm"] = named["norm"]
    parts_by_name: dict[Any, str] = module_names(model)
    blocks = {part.attn: (name, part) for part, name in parts_by_name.items() if _adds_attention(part)}

    def output_weight(owner: nn.Module) -> Tensor | None:
        weight = _projection(owner, owner in blocks)
        scale = _layer_scale(blocks[owner][1]) if owner in blocks else None
        return weight if weight is None or scale is None else weight * scale[:, None]

    return Anatomy(
        tokens,
        _readout(model),
        provenance,
        output_weight,
        lambda owner: blocks[owner][0] if owner in blocks else None,
        _answers_at_keys,
    )


def _answers_at_keys(owner: nn.Module) -> bool:
    """GCViT asks one set of global queries in every window; the answers go to the window's own tokens."""
    return type(owner).__name__ == "WindowAttentionGlobal"


def input_spec(model: nn.Module, img_size: int | None = None) -> InputSpec:
    """How pixels are prepared for a model of timm; `img_size` is another side for one that takes any.

    Raises:
        OptionError: If the model takes one size only and it is another.
    """
    config = timm.data.resolve_model_data_config(model)
    stem: Any = getattr(model, "patch_embed", None)
    fixed = getattr(stem, "img_size", None)
    stride: Any = tuple(stem.feat_ratio(as_scalar=False)) if hasattr(stem, "feat_ratio") else (1, 1)
    known: Any = getattr(model, "pretrained_cfg", None) or {}
    convolutional = stem is None and known.get("fixed_input_size") is False
    dynamic = bool(getattr(model, "dynamic_img_size", False)) or convolutional
    size = tuple(fixed) if fixed is not None else tuple(config["input_size"][1:])
    if img_size is not None and dynamic:
        size = tuple(max(1, round(img_size / side)) * side for side in stride)
    elif img_size is not None and size != (img_size, img_size):
        raise OptionError(
            f"{type(model).__name__} takes {size[0]} x {size[1]} pixels only, got {img_size}. Load it with load_model(img_size={img_size})."
        )
    config["input_size"] = (3, *size)
    channels = next((module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)), 3)
    if channels not in (1, 3) and _rearranges(model, size):
        channels = 3
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
        sources=sources(known, "given" if img_size else "model" if fixed or known.get("input_size") else "assumed", channels),
    )


def _rearranges(model: nn.Module, size: tuple[int, int]) -> bool:
    """Whether a stem makes more channels of three before its first convolution, as in TResNet."""
    if model not in _stems:
        _stems[model] = takes(model, 3, size)
    return _stems[model]


def _readout(model: Any) -> str:  # noqa: ANN401 - attributes differ by class
    if getattr(model, "attn_pool", None) is not None:
        return "pool"
    if getattr(model, "dist_token", None) is not None:
        return "cls+distillation"
    headless = not getattr(model, "num_classes", 0)  # then how it would pool says nothing: the class token stands for the image
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


def _adds_attention(block: nn.Module) -> bool:
    """Whether this is a block `x + scale * attn(norm1(x))`, of a class that was read."""
    kind = type(block)
    return (kind.__module__, kind.__name__) in _PRE_NORM


def _layer_scale(block: Any) -> Tensor | None:  # noqa: ANN401
    scale = getattr(block, "gamma_1", None)
    if scale is None:
        scale = getattr(getattr(block, "ls1", None), "gamma", None)
    return None if scale is None else scale.detach()


def _projection(owner: Any, read: bool) -> Tensor | None:  # noqa: ANN401
    """The weight behind the heads; an attention without a norm of its own only where its class was `read`."""
    norm = getattr(owner, "norm", None)
    direct = (isinstance(norm, nn.Identity) or (norm is None and read)) and getattr(owner, "gate", None) is None
    return owner.proj.weight.detach() if direct and isinstance(getattr(owner, "proj", None), nn.Linear) else None


def labels(model: nn.Module) -> tuple[str, ...] | None:
    """Names of the classes, of a model with one of the ImageNet heads."""
    subset = timm.data.infer_imagenet_subset(model)
    if not subset:
        return None
    info = timm.data.ImageNetInfo(subset)
    return tuple(info.index_to_description(index) for index in range(info.num_classes()))


def head(model: Any) -> Callable[[Tensor], Tensor] | None:  # noqa: ANN401
    """From what a block gives to the model's output, where one norm and the head are all that follow."""
    blocks, norm = getattr(model, "blocks", None), getattr(model, "norm", None)
    if blocks is None or norm is None or not hasattr(model, "forward_head"):
        return None
    return lambda tokens: model.forward_head(norm(tokens))


def cam_layer(model: Any) -> str | None:  # noqa: ANN401
    """What the last attention reads: the last place where every patch has a gradient, whatever is read out.

    Of a model whose last features are maps, the last before they are pooled.
    """
    blocks = getattr(model, "blocks", None)
    if isinstance(blocks, (nn.Sequential, nn.ModuleList)) and hasattr(blocks[-1], "norm1"):
        return f"blocks.{len(blocks) - 1}.norm1"
    spec = input_spec(model)
    return last_feature_map(model, spec.channels, spec.size)


def names(pattern: str = "*") -> list[str]:
    """Models with published weights whose tokens can be put back on the image, by name pattern."""
    return [name for module in _MODULES.split() for name in timm.list_models(pattern, module=module, pretrained=True)]


def reach_hub(name: str) -> str:
    """Where the weights of a model come from today.

    Raises:
        WeightsError: If they are not cached and the hub cannot be reached.
    """
    return f"{name}: {_published(name, timm.get_pretrained_cfg(name), download=False)}"


def _published(name: str, config: Any, download: bool = True) -> Path:  # noqa: ANN401 - timm's PretrainedCfg
    return hub_file(name, config and config.hf_hub_id, config and config.hf_hub_filename, download=download)
