"""Images of a run: files, folders, patterns, lists of files, remote files, archives, and datasets of the user."""

from __future__ import annotations

import csv
import glob
import os
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import NamedTuple

from visattn._support.checks import first_line, printable, unreadable
from visattn._support.files import is_folder, regular
from visattn._support.language import flag
from visattn._support.outside import fault_of, folded
from visattn._support.own_code import is_function
from visattn.batch.archives import ARCHIVES, PACKED, in_archive, named_member
from visattn.batch.items import Item, Named, Refusal, fault_error, refused
from visattn.batch.journal import FILES, SPARE
from visattn.batch.own_datasets import of_function
from visattn.batch.remote import WILD, is_remote, local_archive, local_path, remote_file, remote_files
from visattn.core.images import FORMATS
from visattn.core.images.image_folders import endings_of_photos, photos_in
from visattn.core.images.sources import as_file, named
from visattn.errors import ImageError, OptionError, VisattnError

COLUMNS = "image", "path", "file", "filename"
_LISTS = ".txt", ".csv"
_LARGEST_LIST = 2**28  # bytes


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


def items_of(inputs: Sequence[str | os.PathLike[str]], but: Path | None = None) -> list[Item]:
    """List the images of a run, in an order that depends on the inputs alone.

    An input that cannot be opened or listed is one image that fails, as long as another input gives images.

    Args:
        inputs: Image files; folders, with all their subfolders; patterns such as `photos/**/*.jpg`; text files with a path on each line;
            CSV files with a column `image`, `path`, `file` or `filename`, whose paths are relative to the file; tar files with images,
            as WebDataset has them, and zip files; files, folders and patterns of fsspec, such as `s3://bucket/photos`; or
            `file.py:function`, which returns a dataset: items are images, tuples that begin with one, or dictionaries with the key
            `image`. A name that exists as a file is that file, whatever it looks like.
        but: Folder that is left out, such as that of the results.

    Returns:
        The images. Those of a folder keep their subfolders in the name. Names are unique.

    Raises:
        ImageError: If no input gives an image that can be read: the error of the first.
        OptionError: If an input is the output folder, a CSV file has no such column, or the function fails.
    """
    images, errors = [], []
    for given in map(str, inputs):
        try:
            images += _of(given, but)
        except VisattnError as error:
            errors.append(error)
            images.append(refused(given, error))
        except Exception as error:  # a library, at an input of any kind
            errors.append(fault_error(given, error))
            images.append(refused(given, errors[-1]))
    if not images:
        raise ImageError("no images were given. Pass files, folders, patterns or lists.")
    images = [_without_ours(image) for image in images]
    refusals = [image.content for image in images if isinstance(image.content, Refusal)]
    if len(refusals) == len(images):
        raise errors[0] if errors else ImageError(refusals[0].text)
    names = iter(_unique([image.name for image in images if image.name.name]))
    return [Item(image.source, next(names) if image.name.name else "", image.content) for image in images]


def _without_ours(image: Named) -> Named:
    """Refuse an image whose results would lie in place of the journal, or in its folder of unfinished files."""
    if image.name.parts and any(fnmatch(image.name.parts[0], pattern) for pattern in (FILES, SPARE)):
        first, *inner = image.name.parts
        kept = f"{printable(image.source)}: the name {printable(first)} is kept for journals of runs"
        return refused(image.source, ImageError(f"{kept}. Rename {'that folder or archive' if inner else 'it'}."))
    return image


def _of(given: str, but: Path | None) -> list[Named]:
    path = Path(given)
    if os.path.lexists(given):
        return _in_folder(path, but) if is_folder(path) else _of_file(path)
    if is_function(given):
        return of_function(given)
    if (local := local_path(given)) is not None:
        return _of(str(local), but)
    if archive := local_archive(given):
        return in_archive(*archive, given.partition("://")[0].lower())
    if is_remote(given):
        return remote_files(given, endings_of_photos())
    if "://" in given or named(given):
        name = as_file(given).name
        if fault := fault_of(name):
            raise ImageError(f"{printable(given)}: the name '{printable(name)}' {fault}. Pass another address.")
        return [Named(given, Path(name))]
    if any(letter in given for letter in WILD):
        return _fitting(given, None if but is None else but.resolve())
    raise _absent(given)


def _absent(given: str) -> ImageError:
    try:
        os.lstat(given)
    except PermissionError as error:
        return _unread(error)
    except (OSError, ValueError):
        pass
    return ImageError(f"{printable(given)}: no such file; check the path")


def _fitting(pattern: str, but: Path | None) -> list[Named]:
    files = sorted(Path(file) for file in glob.glob(pattern, recursive=True))  # noqa: PTH207 - patterns may be absolute
    files = [file for file in files if not is_folder(file) and (but is None or but not in file.resolve().parents)]
    if not files:
        raise ImageError(
            f"{printable(pattern)}: found no file for this pattern, apart from the output folder. Check the path and its permissions, and "
            "quote the pattern."
        )
    return [image for file in files for image in _attempted(file)]


def _attempted(file: Path) -> list[Named]:
    """Return the images of a file that fits a pattern; one that cannot be listed is one image that fails."""
    try:
        return _of_file(file)
    except VisattnError as error:
        return [refused(str(file), error)]
    except Exception as error:  # a library, at a file of any kind
        return [refused(str(file), fault_error(str(file), error))]


def _of_file(path: Path) -> list[Named]:
    if path.suffix.lower() in _LISTS:
        return _in_list(path)
    if path.suffix.lower() in ARCHIVES:
        return in_archive(path)
    if path.name.lower().endswith(PACKED):
        raise ImageError(
            f"{printable(str(path))}: its name says that it is compressed, so its images cannot be read one by one. Unpack it to .tar."
        )
    return [Named(str(path), Path(path.name))]


def _in_folder(folder: Path, but: Path | None) -> list[Named]:
    name = printable(str(folder))
    if but is not None and but.resolve() == folder.resolve():
        raise ImageError(f"{name}: is the output folder too. Choose another{flag('output')}.")
    files, unread = photos_in(folder, but)
    if not files and not unread:
        apart = "" if but is None else ", apart from the output folder"
        raise ImageError(
            f"{name}: no visible photos ({', '.join(FORMATS)}) in this folder or its subfolders{apart}. Pass another."
        )
    return [
        *(Named(str(file), file.relative_to(folder)) for file in files),
        *(refused(str(error.filename), _unread(error)) for error in unread),
    ]


def _unread(error: OSError) -> ImageError:
    return ImageError(unreadable(error, error.filename))


def _in_list(file: Path) -> list[Named]:
    shown = printable(str(file))
    lines = [line.strip() for line in _lines(file, shown)]
    if not any(lines):
        raise ImageError(f"{shown}: lists no images. Write a path on each line, in a CSV file into the column of images.")
    return [_attempted_line(file, line, number) for number, line in enumerate(lines, start=1) if line]


def _attempted_line(file: Path, line: str, number: int) -> Named:
    """Return the image that a line of a list names; a line that a library cannot parse is one image that fails."""
    try:
        return _listed(file, line, number)
    except Exception as error:
        place = f"{file}, line {number}"
        return refused(place, fault_error(place, error))


def _lines(file: Path, shown: str) -> list[str]:
    """Return the lines of a list, or the cells of its column."""
    try:
        with regular(file).open(encoding="utf-8-sig", newline="") as stream:
            text = stream.read(_LARGEST_LIST + 1)
    except UnicodeDecodeError as error:
        raise ImageError(f"{shown}: cannot be read as text ({first_line(error)}). Save it as UTF-8.") from error
    except OSError as error:
        unread = _unread(error)
        raise unread from error
    if len(text) > _LARGEST_LIST:
        raise ImageError(f"{shown}: has more than {_LARGEST_LIST / 1e6:,.0f} MB. Pass several lists.")
    if file.suffix.lower() != ".csv":
        return text.splitlines()
    try:
        table = csv.DictReader(text.splitlines(keepends=True))
        rows, names = list(table), table.fieldnames or ()
    except csv.Error as error:
        raise ImageError(f"{shown}: cannot be read as CSV ({first_line(error)}).") from error
    column = next((name for name in COLUMNS if name in names), None)
    if column is None:
        raise OptionError(f"{shown}: must have a column {', '.join(COLUMNS[:-1])} or {COLUMNS[-1]}. Add a header.")
    return [row[column] or "" for row in rows]


def _listed(file: Path, line: str, number: int) -> Named:
    """Return the image that a line of a list names. A line names a photo, never code or another list."""
    if archive := local_archive(line):
        kind, _, rest = line.partition("://")
        member = rest.partition("::")[0]
        image = Named(line, Path(Path(member).name), partial(named_member, archive[0], member, kind.lower()))
    elif (local := local_path(line)) is not None:
        image = Named(str(local), Path(local.name))
    elif is_remote(line):
        image = remote_file(line)
    elif "://" in line or named(line):
        image = Named(line, Path(as_file(line).name))
    else:
        path = file.parent / line  # which drops the `./` of `./photo:x`
        image = Named(f"./{path}" if path.parts and ":" in path.parts[0] else str(path), Path(path.name))
    fault = fault_of(image.name.name) if image.name.name else "names no file"
    if fault is None:
        return image
    fix = "Rename the file, and correct the line." if image.name.name else "Correct the line."
    shown = f"{line[:_SHOWN]}..." if len(line) > _SHOWN else line
    error = ImageError(f"{printable(str(file))}, line {number}: '{printable(shown)}' {fault}. {fix}")
    return refused(f"{file}, line {number}", error)


_SHOWN = 200  # letters of a line in messages


def _unique(names: Sequence[Path]) -> list[str]:
    """Return a distinct name for each: without its ending, else with it, else with a number in front."""
    numbered = [str(name.with_name(f"{number}.{name.name}")) for number, name in enumerate(names, start=1)]
    unique = [str(name.parent / ((name.stem.strip(".") and name.stem) or name.name)) for name in names]
    for longer in (list(map(str, names)), numbered):
        counts = Counter(map(folded, unique))
        unique = [name if counts[folded(name)] == 1 else other for name, other in zip(unique, longer, strict=True)]
    return unique if len(set(map(folded, unique))) == len(unique) else numbered
