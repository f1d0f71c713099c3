"""Images of a run: folders, patterns and lists, with a distinct name for each."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from visattn.batch import items_of
from visattn.errors import ImageError, OptionError


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Write photos in a folder and its subfolders, a hidden one and another file."""
    for name in ("b.jpg", "a.png", "cats/a.png", "cats/c.webp", ".hidden/d.png", ".e.png", "out/f.png"):
        file = tmp_path / "photos" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(file)
    (tmp_path / "photos" / "notes.md").write_text("no photo")
    return tmp_path / "photos"


def told(inputs: list[Path | str], **options: Path) -> dict[str, str]:
    return {item.name: item.path.name for item in items_of(inputs, **options)}


def test_folders_keep_their_subfolders(photos: Path) -> None:
    found = told([photos], but=photos / "out")
    assert found == {"a": "a.png", "b": "b.jpg", "cats/a": "a.png", "cats/c": "c.webp"}
    assert list(found) == sorted(found)
    assert "out/f" in told([photos])


def test_patterns_and_lists(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert told([str(photos / "**" / "*.png")])
    (photos.parent / "list.txt").write_text("photos/b.jpg\n\n photos/cats/c.webp \n")
    assert told([photos.parent / "list.txt"]) == {"b": "b.jpg", "c": "c.webp"}
    (photos.parent / "list.csv").write_text("label,image\ncat,photos/cats/a.png\ndog,photos/b.jpg\n")
    assert told([photos.parent / "list.csv"]) == {"a": "a.png", "b": "b.jpg"}
    monkeypatch.chdir(photos.parent)
    assert told(["photos/*.jpg"]) == {"b": "b.jpg"}


def test_names_are_distinct(tmp_path: Path) -> None:
    for name in ("x/a.png", "x/a.jpg", "y/A.png", "y/b.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    names = [item.name for item in items_of([tmp_path / "x", tmp_path / "y" / "A.png", tmp_path / "y" / "b.png"])]
    assert len({name.casefold() for name in names}) == 4


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("x.txt:", ImageError, "lists no images"),
        ("x.csv:label\n1\n", OptionError, "must have a column image, path, file or filename"),
        ("x.txt:\udcff", ImageError, "cannot be read as text"),
    ],
)
def test_bad_lists_are_refused(content: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    name, _, text = content.partition(":")
    (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(error, match=message):
        items_of([tmp_path / name])


def test_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="no images were given"):
        items_of([])
    with pytest.raises(ImageError, match="no file fits this pattern"):
        items_of([str(tmp_path / "*.png")])
    with pytest.raises(ImageError, match="no photos"):
        items_of([tmp_path])
