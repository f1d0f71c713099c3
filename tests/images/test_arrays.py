"""Arrays, tensors and PIL images as photos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.images.making import Pixels, photo_of
from visattn import load_image
from visattn.core.images import as_photo, image_facts
from visattn.errors import ImageError

RAMP = np.arange(30, dtype=np.uint8).reshape(2, 5, 3) * 8  # height 2, width 5


def exact(array: NDArray[Any], scale: float) -> Pixels:
    """Convert each value to a level, one by one."""
    levels = np.zeros(array.shape, np.uint8)
    for index in np.ndindex(*array.shape):
        levels[index] = int(float(array[index]) * scale + 0.5)
    return levels


ARRAYS = {
    "uint8": (RAMP, RAMP),
    "uint16": (RAMP.astype(np.uint16), RAMP),
    "int64": (RAMP.astype(np.int64), RAMP),
    "float32": (RAMP.astype(np.float32) / 255, RAMP),
    "float64": (RAMP.astype(np.float64) / 255, RAMP),
    "float16": ((RAMP.astype(np.float32) / 255).astype(np.float16), RAMP),
    "float between levels": (np.linspace(0, 1, 30).reshape(2, 5, 3), exact(np.linspace(0, 1, 30).reshape(2, 5, 3), 255)),
    "bool": (RAMP > 100, np.where(RAMP > 100, 255, 0).astype(np.uint8)),
    "CHW": (np.ascontiguousarray(RAMP.transpose(2, 0, 1)), RAMP),
    "gray": (RAMP[..., 0], np.repeat(RAMP[..., :1], 3, axis=2)),
    "gray HW1": (RAMP[..., :1], np.repeat(RAMP[..., :1], 3, axis=2)),
    "gray 1HW": (RAMP[None, ..., 0], np.repeat(RAMP[..., :1], 3, axis=2)),
    "negative strides": (RAMP[::-1, ::-1], np.ascontiguousarray(RAMP[::-1, ::-1])),
    "BGR view": (RAMP[..., ::-1], np.ascontiguousarray(RAMP[..., ::-1])),
    "big endian": (RAMP.astype(">u2"), RAMP),
    "opaque RGBA": (np.dstack([RAMP, np.full((2, 5), 255, np.uint8)]), RAMP),
    "clear RGBA": (np.dstack([RAMP, np.zeros((2, 5), np.uint8)]), np.full((2, 5, 3), 255, np.uint8)),
    "maximum 1": (np.ones((2, 4, 3), np.uint8), np.ones((2, 4, 3), np.uint8)),
}


arrays = pytest.mark.parametrize(("array", "expected"), ARRAYS.values(), ids=ARRAYS.keys())


@arrays
def test_dtype_decides_the_range(array: NDArray[Any], expected: Pixels) -> None:
    assert np.array_equal(np.asarray(as_photo(array)), expected)


@arrays
def test_array_is_not_modified(array: NDArray[Any], expected: Pixels) -> None:
    del expected
    given_array = array.copy()
    np.asarray(as_photo(given_array)).sum()
    assert np.array_equal(given_array, array)


@arrays
def test_read_only_array_is_accepted(array: NDArray[Any], expected: Pixels) -> None:
    frozen = array.copy()
    frozen.flags.writeable = False
    assert np.array_equal(np.asarray(as_photo(frozen)), expected)


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.from_numpy(RAMP), id="uint8 HWC"),
        pytest.param(torch.from_numpy(RAMP).permute(2, 0, 1), id="uint8 CHW"),
        pytest.param(torch.from_numpy(RAMP).permute(2, 0, 1).float() / 255, id="float CHW"),
        pytest.param((torch.from_numpy(RAMP).permute(2, 0, 1).float() / 255).requires_grad_(), id="with gradient"),
    ],
)
def test_tensor_is_accepted_and_not_modified(tensor: torch.Tensor) -> None:
    before = tensor.detach().clone()
    assert np.array_equal(np.asarray(as_photo(tensor)), RAMP)
    assert torch.equal(tensor.detach(), before)


def test_bfloat16_tensor_is_accepted() -> None:
    tensor = torch.tensor([0.0, 0.25, 0.5, 1.0, 1.0]).repeat(3, 2, 1).bfloat16()
    assert np.asarray(as_photo(tensor))[0, :, 0].tolist() == [0, 64, 128, 255, 255]


def test_as_photo_returns_an_rgb_image_itself() -> None:
    picture = photo_of()
    assert as_photo(picture) is picture


@pytest.mark.parametrize("mode", ["L", "P", "1", "CMYK", "YCbCr", "HSV", "LAB", "I", "F", "I;16"])
def test_as_photo_converts_every_mode_to_rgb_without_changing_its_input(mode: str) -> None:
    picture = Image.new(mode, (4, 3))
    before = picture.tobytes()
    assert as_photo(picture).mode == "RGB"
    assert (picture.mode, picture.tobytes()) == (mode, before)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        pytest.param(np.full((2, 2), -0.5), r"must lie in \[0, 1\], got -0.5 to -0.5. Scale its values", id="normalized"),
        pytest.param(np.full((2, 2), -3), r"must lie in \[0, 255\], got -3 to -3. Scale its values", id="negative integers"),
        pytest.param(
            np.full((2, 2), 200.0), r"float64 must lie in \[0, 1\], got 200 to 200. Scale its values", id="floats to 255"
        ),
        pytest.param(np.full((2, 2), 4000, np.uint16), r"uint16 must lie in \[0, 255\], got 4000 to 4000", id="12 bit"),
        pytest.param(np.array([[0.5, np.nan], [np.inf, 0]]), "got 2 NaN or infinite values", id="NaN"),
        pytest.param(np.zeros((1, 3, 4, 4)), r"got \(1, 3, 4, 4\). Pass one photo, not a batch", id="batch"),
        pytest.param(np.zeros((5, 6, 2)), r"got \(5, 6, 2\)", id="two channels"),
        pytest.param(np.zeros(4), r"got \(4,\)", id="row"),
        pytest.param(np.zeros((0, 4, 3)), r"got \(0, 4, 3\)", id="empty"),
        pytest.param(np.zeros((2, 2), complex), "must hold real numbers, got complex128", id="complex"),
        pytest.param(np.array([["a", "b"]]), "must hold real numbers, got <U1", id="text"),
        pytest.param("photo.png", r"got \(\)", id="a path"),
    ],
)
def test_invalid_array_is_refused(array: object, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        as_photo(array)


def test_photo_with_broken_exif_text_loads(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    text = PngInfo()
    text.add_text("Raw profile type exif", "\nexif\n      10\nno hexadecimal number\n")
    Image.fromarray(pixels).save(tmp_path / "dog.png", pnginfo=text)
    photo = load_image(tmp_path / "dog.png")
    assert np.array_equal(np.asarray(photo), pixels)
    assert "its EXIF data cannot be read; taken as upright" in image_facts(photo).notes
