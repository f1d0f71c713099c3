"""Caption files: find the file in a folder, and read the captions of one split by image name.

Content is never executed: captions are plain text, and an image name outside the image folder raises an error. This module does not look
for the images themselves.
"""

from __future__ import annotations

import hashlib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from visattn._support.checks import printable
from visattn._support.types import Split
from visattn.data.captions.caption_formats import entries, shown, text_of
from visattn.errors import DataError

NAMES = ("*.jsonl", "dataset_*.json", "captions_*.json", "*.token.txt", "*.token", "captions.txt", "captions.csv")
INNER = ("annotations", "Flickr8k_text")  # folders of published caption files, beside the image folders
_SPLITS = {"train": "train", "restval": "train", "val": "val", "test": "test"}


class Captions(NamedTuple):
    """Captions of one split of a file."""

    pictures: dict[str, tuple[str, ...]]  # image name -> captions, in the order of the file
    bare: int  # images left out because they have no caption
    blank: int  # captions left out because they have no word


def find_captions(folder: Path, split: Split) -> tuple[Path, bool]:
    """Find the caption file of a split in a folder or in its `INNER` subfolders.

    COCO has one file per split. Any other folder must hold a single caption file.

    Args:
        folder: Folder to search.
        split: `train` or `test`; COCO's `val` file is used for `test`.

    Returns:
        The file, and True if all of it belongs to the split.

    Raises:
        DataError: If there is no caption file, or more than one.
    """
    title = printable(str(folder))
    places = [folder, *(folder / name for name in INNER if (folder / name).is_dir())]
    found = next(filter(None, map(_listed, places)), [])
    if not found:
        raise DataError(f"{title}: must hold a caption file, got none. Expected one of {', '.join(NAMES)}.")
    years = [file.name.removeprefix(f"captions_{part}") for file, part in zip(found, ("train", "val"), strict=False)]
    if len(found) == 2 and years[0] == years[1]:
        return found[split == "test"], True
    if len(found) > 1:
        names = printable(", ".join(file.name for file in found))
        raise DataError(f"{title}: must hold one caption file, got {names}. Pass one of these files.")
    return found[0], False


def read_file(path: Path, split: Split, *, whole: bool = False) -> Captions:
    """Read the captions of one split of a file.

    Captions of an image that is listed twice are merged. If the file names splits, `restval` counts as train, and `val` as test if there is
    no `test`. Flickr8k names its splits in lists beside the caption file. Without any split, the name of the image decides: it is in
    `test` if the first eight bytes of the sha256 of its name, read as a big-endian number, are a multiple of ten.

    Args:
        path: Caption file; the format is detected from its ending and content.
        split: `train` or `test`.
        whole: Whether the whole file belongs to that split.

    Returns:
        The captions, with each run of white space replaced by a single space.

    Raises:
        DataError: If the file cannot be read, has an unknown format, is damaged, or holds no captions of this split.
    """
    title = printable(str(path))
    found: dict[str, tuple[list[str], str | None]] = {}
    names: dict[str, str] = {}  # cache: parsing a path is slow, and an image has several captions
    for where, image, captions, told in entries(path, title):
        at = f"{title}, {where}"
        if not (isinstance(image, str) and image in names):
            names[image] = _name(image, at)
        name, part = names[image], _split(told, at)
        texts, known = found.setdefault(name, ([], part))
        if known != part:
            raise DataError(
                f"{at}: {printable(name)} must be in one split, got {known or 'none'} and {part or 'none'}. Remove it from one of them."
            )
        if not isinstance(captions, (list, tuple)):
            raise DataError(f'{at}: captions must be a list of strings, got {shown(captions)}. Write them as ["a dog"].')
        texts += (" ".join(text_of(caption, "a caption", at).split()) for caption in captions)
    chosen = {name: texts for name, (texts, part) in found.items() if whole or part == split}
    parts = {part for _, part in found.values()}
    if not whole and None in parts:
        if len(parts) > 1:
            bare = next(name for name, (_, part) in found.items() if part is None)
            raise DataError(f"{title}: must name a split for all images or for none, got none for {printable(bare)}. Add it.")
        chosen = {name: texts for name, (texts, _) in found.items() if _tenth(name) == (split == "test")}
    elif not whole and split == "test" and "test" not in parts:
        chosen = {name: texts for name, (texts, part) in found.items() if part == "val"}
    worded = {name: tuple(text for text in texts if any(map(str.isalnum, text))) for name, texts in chosen.items()}
    kept = {name: texts for name, texts in worded.items() if texts}
    if not kept:
        _refuse_empty(title, split, len(found), parts, len(chosen))
    blank = sum(map(len, chosen.values())) - sum(map(len, kept.values()))
    return Captions(kept, len(chosen) - len(kept), blank)


def _listed(folder: Path) -> list[Path]:
    """Return the caption files of a folder, by name; hidden files and Flickr8k's files of lemmas are skipped."""
    return sorted(
        item
        for item in folder.iterdir()
        if any(fnmatchcase(item.name.lower(), name) for name in NAMES)
        and not (item.name.startswith(".") or ".lemma." in item.name)
        and item.is_file()
    )


def _tenth(name: str) -> bool:
    """Return True for a fixed tenth of all names."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 10 == 0


def _refuse_empty(title: str, split: str, pictures: int, parts: set[str | None], chosen: int) -> NoReturn:
    if not pictures:
        raise DataError(f"{title}: must hold captions, got none. Add some.")
    if chosen:
        raise DataError(f"{title}: must have captions with words for {split}, got none for its {chosen} images. Add some.")
    if None in parts:
        raise DataError(
            f"{title}: must have images for {split}, got none of {pictures}: a hash of the name assigns one in ten to test. "
            "Add images, or write JSONL that names the split of each."
        )
    names = ", ".join(sorted(filter(None, parts)))
    raise DataError(f"{title}: must have images for {split}, got only the splits {names}. Add some.")


def _name(value: Any, where: str) -> str:  # noqa: ANN401 - of JSON
    """Return an image name as a relative path with forward slashes."""
    text = text_of(value, "an image name", where)
    path = Path(text)
    if not path.name or path.anchor or ".." in path.parts or "\0" in text:
        raise DataError(
            f"{where}: an image must lie inside the image folder, got '{printable(text)}'. "
            "Name it relative to that folder, without .., and pass the folder as root."
        )
    return path.as_posix()


def _split(value: Any, where: str) -> str | None:  # noqa: ANN401 - of JSON
    if value is None:
        return None
    if not isinstance(value, str) or value not in _SPLITS:
        raise DataError(f"{where}: split must be one of {', '.join(_SPLITS)}, got {shown(value)}. Correct it.")
    return _SPLITS[value]
