"""A photo as a model wants its pixels, with the geometry that leads back.

Three rules. `model`: the model's own evaluation transform, step by step. `fit`: the whole photo; where the model takes any size,
the height x width nearest its own area with each side a whole number of patches, else squashed to its one size. `auto`: `model` for
a classifier, `fit` for a headless model.

A model of one channel sees the photo's luminance, ITU-R 601. One of any other number but three takes arrays with as many channels,
each of which goes through the same steps as a photo would.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import timm.data.transforms as timm_transforms
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision import transforms

from visattn._support.checks import one_of
from visattn._support.typed import typed
from visattn._support.types import Resize
from visattn.errors import ImageError, ShapeError, UnsupportedModel
from visattn.families import InputSpec, input_spec
from visattn.geometry import Box, Geometry
from visattn.images import as_photo, load_image
from visattn.images.bands import Bands, bands_of
from visattn.pipeline.preprocessing import Preprocessing
from visattn.provenance import Provenance

_LUMINANCE = "the model takes one channel: it saw the photo's luminance (0.299 red + 0.587 green + 0.114 blue)"


@dataclass(frozen=True, eq=False)
class Prepared:
    """One photo or a batch, ready for the model.

    Attributes:
        pixels: `(B, C, H, W)` normalized, on the model's device; C is 3, or 1 for a model of one channel.
        photos: The upright RGB photos.
        geometries: Where each input lies on its photo.
        notes: What was done to the photos beside that.
        preprocessing: Size, mean and standard deviation, each with its `value` and its `source`: stated by the `model`, `given` by
            the caller, or `assumed`.
        warnings: What was assumed, in a sentence.
        spec: What is known of the model's input.
    """

    pixels: Tensor
    photos: tuple[Image.Image, ...]
    geometries: tuple[Geometry, ...]
    notes: tuple[str, ...] = ()
    preprocessing: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    spec: InputSpec | None = None

    def spec_of(self, model: nn.Module) -> InputSpec:
        """What is known of the model's input; asked of the model where the photos were prepared elsewhere."""
        return self.spec or input_spec(model)

    @property
    def photo(self) -> Image.Image:
        """The photo, of a batch of one.

        Raises:
            ShapeError: If the batch has several.
        """
        return self.photos[self._only()]

    @property
    def geometry(self) -> Geometry:
        """The geometry, of a batch of one.

        Raises:
            ShapeError: If the batch has several.
        """
        return self.geometries[self._only()]

    def noted(self, provenance: Provenance) -> Provenance:
        """Return a provenance with what was done to the photos, and why, added."""
        return provenance.but(preprocessing=dict(self.preprocessing), notes=self.notes, warnings=self.warnings)

    def _only(self) -> int:
        if len(self.photos) != 1:
            raise ShapeError(f"the batch has {len(self.photos)} photos. Use .photos and .geometries.")
        return 0


@typed()
def prepare(photo: Image.Image | Bands, model: nn.Module, *, resize: Resize = "auto", img_size: int | None = None) -> Prepared:
    """One photo as the model wants it.

    Args:
        photo: An upright picture, as `load_image` gives it; for a model of more channels, what `bands_of` gives.
        model: The model that will see it.
        resize: `auto`, `fit` or `model`; see above.
        img_size: Another side in pixels for a model that takes any; it is rounded to whole patches.

    Returns:
        Pixels, photo and geometry.

    Raises:
        OptionError: If `resize` is unknown or the model does not take `img_size`.
        ImageError: If the photo is too narrow to become one patch.
        UnsupportedModel: If the model's transform has a step whose geometry is not known, or it takes more channels than a photo has.
    """
    return prepare_batch([photo], model, resize=resize, img_size=img_size)


@typed()
def prepare_batch(
    photos: Sequence[Image.Image | Bands], model: nn.Module, *, resize: Resize = "auto", img_size: int | None = None
) -> Prepared:
    """Several photos, of any sizes, as one batch.

    Under `fit` a model that takes any size gets one size for all: of the geometric mean of the photos' shapes; each photo is scaled
    to it whole, each axis on its own.

    Args:
        photos: Upright pictures.
        model: The model that will see them.
        resize: See `prepare`.
        img_size: See `prepare`.

    Returns:
        Pixels `(B, C, H, W)`, photos and geometries.

    Raises:
        OptionError: If `resize` is unknown or the model does not take `img_size`.
        ImageError: If a photo is too narrow, or there is none.
        UnsupportedModel: If the model's transform has a step whose geometry is not known, or it takes more channels than a photo has.
    """
    return _prepared(photos, model, input_spec(model, img_size), resize)


def read(image: Any, how: Preprocessing) -> Any:  # noqa: ANN401
    """Read a file; a picture or an array stays as it is."""
    if isinstance(image, (str, os.PathLike, bytes)):
        return load_image(image, max_pixels=how.max_pixels, color_profile=how.color_profile)
    return image


def prepare_any(image: Any, model: nn.Module, how: Preprocessing) -> Prepared:  # noqa: ANN401
    """A picture or an array as the model wants it."""
    spec = input_spec(model, how.img_size)
    picture = as_photo(image) if spec.channels in (1, 3) else bands_of(image, spec.channels, how.rgb)
    return _prepared([picture], model, spec, how.resize)


def _prepared(photos: Sequence[Image.Image | Bands], model: nn.Module, spec: InputSpec, resize: Resize) -> Prepared:
    one_of(resize, get_args(Resize), "resize")
    if not photos:
        raise ImageError("no photos were given; nothing to do")
    if spec.channels in (1, 3):
        pictures: list[Image.Image | Bands] = [as_photo(photo) for photo in photos]
    else:
        pictures = [photo if isinstance(photo, Bands) else bands_of(photo, spec.channels) for photo in photos]
    if resize == "model" or (resize == "auto" and spec.classifier):
        seen = [_each_channel(photo, lambda image: _by_transform(image, spec)) for photo in pictures]
    else:
        size = _fitting_size(pictures, spec)
        seen = [_each_channel(photo, lambda image: _whole(image, size, spec)) for photo in pictures]
    images, geometries = zip(*seen, strict=True)
    pixels = torch.stack([_normalized(image, spec) for image in images])
    device = next((parameter.device for parameter in model.parameters()), pixels.device)
    notes = (_LUMINANCE,) if spec.channels == 1 else ()
    stated = spec.stated()
    stated["size"]["value"] = list(pixels.shape[-2:])
    shown = tuple(picture.photo if isinstance(picture, Bands) else picture for picture in pictures)
    return Prepared(pixels.to(device), shown, geometries, notes, stated, _assumptions(spec), spec)


_Seen = tuple[Image.Image, Geometry]


def _each_channel(photo: Image.Image | Bands, see: Callable[[Image.Image], _Seen]) -> tuple[tuple[Image.Image, ...], Geometry]:
    """What the model sees of a picture, or of each channel of an image of several."""
    seen = [see(image) for image in (photo.channels if isinstance(photo, Bands) else (photo,))]
    return tuple(image for image, _ in seen), seen[0][1]


def _assumptions(spec: InputSpec) -> tuple[str, ...]:
    """What nobody stated of the model's input, in one sentence."""
    if not (names := spec.assumed()):
        return ()
    values = {
        "size": f"size {spec.size[0]} x {spec.size[1]}",
        "mean": f"mean {', '.join(f'{value:g}' for value in spec.mean)}",
        "std": f"std {', '.join(f'{value:g}' for value in spec.std)}",
    }
    return (f"assumed of the model's input, as it does not state it: {'; '.join(values[name] for name in names)}",)


def _fitting_size(photos: Sequence[Image.Image | Bands], spec: InputSpec) -> tuple[int, int]:
    if not spec.dynamic:
        return spec.size
    aspect = math.exp(sum(math.log(photo.height / photo.width) for photo in photos) / len(photos))
    area = spec.size[0] * spec.size[1]
    height, width = max(math.sqrt(area * aspect), spec.stride[0]), max(math.sqrt(area / aspect), spec.stride[1])
    sides = min(height, area / width), min(width, area / height)  # a strip is squashed to one row of patches of the same area
    return tuple(max(1, round(side / step)) * step for side, step in zip(sides, spec.stride, strict=True))  # type: ignore[return-value]


def _whole(photo: Image.Image, size: tuple[int, int], spec: InputSpec) -> tuple[Image.Image, Geometry]:
    image = photo.resize(size[::-1], _filter(spec.interpolation))
    rule = "the whole photo" if spec.dynamic else "the whole photo, squashed to the model's one size"
    return image, Geometry((photo.height, photo.width), size, Box(0, 0, photo.height, photo.width), rule)


def _by_transform(photo: Image.Image, spec: InputSpec) -> tuple[Image.Image, Geometry]:
    """Run the transform's own steps on the picture and follow where its corners go."""
    image = photo
    window = Box(0, 0, photo.height, photo.width)  # the photo's part that `image` shows
    for step in spec.transform:
        if isinstance(step, (timm_transforms.MaybeToTensor, transforms.ToTensor)):
            break
        before, image = image, step(image)
        if isinstance(step, (transforms.CenterCrop, timm_transforms.CenterCropOrPad)):
            window = _cropped(window, before, image)
        elif not isinstance(step, (transforms.Resize, timm_transforms.ResizeKeepRatio)):
            raise UnsupportedModel(
                f"the model's transform has the step {type(step).__name__}, whose geometry is not known. Use resize='fit'."
            )
    geometry = Geometry((photo.height, photo.width), (image.height, image.width), window, "the model's own evaluation transform")
    return image, geometry


def _cropped(window: Box, before: Image.Image, after: Image.Image) -> Box:
    """The window after a centered crop, or a centered padding where `before` is smaller than `after`."""
    offsets = [
        round((old - new) / 2.0) if old >= new else -((new - old) // 2)
        for old, new in ((before.height, after.height), (before.width, after.width))
    ]
    down, across = window.height / before.height, window.width / before.width
    top, left = window.top + offsets[0] * down, window.left + offsets[1] * across
    return Box(top, left, top + after.height * down, left + after.width * across)


def _normalized(images: Sequence[Image.Image], spec: InputSpec) -> Tensor:
    one = len(images) == 1 and spec.channels == 1
    seen = np.dstack([np.asarray(image.convert("L") if one else image) for image in images])
    array = torch.from_numpy(seen).permute(2, 0, 1).float().clamp(0, 255) / 255  # filters of real numbers overshoot
    mean, std = (torch.tensor(values)[:, None, None] for values in (spec.mean, spec.std))
    return (array - mean) / std


def _filter(name: str) -> Image.Resampling:
    return {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC, "lanczos": Image.Resampling.LANCZOS}.get(
        name, Image.Resampling.BICUBIC
    )
