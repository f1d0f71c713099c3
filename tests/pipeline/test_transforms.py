"""Any transform as preprocessing: its pixels are used as they are, and the part of the photo that they show is measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import nn
from torchvision import models, transforms

import visattn
from tests.conftest import Figures
from visattn import data
from visattn.core.geometry import Box, Geometry
from visattn.core.pipeline.transforms import likeness, transformed
from visattn.errors import OptionError

NORMALIZE = transforms.Normalize([0.5, 0.4, 0.3], [0.2, 0.3, 0.4])
PHOTOS = [(451, 300), (300, 451), (97, 640), (1600, 1200), (64, 64)]  # width, height


def photo_of(size: tuple[int, int]) -> Image.Image:
    return visattn.load_image("photo:chelsea").resize(size)


def window_of(size: tuple[int, int], short: int, crop: tuple[int, int]) -> tuple[float, float, float, float]:
    """Return the window of a resize of the shorter side and a center crop, by the arithmetic of torchvision."""
    width, height = size
    scaled = (short, int(short * width / height)) if height <= width else (int(short * height / width), short)  # (height, width)
    top, left = (round((whole - part) / 2.0) for whole, part in zip(scaled, crop, strict=True))
    down, across = height / scaled[0], width / scaled[1]
    return top * down, left * across, (top + crop[0]) * down, (left + crop[1]) * across


def cell(size: tuple[int, int], crop: tuple[int, int], short: int) -> float:
    """Return the allowed error: half of an input pixel, in photo pixels, and the steps of an 8-bit ramp."""
    return 0.5 * max(1.0, min(size) / short) + 0.5 * max(size) / 255


@pytest.mark.parametrize("size", PHOTOS)
@pytest.mark.parametrize(("short", "crop"), [(256, (224, 224)), (72, (64, 64)), (240, (128, 224)), (48, (48, 48))])
@pytest.mark.parametrize("kind", [transforms.InterpolationMode.BILINEAR, transforms.InterpolationMode.BICUBIC])
def test_window_of_a_resize_and_crop_is_found(
    size: tuple[int, int], short: int, crop: tuple[int, int], kind: transforms.InterpolationMode
) -> None:
    transform = transforms.Compose(
        [transforms.Resize(short, kind), transforms.CenterCrop(crop), transforms.ToTensor(), NORMALIZE]
    )
    found = transformed(photo_of(size), transform)
    assert torch.equal(found.pixels, transform(photo_of(size)))
    expected = window_of(size, short, crop)
    assert np.abs(np.subtract(found.geometry.window, expected)).max() < cell(size, crop, short)
    assert found.mean == pytest.approx((0.5, 0.4, 0.3), abs=1e-3)
    assert found.std == pytest.approx((0.2, 0.3, 0.4), abs=1e-3)


@pytest.mark.parametrize("size", PHOTOS)
def test_whole_photo_is_found_exactly(size: tuple[int, int]) -> None:
    found = transformed(photo_of(size), transforms.Compose([transforms.Resize((96, 160)), transforms.ToTensor()]))
    assert list(found.geometry.window) == [0, 0, size[1], size[0]]
    assert found.geometry.input == (96, 160)


@pytest.mark.parametrize("size", PHOTOS)
def test_padding_reaches_outside_the_photo(size: tuple[int, int]) -> None:
    side = max(size)

    def padded(image: Image.Image) -> torch.Tensor:
        return transforms.functional.to_tensor(ImageOps.pad(image, (side, side), color=(128, 128, 128)).resize((112, 112)))

    found = transformed(photo_of(size), padded).geometry.window
    across, down = (side - size[0]) / 2, (side - size[1]) / 2
    assert np.abs(np.subtract(found, (-down, -across, size[1] + down, size[0] + across))).max() < 1.5 * side / 112


def test_weights_of_torchvision_stand_for_their_transform() -> None:
    weights = models.ResNet18_Weights.DEFAULT
    found = transformed(photo_of((451, 300)), weights)
    assert torch.equal(found.pixels, weights.transforms()(photo_of((451, 300))))
    assert found.mean == pytest.approx((0.485, 0.456, 0.406), abs=1e-3)


def equalized(image: Image.Image) -> torch.Tensor:
    return transforms.functional.to_tensor(Image.eval(image.resize((32, 32)), lambda level: int(255 * (level / 255) ** 2)))


REFUSED: dict[str, tuple[Callable[[Image.Image], Any], str]] = {
    "random": (transforms.Compose([transforms.RandomCrop(64), transforms.ToTensor()]), "gives another result each time"),
    "mirrored": (lambda image: transforms.functional.to_tensor(ImageOps.mirror(image).resize((64, 64))), "mirrors the photo"),
    "rotated": (
        lambda image: transforms.functional.to_tensor(image.rotate(90, expand=True).resize((64, 64))),
        "so the map cannot be placed",
    ),
    "turned by a few degrees": (
        lambda image: transforms.functional.to_tensor(image.rotate(20).resize((64, 64))),
        "is no crop and resize",
    ),
    "nonlinear": (equalized, "in a nonlinear way"),
    "of the photo's content": (
        lambda image: transforms.functional.to_tensor(
            (
                image
                if image.getpixel((0, 0)) == image.getpixel((5, 5)) or image.convert("L").getextrema() == (0, 255)
                else image.crop((0, 0, 150, 150))
            ).resize((64, 64))
        ),
        "depends on what the photo shows",
    ),
    "constant": (lambda image: torch.zeros(3, 32, 32), "the same result for a black and a white image"),
    "of a batch": (
        lambda image: torch.zeros(2, 3, 32, 32),
        r"must return floats \(C, H, W\), got torch.float32 \(2, 3, 32, 32\)",
    ),
    "of whole numbers": (transforms.PILToTensor(), r"got torch.uint8 \(3, 300, 451\)"),
    "of arrays": (lambda array: array[..., ::-1], "transform fails for a photo of 451 x 300 pixels: TypeError"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_transform_that_places_nothing_is_refused(name: str) -> None:
    transform, message = REFUSED[name]
    with pytest.raises(OptionError, match=message):
        transformed(photo_of((451, 300)), transform)


@pytest.fixture(scope="module")
def vit() -> nn.Module:
    return visattn.load_model("scenes_vit")


def test_map_lies_where_the_transform_looked(vit: nn.Module) -> None:
    transform = transforms.Compose([transforms.Resize(128), transforms.CenterCrop(64), transforms.ToTensor(), NORMALIZE])
    found = visattn.explain(vit, "photo:chelsea", transform=transform, method="attention")
    expected = window_of((451, 300), 128, (64, 64))
    assert np.abs(np.subtract(found.heatmap().seen, expected)).max() <= 2
    assert found.provenance.preprocessing["mean"] == {"value": pytest.approx([0.5, 0.4, 0.3], abs=1e-3), "source": "given"}


def test_mean_and_std_replace_the_assumed_ones(vit: nn.Module) -> None:
    own, given = (visattn.prepare("scene:7", vit, **options) for options in ({}, {"mean": [0.5] * 3, "std": [0.25]}))
    assert own.spec is not None
    mean, std = (torch.tensor(values)[:, None, None] for values in (own.spec.mean, own.spec.std))
    assert torch.allclose(given.pixels[0], (own.pixels[0] * std + mean - 0.5) / 0.25, atol=1e-5)
    assert given.preprocessing["std"] == {"value": [0.25] * 3, "source": "given"}


def test_ready_pixels_show_the_whole_photo(vit: nn.Module) -> None:
    photo = visattn.load_image("photo:coffee")
    pixels = NORMALIZE(transforms.functional.to_tensor(photo.resize((64, 64))))[None]
    found = visattn.explain(vit, photo, pixels=pixels, method="attention")
    assert list(found.geometry.window) == [0, 0, photo.height, photo.width]
    alone = visattn.explain(vit, pixels=pixels, mean=[0.5, 0.4, 0.3], std=[0.2, 0.3, 0.4], method="attention")
    assert torch.equal(found.map.values, alone.map.values)
    assert alone.photo.size == (64, 64)


@pytest.mark.parametrize("share", [0.95, 0.875, 0.5])
def test_ready_pixels_of_a_crop_are_refused(vit: nn.Module, share: float) -> None:
    photo = visattn.load_image("photo:coffee")
    crop = transforms.functional.center_crop(photo, [int(share * photo.height), int(share * photo.width)])
    pixels = transforms.functional.to_tensor(crop.resize((64, 64)))[None]
    with pytest.raises(OptionError, match=r"photo 0 must show just what the image shows, but their correlation is 0\.\d+"):
        visattn.explain(vit, photo, pixels=pixels)


def test_whole_photos_and_crops_of_them_are_told_apart(figures: Figures) -> None:
    folders = data.photo_path("chelsea").parent, Path(__file__).parents[2] / "assets" / "objects"
    files = [file for folder in folders for file in sorted(folder.glob("*.[jp][pn]g"))]
    assert len(files) == 15
    whole, cropped = [], []
    for file in files:
        photo = visattn.load_image(file)
        place = Geometry((photo.height, photo.width), (224, 224), Box(0, 0, photo.height, photo.width))
        for kind in (Image.Resampling.NEAREST, Image.Resampling.BILINEAR, Image.Resampling.BICUBIC):
            whole.append(likeness(transforms.functional.to_tensor(photo.resize((224, 224), kind)), photo, place))
        crop = transforms.functional.center_crop(photo, [round(0.95 * photo.height), round(0.95 * photo.width)])
        cropped.append(likeness(transforms.functional.to_tensor(crop.resize((224, 224))), photo, place))
    figures("correlation of an input with its whole photo, smallest", min(whole), "> 0.99")
    figures("correlation of a crop of 95 % with its whole photo, largest", max(cropped), "< 0.98")
    assert min(whole) > 0.99
    assert max(cropped) < 0.98
