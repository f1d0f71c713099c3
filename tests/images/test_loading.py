"""Loaded images: exact pixels, formats, facts."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.images.making import Pixels, encoded, photo_of
from visattn import load_image
from visattn.core.images import ImageFacts, image_facts


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "BMP", "PPM"])
def test_lossless_file_gives_its_exact_pixels(kind: str, pixels: Pixels, tmp_path: Path) -> None:
    path = tmp_path / "photo.img"
    path.write_bytes(encoded(Image.fromarray(pixels), kind, **({"lossless": True} if kind == "WEBP" else {})))
    assert np.array_equal(np.asarray(load_image(path)), pixels)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "PPM", "AVIF"])
def test_each_format_loads_as_the_first_image_of_a_process(kind: str, tmp_path: Path) -> None:
    """Load each format first in a new process: Pillow loads its plugins one by one, and no format may depend on another."""
    path = tmp_path / "photo.img"
    path.write_bytes(encoded(photo_of(), kind))
    code = "import sys; from visattn import load_image; print(load_image(sys.argv[1]).size)"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("(50, 40)", 0), done.stderr


def test_content_and_path_give_the_same_photo(pixels: Pixels, tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(encoded(Image.fromarray(pixels), "PNG"))
    assert load_image(path.read_bytes()).tobytes() == load_image(path).tobytes() == load_image(str(path)).tobytes()


def test_facts_hold_name_digest_and_notes(pixels: Pixels, tmp_path: Path) -> None:
    path = tmp_path / "duck.png"
    path.write_bytes(encoded(Image.fromarray(pixels), "PNG"))
    assert image_facts(load_image(path)) == ImageFacts("duck.png", hashlib.sha256(path.read_bytes()).hexdigest(), ())


def test_facts_are_kept_in_a_copy(pixels: Pixels) -> None:
    photo = load_image(encoded(Image.fromarray(pixels), "PNG"))
    assert image_facts(photo.copy()) == image_facts(photo)


def test_facts_of_an_image_not_loaded_from_a_file_describe_its_pixels(pixels: Pixels) -> None:
    assert image_facts(Image.fromarray(pixels)).sha256 == hashlib.sha256(pixels.tobytes()).hexdigest()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF"])
def test_loaded_photo_keeps_no_metadata_except_its_facts(kind: str, pixels: Pixels) -> None:
    exif = Image.Exif()
    exif[0x0112] = 3
    exif[0x010E] = "secret place"
    photo = load_image(encoded(Image.fromarray(pixels), kind, exif=exif, dpi=(72, 72)))
    assert list(photo.info.values()) == [image_facts(photo)]
    assert b"secret place" not in encoded(photo, "PNG")


def test_source_file_is_not_changed(pixels: Pixels, tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(encoded(Image.fromarray(pixels), "PNG"))
    before = path.read_bytes(), path.stat().st_mtime_ns
    load_image(path)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
