"""Preprocessed image tensors, for example batches of a training run, with the pictures to draw maps on."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from visattn._support.modes import in_own_modes
from visattn._support.typed import typed
from visattn.core.families import input_spec
from visattn.core.families.spec import per_channel
from visattn.core.geometry import Box, Geometry
from visattn.core.images.sources import as_image
from visattn.core.pipeline.inputs import Prepared, prepare_with
from visattn.core.pipeline.preprocessing import Preprocessing
from visattn.core.pipeline.transforms import ALIKE, likeness
from visattn.errors import OptionError, ShapeError

__all__ = ["prepare_inputs", "prepare_tensor"]

_PIXELS = "pixel_values", "pixels", "images", "image", "x"  # names of an image among the inputs of models
_NAMED = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
_SAME = 1e-3  # largest difference between pixels that one processor made twice, with and without its fast path
_ROUNDING = 0.02  # rounding error of normalized images in half precision


@typed()
@in_own_modes
def prepare_tensor(
    images: Tensor,
    model: nn.Module,
    *,
    photos: Sequence[Image.Image] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Prepared:
    """Wrap image tensors that are already preprocessed for a model.

    Args:
        images: `(B, C, H, W)` in the model's input format; they are copied.
        model: The model.
        photos: Pictures to draw the maps on, one per image, which shows all of it. By default the images themselves, with their
            normalization undone.
        mean: Mean per channel of that normalization, for pixels in [0, 1]; by default the model's own. If neither `mean` nor `std`
            is given, images that lie in [0, 1] are shown unchanged.
        std: Standard deviation per channel of that normalization; by default the model's own.

    Returns:
        Pixels, photos and geometries.

    Raises:
        ShapeError: If images are not floats `(B, C, H, W)`, or the number of photos differs.
        OptionError: If the images cannot be shown, or a photo shows something else, for example more than the image.
    """
    if images.ndim != 4 or not len(images) or not images.is_floating_point():
        raise ShapeError(
            f"images must be floats (B, C, H, W), got {images.dtype} {tuple(images.shape)}. Pass them in the model's input format."
        )
    shown = tuple(map(as_image, _shown(images, mean, std, model) if photos is None else photos))
    if len(shown) != len(images):
        raise ShapeError(f"photos must be one per image ({len(images)}), got {len(shown)}.")
    sizes, size = [(photo.height, photo.width) for photo in shown], (images.shape[2], images.shape[3])
    places = tuple(Geometry(whole, size, Box(0, 0, *whole), "the whole photo") for whole in sizes)
    for number, (image, photo, place) in enumerate(zip(images, shown, places, strict=True)):
        if photos is not None and len(image) in (1, 3) and (alike := likeness(image, photo, place)) < ALIKE:
            raise OptionError(
                f"photo {number} must show just what the image shows, but their correlation is {alike:.2f}. Pass the picture after "
                "cropping, or pass visattn.explain the photo with transform=."
            )
    spec = input_spec(model)
    spec = replace(spec, size=size, sources={**spec.sources, "size": "given"})
    return Prepared(images.detach().clone(), shown, places, spec=spec)


@in_own_modes
def prepare_inputs(
    inputs: Mapping[str, Any],
    photo: Any,  # noqa: ANN401
    model: nn.Module,
    how: Preprocessing,
    picture: str | None = None,
) -> Prepared:
    """Prepare the inputs of a model for one image, given by name as a processor of transformers returns them.

    Args:
        inputs: Inputs by name. Pixels `(1, C, H, W)` among them are compared with the photo; without any, they are made from it.
        photo: The photo, or None if the pixels show themselves.
        model: The model.
        how: Options of the preprocessing, which makes the pixels if there are none.
        picture: Name of the input that is the picture; by default the one that models call so, else the only one `(1, C, H, W)`.

    Returns:
        Pixels, photo and geometry, with the other inputs.

    Raises:
        OptionError: If there is neither photo nor pixels, several inputs may be the picture, or the photo shows something else.
        ShapeError: If the pixels are not one image.
    """
    device = next((parameter.device for parameter in model.parameters()), None)
    others = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    own = None if photo is None else prepare_with([photo], model, how)
    name = picture or _picture_among(others, None if own is None else own.pixels.shape)
    if name is None:
        if own is None:
            raise OptionError(f"inputs have no pixels ({', '.join(others) or 'empty'}). Pass the photo too, or pixel_values.")
        spec = own.spec_of(model)
        return replace(own, inputs=others, spec=replace(spec, keyword=spec.keyword or _free_parameter(model, others)))
    pixels = others.pop(name)
    if pixels.ndim != 4 or len(pixels) != 1:
        raise ShapeError(
            f"{name} must be one image (1, C, H, W), got {tuple(pixels.shape)}. For several images, clips or packed patches use "
            "visattn.capture."
        )
    if own is None or own.pixels.shape != pixels.shape or not torch.allclose(own.pixels, pixels.to(own.pixels), atol=_SAME):
        own = prepare_tensor(pixels, model, photos=None if photo is None else [photo], mean=how.mean, std=how.std)
    assert own.spec is not None  # noqa: S101 - both state it
    return replace(own, pixels=pixels, spec=replace(own.spec, keyword=name), inputs=others)


def _picture_among(inputs: Mapping[str, Any], shape: torch.Size | None) -> str | None:
    """Return the name of the picture among inputs, or None if there is none; `shape` is that of a photo's pixels, if it is given too.

    Raises:
        OptionError: If several may be the picture.
    """
    maps = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.ndim == 4}
    wide = {name: value for name, value in maps.items() if value.is_floating_point() and value.shape[2:].numel() > 1}
    images = [name for name, value in wide.items() if shape in (None, value.shape)]
    named = next((name for name in _PIXELS if isinstance(inputs.get(name), Tensor)), None)
    if named is not None or len(images) < 2:
        return named or next(iter(images), None)
    raise OptionError(
        f"each of the inputs {', '.join(images)} may be the picture. Name it: image='{images[0]}', or make its map with another call."
    )


def _free_parameter(model: nn.Module, inputs: Mapping[str, Any]) -> str:
    """Return the name under which pixels go beside other inputs, if one of these is the first parameter; empty: they come first."""
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):  # of a compiled or foreign function
        return ""
    if not parameters or parameters[0].name not in inputs:
        return ""
    free = [one.name for one in parameters if one.name not in inputs and one.default is one.empty and one.kind in _NAMED]
    return free[0] if len(free) == 1 else ""


def _shown(pixels: Tensor, mean: Sequence[float] | None, std: Sequence[float] | None, model: nn.Module) -> Tensor:
    """Undo the normalization; return images in [0, 1]."""
    pixels, channels = pixels.detach().float().cpu(), pixels.shape[1]
    if channels not in (1, 3):
        raise OptionError(f"images must have 1 or 3 channels to be shown, got {channels}. Pass photos=, the pictures to draw on.")
    wrong = next((len(given) for given in (mean, std) if given is not None and len(given) not in (1, channels)), None)
    if wrong is not None:
        raise OptionError(f"mean and std must have 1 value or {channels} (one per channel), got {wrong}.")
    low, high = pixels.aminmax()
    if mean is not None or std is not None or low < 0 or high > 1:
        spec = input_spec(model)
        scale, shift = (
            torch.tensor(per_channel(own if given is None else given, channels))[:, None, None]
            for given, own in ((std, spec.std), (mean, spec.mean))
        )
        pixels = pixels * scale + shift
        low, high = pixels.aminmax()
    if not (low >= -_ROUNDING and high <= 1 + _ROUNDING):  # NaN is refused too
        raise OptionError(
            f"images must lie in [0, 1] after their normalization is undone, got {low:.3g} to {high:.3g}. Pass the mean= and std= "
            "of their normalization, or photos=, to visattn.prepare_tensor."
        )
    return pixels.clamp(0, 1)
