"""Gray TIFF files of every depth, compared with tifffile; the scaling rules are implemented here independently."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray
from PIL import Image
from PIL.TiffImagePlugin import OPEN_INFO

from tests.images import tiff
from visattn import load_image
from visattn.core.images import image_facts
from visattn.errors import ImageError

# every gray format that Pillow lists: order, photometric, (format,), fill order, bits, extra samples
KINDS = [key for key in OPEN_INFO if key[1] in (0, 1)]
NOT_DECODED = [key for key in KINDS if key[1:5] == (0, (1,), 2, (8,))]  # listed, but Pillow has no code for it
NAMES = {1: "u", 2: "i", 3: "f"}


def samples_of(kind: int, bits: int, shape: tuple[int, ...]) -> NDArray[Any]:
    random = np.random.default_rng(bits)
    if kind == 3:
        return random.normal(size=shape).astype(f"f{bits // 8}")
    low = -(2 ** (bits - 1)) if kind == 2 else 0
    return random.integers(low, low + 2**bits, shape).astype(f"{NAMES[kind]}{max(1, 2 ** ((bits - 1).bit_length() - 3))}")


def shown(values: NDArray[Any], kind: int, bits: int, photometric: int) -> NDArray[np.float64]:
    """Compute gray levels by the rule: unsigned samples of up to 16 bits by their bits, others by minimum and maximum."""
    real = values.astype(np.float64)
    low, high = (0.0, 2.0**bits - 1) if kind == 1 and bits <= 16 else (real.min(), real.max())
    share = (real - low) / (high - low)
    return 255 * (1 - share if photometric == 0 else share)


@pytest.mark.parametrize("key", [key for key in KINDS if key not in NOT_DECODED], ids=str)
def test_gray_of_a_tiff_equals_tifffile(key: tuple[Any, ...]) -> None:
    order, photometric, (kind, *_), fill_order, bits, extra = key
    samples = samples_of(kind, bits[0], (5, 6, len(bits)) if extra else (5, 6))
    data = tiff.gray(samples, bits[0], order=order, photometric=photometric, kind=kind, fill_order=fill_order, extra=extra)
    read = tifffile.imread(io.BytesIO(data))
    assert np.array_equal(read, samples)
    expected = shown(read[..., 0] if extra else read, kind, bits[0], photometric)
    if extra and extra[0] == 2:  # alpha: placed on white
        alpha = read[..., 1] / 255
        expected = expected * alpha + 255 * (1 - alpha)
    elif extra and extra[0] == 1:  # premultiplied alpha; Pillow divides by it, in whole levels
        expected = np.minimum(255, expected + 255 - read[..., 1])
    found = np.asarray(load_image(data)).astype(float)
    assert (found[..., 0] == found[..., 1]).all()
    assert (found[..., 0] == found[..., 2]).all()
    assert np.abs(found[..., 0] - expected).max() <= (1 if extra else 0.502)


@pytest.mark.parametrize("key", NOT_DECODED, ids=str)
def test_gray_that_pillow_lists_and_cannot_decode_is_refused(key: tuple[Any, ...]) -> None:
    data = tiff.gray(samples_of(1, 8, (5, 6)), 8, order=key[0], photometric=0, fill_order=2)
    with pytest.raises(ImageError, match="damaged or unsupported image"):
        load_image(data)


@pytest.mark.parametrize(
    ("dtype", "byteorder", "photometric", "name"),
    [
        ("f8", "<", "minisblack", "64-bit floating-point gray, little-endian"),
        ("u8", "<", "minisblack", "64-bit unsigned gray, little-endian"),
        ("f2", "<", "minisblack", "16-bit floating-point gray, little-endian"),
        ("c8", "<", "minisblack", "64-bit complex gray, little-endian"),
        ("u4", ">", "minisblack", "32-bit unsigned gray, big-endian"),
        ("u2", ">", "miniswhite", "16-bit unsigned gray, white is zero, big-endian"),
        ("i4", "<", "miniswhite", "32-bit signed gray, white is zero, little-endian"),
    ],
)
def test_other_gray_is_refused_by_name(dtype: str, byteorder: Any, photometric: Any, name: str) -> None:
    stream = io.BytesIO()
    tifffile.imwrite(stream, np.ones((4, 5), dtype), byteorder=byteorder, photometric=photometric)
    with pytest.raises(ImageError, match=rf"^image: TIFF of {name}, is not supported; convert it to 8- or 16-bit PNG$"):
        load_image(stream.getvalue())


@pytest.mark.parametrize("big", [False, True])
def test_other_color_is_refused_by_name(big: bool) -> None:
    stream = io.BytesIO()
    tifffile.imwrite(stream, np.zeros((4, 5, 3), np.float32), photometric="rgb", bigtiff=big)
    with pytest.raises(ImageError, match="TIFF of 3 x 32-bit floating-point RGB, little-endian, is not supported"):
        load_image(stream.getvalue())


@pytest.mark.parametrize(
    ("bits", "kind", "photometric", "notes"),
    [
        (12, 1, 1, ["12-bit gray, 0 to 4095 shown as 0 to 255; the largest is 4000"]),
        (
            16,
            1,
            0,
            ["16-bit gray, 0 to 65535 shown as 0 to 255; the largest is 4000", "gray inverted: in this file white is zero"],
        ),
        (16, 2, 1, ["gray values -3 to 4000 shown as 0 to 255"]),
        (32, 1, 1, ["gray values 0 to 4000 shown as 0 to 255"]),
    ],
)
def test_scaling_rule_of_wide_gray_is_noted(bits: int, kind: int, photometric: int, notes: list[str]) -> None:
    samples = np.array([[-3 if kind == 2 else 0, 100, 4000]], f"{NAMES[kind]}{max(2, bits // 8)}")
    assert image_facts(load_image(tiff.gray(samples, bits, photometric=photometric, kind=kind))).notes == tuple(notes)


@pytest.mark.parametrize("compression", ["zlib", "lzw", "packbits"])
@pytest.mark.parametrize("dtype", ["u2", "i2", "u4", "i4", "f4"])
def test_compressed_wide_gray_equals_tifffile(dtype: str, compression: Any) -> None:
    kind, bits = {"u": 1, "i": 2, "f": 3}[dtype[0]], 8 * int(dtype[1])
    stream = io.BytesIO()
    tifffile.imwrite(stream, samples_of(kind, bits, (7, 9)), compression=compression)
    expected = shown(tifffile.imread(io.BytesIO(stream.getvalue())), kind, bits, 1)
    assert np.abs(np.asarray(load_image(stream.getvalue()))[..., 1] - expected).max() <= 0.502


def test_orientation_of_wide_gray_is_applied() -> None:
    stream = io.BytesIO()
    tifffile.imwrite(stream, np.arange(6, dtype=np.uint16).reshape(2, 3) * 10_000, extratags=[(274, 3, 1, 6, True)])
    assert np.asarray(load_image(stream.getvalue()))[..., 0].tolist() == [[117, 0], [156, 39], [195, 78]]


def test_transparent_value_of_16_bit_gray_is_shown_on_white() -> None:
    values = np.array([[1000, 1001], [0, 65535]], ">u2")

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = b"".join(b"\0" + row.tobytes() for row in values)
    head = struct.pack(">IIBBBBB", 2, 2, 16, 0, 0, 0, 0)
    parts = (b"IHDR", head), (b"tRNS", struct.pack(">H", 1000)), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")
    photo = load_image(b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts))
    assert np.asarray(photo)[..., 0].tolist() == [[255, 4], [0, 255]]
    assert image_facts(photo).notes[-1] == "transparent pixels shown on white"


def test_wide_gray_of_an_open_file_is_read_by_its_tags(tmp_path: Path) -> None:
    from visattn.core.images import as_photo

    path = tmp_path / "x.tif"
    path.write_bytes(tiff.gray(np.array([[0, 4095]], np.uint16), 12))
    with Image.open(path) as image:
        assert np.asarray(as_photo(image))[..., 0].tolist() == [[0, 255]]
