"""Images on file systems of fsspec: folders, patterns, files, lists of addresses, and what is refused."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from PIL import Image

from visattn.batch import items_of
from visattn.errors import ImageError


@pytest.fixture
def bucket() -> Iterator[str]:
    """Give an address in memory with photos, a text and a damaged photo."""
    files = fsspec.filesystem("memory")
    for name, color in (("a.png", "red"), ("more/a.png", "lime"), ("more/b.jpg", "blue"), ("more/.c.png", "white")):
        stream = io.BytesIO()
        Image.new("RGB", (8, 6), color).save(stream, "PNG")
        files.pipe_file(f"/bucket/{name}", stream.getvalue())
    files.pipe_file("/bucket/notes.txt", b"no photo")
    yield "memory://bucket"
    files.rm("/bucket", recursive=True)


def told(*inputs: str | Path) -> dict[str, str]:
    return {item.name: item.source for item in items_of(inputs)}


def test_folders_patterns_and_files(bucket: str) -> None:
    every = {"a": "memory:///bucket/a.png", "more/a": "memory:///bucket/more/a.png", "more/b": "memory:///bucket/more/b.jpg"}
    assert told(bucket) == every
    assert told(f"{bucket}/more/*.jpg") == {"b": every["more/b"]}
    assert told(f"{bucket}/more/b.jpg") == {"b": f"{bucket}/more/b.jpg"}


def test_their_pixels_and_digests_are_those_of_the_file(bucket: str, tmp_path: Path) -> None:
    item = pickle.loads(pickle.dumps(items_of([bucket])[1]))
    assert item.photo().getpixel((0, 0)) == (0, 255, 0)
    (tmp_path / "a.png").write_bytes(fsspec.filesystem("memory").cat_file("/bucket/more/a.png"))
    assert item.digest() == items_of([tmp_path / "a.png"])[0].digest()


def test_lists_of_addresses(bucket: str, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text(f"{bucket}/more/b.jpg\nhttp://127.0.0.1:9/x/photo.jpg?size=2\nlocal.png\n")
    assert told(tmp_path / "list.txt") == {
        "b": f"{bucket}/more/b.jpg",
        "photo": "http://127.0.0.1:9/x/photo.jpg?size=2",
        "local": str(tmp_path / "local.png"),
    }


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("memory://bucket/none", "cannot be read"),
        ("memory://bucket/more/*.webp", "no visible photos"),
        ("s3://bucket/a.png", "s3fs"),
        ("nonsense://bucket", "nonsense"),
    ],
)
def test_what_is_refused(bucket: str, address: str, message: str) -> None:
    with pytest.raises(ImageError, match=message) as told:
        items_of([address])[0].photo()
    assert "\n" not in str(told.value)
    assert str(told.value).startswith(address.partition(":")[0])
