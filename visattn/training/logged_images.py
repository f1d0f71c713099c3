"""The images that an `AttentionLogger` draws, the model inside of its wrappers, and the classes that are explained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from timm.utils import ModelEmaV2, ModelEmaV3
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from visattn.errors import OptionError, ShapeError, UnsupportedModel
from visattn.families import input_spec
from visattn.families.spec import per_channel
from visattn.geometry import Box, Geometry
from visattn.images import as_photo
from visattn.pipeline.inputs import Prepared

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel, ModelEmaV2, ModelEmaV3)


_ROUNDING = 0.02  # of normalised images in half precision


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of what parallelises, compiles or averages it."""
    while isinstance(model, _WRAPPERS) or isinstance(getattr(model, "_orig_mod", None), nn.Module):
        model = model.module if isinstance(model, _WRAPPERS) else model._orig_mod  # type: ignore[assignment]
    split = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
    if split or any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        raise UnsupportedModel(
            f"{type(model).__name__}: each process must hold all parameters, they are split among several, so that one alone cannot "
            "draw. Draw from a checkpoint, with visattn.explain."
        )
    return model


def targets_of(target: Any, count: int) -> Any:  # noqa: ANN401 - see `AttentionLogger`
    """A function, a class for each image, or None."""
    if target is None or callable(target):
        return target
    classes = [target] * count if isinstance(target, int) else [int(one) for one in target]
    if len(classes) != count:
        raise ShapeError(f"target must be one class or {count}, one for each image, got {len(classes)}.")
    return classes


def prepared_images(
    images: Tensor | Prepared,
    photos: Sequence[Image.Image] | None,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    model: nn.Module,
) -> Prepared:
    """The images, kept from changes, with what is shown of them."""
    pixels = images.pixels if isinstance(images, Prepared) else images
    if pixels.ndim != 4 or not len(pixels) or not pixels.is_floating_point():
        raise ShapeError(
            f"images must be floats (B, C, H, W), got {pixels.dtype} {tuple(pixels.shape)}. Pass them as the model takes them."
        )
    if isinstance(images, Prepared):
        shown, places = images.photos, images.geometries
    else:
        shown = tuple(map(as_photo, _shown(pixels, mean, std, model) if photos is None else photos))
        sizes, size = [(photo.height, photo.width) for photo in shown], (pixels.shape[2], pixels.shape[3])
        places = tuple(Geometry(whole, size, Box(0, 0, *whole), "the whole photo") for whole in sizes)
    if len(shown) != len(pixels):
        raise ShapeError(f"photos must be as many as images, {len(pixels)}, got {len(shown)}.")
    return Prepared(pixels.detach().cpu().clone(), shown, places)


def _shown(pixels: Tensor, mean: Sequence[float] | None, std: Sequence[float] | None, model: nn.Module) -> Tensor:
    """The images in [0, 1]."""
    pixels, channels = pixels.detach().float().cpu(), pixels.shape[1]
    if channels not in (1, 3):
        raise OptionError(f"images must have 1 or 3 channels to be shown, got {channels}. Pass photos=.")
    wrong = next((len(given) for given in (mean, std) if given is not None and len(given) not in (1, channels)), None)
    if wrong is not None:
        raise OptionError(f"mean and std must have 1 value or {channels}, one for each channel, got {wrong}.")
    low, high = pixels.aminmax()
    if mean is not None or std is not None or low < 0 or high > 1:
        spec = input_spec(model)
        scale, shift = (
            torch.tensor(per_channel(known if given is None else given, channels))[:, None, None]
            for given, known in ((std, spec.std), (mean, spec.mean))
        )
        pixels = pixels * scale + shift
        low, high = pixels.aminmax()
    if not (low >= -_ROUNDING and high <= 1 + _ROUNDING):  # NaN is refused too
        raise OptionError(
            f"images must lie in [0, 1] once their normalisation is undone, got {low:.3g} to {high:.3g}. Pass the mean= and std= "
            "that they were made with, or photos=."
        )
    return pixels.clamp(0, 1)
