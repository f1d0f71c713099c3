"""Images of a run: folders, patterns and lists, with a distinct name for each."""

from __future__ import annotations

import hashlib
import io
import pickle
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from visattn.batch import items_of
from visattn.core.images import image_facts
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
    return {item.name: Path(item.source).name for item in items_of(inputs, **options)}


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
        ("x.txt:/", ImageError, "'/' names no file"),
        ("x.csv:image\n", ImageError, "lists no images"),
        ('x.csv:image\n"' + "a" * 200_000, ImageError, "cannot be read as CSV"),
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
    with pytest.raises(ImageError, match="found no file for this pattern"):
        items_of([str(tmp_path / "*.png")])
    with pytest.raises(ImageError, match="no visible photos"):
        items_of([tmp_path])
    with pytest.raises(ImageError, match=r"none.png: no such file; check the path"):
        items_of([tmp_path / "none.png"])
    with pytest.raises(ImageError, match=r"aaa: no such file; check the path"):
        items_of(["a" * 300])
    with pytest.raises(ImageError, match="is the output folder too"):
        items_of([tmp_path], but=tmp_path)


def test_results_are_no_inputs(photos: Path) -> None:
    found = [Path(item.source) for item in items_of([str(photos / "**" / "*.png")], but=photos / "out")]
    assert photos / "out" / "f.png" not in found
    assert photos / "cats" / "a.png" in found


def test_addresses_may_be_long_and_links_dead(tmp_path: Path) -> None:
    address = "https://example.org/a.png?" + "key" * 200
    assert [item.source for item in items_of([address])] == [address]
    (tmp_path / "dead.png").symlink_to(tmp_path / "gone.png")
    (item,) = items_of([tmp_path / "dead.png"])
    with pytest.raises(ImageError, match="link to a missing file"):
        item.photo()
    (tmp_path / "list.txt").write_text("photo:coffee\n")
    assert [item.source for item in items_of([tmp_path / "list.txt", "photo:chelsea"])] == ["photo:coffee", "photo:chelsea"]


def shard(folder: Path, *, mode: str = "w") -> Path:
    """Write a tar file as WebDataset has it: images and their labels, one image damaged."""
    file = folder / "shard-0.tar"
    with tarfile.open(file, mode) as packed:  # type: ignore[call-overload]
        for number in range(4):
            stream = io.BytesIO()
            Image.new("RGB", (8, 8), (60 * number, 0, 0)).save(stream, "PNG")
            content = stream.getvalue()[: 40 if number == 2 else None]
            for name, data in ((f"{number:03}.png", content), (f"{number:03}.cls", b"1")):
                facts = tarfile.TarInfo(f"part/{name}")
                facts.size = len(data)
                packed.addfile(facts, io.BytesIO(data))
    return file


def test_images_in_tar_files_are_read_where_they_lie(tmp_path: Path) -> None:
    items = items_of([shard(tmp_path)])
    assert [item.name for item in items] == [f"shard-0/part/{number:03}" for number in range(4)]
    assert [item.photo().getpixel((0, 0)) for item in items[:2]] == [(0, 0, 0), (60, 0, 0)]
    with tarfile.open(tmp_path / "shard-0.tar") as packed:
        content = packed.extractfile("part/003.png").read()  # type: ignore[union-attr]
    assert items[3].digest() == hashlib.sha256(content).hexdigest() == image_facts(items[3].photo()).sha256
    with pytest.raises(ImageError, match=r"shard-0.tar/part/002.png: "):
        items[2].photo()
    (tmp_path / "b").mkdir()
    shard(tmp_path / "b").rename(tmp_path / "shard-1.tar")
    assert len(items_of([str(tmp_path / "*.tar")])) == 8


def test_tar_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"shard-0.tgz: its name says that it is compressed"):
        items_of([shard(tmp_path, mode="w:gz").rename(tmp_path / "shard-0.tgz")])
    file = shard(tmp_path)
    file.write_bytes(b"nothing")
    with pytest.raises(ImageError, match="is no tar file, or damaged"):
        items_of([file])
    file.write_bytes(shard(tmp_path).read_bytes()[:560])
    member, end = items_of([file])
    with pytest.raises(ImageError, match=r"shard-0.tar/part/000.png: cannot be read"):
        member.photo()
    with pytest.raises(ImageError, match=r"shard-0.tar: is damaged, or cut off, after 1 images"):
        end.photo()


def test_images_before_the_damage_of_a_tar_file_are_read_and_the_damage_is_told(tmp_path: Path) -> None:
    whole = shard(tmp_path).read_bytes()
    with tarfile.open(tmp_path / "shard-0.tar") as packed:
        starts = [(member.offset, member.name) for member in packed][1:]
    for start, name in starts:
        for damaged in (whole[:start], whole[: start + 100], whole[:start] + b"\xff" * 512 + whole[start + 512 :]):
            (tmp_path / "shard-0.tar").write_bytes(damaged)
            *images, end = items_of([tmp_path / "shard-0.tar"])
            count = (int(name[5:8]) + name.endswith(".cls")) if name else 0
            assert [item.name for item in images] == [f"shard-0/part/{number:03}" for number in range(count)]
            assert [image.photo().getpixel((0, 0)) for number, image in enumerate(images) if number != 2] == [
                (60 * number, 0, 0) for number in range(count) if number != 2
            ]
            with pytest.raises(ImageError, match=r"shard-0.tar: is damaged, or cut off, after \d images"):
                end.photo()


def test_links_in_tar_files_are_followed_and_hidden_files_left_out(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a.png")
    (tmp_path / "b.png").hardlink_to(tmp_path / "a.png")
    (tmp_path / "._a.png").write_bytes(b"of macOS")
    with tarfile.open(tmp_path / "x.tar", "w") as packed:
        for name in ("a.png", "b.png", "._a.png"):
            packed.add(tmp_path / name, name)
    items = items_of([tmp_path / "x.tar"])
    assert [item.name for item in items] == ["x/a", "x/b"]
    assert [item.photo().getpixel((0, 0)) for item in items] == [(255, 0, 0)] * 2
    (tmp_path / "x.tar").unlink()
    with pytest.raises(ImageError, match=r"x.tar: cannot be read \(no such file or directory\)"):
        items[0].photo()


def test_datasets_of_a_function(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from PIL import Image\n"
        "class Own:\n"
        "    def __len__(self):\n"
        "        return 4\n"
        "    def __getitem__(self, index):\n"
        "        image = Image.new('RGB', (8, 8), (60 * index, 0, 0))\n"
        "        if index == 2:\n"
        "            raise KeyError('gone')\n"
        "        return [image, (image, 1), None, {'image': image}][index]\n"
        "def images():\n"
        "    return Own()\n"
        "def none():\n"
        "    return 3\n"
    )
    items = items_of([f"{file}:images"])
    assert [item.name for item in items] == [f"own_{number:06}" for number in range(4)]
    assert [items[number].photo().getpixel((0, 0)) for number in (0, 1, 3)] == [(0, 0, 0), (60, 0, 0), (180, 0, 0)]
    assert items[1].digest() == image_facts(items[1].photo()).sha256
    assert items[2].digest() == ""
    assert pickle.loads(pickle.dumps(items[1])).digest() == items[1].digest()  # another process calls the function itself
    with pytest.raises(ImageError, match=r"own.py:images 2: cannot be read \(KeyError: 'gone'\)"):
        items[2].photo()
    with pytest.raises(OptionError, match="returns a int; return a dataset"):
        items_of([f"{file}:none"])
    with pytest.raises(OptionError, match="has no function 'image'"):
        items_of([f"{file}:image"])


def test_images_of_a_dataset_are_left_as_they_are_and_damaged_ones_are_told(tmp_path: Path) -> None:
    Image.new("RGB", (40, 40), "red").save(tmp_path / "a.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "a.png").read_bytes()[:60])
    file = tmp_path / "lazy.py"
    file.write_text(
        "import io\nfrom pathlib import Path\nfrom PIL import Image\n"
        f"ONE, CUT = (Image.open(io.BytesIO((Path({str(tmp_path)!r}) / name).read_bytes())) for name in ('a.png', 'cut.png'))\n"
        "ONE.info['mine'] = 1\n"
        "def images():\n"
        "    return [ONE, CUT, ONE]\n"
    )
    items = items_of([f"{file}:images"])
    first, last = items[0].photo(), items[2].photo()
    assert [image_facts(photo).name for photo in (first, last)] == ["lazy_000000", "lazy_000002"]
    assert items[0].photo().getpixel((0, 0)) == (255, 0, 0)
    assert items[1].digest() == ""
    with pytest.raises(ImageError, match=r"lazy.py:images 1: cannot be read"):
        items[1].photo()
