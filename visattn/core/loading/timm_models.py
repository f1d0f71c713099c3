"""timm models: built by name, with weights from the hub or from a file."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import timm
import torch
from timm.models import _builder
from torch import Tensor, nn

from visattn._support.checks import printable, suggest
from visattn._support.faces import Later
from visattn._support.language import worded
from visattn._support.notes import note
from visattn.core.families import timm as family
from visattn.core.loading.downloads import Unreachable, weights_file
from visattn.core.loading.initial_values import without_initial_values
from visattn.core.loading.translation import Translate, channels_in, classes_in, fill, shapes_of
from visattn.core.loading.weights import digest, read_tensors
from visattn.core.offers import offered
from visattn.core.provenance import Provenance
from visattn.errors import UnsupportedModel, WeightsError

if TYPE_CHECKING:
    from visattn.core.loading import offline
else:
    offline = Later(f"{__package__}.offline")

# timm's modules with models whose attention covers the image (docs/coverage.md)
_MODULES = """
    beit byoanet cait convit cpubone crossvit csatv2 davit deepseek_vit deit efficientformer efficientformer_v2 efficientvit_msra eva
    fastvit gcvit gemma4_vit hiera hieradet_sam2 iformer levit lowformer maxxvit metaformer mobilenetv5 mobilevit mvitv2 naflexvit nest
    nextvit pit pvt_v2 qwen3_vit shvit swin_transformer swin_transformer_v2 swin_transformer_v2_cr tiny_vit tnt twins visformer
    vision_transformer vision_transformer_hybrid vision_transformer_relpos vision_transformer_sam vitamin volo xcit
"""


def load(name: str, weights: str | Path, seed: int, img_size: tuple[int, int] | None) -> tuple[nn.Module, Provenance]:
    """Build a timm model in evaluation mode.

    Args:
        name: Name with or without a tag.
        weights: `auto`, `none` or a checkpoint file.
        seed: Seed of random weights.
        img_size: Input size to build for, if the model has a fixed input size.

    Returns:
        The model, and the origin of its weights.

    Raises:
        UnsupportedModel: If timm has no such model.
        WeightsError: If the weights cannot be reached, are damaged, or belong to another model.
    """
    _check_name(name)
    if weights == "none":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _build(name, img_size)
        warning = "the weights are random; the map shows nothing about a trained model"
        return model.eval(), Provenance(model=name, weights=f"random, seed {seed}", random=True, warnings=(warning,))
    config = timm.get_pretrained_cfg(name)
    file, source, known = _file_of(name, config) if weights == "auto" else (Path(weights), "", ())
    shown = printable(str(file))
    model, translate, lenient = _unfilled(name, img_size)
    tensors, notes = read_tensors(file, model)
    options, adapted = ({}, ()) if weights == "auto" and not known else _like(tensors, shapes_of(model), config)
    if any(getattr(model, key, None) != value for key, value in options.items()):
        with without_initial_values():
            model = _build(name, img_size, **options)
    changed = fill(model, tensors, shown, translate, lenient)
    named = config.architecture if known else name  # a tag names weights, and these are others
    notes = (*known, *notes, *adapted, *changed)
    if weights == "auto" or _is_of_package(file, config):
        family.remember(model)
    return model.eval(), Provenance(model=named, weights=source or printable(file.name), weights_sha256=digest(file), notes=notes)


def _is_of_package(file: Path, config: Any) -> bool:  # noqa: ANN401 - timm's PretrainedCfg
    """Check whether a file is that of `offline_weights` for the model of a configuration."""
    known = config is not None and config.architecture in offline.SOURCES
    return known and file.resolve() == offline.cached(config.architecture).resolve()


def built(name: str, size: tuple[int, int], **options: Any) -> nn.Module:  # noqa: ANN401
    """Build a timm model with random weights for one input size, to be trained.

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
        offered("networks", "visattn")  # registers our models with timm
    if not timm.is_model(name):
        known = timm.list_models() + timm.list_models(pretrained=True)
        if name.endswith(".py"):
            raise UnsupportedModel(f"{printable(name)}: name the function in it that returns the model: {printable(name)}:build")
        near = ", ".join(suggest(name, known)) or worded("none; see visattn.loading.list_models()", "none; run `visattn list`")
        raise UnsupportedModel(f"unknown model '{printable(name)}'. Close matches: {near}.")


def _like(tensors: dict[str, Tensor], shapes: dict[str, torch.Size], config: Any) -> tuple[dict[str, int], tuple[str, ...]]:  # noqa: ANN401
    """Return the options to build a model for the head and stem of a checkpoint, and notes on differences from the published model."""
    if config is None or not any(key in shapes for key in tensors):  # names of another library: timm translates them later
        return {}, ()
    classes, channels = classes_in(tensors, config.classifier), channels_in(tensors, config.first_conv)
    options, notes = {"num_classes": classes}, []
    if not classes and config.num_classes > 0:
        notes.append("the checkpoint has no classification head; the model is built without one")
    if channels not in (3, _stem_channels(shapes, config.first_conv)):  # TResNet's stem sees rearranged pixels
        options["in_chans"] = channels
        notes.append(f"the model takes {channels} channel{'s' * (channels > 1)}, like the first layer of the checkpoint")
    return options, tuple(notes)


def _stem_channels(shapes: dict[str, torch.Size], stem: str | Sequence[str] | None) -> int:
    """Return the input channels of a model's first convolution, by its name(s); 3 if it has none."""
    names = [stem] if isinstance(stem, str) else stem or ()
    return next((shapes[key][1] for name in names if len(shapes.get(key := f"{name}.weight", ())) == 4), 3)


def _build(name: str, img_size: tuple[int, int] | None, **options: Any) -> Any:  # noqa: ANN401 - its attributes differ
    """Build a model that takes any input size if its class supports that, else one for `img_size`."""
    try:
        return timm.create_model(name, dynamic_img_size=True, **options)
    except TypeError:
        config = timm.get_pretrained_cfg(name)
        fixed = config is None or config.fixed_input_size
        size = {"img_size": img_size} if img_size is not None and fixed else {}
        return timm.create_model(name, **size, **options)


_taking = threading.Lock()


def _unfilled(name: str, img_size: tuple[int, int] | None) -> tuple[nn.Module, Translate | None, bool]:
    """Return a model without values, timm's checkpoint filter for it, and whether timm allows unexpected tensors.

    The filter is available only in the function that builds the model, which passes it to `load_pretrained`. To read the filter,
    `load_pretrained` is replaced temporarily by a function that loads nothing. Loading in other threads is not affected.
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
            with without_initial_values():
                model: nn.Module = _build(name, img_size, pretrained=True)
        finally:
            _builder.load_pretrained = original
    translate = taken.get("filter_fn")
    if translate is not None and len(inspect.signature(translate).parameters) == 1:  # some filters take no model
        return model, lambda tensors, _: translate(tensors), not taken.get("strict", True)
    return model, translate, not taken.get("strict", True)


def names(pattern: str = "*") -> list[str]:
    """Return the names of models with published weights whose tokens map to image positions, by name pattern."""
    return [name for module in _MODULES.split() for name in timm.list_models(pattern, module=module, pretrained=True)]


def reach_hub(name: str) -> str:
    """Return the name of a model and the address or cached file of its weights, without a download.

    Raises:
        WeightsError: If they are not cached and the hub cannot be reached.
    """
    return f"{name}: {_published(name, timm.get_pretrained_cfg(name), download=False)}"


def _file_of(name: str, config: Any) -> tuple[Path, str, tuple[str, ...]]:  # noqa: ANN401 - timm's PretrainedCfg
    """Return the published weights of a model, or those of a package if the hub cannot be reached; their name, and a note on the latter.

    Raises:
        WeightsError: If neither can be reached.
    """  # noqa: DOC501 - `Unreachable` is a WeightsError
    tag = f"{config.architecture}.{config.tag}" if config is not None and config.tag else name
    try:
        return _published(tag, config), tag, ()
    except Unreachable as unreachable:
        source = offline.SOURCES.get(config.architecture)
        if source is None:
            raise
        if not offline.cached(config.architecture).exists():
            text = f"the Hugging Face Hub cannot be reached; downloading {source.name} from the package index"
            note(f"{name}: {text}")
        try:
            file = offline.offline_weights(config.architecture)
        except WeightsError as error:
            raise WeightsError(f"{tag}: weights are not cached and the hub cannot be reached; {error}") from unreachable
        other = f"the weights are those of {source.name}, since the hub cannot be reached; they were not compared with {tag}"
        return file, source.name, (other,)


def _published(name: str, config: Any, download: bool = True) -> Path:  # noqa: ANN401 - timm's PretrainedCfg
    return weights_file(name, config and config.hf_hub_id, config and config.hf_hub_filename, download=download)
