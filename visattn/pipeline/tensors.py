"""Preprocessed image tensors, for example batches of a training run, with the pictures to draw maps on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from visattn._support.typed import typed
from visattn.data.sources import as_image
from visattn.errors import OptionError, ShapeError
from visattn.families import input_spec
from visattn.families.spec import per_channel
from visattn.geometry import Box, Geometry
from visattn.pipeline.inputs import Prepared

_SMALL = 64  # side in pixels at which image and photo are compared
_ALIKE = 0.985  # on natural photos the whole correlates above 0.99 with any interpolation, a crop of 95 % below 0.98
_ROUNDING = 0.02  # rounding error of normalized images in half precision


@typed()
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
    if photos is not None and images.shape[1] in (1, 3):
        _check_whole(images, shown)
    sizes, size = [(photo.height, photo.width) for photo in shown], (images.shape[2], images.shape[3])
    places = tuple(Geometry(whole, size, Box(0, 0, *whole), "the whole photo") for whole in sizes)
    spec = input_spec(model)
    spec = replace(spec, size=size, sources={**spec.sources, "size": "given"})
    return Prepared(images.detach().clone(), shown, places, spec=spec)


def _check_whole(images: Tensor, photos: Sequence[Image.Image]) -> None:
    """Check that each image shows its whole photo: small versions of both must correlate, which crops and flips do not.

    Raises:
        OptionError: If one does not.
    """
    small = torch.nn.functional.interpolate(images.detach().float().cpu(), (_SMALL, _SMALL), mode="bilinear", antialias=True)
    for number, (one, photo) in enumerate(zip(small, photos, strict=True)):
        seen = torch.from_numpy(np.asarray(photo.convert("L").resize((_SMALL, _SMALL), Image.Resampling.BILINEAR)).copy())
        alike = max(_correlation(channel, seen) for channel in (*one, one.mean(0)))
        if alike < _ALIKE:
            raise OptionError(
                f"photo {number} must show just what the image shows, but their correlation is {alike:.2f}. Pass the picture after "
                "cropping, or pass visattn.explain the photo with transform=."
            )


def _correlation(one: Tensor, other: Tensor) -> float:
    """Compute the correlation of two images; 1 if one of them is constant."""
    one, other = (x.double() - x.double().mean() for x in (one, other))
    norm = float(one.norm() * other.norm())
    return float((one * other).sum()) / norm if norm > 0 else 1.0


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
            torch.tensor(per_channel(known if given is None else given, channels))[:, None, None]
            for given, known in ((std, spec.std), (mean, spec.mean))
        )
        pixels = pixels * scale + shift
        low, high = pixels.aminmax()
    if not (low >= -_ROUNDING and high <= 1 + _ROUNDING):  # NaN is refused too
        raise OptionError(
            f"images must lie in [0, 1] after their normalization is undone, got {low:.3g} to {high:.3g}. Pass the mean= and std= "
            "of their normalization, or photos=, to visattn.prepare_tensor."
        )
    return pixels.clamp(0, 1)
