"""Images of a run: files, folders, patterns, and lists of files."""

from __future__ import annotations

import csv
import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from visattn._support.checks import printable
from visattn.errors import ImageError, OptionError
from visattn.images import FORMATS

COLUMNS = "image", "path", "file", "filename"
_LISTS = ".txt", ".csv"
_WILD = "*?["


class Item(NamedTuple):
    """An image of a run.

    Attributes:
        path: Its file.
        name: Path of what is written for it, without an ending, relative to the output folder.
    """

    path: Path
    name: str


def items_of(inputs: Sequence[str | os.PathLike[str]], but: Path | None = None) -> list[Item]:
    """List the images of a run, in an order that depends on the inputs alone.

    Args:
        inputs: Image files; folders, with all their subfolders; patterns such as `photos/**/*.jpg`; text files with a path on each line;
            CSV files with a column `image`, `path`, `file` or `filename`. Paths in a list are relative to the list.
        but: Folder that is left out, such as that of the results.

    Returns:
        The images. Those of a folder keep their subfolders in the name. Names are unique.

    Raises:
        ImageError: If an input does not exist, or gives no images.
        OptionError: If a CSV file has no such column.
    """
    found: list[tuple[Path, Path]] = []  # file, and the name that it would like
    for given in inputs:
        path = Path(given)
        if path.is_dir():
            found += _in_folder(path, but)
        elif path.suffix.lower() in _LISTS and path.is_file():
            found += _in_list(path)
        elif any(letter in str(given) for letter in _WILD) and "://" not in str(given) and not path.exists():
            files = sorted(Path(file) for file in glob.glob(str(given), recursive=True))  # noqa: PTH207 - patterns may be absolute
            found += [(file, Path(file.name)) for file in files if file.is_file()]
            if not files:
                raise ImageError(f"{printable(str(given))}: no file fits this pattern. Check the path, and quote the pattern.")
        else:
            found.append((path, Path(path.name)))
    if not found:
        raise ImageError("no images were given. Pass files, folders, patterns or lists.")
    names = _unique([name for _, name in found])
    return [Item(file, name) for (file, _), name in zip(found, names, strict=True)]


def _in_folder(folder: Path, but: Path | None) -> list[tuple[Path, Path]]:
    endings = {ending for ending, kind in Image.registered_extensions().items() if kind in FORMATS}
    left_out = None if but is None else but.resolve()
    refused: list[OSError] = []

    def walk() -> Iterator[Path]:
        seen = {left_out}
        for place, folders, files in os.walk(folder, onerror=refused.append, followlinks=True):
            if (real := Path(place).resolve()) in seen:
                folders.clear()
                continue
            seen.add(real)
            folders[:] = sorted(child for child in folders if not child.startswith("."))
            yield from (Path(place, file) for file in files if not file.startswith("."))

    found = sorted(file for file in walk() if file.suffix.lower() in endings)
    if refused:
        reason = (refused[0].strerror or str(refused[0])).lower()
        raise ImageError(f"{printable(str(refused[0].filename))}: cannot be read ({reason}). Check its permissions.")
    if not found:
        raise ImageError(
            f"{printable(str(folder))}: no photos ({', '.join(FORMATS)}) in this folder or its subfolders. Pass another."
        )
    return [(file, file.relative_to(folder)) for file in found]


def _in_list(file: Path) -> list[tuple[Path, Path]]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ImageError(f"{printable(str(file))}: cannot be read as text ({error}). Save it as UTF-8.") from error
    if file.suffix.lower() == ".csv":
        rows = list(csv.DictReader(text.splitlines()))
        column = next((name for name in COLUMNS if rows and name in rows[0]), None)
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
    return [(file.parent / line, Path(Path(line).name)) for line in named]


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
