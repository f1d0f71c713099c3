"""Models by name: of timm, of torchvision, of a file of yours, of a folder that visattn trained."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

import torch
from torch import nn

from visattn import families
from visattn._support.checks import first_line, printable
from visattn._support.files import is_file
from visattn._support.typed import typed
from visattn.errors import ModelError, OptionError, ResourceError
from visattn.loading import own_files, timm_models, torchvision_models
from visattn.loading.weights import FACTS


@typed()
def load_model(
    name: str,
    *,
    weights: str | os.PathLike[str] = "auto",
    seed: int = 0,
    img_size: int | None = None,
    device: str | torch.device = "cpu",
) -> nn.Module:
    """Build a model by its timm name, as `tv:` and its torchvision name, by `file.py:factory` or a folder, in evaluation mode.

    Args:
        name: For example `vit_small_patch14_dinov2.lvd142m`, `tv:resnet50`, `tv:resnet50.IMAGENET1K_V1`, a file of yours and the
            function in it that makes the model, or a folder with a network that visattn trained.
        weights: `auto`: the local cache, then the hub; `none`: random weights; else a safetensors file, or a checkpoint that loads
            without running code. It must have every tensor of the model; the number of classes and of input channels is its own.
            A file's function and a folder have their own: only `auto` then.
        seed: Seed of random weights.
        img_size: Input side in pixels to build for, where the model takes one size only.
        device: Where the model lives: `cpu`, `cuda`, `cuda:1`, ...

    Returns:
        The model; where its weights came from is remembered for the provenance.

    Raises:
        OptionError: If no device goes by such a name, or weights are given to a model that has its own.
        ModelError: If there is no such device on this machine.
        UnsupportedModel: If there is no such model.
        WeightsError: If weights are unreachable, damaged or of another model.
    """
    place = check_device(device)
    from_file, folder = name.rpartition(":")[0].endswith(".py"), Path(name)
    if weights != "auto" and (from_file or is_file(folder / FACTS)):
        what = "the function of a file loads its own weights" if from_file else "a folder holds its own weights"
        raise OptionError(f"{printable(name)}: {what}, got {printable(str(weights))}. Leave weights out.")
    if from_file:
        model, provenance = own_files.load(name)
    elif is_file(folder / FACTS):
        model, provenance = import_module("visattn.loading.folders").load(
            folder
        )  # knows our own networks, which others do without
    else:
        library = torchvision_models if name.startswith(torchvision_models.PREFIX) else timm_models
        model, provenance = library.load(name, weights if isinstance(weights, str) else Path(weights), seed, img_size)
    model = _moved(model, place)
    families.remember(model, provenance)
    return model


def _moved(model: nn.Module, place: torch.device) -> nn.Module:
    try:
        model.to(place)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ResourceError(f"out of memory on {place}; choose a smaller model or another device.") from error
    except Exception as error:  # a model on the meta device, one with a `to` of its own
        raise ModelError(
            f"{type(model).__name__}: cannot be moved to {place} ({first_line(error)}). Return a model whose parameters have values."
        ) from error
    return model


def list_models(pattern: str = "*") -> list[str]:
    """Models with published weights whose maps are known, by name pattern."""
    return timm_models.names(pattern) + torchvision_models.names(pattern)


def check_device(name: str | torch.device) -> torch.device:
    """A device that works, tried before weights are fetched."""
    try:
        place = torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"unknown device '{printable(str(name))}'. Choose cpu, or cuda or cuda:N for a GPU.") from error
    try:
        torch.zeros(1, device=place).cpu()
    except (RuntimeError, AssertionError, ImportError) as error:  # which of them depends on how torch was built
        count = torch.cuda.device_count()
        there = f"cpu, {', '.join(f'cuda:{i}' for i in range(count))}" if count else "cpu"
        raise ModelError(f"device '{place}' must be one that works on this machine. Choose from: {there}.") from error
    return place
