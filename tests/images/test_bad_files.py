"""Files that must be rejected, unusual files that must load, and damaged bytes: loading gives an image or an `ImageError`."""

from __future__ import annotations

import os
import re
import socket
import stat
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image

from tests.images.making import Pixels, encoded, photo_of
from visattn import load_image
from visattn.core.images import as_photo, image_facts
from visattn.errors import ImageError, OptionError


def png(width: int, height: int) -> bytes:
    """Write a black 1-bit PNG by hand."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    packer = zlib.compressobj(9)
    row = bytes(1 + -(-width // 8))
    packed = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def assert_one_printable_line(text: str) -> None:
    assert text.isprintable(), ascii(text)
    text.encode("utf-8")


def test_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.png"
    path.touch()
    with pytest.raises(ImageError, match=r"empty\.png: empty file; check the download"):
        load_image(path)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"])
def test_truncated_file_is_refused(kind: str, share: float, tmp_path: Path) -> None:
    whole = encoded(photo_of(), kind)
    path = tmp_path / "cut.img"
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ImageError, match=r"cut\.img: truncated \(image data ends early\)"):
        load_image(path)


def test_jpeg_without_its_last_two_bytes_is_refused() -> None:
    with pytest.raises(ImageError, match="truncated"):
        load_image(encoded(photo_of(), "JPEG")[:-2])


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"])
@pytest.mark.parametrize("suffix", [".png", ".jpg", ".txt", ""])
def test_content_decides_not_the_extension(kind: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"photo{suffix}"
    path.write_bytes(encoded(photo_of(), kind))
    assert load_image(path).size == (50, 40)


@pytest.mark.parametrize(
    ("content", "start"),
    [
        pytest.param(b"hello, this is a note", "hello, this is a note", id="text"),
        pytest.param(b"<html><body>404</body></html>", "<html>", id="html"),
        pytest.param(b"\n<!DOCTYPE html>\n<title>x</title>", "<!DOCTYPE html>", id="html-after-newline"),
        pytest.param(b'{"error": "not found"}', '{"error": "not found"}', id="json"),
        pytest.param(b"%PDF-1.7 stream", "%PDF-1.7", id="pdf"),
    ],
)
def test_document_named_png_is_refused(content: bytes, start: str, tmp_path: Path) -> None:
    path = tmp_path / "page.png"
    path.write_bytes(content)
    with pytest.raises(ImageError, match="not an image") as caught:
        load_image(path)
    assert f"page.png: not an image (starts with '{start}" in str(caught.value)
    assert "supported formats are PNG, JPEG" in str(caught.value)
    assert_one_printable_line(str(caught.value))


def test_noise_is_refused_as_no_known_format() -> None:
    with pytest.raises(ImageError, match=r"not an image \(unknown format\)"):
        load_image(b"\x00\x01\x02\x03" * 32)


def stored_as(upright: Pixels, orientation: int) -> Pixels:
    """Store an upright image as a camera does, pixel by pixel, by the EXIF table of the sides at which row 0 and column 0 lie."""
    height, width = upright.shape[:2]
    shape = (height, width, 3) if orientation < 5 else (width, height, 3)
    stored = np.zeros(shape, np.uint8)
    for r in range(shape[0]):
        for c in range(shape[1]):
            place = {
                1: (r, c),  # row 0 at the top, column 0 at the left
                2: (r, width - 1 - c),  # top, right
                3: (height - 1 - r, width - 1 - c),  # bottom, right
                4: (height - 1 - r, c),  # bottom, left
                5: (c, r),  # left, top
                6: (c, width - 1 - r),  # right, top
                7: (height - 1 - c, width - 1 - r),  # right, bottom
                8: (height - 1 - c, r),  # left, bottom
            }[orientation]
            stored[r, c] = upright[place]
    return stored


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
def test_every_orientation_gives_the_same_upright_photo(kind: str, orientation: int, pixels: Pixels) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(Image.fromarray(stored_as(pixels, orientation)), kind, exif=exif, **options)
    assert np.array_equal(np.asarray(load_image(data)), pixels)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_of_a_jpeg_gives_the_same_upright_photo(orientation: int) -> None:
    upright = np.full((16, 24, 3), 20, np.uint8)
    upright[:8, 16:] = (250, 10, 10)  # one red corner: top right
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(stored_as(upright, orientation)), "JPEG", quality=95, subsampling=0, exif=exif)
    assert np.abs(np.asarray(load_image(data)).astype(int) - upright).max() <= 12


@pytest.mark.parametrize(
    "block", [b"Exif\0\0", b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff"], ids=["empty", "text", "offset"]
)
def test_broken_exif_is_accepted(block: bytes) -> None:
    assert load_image(encoded(photo_of(), "JPEG", exif=block)).size == (50, 40)


def test_cmyk_jpeg_has_the_right_colors() -> None:
    picture = Image.new("RGB", (16, 16), (200, 30, 40)).convert("CMYK")
    got = np.asarray(load_image(encoded(picture, "JPEG", quality=95))).astype(int)
    assert np.abs(got - (200, 30, 40)).max() <= 6


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_transparent_palette_entry_is_white(kind: str) -> None:
    picture = Image.new("P", (4, 3), 1)
    picture.putpalette([10, 20, 30, 200, 0, 0])
    picture.putpixel((2, 1), 0)
    got = np.asarray(load_image(encoded(picture, kind, transparency=0)))
    expected = np.full((3, 4, 3), (200, 0, 0), np.uint8)
    expected[1, 2] = 255
    assert np.array_equal(got, expected)


@pytest.mark.parametrize(("mode", "hidden"), [("RGB", (9, 8, 7)), ("L", 9)], ids=["color key of RGB", "gray key of L"])
def test_transparent_color_key_is_white(mode: str, hidden: Any) -> None:
    picture = Image.new(mode, (4, 3), 100 if mode == "L" else (100, 100, 100))
    picture.putpixel((0, 2), hidden)
    got = np.asarray(load_image(encoded(picture, "PNG", transparency=hidden)))
    expected = np.full((3, 4, 3), 100, np.uint8)
    expected[2, 0] = 255
    assert np.array_equal(got, expected)


WIDE = np.array([[0, 1, 128, 129, 255], [256, 257, 4096, 32768, 32895], [65000, 65278, 65406, 65407, 65535]], np.uint16)


NARROW = np.array(
    [[0, 0, 0, 1, 1], [1, 1, 16, 128, 128], [253, 254, 254, 255, 255]], np.uint8
)  # worked out by hand: divided by 257 and rounded


def wide_gray(mode: str) -> Image.Image:
    if mode == "I;16B":
        return Image.frombytes("I;16B", (5, 3), WIDE.astype(">u2").tobytes())
    return Image.fromarray(WIDE) if mode == "I;16" else Image.fromarray(WIDE.astype(np.int32))


@pytest.mark.parametrize(("mode", "kind"), [("I;16", "PNG"), ("I;16", "TIFF"), ("I;16B", "TIFF"), ("I", "TIFF")], ids=str)
def test_16bit_gray_is_scaled_not_clipped(mode: str, kind: str) -> None:
    photo = load_image(encoded(wide_gray(mode), kind))
    assert np.array_equal(np.asarray(photo), np.repeat(NARROW[..., None], 3, axis=2))
    rule = (
        "gray values 0 to 65535 shown as 0 to 255"
        if mode == "I"
        else "16-bit gray, 0 to 65535 shown as 0 to 255; the largest is 65535"
    )
    assert image_facts(photo).notes == (rule,)


def test_float_tiff_is_scaled_from_its_own_minimum_and_maximum() -> None:
    values = np.array([[-1, 0, 2], [0.5, 1, 1.5]], np.float32)
    photo = load_image(encoded(Image.fromarray(values), "TIFF"))
    expected = [[0, 85, 255], [128, 170, 212]]  # (v + 1) / 3 * 255; 127.5 rounds to the even 128, 212.5 to 212
    assert np.asarray(photo)[..., 0].tolist() == expected
    assert image_facts(photo).notes == ("gray values -1 to 2 shown as 0 to 255",)


def test_float_tiff_with_nan_is_refused_with_name_and_count(tmp_path: Path) -> None:
    values = np.ones((3, 4), np.float32)
    values[1, 1:3] = np.nan, np.inf
    path = tmp_path / "depth.tif"
    path.write_bytes(encoded(Image.fromarray(values), "TIFF"))
    with pytest.raises(ImageError, match=r"depth\.tif: .*2 NaN or infinite pixels"):
        load_image(path)


def test_one_bit_image_is_black_and_white() -> None:
    bits = np.array([[True, False, True], [False, False, True]])
    got = np.asarray(load_image(encoded(Image.fromarray(bits), "PNG")))
    assert got[..., 1].tolist() == [[255, 0, 255], [0, 0, 255]]


def on_white(value: int, alpha: int) -> float:
    return value * alpha / 255 + 255 * (255 - alpha) / 255


@pytest.mark.parametrize("alpha", [0, 1, 127, 128, 254, 255])
@pytest.mark.parametrize(("mode", "kind"), [("LA", "PNG"), ("RGBA", "PNG"), ("RGBA", "TIFF"), ("RGBA", "WEBP")], ids=str)
def test_alpha_of_a_file_is_composited_on_white(mode: str, kind: str, alpha: int) -> None:
    color = (40, alpha) if mode == "LA" else (40, 90, 200, alpha)
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    photo = load_image(encoded(Image.new(mode, (3, 2), color), kind, **options))
    channels = (40, 40, 40) if mode == "LA" else (40, 90, 200)
    expected = [on_white(value, alpha) for value in channels]
    assert np.abs(np.asarray(photo).astype(float) - expected).max() <= 1


def test_transparency_is_noted() -> None:
    photo = load_image(encoded(Image.new("RGBA", (3, 2), (40, 90, 200, 128)), "PNG"))
    assert image_facts(photo).notes == ("transparent pixels shown on white",)


def see_through(mode: str) -> Image.Image:
    if mode == "PA":
        picture = Image.new("P", (3, 2), 1)
        picture.putpalette([0, 0, 0, 40, 40, 40])
        picture.putalpha(Image.new("L", (3, 2), 128))
        return picture
    if mode in ("LA", "La"):
        return Image.new("LA", (3, 2), (40, 128)).convert(mode)
    return Image.new("RGBA", (3, 2), (40, 40, 40, 128)).convert(mode)


@pytest.mark.parametrize("mode", ["LA", "La", "PA", "RGBA", "RGBa"])
def test_alpha_of_every_mode_is_composited_on_white(mode: str) -> None:
    picture = see_through(mode)
    assert picture.mode == mode
    assert np.abs(np.asarray(as_photo(picture)).astype(float) - on_white(40, 128)).max() <= 2


def test_animation_gives_its_first_frame_with_a_note() -> None:
    frames = [Image.new("RGB", (8, 6), color) for color in ((250, 0, 0), (0, 250, 0), (0, 0, 250))]
    photo = load_image(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert np.abs(np.asarray(photo).astype(int) - (250, 0, 0)).max() <= 4
    assert image_facts(photo).notes == ("3 frames; the first is used",)


def test_corrupt_color_profile_is_accepted() -> None:
    assert load_image(encoded(photo_of(), "PNG", icc_profile=b"no profile")).size == (50, 40)


BOMB_SIDE = 30_000


@pytest.fixture(scope="module")
def bomb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bomb") / "bomb.png"
    path.write_bytes(png(BOMB_SIDE, BOMB_SIDE))
    assert path.stat().st_size < 200_000
    return path


MEASURE = """
import re, sys
from visattn import load_image
peak = lambda: int(re.search("VmHWM: *(\\d+)", open("/proc/self/status").read().replace("\\t", " "))[1]) // 1024  # ru_maxrss: the parent's
before = peak()
try:
    load_image(sys.argv[1])
except ValueError as error:
    print(type(error).__name__, peak() - before, error, sep="|")
"""


def test_decompression_bomb_is_refused_from_its_header_in_little_memory(bomb: Path) -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE, str(bomb)], capture_output=True, text=True, timeout=600, check=True)
    kind, grown, message = done.stdout.strip().split("|")
    assert kind == "ImageError"
    assert int(grown) < 200  # MiB; decoded it would take 858
    assert "bomb.png: " in message
    assert "pixels exceed the limit of 64 million" in message


def test_pixel_limit_can_be_lowered() -> None:
    with pytest.raises(ImageError, match=r"50 x 40 pixels exceed the limit of 0\.001999 million"):
        load_image(encoded(photo_of(), "PNG"), max_pixels=1999)


def test_image_of_exactly_max_pixels_is_allowed() -> None:
    assert load_image(encoded(photo_of(), "PNG"), max_pixels=2000).size == (50, 40)


def test_pixel_limit_cannot_exceed_the_decoder_limit() -> None:
    with pytest.raises(OptionError, match="max_pixels must be a number from 1 to"):
        load_image(encoded(photo_of(), "PNG"), max_pixels=200_000_000)


@pytest.mark.parametrize("size", [(60_000, 1), (1, 60_000), (1, 1)], ids=["wide", "tall", "dot"])
def test_strip_keeps_its_size(size: tuple[int, int]) -> None:
    assert load_image(encoded(Image.new("RGB", size, (1, 2, 3)), "PNG")).size == size


def test_header_without_pixels_is_refused() -> None:
    with pytest.raises(ImageError, match="image: "):
        load_image(png(0, 10))


NAMES = {
    "space": "a photo.png",
    "quotes": 'it\'s "quoted".png',
    "url": "50% #1?.png",
    "dash": "-rf.png",
    "newline": "line\nbreak.png",
    "tab": "tab\tstop.png",
    "escape": "\x1b[31mred.png",
    "rtl": "\u202egnp.exe",
    "emoji": "🦆.png",
    "markup": "<img src=x onerror=alert(1)>.png",
    "pattern": "seq_%03d.png",
    "255 bytes": "x" * 251 + ".png",
    "not utf-8 (I24)": os.fsdecode(b"bad\xff.png"),
}


named = pytest.mark.parametrize("name", NAMES.values(), ids=NAMES.keys())


@named
def test_odd_name_is_read(name: str, pixels: Pixels, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(encoded(Image.fromarray(pixels), "PNG"))
    photo = load_image(path)
    assert np.array_equal(np.asarray(photo), pixels)
    assert_one_printable_line(image_facts(photo).name)


@named
def test_odd_name_is_shown_on_one_line_of_the_message(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"no image")
    with pytest.raises(ImageError) as caught:
        load_image(path)
    assert_one_printable_line(str(caught.value))


def test_undecodable_byte_is_shown_escaped(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"bad\xff.png")
    path.touch()
    with pytest.raises(ImageError, match=r"bad\\udcff\.png: empty file"):
        load_image(path)


def test_broken_link_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "link.png").symlink_to("gone.png")
    with pytest.raises(ImageError, match=r"link\.png: link to a missing file"):
        load_image(tmp_path / "link.png")


def test_link_loop_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "a.png").symlink_to("b.png")
    (tmp_path / "b.png").symlink_to("a.png")
    with pytest.raises(ImageError, match=r"a\.png: cannot be read \(too many levels of symbolic links\)"):
        load_image(tmp_path / "a.png")


@pytest.mark.parametrize("closed", ["file", "folder"])
def test_unreadable_photo_is_refused(closed: str, public_folder: Path, request: pytest.FixtureRequest) -> None:
    folder = public_folder / "album"
    folder.mkdir(0o755)
    path = folder / "mine.png"
    path.write_bytes(encoded(photo_of(), "PNG"))
    (path if closed == "file" else folder).chmod(0)
    request.getfixturevalue("ordinary_user")
    with pytest.raises(ImageError, match=r"mine\.png: permission denied"):
        load_image(path)


def test_directory_named_jpg_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photos.jpg").mkdir()
    with pytest.raises(ImageError, match=r"photos\.jpg: is a directory; pass an image file in it"):
        load_image(tmp_path / "photos.jpg")


def test_fifo_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(ImageError, match=r"pipe\.png: not a regular file"):
        load_image(tmp_path / "pipe.png")


def test_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket has a length limit
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s.png")
        with pytest.raises(ImageError, match=r"s\.png: not a regular file"):
            load_image("s.png")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no /dev/zero here")
def test_endless_device_is_refused() -> None:
    assert stat.S_ISCHR(Path("/dev/zero").stat().st_mode)
    with pytest.raises(ImageError, match=r"/dev/zero: not a regular file"):
        load_image("/dev/zero")


def test_format_outside_the_list_is_refused() -> None:
    with pytest.raises(ImageError, match="supported formats are PNG, JPEG"):
        load_image(encoded(photo_of(), "SGI"))


BOX = struct.pack(">I", 24)


FOREIGN = {
    "HEIC": BOX + b"ftypheic" + b"\0" * 12,
    "JPEG XL": b"\xff\x0a" + b"\0" * 20,
    "PSD (Photoshop)": b"8BPS\0\1" + b"\0" * 20,
    "OpenEXR": b"v/1\x01\x02" + b"\0" * 20,
    "DICOM": b"\0" * 128 + b"DICM" + b"\0" * 20,
    "JPEG 2000": None,
    "TGA": None,
    "ICO": None,
    "QOI": None,
    "DDS": None,
}


@pytest.mark.parametrize("name", FOREIGN)
def test_other_formats_are_refused_by_name(name: str, tmp_path: Path) -> None:
    content = FOREIGN[name] or encoded(photo_of(), name.replace(" ", ""))
    (tmp_path / "x.jpg").write_bytes(content)
    with pytest.raises(ImageError, match=rf"x\.jpg: {re.escape(name)} is not supported; convert it to PNG or JPEG$"):
        load_image(tmp_path / "x.jpg")


@pytest.mark.parametrize("start", ["", "\ufeff", "<?xml version='1.0'?>\n<!-- made -->\n"])
def test_svg_is_refused_by_name(start: str) -> None:
    with pytest.raises(ImageError, match=r"^image: SVG is a vector format without pixels; render it to PNG$"):
        load_image(f"{start}<svg xmlns='http://www.w3.org/2000/svg'/>".encode())


def test_html_page_with_an_svg_element_is_not_called_svg() -> None:
    with pytest.raises(ImageError, match=r"not an image \(starts with '<html>"):
        load_image(b"<html><body>404 <svg/></body></html>")


@pytest.mark.parametrize("size", [(0, 5), (5, 0)])
def test_image_without_pixels_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ImageError, match=r"^image: its width or height is 0; export it again$"):
        load_image(png(*size))


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"nothing\.png: no such file; check the path"):
        load_image(tmp_path / "nothing.png")


def test_path_through_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ImageError, match=r"cannot be read \(not a directory\)"):
        load_image(tmp_path / "file" / "photo.png")


@pytest.mark.parametrize("name", ["a\0b.png", "x" * 300 + ".png"], ids=["NUL", "too long"])
def test_impossible_name_is_refused(name: str) -> None:
    with pytest.raises(ImageError) as caught:
        load_image(name)
    assert_one_printable_line(str(caught.value))


EDITS = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=8)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"])
@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(edits=EDITS, kept=st.floats(0, 1), zone=st.sampled_from([1.0, 0.05]))
def test_damaged_bytes_give_a_photo_or_an_image_error(
    kind: str, edits: list[tuple[float, int]], kept: float, zone: float
) -> None:
    """Overwrite bytes anywhere or in the header only; the end may be missing."""
    damaged = bytearray(encoded(photo_of(9, 12), kind))
    for place, value in edits:
        damaged[int(place * zone * len(damaged))] = value
    damaged = damaged[: int(len(damaged) * max(kept, 0.05) ** 0.2)]
    try:
        photo = load_image(bytes(damaged), max_pixels=1_000_000)
    except ImageError as error:
        assert_one_printable_line(str(error))
    else:
        assert photo.mode == "RGB"
        assert list(photo.info.values()) == [image_facts(photo)]


@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(st.binary(min_size=1, max_size=200))
def test_random_bytes_are_refused_by_an_image_error(data: bytes) -> None:
    with pytest.raises(ImageError) as caught:
        load_image(data)
    assert_one_printable_line(str(caught.value))
