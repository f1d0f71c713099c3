"""Preprocessing of photos for a model, and the geometry that maps positions back to the photo.

There are three rules, unless a transform is given. `model` applies the model's own evaluation transform, step by step. `fit` uses the
whole photo: a model with a fixed input size gets it squashed to that size, and so does any model if height and width are given. For
others, height x width is close to the area of the default input, and each side is a whole number of patches. `auto` is `model` for a
classifier and `fit` for a headless model.

A model with one input channel receives the photo's luminance (ITU-R 601). A model with any number other than one or three takes
arrays with that many channels; each channel is processed as a photo would be.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import timm.data.transforms as timm_transforms
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision import transforms

from visattn._support.faces import Later
from visattn._support.language import option
from visattn._support.modes import in_own_modes
from visattn._support.options import with_options
from visattn._support.reprs import brief, in_pixels
from visattn._support.typed import check_types
from visattn.core.families import InputSpec, input_spec
from visattn.core.families.spec import STATED, Source, normalized
from visattn.core.geometry import Box, Geometry
from visattn.core.images.sources import as_image, load_image
from visattn.core.pipeline.arguments import image_of
from visattn.core.pipeline.preprocessing import Preprocessing, PreprocessingOptions
from visattn.core.provenance import Provenance
from visattn.errors import ImageError, OptionError, ShapeError, UnsupportedModel

if TYPE_CHECKING:
    from visattn.core.images import bands
    from visattn.core.pipeline import transforms as users_transforms
else:
    bands = Later("visattn.core.images.bands")
    users_transforms = Later("visattn.core.pipeline.transforms")

__all__ = ["Prepared", "prepare", "prepare_batch", "prepare_with", "read"]

_LUMINANCE = "the model has one input channel: it received the photo's luminance (0.299 red + 0.587 green + 0.114 blue)"


@dataclass(frozen=True, eq=False)
class Prepared:
    """Preprocessed photo or batch of photos.

    Attributes:
        pixels: `(B, C, H, W)` normalized, on the model's device; C is the model's number of input channels.
        photos: The upright RGB photos.
        geometries: Position of each input on its photo.
        notes: Other steps that were applied to the photos.
        preprocessing: Size, mean and standard deviation, each with its `value` and its `source`: stated by the `model`, `given` by
            the caller, or `assumed`.
        warnings: Sentences that state assumptions.
        spec: Known facts about the model's input.
        inputs: Other inputs of the model by keyword, such as words.
        seed: Seed of what the model draws in its forward pass.
        how: Options that the pixels were made by from the photos; None if they came ready.
    """

    pixels: Tensor
    photos: tuple[Image.Image, ...]
    geometries: tuple[Geometry, ...]
    notes: tuple[str, ...] = ()
    preprocessing: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    spec: InputSpec | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    how: Preprocessing | None = None

    __repr__ = brief

    def spec_of(self, model: nn.Module) -> InputSpec:
        """Return the known facts about the model's input; read them from the model if the photos were prepared elsewhere."""
        return self.spec or input_spec(model)

    @property
    def photo(self) -> Image.Image:
        """Photo of a batch of one.

        Raises:
            ShapeError: If the batch has several.
        """
        return self.photos[self._only()]

    @property
    def geometry(self) -> Geometry:
        """Geometry of a batch of one.

        Raises:
            ShapeError: If the batch has several.
        """
        return self.geometries[self._only()]

    def with_notes(self, *notes: str) -> Prepared:
        """Return the photos with more notes."""
        return replace(self, notes=(*self.notes, *notes))

    def noted(self, provenance: Provenance) -> Provenance:
        """Return a provenance with the preprocessing, if it is known here, its notes and its warnings added."""
        facts = {"preprocessing": dict(self.preprocessing)} if self.preprocessing else {}
        return provenance.but(**facts, notes=self.notes, warnings=self.warnings)

    def _only(self) -> int:
        if len(self.photos) != 1:
            raise ShapeError(f"the batch has {len(self.photos)} photos. Use .photos and .geometries.")
        return 0


@with_options(PreprocessingOptions)
def prepare(photo: Any, model: nn.Module, **options: Unpack[PreprocessingOptions]) -> Prepared:  # noqa: ANN401 - see below
    """Preprocess one photo for a model.

    Args:
        photo: A PIL image, an array, a tensor, or a source of `visattn.load_image`. A model with other than one or three input channels
            needs an array `(H, W, C)` or `(C, H, W)`.
        model: The model that the pixels are for.
        options: See `Preprocessing`: `resize` (`model`: the model's own evaluation transform; `fit`: the whole photo; `auto`: `model` for
            a classifier, else `fit`), `img_size`, `mean`, `std`, `transform`, `color_profile`, `max_pixels`, `max_bytes`, `rgb`.

    Returns:
        Pixels, photo and geometry.

    Raises:
        OptionError: If an option is unknown or out of range, or the model does not take `img_size`.
        ImageError: If the photo cannot be used as an image with the model's number of channels.
        UnsupportedModel: If the geometry of a step of the model's transform is unknown, or the model takes more channels than a photo
            has.
    """
    return prepare_batch([photo], model, **options)


@with_options(PreprocessingOptions)
def prepare_batch(photos: Sequence[Any], model: nn.Module, **options: Unpack[PreprocessingOptions]) -> Prepared:
    """Preprocess several photos, of any sizes, as one batch.

    With `fit` and a model that takes any size, all photos are resized to one size, whose aspect ratio is the geometric mean of
    theirs. Each photo is kept whole, and each axis is scaled by its own factor.

    Args:
        photos: Photos, see `prepare`.
        model: The model that the pixels are for.
        options: See `prepare`.

    Returns:
        Pixels `(B, C, H, W)`, photos and geometries.

    Raises:
        OptionError: If an option is unknown or out of range, or the model does not take `img_size`.
        ImageError: If a photo cannot be used, or no photos are given.
        UnsupportedModel: If the geometry of a step of the model's transform is unknown, or the model takes more channels than a photo
            has.
    """
    return prepare_with(photos, model, Preprocessing(**options))


def read(image: Any, how: Preprocessing) -> Any:  # noqa: ANN401
    """Load the image that a source names; return an image or array unchanged."""
    image = image_of(image)
    if isinstance(image, (str, os.PathLike, bytes)):
        return load_image(image, **how.reading)
    return image


@in_own_modes
def prepare_with(photos: Sequence[Any], model: nn.Module, how: Preprocessing) -> Prepared:
    """Preprocess photos for a model; see `prepare_batch`."""
    check_types(prepare, {"model": model})
    if isinstance(photos, (str, bytes)):
        raise ImageError("photos must be a list; for one photo use visattn.prepare")
    if not photos:
        raise ImageError("no photos were given; nothing to do")
    spec = normalized(input_spec(model, how.img_size), how.mean, how.std)
    images = [read(photo, how) for photo in photos]
    if spec.channels in (1, 3):
        pictures: list[Image.Image | bands.Bands] = [as_image(image) for image in images]
    else:
        pictures = [
            image if isinstance(image, bands.Bands) else bands.bands_of(image, spec.channels, how.rgb) for image in images
        ]
    own = spec.processor if how.resize != "fit" and (how.mean, how.std, how.img_size) == (None, None, None) else None
    if transform := how.transform or own:
        pixels, geometries, spec = _by_function(pictures, transform, spec, "model" if how.transform is None else "given")
    else:
        pixels, geometries = _by_rule(pictures, spec, how)
    device = next((parameter.device for parameter in model.parameters()), pixels.device)
    notes = (_LUMINANCE,) if spec.channels == 1 and not transform else ()
    stated = spec.stated()
    stated["size"]["value"] = list(pixels.shape[-2:])
    shown = tuple(picture if isinstance(picture, Image.Image) else picture.photo for picture in pictures)
    return Prepared(pixels.to(device), shown, geometries, notes, stated, _assumptions(spec), spec, how=how)


def _by_rule(
    pictures: Sequence[Image.Image | bands.Bands], spec: InputSpec, how: Preprocessing
) -> tuple[Tensor, tuple[Geometry, ...]]:
    """Preprocess photos with the model's own steps, or squash each into the input."""
    if how.resize == "model" or (how.resize == "auto" and spec.classifier):
        seen = [_each_channel(photo, lambda image: _by_transform(image, spec)) for photo in pictures]
    else:
        one_size = not spec.dynamic or isinstance(how.img_size, tuple)
        size = spec.size if one_size else _fitting_size(pictures, spec)
        rule = "the whole photo, squashed to one size" if one_size else "the whole photo"
        seen = [_each_channel(photo, lambda image: _whole(image, size, spec, rule)) for photo in pictures]
    images, geometries = zip(*seen, strict=True)
    return torch.stack([_normalized(image, spec) for image in images]), geometries


def _by_function(
    pictures: Sequence[Image.Image | bands.Bands], transform: Callable[..., Any], spec: InputSpec, source: Source
) -> tuple[Tensor, tuple[Geometry, ...], InputSpec]:
    """Preprocess photos with a transform; the spec gets the size and normalization that were measured.

    Raises:
        OptionError: If the photos have other channels than RGB, or the inputs differ in size.
    """
    if any(not isinstance(picture, Image.Image) for picture in pictures):
        raise OptionError(f"transform takes RGB photos, but the model has {spec.channels} channels. Pass mean and std instead.")
    seen = [users_transforms.transformed(picture, transform) for picture in pictures if isinstance(picture, Image.Image)]
    shapes = {tuple(picture_seen.pixels.shape) for picture_seen in seen}
    if len(shapes) > 1:
        raise OptionError(f"transform must give all photos of a batch one size, got {sorted(shapes)}. Pass them one by one.")
    pixels = torch.stack([picture_seen.pixels for picture_seen in seen])
    stated = replace(
        spec,
        size=(pixels.shape[2], pixels.shape[3]),
        mean=seen[0].mean,
        std=seen[0].std,
        channels=pixels.shape[1],
        sources=dict.fromkeys(STATED, source),
    )
    return pixels, tuple(picture_seen.geometry for picture_seen in seen), stated


_Seen = tuple[Image.Image, Geometry]


def _each_channel(
    photo: Image.Image | bands.Bands, see: Callable[[Image.Image], _Seen]
) -> tuple[tuple[Image.Image, ...], Geometry]:
    """Apply `see` to an image, or to each channel of a multi-channel image."""
    seen = [see(image) for image in ((photo,) if isinstance(photo, Image.Image) else photo.channels)]
    return tuple(image for image, _ in seen), seen[0][1]


def _assumptions(spec: InputSpec) -> tuple[str, ...]:
    """Return one sentence that names the assumed settings of the model's input."""
    if not (names := spec.assumed()) or not spec.why:
        return ()
    values = {
        "size": f"size {in_pixels(spec.size)}",
        "mean": f"mean {', '.join(f'{value:g}' for value in spec.mean)}",
        "std": f"std {', '.join(f'{value:g}' for value in spec.std)}",
    }
    return (f"{spec.why}; assumed: {'; '.join(values[name] for name in names)}",)


def _fitting_size(photos: Sequence[Image.Image | bands.Bands], spec: InputSpec) -> tuple[int, int]:
    aspect = math.exp(sum(math.log(photo.height / photo.width) for photo in photos) / len(photos))
    area = spec.size[0] * spec.size[1]
    height, width = max(math.sqrt(area * aspect), spec.stride[0]), max(math.sqrt(area / aspect), spec.stride[1])
    sides = (
        min(height, area / width),
        min(width, area / height),
    )  # a very narrow photo is squashed to one row of patches of the same area
    return tuple(max(1, round(side / step)) * step for side, step in zip(sides, spec.stride, strict=True))  # type: ignore[return-value]


def _whole(photo: Image.Image, size: tuple[int, int], spec: InputSpec, rule: str) -> tuple[Image.Image, Geometry]:
    image = photo.resize(size[::-1], _filter(spec.interpolation))
    return image, Geometry((photo.height, photo.width), size, Box(0, 0, photo.height, photo.width), rule)


def _by_transform(photo: Image.Image, spec: InputSpec) -> tuple[Image.Image, Geometry]:
    """Apply the steps of the transform to the image and keep track of its window on the photo."""
    image = photo
    window = Box(0, 0, photo.height, photo.width)  # part of the photo that `image` shows
    for step in spec.transform:
        if isinstance(step, (timm_transforms.MaybeToTensor, transforms.ToTensor)):
            break
        before, image = image, step(image)
        if isinstance(step, (transforms.CenterCrop, timm_transforms.CenterCropOrPad)):
            window = _cropped(window, before, image)
        elif not isinstance(step, (transforms.Resize, timm_transforms.ResizeKeepRatio)):
            raise UnsupportedModel(
                f"the model's transform has the unsupported step {type(step).__name__}. Use {option('resize', 'fit')}."
            )
    geometry = Geometry((photo.height, photo.width), (image.height, image.width), window, "the model's own evaluation transform")
    return image, geometry


def _cropped(window: Box, before: Image.Image, after: Image.Image) -> Box:
    """Return the window after a center crop, or after centered padding if `before` is smaller than `after`."""
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
    array = torch.from_numpy(seen).permute(2, 0, 1).to(torch.float32, copy=True)
    mean, std = (torch.tensor(values)[:, None, None] for values in (spec.mean, spec.std))
    return array.clamp_(0, 255).div_(255).sub_(mean).div_(std)  # resampling of float images may overshoot


def _filter(name: str) -> Image.Resampling:
    return {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC, "lanczos": Image.Resampling.LANCZOS}.get(
        name, Image.Resampling.BICUBIC
    )
