"""Caption formats: parse a file into one entry per image or caption. Only the format is checked here.

Your own data is JSONL, one line per image: `{"image": "photos/1.jpg", "captions": ["a dog", "a dog runs"], "split": "train"}`. JSON is read
in Karpathy's format (`images` with `sentences`) and COCO's (`images` and `annotations`). Text is read in Flickr's format (`NAME#0`, a tab,
a caption) and as a table with the header `image,caption`.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict, TypeVar, get_args

from msgspec import Raw

from visattn._support.checks import printable, unreadable, whole_number
from visattn._support.files import regular
from visattn._support.json_files import Content, decoded
from visattn._support.types import Split
from visattn.errors import DataError

T = TypeVar("T")
_FORMS = (
    "JSONL of image and captions (.jsonl), Karpathy's or COCO's JSON (.json), lines of NAME#0, tab, caption, or a table with the header "
    "image,caption"
)
_FIX = "Convert it to one of these, or correct its ending."


class _CocoImage(TypedDict):
    id: int | str
    file_name: str


class _Annotation(TypedDict):
    image_id: int | str
    caption: str


class _Sentence(TypedDict, total=False):
    raw: str
    tokens: list[str]


class _KarpathyImage(TypedDict):
    filename: str
    filepath: NotRequired[str]
    sentences: list[_Sentence]
    split: NotRequired[Any]


class Entry(NamedTuple):
    """Captions of an image as read from the file; nothing is checked yet."""

    where: str  # position in the file, for messages
    image: Any
    captions: Any
    split: Any = None


def entries(path: Path, title: str) -> Iterator[Entry]:
    """Parse a caption file; its ending and first line decide the format."""
    text = _content(path, title)
    first = text.lstrip().split("\n", 1)[0].rstrip("\r")
    if path.suffix.lower() == ".jsonl":
        return _lines(text, title)
    if path.suffix.lower() == ".json":
        return _json(text, title)
    if first.strip().lower().replace('"', "") == "image,caption":
        return _table(text, title)
    if "\t" in first:
        return _tokens(path, text, title)
    if not first:
        return iter(())
    raise DataError(f"{title}: must be {_FORMS}; got a file that begins with {shown(first)}. {_FIX}")


def text_of(value: Any, what: str, where: str) -> str:  # noqa: ANN401 - of JSON
    """Return a value after checking that it is text."""
    if not isinstance(value, str):
        raise DataError(f"{where}: {what} must be text, got {shown(value)}. Correct it.")
    return value


def shown(value: Any) -> str:  # noqa: ANN401 - of JSON
    """Format a value as JSON for a message; long text is cut."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _keys(record: Mapping[str, Any]) -> str:
    names = ", ".join(list(record)[:8])
    return printable(f"the keys {names}") if names else "no keys"


def _content(path: Path, title: str) -> str:
    try:
        content = regular(path).read_bytes()
    except OSError as error:
        raise DataError(unreadable(error, path)) from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # with a byte order mark, the decoder counts positions from the byte after it
        at = error.start + len(content) - len(error.object)
        line = content[:at].count(b"\n") + 1
        raise DataError(
            f"{title}, line {line}: must be UTF-8, got the byte 0x{content[at]:02x}. Save the text as UTF-8, or pass another file."
        ) from error


def _parsed(content: Content, kind: type[T], where: str, fix: str = "Correct it.", name: str = "") -> T:
    try:
        return decoded(content, kind, name)
    except ValueError as error:
        raise DataError(f"{where}: {printable(str(error))}. {fix}") from error


def _lines(text: str, title: str) -> Iterator[Entry]:
    """Parse JSONL, also that written by `visattn.data.scenes.write`; only line feeds end a line."""
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{title}, line {number}"
        whole = line.strip().startswith("{") and line.strip().endswith("}")
        record = _parsed(line, dict[str, Any], where, "Correct it." if whole else "Write one object per line.")
        image, captions = (
            next((key for key in keys if key in record), keys[0]) for keys in (("image", "file"), ("captions", "caption"))
        )
        for name in (captions, image):
            if name not in record:
                raise DataError(f"{where}: must have {name}, got {_keys(record)}. Correct it.")
        told = record[captions]
        yield Entry(f"line {number}", record[image], [told] if isinstance(told, str) else told, record.get("split"))


def _json(text: str, title: str) -> Iterator[Entry]:
    if not text.strip():
        return iter(())
    listed = text.lstrip().startswith("[")
    fix = "Write one object per line, and" if listed else "Download it again; if it has one object per line,"
    parts = _parsed(text, dict[str, Raw], title, f"{fix} name it .jsonl.")
    if {"images", "annotations"} <= parts.keys():
        return _coco(parts, title)
    if "images" in parts:
        return _karpathy(parts["images"], title)
    raise DataError(f"{title}: must be {_FORMS}; got {_keys(parts)}. {_FIX}")


def _karpathy(images: Raw, title: str) -> Iterator[Entry]:
    for number, image in enumerate(_parsed(images, list[_KarpathyImage], title, name="images")):
        folder, at = image.get("filepath"), f"image {number}"
        texts = [_sentence(one, f"{title}, {at}") for one in image["sentences"]]
        yield Entry(at, f"{folder}/{image['filename']}" if folder else image["filename"], texts, image.get("split"))


def _sentence(told: _Sentence, where: str) -> str:
    """Return the raw text of a sentence; without it, join the tokens."""
    if "raw" not in told and "tokens" not in told:
        raise DataError(f"{where}: a sentence must have raw or tokens. Correct it.")
    return told["raw"] if "raw" in told else " ".join(told["tokens"])


def _coco(parts: dict[str, Raw], title: str) -> Iterator[Entry]:
    names: dict[int | str, str] = {}
    for number, image in enumerate(_parsed(parts["images"], list[_CocoImage], title, name="images")):
        key, name = image["id"], image["file_name"]
        if names.setdefault(key, name) != name:
            raise DataError(
                f"{title}, image {number}: ids must be unique, got {shown(key)} for another image too. Correct one of them."
            )
        yield Entry(f"image {number}", name, [])
    for number, note in enumerate(_parsed(parts["annotations"], list[_Annotation], title, name="annotations")):
        key = note["image_id"]
        if key not in names:
            raise DataError(
                f"{title}, annotation {number}: image_id must be the id of an image, got {shown(key)}. Correct it, or add the image."
            )
        yield Entry(f"annotation {number}", names[key], [note["caption"]])


def _tokens(path: Path, text: str, title: str) -> Iterator[Entry]:
    parts = _lists(path)
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        key, tab, caption = line.partition("\t")
        name, _, which = key.rpartition("#")
        if not (tab and name and whole_number(which) is not None):
            raise DataError(
                f"{title}, line {number}: must be a name, # and a number, a tab and a caption, got {shown(line.strip())}. Correct it."
            )
        yield Entry(f"line {number}", name, [caption], parts.get(name, "val") if parts else None)


def _lists(path: Path) -> dict[str, str]:
    """Return the splits of names in Flickr8k's lists, if the lists exist; the caller puts all other names into `val`."""
    files = {split: path.with_name(f"Flickr_8k.{split}Images.txt") for split in get_args(Split)}
    there = [file for file in files.values() if file.is_file()]
    if len(there) == 1:
        names = " and ".join(file.name for file in files.values())
        raise DataError(f"{printable(str(path.parent))}: must hold both {names} or neither, got {there[0].name}. Add the other.")
    parts: dict[str, str] = {}
    for split, file in files.items() if there else ():
        for name in filter(None, map(str.strip, _content(file, printable(str(file))).split("\n"))):
            if parts.setdefault(name, split) != split:
                raise DataError(f"{printable(str(file))}: must not share an image with train, got {printable(name)}. Remove it.")
    return parts


def _table(text: str, title: str) -> Iterator[Entry]:
    rows = csv.reader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True)
    begun = False
    while True:
        number = rows.line_num + 1  # a row of several lines is named by its first
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise DataError(f"{title}, line {number}: must be a table row, got an error ({error}). Correct it.") from error
        if row is None:
            return
        if not "".join(row).strip():
            continue
        if begun and len(row) != 2:
            got, fix = (
                ("1 column", "Add the caption.")
                if len(row) == 1
                else (f"{len(row)} columns", "Quote captions that contain a comma.")
            )
            raise DataError(f"{title}, line {number}: must be image,caption, got {got}. {fix}")
        if begun:
            yield Entry(f"line {number}", row[0], [row[1]])
        begun = True
