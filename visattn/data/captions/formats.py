"""Caption formats: parse a file into one entry per image or caption. Only the format is checked here.

Your own data is JSONL, one line per image: `{"image": "photos/1.jpg", "captions": ["a dog", "a dog runs"], "split": "train"}`. JSON is read
in Karpathy's format (`images` with `sentences`) and COCO's (`images` and `annotations`). Text is read in Flickr's format (`NAME#0`, a tab,
a caption) and as a table with the header `image,caption`.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

from visattn._support.checks import printable, whole_number
from visattn._support.files import regular
from visattn._support.types import Split
from visattn.errors import DataError

_FORMS = "JSONL of image and captions, Karpathy's or COCO's JSON, lines of NAME#0, tab, caption, or a table with the header image,caption"
_KINDS: dict[str, tuple[type, ...]] = {"text": (str,), "a list": (list,), "a number or text": (int, str), "anything": (object,)}


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
    if first.strip().lower() == "image,caption":
        return _table(text, title)
    if "\t" in first:
        return _tokens(path, text, title)
    if not first:
        return iter(())
    raise DataError(f"{title}: must be {_FORMS}; got a file that begins with {shown(first)}. Convert it to one of these.")


def text_of(value: Any, what: str, where: str) -> str:  # noqa: ANN401 - of JSON
    """Return a value after checking that it is text."""
    if not isinstance(value, str):
        raise DataError(f"{where}: {what} must be text, got {shown(value)}. Correct it.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {what} must be text, got half a character, {value[error.start]!a}. Correct it.") from error
    return value


def shown(value: Any) -> str:  # noqa: ANN401 - of JSON
    """Format a value as JSON for a message; long text is cut."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _field(record: Any, name: str, kind: str, where: str) -> Any:  # noqa: ANN401 - of JSON
    """Return a field of a JSON object after checking its type."""
    if not isinstance(record, dict):
        raise DataError(f"{where}: must be an object with {name}, got {shown(record)}. Correct it.")
    if name not in record:
        raise DataError(f"{where}: must have {name}, got {_keys(record)}. Correct it.")
    if not isinstance(record[name], _KINDS[kind]):
        raise DataError(f"{where}: {name} must be {kind}, got {shown(record[name])}. Correct it.")
    return record[name]


def _keys(record: dict[str, Any]) -> str:
    names = ", ".join(list(record)[:8])
    return printable(f"the keys {names}") if names else "no keys"


def _content(path: Path, title: str) -> str:
    try:
        content = regular(path).read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # with a byte order mark, the decoder counts positions from the byte after it
        at = error.start + len(content) - len(error.object)
        line = content[:at].count(b"\n") + 1
        raise DataError(
            f"{title}, line {line}: must be UTF-8, got the byte 0x{content[at]:02x}. Save the file as UTF-8."
        ) from error


def unreadable(path: Path, error: OSError) -> DataError:
    """Build the error for a file or folder that cannot be read."""
    name = printable(str(error.filename or path))
    return DataError(f"{name}: cannot be read ({(error.strerror or str(error)).lower()}). Check its name and permissions.")


def _parsed(text: str, where: str, fix: str) -> Any:  # noqa: ANN401 - of JSON
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: must be valid JSON, got an error ({printable(str(error)).lower()}). {fix}") from error


def _lines(text: str, title: str) -> Iterator[Entry]:
    """Parse JSONL, also that written by `visattn.data.scenes.write`; only line feeds end a line."""
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{title}, line {number}"
        record = _parsed(line, where, "Write one object per line.")
        image, captions = (
            next((key for key in keys if isinstance(record, dict) and key in record), keys[0])
            for keys in (("image", "file"), ("captions", "caption"))
        )
        told = _field(record, captions, "anything", where)
        yield Entry(
            f"line {number}",
            _field(record, image, "anything", where),
            [told] if isinstance(told, str) else told,
            record.get("split"),
        )


def _json(text: str, title: str) -> Iterator[Entry]:
    if not text.strip():
        return iter(())
    content = _parsed(text, title, "Download it again; name it .jsonl if it has one object per line.")
    keys = set(content) if isinstance(content, dict) else set()
    if {"images", "annotations"} <= keys:
        return _coco(content, title)
    if "images" in keys:
        return _karpathy(content, title)
    got = _keys(content) if isinstance(content, dict) else shown(content)
    raise DataError(f"{title}: must be {_FORMS}; got {got}. Convert it to one of these.")


def _karpathy(content: dict[str, Any], title: str) -> Iterator[Entry]:
    for number, image in enumerate(_field(content, "images", "a list", title)):
        at = f"image {number}"
        where = f"{title}, {at}"
        name = _field(image, "filename", "text", where)
        if folder := _field({"filepath": "", **image}, "filepath", "text", where):
            name = f"{folder}/{name}"
        told = _field(image, "sentences", "a list", where)
        yield Entry(at, name, [_sentence(one, where) for one in told], image.get("split"))


def _sentence(record: Any, where: str) -> Any:  # noqa: ANN401 - of JSON
    """Return the raw text of a sentence; without it, join the tokens."""
    if isinstance(record, dict) and "raw" not in record and "tokens" in record:
        return " ".join(text_of(token, "a token", where) for token in _field(record, "tokens", "a list", where))
    return _field(record, "raw", "anything", where)


def _coco(content: dict[str, Any], title: str) -> Iterator[Entry]:
    names: dict[int | str, str] = {}
    for number, image in enumerate(_field(content, "images", "a list", title)):
        where = f"{title}, image {number}"
        key, name = _field(image, "id", "a number or text", where), _field(image, "file_name", "text", where)
        if names.setdefault(key, name) != name:
            raise DataError(f"{where}: ids must be unique, got {shown(key)} for another image too. Correct one of them.")
        yield Entry(f"image {number}", name, [])
    for number, note in enumerate(_field(content, "annotations", "a list", title)):
        where = f"{title}, annotation {number}"
        key, caption = _field(note, "image_id", "a number or text", where), _field(note, "caption", "anything", where)
        if key not in names:
            raise DataError(f"{where}: image_id must be the id of an image, got {shown(key)}. Correct it, or add the image.")
        yield Entry(f"annotation {number}", names[key], [caption])


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
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    begun = False
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise DataError(f"{title}, line {rows.line_num}: must be a table row, got an error ({error}). Correct it.") from error
        if row is None:
            return
        if not "".join(row).strip():
            continue
        if begun and len(row) != 2:
            raise DataError(
                f"{title}, line {rows.line_num}: must be image,caption, got {len(row)} columns. Quote captions that contain a comma."
            )
        if begun:
            yield Entry(f"line {rows.line_num}", row[0], [row[1]])
        begun = True
