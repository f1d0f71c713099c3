"""Preprocessed image tensors, for example batches of a training run, with the pictures to draw maps on."""

from __future__ import annotations

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
from visattn.core.pipeline import input_pictures
from visattn.core.pipeline.input_pictures import shape_of
from visattn.core.pipeline.inputs import Prepared, prepare_with, read
from visattn.core.pipeline.preprocessing import Preprocessing
from visattn.core.pipeline.transforms import ALIKE, likeness
from visattn.errors import OptionError, ShapeError

__all__ = ["prepare_inputs", "prepare_tensor"]

_GIVEN_PICTURE = "Or pass the picture that they show: image= of visattn.explain, photos= of visattn.prepare_tensor."
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
    inputs: Mapping[Any, Any],
    image: Any,  # noqa: ANN401
    model: nn.Module,
    how: Preprocessing,
) -> Prepared:
    """Prepare the inputs of a model for one image, given by name as a processor of transformers returns them, or by position.

    Args:
        inputs: Inputs by name or position; tensors may lie inside of lists, tuples, dictionaries and dataclasses. Photos (PIL images)
            are preprocessed. Pixels `(1, C, H, W)` may be those of the photo; without any, they are made from it.
        image: The photo or its source; or the path of the input that is the picture, such as `rgb`, `1` or `batch.rgb`; None: the only
            input that may be one.
        model: The model.
        how: Options of the preprocessing.

    Returns:
        Pixels, photo and geometry, with the other inputs.

    Raises:
        OptionError: If an input is unknown, there is neither photo nor pixels, several inputs may be the picture, or the photo shows
            something else.
        ShapeError: If the pixels are not one image.
    """
    given = input_pictures.given_inputs(inputs, model, how)
    picture = input_pictures.named_by(image, given)
    photo = None if image is None or picture is not None else read(image, how)
    own = None if photo is None else prepare_with([photo], model, how)
    place = input_pictures.place_of(given, own, picture)
    if given.leaves.get(place) is not None:
        own = given.photos.get(place) or _shown_by(given.leaves[place], place, photo, own, model, how)
    assert own is not None  # noqa: S101 - else a place without a photo would have been refused
    spec = replace(own.spec_of(model), keyword=place)
    return replace(own, pixels=own.pixels.detach().clone(), spec=spec, inputs=given.without(place)).with_notes(
        *given.notes(place)
    )


def _shown_by(
    pixels: Any,  # noqa: ANN401
    name: str,
    photo: Any,  # noqa: ANN401
    own: Prepared | None,
    model: nn.Module,
    how: Preprocessing,
) -> Prepared:
    """Return pixels among the inputs with the photo that they show; `own` is what the model's preprocessing makes of the photo.

    Raises:
        OptionError: If the photo shows something else, or the pixels cannot be shown.
        ShapeError: If the pixels are not one image.
    """
    if not isinstance(pixels, Tensor) or pixels.ndim != 4 or len(pixels) != 1:
        raise ShapeError(
            f"{name} must be one image (1, C, H, W), got {shape_of(pixels)}. For several images, clips or packed patches use "
            "visattn.capture."
        )
    if own is None or not input_pictures.is_same(pixels, own.pixels):
        try:
            own = prepare_tensor(pixels, model, photos=None if photo is None else [photo], mean=how.mean, std=how.std)
        except OptionError as error:
            if photo is None:
                raise
            elsewhere = "If the model takes the photo elsewhere, pass it there among inputs, and name its place as image."
            raise OptionError(f"the input {name} is the only one that may be the photo. {error} {elsewhere}") from error
    return replace(own, pixels=pixels)


def _shown(pixels: Tensor, mean: Sequence[float] | None, std: Sequence[float] | None, model: nn.Module) -> Tensor:
    """Undo the normalization; return images in [0, 1]."""
    pixels, channels = pixels.detach().float().cpu(), pixels.shape[1]
    if channels not in (1, 3):
        raise OptionError(f"images must have 1 or 3 channels to be shown, got {channels}. Pass photos=, the pictures to draw on.")
    wrong = next((len(given) for given in (mean, std) if given is not None and len(given) not in (1, channels)), None)
    if wrong is not None:
        raise OptionError(f"mean and std must have 1 value or {channels} (one per channel), got {wrong}.")
    low, high = pixels.aminmax()
    if low.isnan():
        raise OptionError("pixels with NaN cannot be shown. Remove the NaN from them.")
    undone = ""
    if mean is not None or std is not None or low < 0 or high > 1:
        spec = input_spec(model)
        scale, shift = (
            per_channel(own if given is None else given, channels) for given, own in ((std, spec.std), (mean, spec.mean))
        )
        whose = "given" if mean is not None and std is not None else "assumed" if spec.assumed() else "of the model"
        undone = f" after mean {_listed(shift)} and std {_listed(scale)} ({whose}) are undone"
        pixels = pixels * torch.tensor(scale)[:, None, None] + torch.tensor(shift)[:, None, None]
    first, last = pixels.aminmax()
    if not (first >= -_ROUNDING and last <= 1 + _ROUNDING):
        raise OptionError(
            f"pixels of {low:.3g} to {high:.3g} cannot be shown: they are {first:.3g} to {last:.3g}{undone}, outside of [0, 1]. Pass "
            f"mean= and std= of their normalization. {_GIVEN_PICTURE}"
        )
    return pixels.clamp(0, 1)


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
