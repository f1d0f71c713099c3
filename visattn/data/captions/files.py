"""Captions in a file: which file it is, and names of pictures with their captions in one split.

Nothing is run or looked up by what is read: captions are text, and a name that leaves the folder of pictures is refused. Pictures are not
looked for here.
"""

from __future__ import annotations

import hashlib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from visattn._support.checks import printable
from visattn._support.types import Split
from visattn.data.captions.formats import entries, shown, text_of
from visattn.errors import DataError

NAMES = ("*.jsonl", "dataset_*.json", "captions_*.json", "*.token.txt", "*.token", "captions.txt", "captions.csv")
INNER = ("annotations", "Flickr8k_text")  # folders, beside those of pictures, in which published files lie
_SPLITS = {"train": "train", "restval": "train", "val": "val", "test": "test"}


class Captions(NamedTuple):
    """What a file holds of one split."""

    pictures: dict[str, tuple[str, ...]]  # captions by name, in the order of the file
    bare: int  # pictures that were left out, as they have no caption
    blank: int  # captions that were left out, as they have no word


def find_captions(folder: Path, split: Split) -> tuple[Path, bool]:
    """The one file of captions in a folder or in its `INNER`, or of COCO's two that of the split.

    Args:
        folder: Where to look.
        split: `train` or `test`; COCO's `val` stands for `test`.

    Returns:
        The file, and whether all of it belongs to the split.

    Raises:
        DataError: If there is none, or more than one.
    """
    title = printable(str(folder))
    places = [folder, *(folder / name for name in INNER if (folder / name).is_dir())]
    found = next(filter(None, map(_listed, places)), [])
    if not found:
        raise DataError(f"{title}: must hold a file of captions, got none. Expected one of {', '.join(NAMES)}.")
    years = [file.name.removeprefix(f"captions_{part}") for file, part in zip(found, ("train", "val"), strict=False)]
    if len(found) == 2 and years[0] == years[1]:
        return found[split == "test"], True
    if len(found) > 1:
        names = printable(", ".join(file.name for file in found))
        raise DataError(f"{title}: must hold one file of captions, got {names}. Pass the one that is meant.")
    return found[0], False


def read_file(path: Path, split: Split, *, whole: bool = False) -> Captions:
    """Captions of one split of a file.

    A picture that is named twice has the captions of both. Where the file names splits, `restval` is train, and `val` is test if there is
    no `test`; for Flickr8k the lists of names beside it do. Where nothing does, a picture is in `test` if the first eight bytes of the
    sha256 of its name, as a number from the most significant byte on, are a multiple of ten.

    Args:
        path: The file; what is in it tells its format.
        split: `train` or `test`.
        whole: Whether all of it is that split.

    Returns:
        The captions, their white space made single spaces.

    Raises:
        DataError: If the file cannot be read, is of no known format or damaged, or holds no captions of this split.
    """
    title = printable(str(path))
    found: dict[str, tuple[list[str], str | None]] = {}
    names: dict[str, str] = {}  # a path takes its time, and a picture has several captions
    for where, image, captions, told in entries(path, title):
        at = f"{title}, {where}"
        if not (isinstance(image, str) and image in names):
            names[image] = _name(image, at)
        name, part = names[image], _split(told, at)
        texts, known = found.setdefault(name, ([], part))
        if known != part:
            raise DataError(
                f"{at}: {printable(name)} must be in one split, got {known or 'none'} and {part or 'none'}. Remove it from one."
            )
        if not isinstance(captions, (list, tuple)):
            raise DataError(f"{at}: captions must be a list of texts, got {shown(captions)}. Put them in brackets.")
        texts += (" ".join(text_of(caption, "a caption", at).split()) for caption in captions)
    chosen = {name: texts for name, (texts, part) in found.items() if whole or part == split}
    parts = {part for _, part in found.values()}
    if not whole and None in parts:
        if len(parts) > 1:
            bare = next(name for name, (_, part) in found.items() if part is None)
            raise DataError(f"{title}: must name a split for all pictures or for none, got none for {printable(bare)}. Add it.")
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
    """Files of captions by their names; not leftovers of a system, and not the lemmas that lie beside Flickr8k's captions."""
    return sorted(
        item
        for item in folder.iterdir()
        if any(fnmatchcase(item.name, name) for name in NAMES)
        and not (item.name.startswith(".") or ".lemma." in item.name)
        and item.is_file()
    )


def _tenth(name: str) -> bool:
    """One in ten names, the same for ever."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 10 == 0


def _refuse_empty(title: str, split: str, pictures: int, parts: set[str | None], chosen: int) -> NoReturn:
    if not pictures:
        raise DataError(f"{title}: must hold captions, got none. Add some.")
    if chosen:
        raise DataError(f"{title}: must have captions of words for {split}, got none for its {chosen} pictures. Add some.")
    if None in parts:
        raise DataError(
            f"{title}: must have pictures for {split}, got none of {pictures}: a hash of the name sends one in ten to test. "
            "Add pictures, or name the split of each."
        )
    names = ", ".join(sorted(filter(None, parts)))
    raise DataError(f"{title}: must have pictures for {split}, got splits {names} alone. Add some.")


def _name(value: Any, where: str) -> str:  # noqa: ANN401 - of JSON
    """A picture's name, relative and with slashes."""
    text = text_of(value, "a picture's name", where)
    path = Path(text)
    if not path.name or path.anchor or ".." in path.parts or "\0" in text:
        raise DataError(
            f"{where}: a picture must lie below the folder of pictures, got '{printable(text)}'. "
            "Name it relative to that folder, and pass the folder as root."
        )
    return path.as_posix()


def _split(value: Any, where: str) -> str | None:  # noqa: ANN401 - of JSON
    if value is None:
        return None
    if not isinstance(value, str) or value not in _SPLITS:
        raise DataError(f"{where}: split must be one of {', '.join(_SPLITS)}, got {shown(value)}. Correct it.")
    return _SPLITS[value]
