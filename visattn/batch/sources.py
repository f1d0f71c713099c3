"""Images of a run: files, folders, patterns, lists of files, remote files, shards in tar files, and datasets of the user."""

from __future__ import annotations

import csv
import glob
import hashlib
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import NamedTuple

from PIL import Image

from visattn._support.checks import first_line, printable
from visattn._support.files import exists, is_file, is_folder
from visattn._support.own_code import is_function, made
from visattn._support.types import MAX_PIXELS, ColorProfile
from visattn.batch.remote import WILD, is_remote, remote_file, remote_files
from visattn.data.sources import as_file, as_image, load_image, named
from visattn.errors import ImageError, OptionError
from visattn.images import FORMATS, decode, image_facts, stating
from visattn.images.folders import endings_of_photos, photos_in

COLUMNS = "image", "path", "file", "filename"
_LISTS = ".txt", ".csv"
_PACKED = ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst"

_BLOCK = 512  # bytes of a header in a tar file, and of the zeros at its end

Content = Callable[[], bytes | Image.Image]


class Item(NamedTuple):
    """An image of a run.

    Attributes:
        source: Its file, its address, or what else names it: `SHARD.tar/MEMBER`, or `file.py:function/INDEX`.
        name: Path of what is written for it, without an ending, relative to the output folder.
        content: Function that returns the content of its file, or the image itself; None if `load_image` reads `source`.
    """

    source: str
    name: str
    content: Content | None = None

    @property
    def path(self) -> Path:
        """Source as a path, for its name and its folder."""
        return Path(self.source)

    def photo(self, *, max_pixels: int = MAX_PIXELS, color_profile: ColorProfile = "convert") -> Image.Image:
        """Load the image; see `visattn.load_image`.

        Raises:
            ImageError: If it cannot be read.
        """
        if self.content is None:
            return load_image(self.source, max_pixels=max_pixels, color_profile=color_profile)
        found = self.content()
        if isinstance(found, bytes):
            return decode(found, self.source, max_pixels=max_pixels, color_profile=color_profile)
        photo = found.copy()  # the dataset may keep it, and give it again
        return stating(photo, replace(image_facts(photo), name=self.name))

    def digest(self) -> str:
        """Return the SHA-256 of its file or its pixels; empty if it cannot be read."""
        try:
            found = self._whole()
        except (OSError, ImageError):
            return ""
        return hashlib.sha256(found).hexdigest() if isinstance(found, bytes) else image_facts(found).sha256

    def _whole(self) -> bytes | Image.Image:
        if self.content is not None:
            return self.content()
        return self.path.read_bytes() if is_file(self.path) else load_image(self.source)


class Batches(NamedTuple):
    """Batches of a run, or of a part of it: batch `b` holds the images from `b * size` on, and part `b % parts` computes it.

    Attributes:
        size: Images in a batch.
        part: Number of the part.
        parts: Number of parts.
    """

    size: int
    part: int = 0
    parts: int = 1

    def first(self, count: int) -> range:
        """Return the number of the first image of each batch of the part, of `count` images."""
        return range(self.part * self.size, count, self.parts * self.size)


class _Found(NamedTuple):
    """An image, and the name that it would like."""

    source: str
    name: Path
    content: Content | None = None


def items_of(inputs: Sequence[str | os.PathLike[str]], but: Path | None = None) -> list[Item]:
    """List the images of a run, in an order that depends on the inputs alone.

    Args:
        inputs: Image files; folders, with all their subfolders; patterns such as `photos/**/*.jpg`; text files with a path on each line;
            CSV files with a column `image`, `path`, `file` or `filename`, whose paths are relative to the file; tar files with images,
            as WebDataset has them; files, folders and patterns of fsspec, such as `s3://bucket/photos`; or `file.py:function`, which
            returns a dataset: items are images, tuples that begin with one, or dictionaries with the key `image`.
        but: Folder that is left out, such as that of the results.

    Returns:
        The images. Those of a folder keep their subfolders in the name. Names are unique.

    Raises:
        ImageError: If an input does not exist, cannot be read, or gives no images.
        OptionError: If a CSV file has no such column, or the function fails.
    """
    found = [image for given in inputs for image in _of(str(given), but)]
    if not found:
        raise ImageError("no images were given. Pass files, folders, patterns or lists.")
    names = _unique([image.name for image in found])
    return [Item(image.source, name, image.content) for image, name in zip(found, names, strict=True)]


def _of(given: str, but: Path | None) -> list[_Found]:
    path = Path(given)
    if is_function(given):
        return _of_function(given)
    if is_remote(given):
        return [_Found(*one) for one in remote_files(given, endings_of_photos())]
    if "://" in given or named(given):
        return [_Found(given, Path(as_file(given).name))]
    if is_folder(path):
        return _in_folder(path, but)
    if any(letter in given for letter in WILD) and not exists(path):
        return _fitting(given, None if but is None else but.resolve())
    return _of_file(path)


def _fitting(pattern: str, but: Path | None) -> list[_Found]:
    files = sorted(Path(file) for file in glob.glob(pattern, recursive=True))  # noqa: PTH207 - patterns may be absolute
    files = [file for file in files if not is_folder(file) and (but is None or but not in file.resolve().parents)]
    if not files:
        raise ImageError(
            f"{printable(pattern)}: no file fits this pattern, apart from the output folder. Check the path, and quote the pattern."
        )
    return [image for file in files for image in _of_file(file)]


def _of_file(path: Path) -> list[_Found]:
    if not os.path.lexists(path):
        raise ImageError(f"{printable(str(path))}: no such file; check the path")
    if path.suffix.lower() in _LISTS and path.is_file():
        return _in_list(path)
    if path.suffix.lower() == ".tar" and path.is_file():
        return list(_in_shard(path))
    if path.name.lower().endswith(_PACKED):
        raise ImageError(
            f"{printable(str(path))}: is compressed, so its images cannot be read one by one. Unpack it to a .tar file."
        )
    return [_Found(str(path), Path(as_file(path).name))]


def _in_folder(folder: Path, but: Path | None) -> list[_Found]:
    name = printable(str(folder))
    if but is not None and but.resolve() == folder.resolve():
        raise ImageError(f"{name}: is the output folder too. Choose another (-o/--output).")
    found, refused = photos_in(folder, but)
    if refused:
        reason = (refused[0].strerror or str(refused[0])).lower()
        raise ImageError(f"{printable(str(refused[0].filename))}: cannot be read ({reason}). Check its permissions.")
    if not found:
        raise ImageError(f"{name}: no photos ({', '.join(FORMATS)}) in this folder or its subfolders. Pass another.")
    return [_Found(str(file), file.relative_to(folder)) for file in found]


def _in_list(file: Path) -> list[_Found]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ImageError(f"{printable(str(file))}: cannot be read as text ({error}). Save it as UTF-8.") from error
    if file.suffix.lower() == ".csv":
        try:
            table = csv.DictReader(text.splitlines(keepends=True))
            rows, names = list(table), table.fieldnames or ()
        except csv.Error as error:
            raise ImageError(f"{printable(str(file))}: cannot be read as CSV ({first_line(error)}).") from error
        column = next((name for name in COLUMNS if name in names), None)
        if column is None:
            raise OptionError(
                f"{printable(str(file))}: must have a column {', '.join(COLUMNS[:-1])} or {COLUMNS[-1]}. Add a header."
            )
        lines = [row[column] or "" for row in rows]
    else:
        lines = text.splitlines()
    named = [line.strip() for line in lines if line.strip()]
    if not named:
        raise ImageError(f"{printable(str(file))}: lists no images. Write a path on each line.")
    return [_named_by(file, line) for line in named]


def _named_by(file: Path, line: str) -> _Found:
    """Return the image that a line of a list names."""
    if is_remote(line):
        return _Found(*remote_file(line))
    source = line if "://" in line or named(line) else str(file.parent / line)
    name = Path(as_file(source).name)
    if not name.name:
        raise ImageError(f"{printable(str(file))}: '{printable(line)}' names no file.")
    return _Found(source, name)


def _in_shard(file: Path) -> Iterator[_Found]:
    """Yield the images of a tar file, in its order. Their places are noted, so that any thread can read any of them."""
    endings, count = endings_of_photos(), 0
    places: dict[str, tuple[int, int]] = {}
    try:
        with tarfile.open(file, "r:") as shard:
            for member in shard:
                path = PurePosixPath(member.name)
                if member.isreg():
                    places[member.name] = member.offset_data, member.size
                if path.suffix.lower() not in endings or path.name.startswith(".") or not (member.isreg() or member.islnk()):
                    continue
                count += 1
                name = Path(file.stem, *(part for part in path.parts if part not in ("/", "..", ".")))
                place = places[member.linkname if member.islnk() else member.name]
                yield _Found(str(file / member.name), name, partial(_part, file, *place))
            ended = _part(file, shard.offset, _BLOCK) == bytes(_BLOCK)
    except (OSError, KeyError, tarfile.TarError) as error:
        raise ImageError(f"{printable(str(file))}: is no tar file, or damaged ({first_line(error)}). Make it again.") from error
    if not ended:  # tarfile itself takes a damaged header for the end
        raise ImageError(f"{printable(str(file))}: is damaged, or cut off, after {count} images. Make it again.")
    if not count:
        raise ImageError(f"{printable(str(file))}: no photos ({', '.join(FORMATS)}) in this tar file. Pass another.")


def _part(file: Path, start: int, size: int) -> bytes:
    try:
        with file.open("rb") as stream:
            stream.seek(start)
            return stream.read(size)
    except OSError as error:
        cause = (error.strerror or str(error)).lower()
        raise ImageError(f"{printable(str(file))}: cannot be read ({cause}). Check the path.") from error


class _Dataset:
    """Dataset that the user's function returns. A process that receives it calls the function itself."""

    def __init__(self, name: str) -> None:
        self.name, self._dataset = name, made(name, OptionError)
        self._one_by_one = Lock()  # few datasets may be read by several threads
        if not (hasattr(self._dataset, "__len__") and hasattr(self._dataset, "__getitem__")):
            raise OptionError(
                f"{printable(name)}: the function returns a {type(self._dataset).__name__}; "
                "return a dataset with __len__ and __getitem__."
            )

    def __reduce__(self) -> tuple[Callable[[str], _Dataset], tuple[str]]:
        return _dataset, (self.name,)

    def __len__(self) -> int:
        return len(self._dataset)

    def image(self, index: int) -> Image.Image:
        try:
            with self._one_by_one:
                item = self._dataset[index]
            image = item["image"] if isinstance(item, dict) else item[0] if isinstance(item, (tuple, list)) else item
            photo = as_image(image)
            photo.load()
            return photo
        except Exception as error:  # the user's code may raise anything
            raise ImageError(
                f"{printable(self.name)} {index}: cannot be read ({type(error).__name__}: {first_line(error)})"
            ) from error


@cache
def _dataset(name: str) -> _Dataset:
    return _Dataset(name)


def _of_function(name: str) -> list[_Found]:
    dataset, title = _Dataset(name), Path(name.rpartition(":")[0]).stem
    return [
        _Found(f"{name}/{index}", Path(f"{title}_{index:06}"), partial(dataset.image, index)) for index in range(len(dataset))
    ]


def _unique(names: Sequence[Path]) -> list[str]:
    """Return a distinct name for each: without its ending, else with it, else with a number in front."""
    stems = [str(name.with_suffix("")) for name in names]
    counts: dict[str, int] = {}
    for stem in stems:
        counts[stem.casefold()] = counts.get(stem.casefold(), 0) + 1
    found = [stem if counts[stem.casefold()] == 1 else str(name) for stem, name in zip(stems, names, strict=True)]
    if len({name.casefold() for name in found}) < len(found):
        found = [str(name.with_name(f"{number}.{name.name}")) for number, name in enumerate(names, start=1)]
    return found
