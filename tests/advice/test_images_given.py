"""Advice of messages about photos, their files and addresses: followed literally, it works."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import timm
import torch
from PIL import Image

import visattn
from tests import tiny
from tests.advice.closing import Close, closed  # noqa: F401 - a fixture
from tests.images import tiff
from tests.images.making import encoded, photo_of
from tests.serving import Store, store  # noqa: F401 - a fixture
from visattn._support.language import in_shell
from visattn.core.images import as_photo
from visattn.errors import ImageError, UnsupportedModel


def test_names_of_photos_and_scenes_are_corrected() -> None:
    for source, message, right in (
        ("photo:cofee", r"did you mean photo:coffee\?", "photo:coffee"),
        ("photo:dog", r"only astronaut, coffee, rocket, .*; choose one of these", "photo:rocket"),
        ("scene:9999999999", "a scene is a whole number of at most nine digits", "scene:7"),
        ("scene:seven", r"a scene is a whole number of at most nine digits; pass for example scene:7", "scene:7"),
    ):
        with pytest.raises(ImageError, match=message):
            visattn.load_image(source)
        assert visattn.load_image(right).mode == "RGB"


def test_addresses_are_checked_and_images_downloaded(store: Store, tmp_path: Path) -> None:  # noqa: F811
    content = encoded(photo_of(), "PNG")
    store.answers["cat.png"] = 200, content
    with pytest.raises(ImageError, match=r"dog\.png: the server answers 404 Not Found; check the address"):
        visattn.load_image(store.url("dog.png"))
    assert visattn.load_image(store.url("cat.png")).size == (50, 40)
    with pytest.raises(ImageError, match=r"cannot be reached \(.*refused\); download the image and pass its file"):
        visattn.load_image("http://127.0.0.1:9/cat.png")
    (tmp_path / "cat.png").write_bytes(content)
    assert visattn.load_image(tmp_path / "cat.png").size == (50, 40)


def test_images_of_more_channels_are_passed_as_arrays() -> None:
    model = tiny.vit(in_chans=5)
    values = np.random.default_rng(0).random((32, 48, 5))
    with pytest.raises(
        UnsupportedModel, match=r"takes 5 channels, got an image of mode RGB\. Pass an array \(H, W, 5\) or \(5, H, W\) to vis"
    ):
        visattn.explain(model, photo_of(), method="rollout")
    with pytest.raises(
        ImageError, match=r"the model takes 5 channels, got \(32, 48, 4\)\. Pass an array \(H, W, 5\) or \(5, H, W\)"
    ):
        visattn.explain(model, values[..., :4], method="rollout")
    one, other = (visattn.explain(model, array, method="rollout").map.values for array in (values, values.transpose(2, 0, 1)))
    assert one.shape == tiny.GRID
    assert torch.equal(one, other)


def test_pixels_that_are_not_finite_are_replaced() -> None:
    values = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)
    values[1, 1:3] = np.nan, np.inf
    with pytest.raises(ImageError, match=r"has 2 NaN or infinite pixels; replace them"):
        visattn.load_image(encoded(Image.fromarray(values), "TIFF"))
    values[1, 1:3] = 0
    assert visattn.load_image(encoded(Image.fromarray(values), "TIFF")).size == (4, 3)


def test_limits_of_files_are_raised_or_kept(tmp_path: Path) -> None:
    file = tmp_path / "x.png"
    file.write_bytes(encoded(photo_of(), "PNG"))
    with pytest.raises(ImageError, match=r"x\.png: has more than 100 bytes; check the file, or raise max_bytes"):
        visattn.load_image(file, max_bytes=100)
    assert visattn.load_image(file, max_bytes=10_000).size == (50, 40)
    with pytest.raises(
        ImageError, match=r"50 x 40 pixels exceed the limit of .* million; scale the image down, or raise max_pixels"
    ):
        visattn.load_image(file, max_pixels=1999)
    assert visattn.load_image(file, max_pixels=2000).size == (50, 40)
    photo_of().resize((25, 20)).save(file)
    assert visattn.load_image(file, max_pixels=1999).size == (25, 20)


def test_arrays_are_passed_as_their_messages_say() -> None:
    batch = np.random.default_rng(0).random((2, 6, 5, 3))
    with pytest.raises(ImageError, match=r"got \(2, 6, 5, 3\)\. Pass one photo, not a batch"):
        as_photo(batch)
    assert as_photo(batch[0]).size == (5, 6)
    with pytest.raises(ImageError, match=r"must hold real numbers, got complex128\. Pass uint8 0 to 255 or floats 0 to 1"):
        as_photo(batch[0] * 1j)
    assert np.array_equal(
        np.asarray(as_photo(np.abs(batch[0] * 1j))), np.asarray(as_photo((batch[0] * 255).round().astype(np.uint8)))
    )


PNG = encoded(photo_of(), "PNG")
STREAM = io.BytesIO()
tifffile.imwrite(STREAM, np.ones((4, 5), np.float64))
# a wrong content, the message, and the content after the advice
CONTENTS: dict[str, tuple[bytes, str, bytes]] = {
    "empty": (b"", "empty file; check the download or the copy", PNG),
    "cut": (PNG[:200], r"truncated \(image data ends early\); download or copy it again", PNG),
    "cut header": (PNG[:6], r"truncated \(image data ends early\) or damaged; download or copy it again", PNG),
    "cut WebP": (
        encoded(photo_of(), "WEBP")[:-40],
        r"truncated \(image data ends early\); download or",
        encoded(photo_of(), "WEBP"),
    ),
    "a page": (b"<html>", r"not an image \(starts with '<html>'\); supported formats are PNG, JPEG", PNG),
    "another format": (encoded(photo_of(), "ICO"), "ICO is not supported; convert it to PNG or JPEG", PNG),
    "another TIFF": (
        STREAM.getvalue(),
        "TIFF of 64-bit floating-point gray, .* is not supported; convert it to 8- or 16-bit PNG",
        PNG,
    ),
    "undecodable": (
        tiff.gray(np.arange(30, dtype=np.uint8).reshape(5, 6), 8, photometric=0, fill_order=2),
        r"damaged or unsupported image \(.*\); open it in an editor and save it again",
        PNG,
    ),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_files_that_are_copied_or_converted_are_read(name: str, tmp_path: Path) -> None:
    wrong, message, right = CONTENTS[name]
    (tmp_path / "x.png").write_bytes(wrong)
    with pytest.raises(ImageError, match=rf"x\.png: {message}"):
        visattn.load_image(tmp_path / "x.png")
    (tmp_path / "x.png").write_bytes(right)
    assert visattn.load_image(tmp_path / "x.png").size == (50, 40)


def test_an_image_that_does_not_fit_in_memory_is_scaled_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Image.Image.load

    def short(image: Image.Image) -> Any:  # stands for a machine with memory for 1000 pixels
        if image.width * image.height > 1000:
            raise MemoryError
        return load(image)

    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", short)
    with pytest.raises(ImageError, match="out of memory while decoding; scale the image down"):
        visattn.load_image(PNG)
    assert visattn.load_image(encoded(photo_of(20, 25), "PNG")).size == (25, 20)


def test_paths_are_corrected(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "a.png").write_bytes(PNG)
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "link.png").symlink_to("gone.png")
    for name, message in (
        ("f", "is a directory; pass an image file in it$"),
        ("pipe.png", "not a regular file; pass an image file"),
        ("gone.png", "no such file; check the path"),
        ("link.png", "link to a missing file; check the path"),
        ("f/a.png/b.png", r"cannot be read \(not a directory\); check the path"),
    ):
        with pytest.raises(ImageError, match=message):
            visattn.load_image(tmp_path / name)
    assert visattn.load_image(tmp_path / "f" / "a.png").size == (50, 40)


@pytest.mark.parametrize("place", ["album", "album/a.png"])
def test_permissions_of_a_photo_and_its_folder_are_checked(place: str, public_folder: Path, closed: Close) -> None:  # noqa: F811
    (public_folder / "album").mkdir()
    file = public_folder / "album" / "a.png"
    file.write_bytes(PNG)
    reopen = closed(public_folder / place)
    with pytest.raises(ImageError, match=r"a\.png: permission denied; check the permissions of the file and its folder$"):
        visattn.load_image(file)
    reopen()
    assert visattn.load_image(file).size == (50, 40)


def test_a_folder_is_several_images_in_the_shell(tmp_path: Path) -> None:
    with (
        in_shell(),
        pytest.raises(ImageError, match=r"is a directory; pass the image files in it, or run: visattn batch .* -o maps$"),
    ):
        visattn.load_image(tmp_path)


@pytest.mark.parametrize(
    ("code", "fix"),
    [
        (410, "check the address"),
        (401, "download the image and pass its file"),
        (403, "download the image and pass its file"),
        (429, "try again later"),
        (503, "try again later"),
    ],
)
def test_an_answer_of_a_server_decides_the_fix(code: int, fix: str, store: Store) -> None:  # noqa: F811
    store.answers["x.png"] = code, b""
    with pytest.raises(ImageError, match=f"the server answers {code} .*; {fix}$"):
        visattn.load_image(store.url("x.png"))


@pytest.mark.parametrize("address", ["http://[", "http://127.0.0.1/a b.png"])
def test_an_address_that_is_none_is_not_called_out_of_reach(address: str) -> None:
    with pytest.raises(ImageError, match=r"is no valid address \(.*\); correct it$"):
        visattn.load_image(address)


@pytest.mark.parametrize("limit", ["max_pixels", "max_bytes"])
def test_a_limit_is_named_only_where_it_can_be_raised(limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.png").write_bytes(PNG)
    monkeypatch.setattr(f"visattn.core.images.loading.{limit.upper()}", 100)
    with pytest.raises(ImageError, match=r"(scale the image down|check the file)$"):
        visattn.overlay(tmp_path / "x.png", np.eye(40, 50, dtype=np.float32))
    with pytest.raises(ImageError, match=f"(scale the image down|check the file), or raise {limit}$"):
        visattn.load_image(tmp_path / "x.png", **{limit: 100})  # type: ignore[arg-type]
    photo = visattn.load_image(tmp_path / "x.png", **{limit: 10_000})  # type: ignore[arg-type]
    assert visattn.overlay(photo, np.eye(40, 50, dtype=np.float32)).size == photo.size


@pytest.mark.parametrize("shape", [(5, 6, 2), (4,), (0, 4, 3), ()], ids=str)
def test_only_an_array_of_four_axes_is_called_a_batch(shape: tuple[int, ...]) -> None:
    with pytest.raises(ImageError, match=r"a photo must be \(H, W\), .*, got \([\d, ]*\)\.$"):
        as_photo(np.zeros(shape))


def test_a_range_that_is_hardly_exceeded_is_told_in_all_digits() -> None:
    array = np.full((4, 4, 3), np.nextafter(np.float32(1), np.float32(2)))
    array[0] = 0
    with pytest.raises(ImageError, match=r"must lie in \[0, 1\], got 0 to 1\.00000011\d+\. Scale its values to that range"):
        as_photo(array)
    assert as_photo(array / array.max()).size == (4, 4)


@pytest.mark.parametrize(
    "content",
    [b"RIFF" + (36).to_bytes(4, "little") + b"WAVEfmt " + bytes(28), b"BMW builds cars. This is an intact file of text.\n" * 3],
    ids=["sound", "text"],
)
def test_intact_files_of_other_kinds_are_not_called_truncated(content: bytes) -> None:
    with pytest.raises(ImageError, match=r"image: not an image \(.*\); supported formats are"):
        visattn.load_image(content)


@pytest.mark.parametrize("kind", ["WEBP", "BMP"])
def test_a_cut_header_is_told_as_truncated(kind: str) -> None:
    with pytest.raises(ImageError, match=r"truncated \(image data ends early\) or damaged; download or copy it again"):
        visattn.load_image(encoded(photo_of(), kind)[:14])


def test_an_image_of_four_channels_is_told_by_its_mode() -> None:
    model = timm.create_model("test_vit", in_chans=4).eval()
    with pytest.raises(UnsupportedModel, match=r"takes 4 channels, got an image of mode RGBA\. Pass an array \(H, W, 4\)"):
        visattn.explain(model, Image.new("RGBA", (160, 160)), method="rollout")
    values = np.asarray(Image.new("RGBA", (160, 160), (9, 8, 7, 6)))
    assert visattn.explain(model, values, method="rollout").map.values.ndim == 2


@pytest.mark.parametrize(
    "start", [b"\0\0\0\x18ftypmp42", b"\0\0\0\x14ftypqt  ", b"\x1aE\xdf\xa3\x9fB\x86\x81", b"RIFF\0\0\0\0AVI LIST", b"\0\0\1\xba"]
)
def test_a_film_is_told_from_an_image(start: bytes, tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(start + bytes(200))
    with pytest.raises(ImageError, match=r"clip\.mp4: a film, not an image; use visattn\.explain_video$"):
        visattn.load_image(tmp_path / "clip.mp4")
    with in_shell(), pytest.raises(ImageError, match=r"run: visattn video FILE -o maps\.mp4$"):
        visattn.load_image(tmp_path / "clip.mp4")
