"""Maps as files of other programs: `.npy`, `.csv`, and 16-bit `.tif` and `.png`.

An image holds whole numbers from 0 to 65535. Its tags state `scale` and `offset`: a value is `offset + scale * number`. With N steps
between the lowest and the highest value, it differs from the map's by at most `(highest - lowest) / N / 2`, beside the rounding of
float32. N is 65535. A map with holes has one step less, as the number 0 stands for a hole; the tag `nodata` says so.
"""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeGuard, get_args

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from visattn._support.checks import printable
from visattn._support.json_files import Anything, converted, decoded
from visattn._support.language import option
from visattn._support.types import MapFormat
from visattn.core.maps import map_schema as schema
from visattn.errors import OptionError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Tags = dict[str, Any]
    Grid = NDArray[np.float32]

__all__ = ["map_format"]

ENDINGS = get_args(MapFormat)
_ONE_GRID = ("csv", "tif", "png")
_STEPS = 2**16 - 1
_HOLE = 0  # number of a hole, in images that have one
_MOST_TEXT = 2**24  # characters of the facts, or of a line of a table
_LARGEST = 1e39  # beyond every value of float32
_MADE_BY, _MAP = "visattn", "visattn_map"  # names of tags: provenance, as in pictures, and all other facts
_SCALING = ("scale", "offset", "nodata")
_DESCRIPTION, _GDAL_METADATA, _GDAL_NODATA, _ASCII = 270, 42112, 42113, 2  # tags of TIFF, and their type
_GRAY = ("1", "L", "I;16", "I;16B", "I", "F")  # Pillow's modes of one channel
_BEGINNINGS = {b"\x89PNG\r\n\x1a\n": "PNG", b"II*\0": "TIFF", b"MM\0*": "TIFF"}


def map_format(path: Path) -> MapFormat:
    """Return the format that the ending of a file name stands for.

    Raises:
        OptionError: If maps are not saved under this ending.
    """
    ending = path.suffix.lower().removeprefix(".")
    known: dict[str, MapFormat] = {name: name for name in ENDINGS} | {"tiff": "tif"}
    if ending in known:
        return known[ending]
    endings = ", ".join(f".{name}" for name in ENDINGS)
    raise OptionError(f"{printable(path.name)}: maps are saved as {endings}. Choose a name with one of these endings.")


def check_axes(axes: tuple[str, ...], ending: MapFormat) -> None:
    """Check that a format can hold a map with these axes.

    Raises:
        OptionError: If it holds one grid, but the map has several.
    """
    if axes and ending in _ONE_GRID:
        choice = (
            f" Or save one head, {option('head', 'N')}, or their mean, {option('fusion', 'mean')}." if axes == ("head",) else ""
        )
        raise OptionError(
            f".{ending} holds one grid, but the map has one for each {' and '.join(axes)}. Save it as .npz.{choice}"
        )


def encode_grid(values: Grid, facts: Tags, ending: MapFormat) -> bytes:
    """Serialize values `(rows, columns)`, or of any shape as `.npy`, with the facts that the format can hold."""
    if ending == "npy":
        stream = io.BytesIO()
        np.save(stream, values)
        return stream.getvalue()
    facts = dict(facts)
    tags = {_MADE_BY: facts.pop("provenance"), _MAP: facts}
    if ending == "csv":
        return _table(values, tags)
    numbers, scaling = _numbers(values)
    return (_tiff if ending == "tif" else _png)(numbers, scaling, tags)


def image_kind(stream: IO[bytes]) -> str | None:
    """Return `PNG` or `TIFF` if a file begins like one; it is then read from its beginning again."""
    first = stream.read(8)
    stream.seek(0)
    return next((kind for start, kind in _BEGINNINGS.items() if first.startswith(start)), None)


def read_image(stream: IO[bytes], kind: str) -> tuple[schema.Facts, Grid] | Grid:
    """Read the facts and values of an image that `encode_grid` made, or the numbers of another gray one.

    Raises:
        ValueError: If it has colors, several pages, or too many pixels, or its facts have wrong types. Errors of Pillow and json are
            not caught.
    """
    with Image.open(stream, formats=[kind]) as image:
        if image.width * image.height > schema.MOST_VALUES:
            raise ValueError(f"its {image.width} x {image.height} values are more than {schema.MOST_VALUES:,}")
        if image.mode not in _GRAY:
            raise ValueError("a map is an image of one gray channel; this one has colors")
        if kind == "TIFF" and _has_more_pages(image):
            raise ValueError("a map has one page, and this file several")
        numbers = np.asarray(image)
        tags = _tags_of_tiff(image) if kind == "TIFF" else _tags_of_png(image)
    if tags is None:
        return numbers.astype(np.float32)
    facts = _facts(tags)
    scale, offset, hole = (tags.get(name, None) for name in _SCALING)
    if numbers.dtype != np.uint16 or not _is_number(scale) or not _is_number(offset) or hole not in (None, _HOLE):
        raise ValueError("its numbers or their scaling are not those of a map")
    values = offset + scale * numbers.astype(np.float64)
    if hole is not None:
        values[numbers == hole] = math.nan
    return facts, values.astype(np.float32)


def read_table(stream: IO[bytes]) -> tuple[schema.Facts, Grid] | Grid:
    """Read the facts and values of a table that `encode_grid` made, or the numbers of another one with commas or spaces and no header.

    Raises:
        ValueError: If a line has something else, or other columns than the first, or the table has too many values or none.
    """
    rows: list[Grid] = []
    tags: dict[str, Any] = {}
    for number, line in enumerate(iter(lambda: stream.readline(_MOST_TEXT + 1), b""), start=1):
        if len(line) > _MOST_TEXT:
            raise ValueError(f"its line {number} has more than {_MOST_TEXT:,} characters")
        text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        if text.startswith("#"):
            name, colon, content = text.removeprefix("#").strip().partition(": ")
            if colon and name in (_MADE_BY, _MAP):
                tags[name] = decoded(content, Anything, name, lax=True)
        elif text:
            rows.append(_row(text, number))
            if len(rows[-1]) != len(rows[0]):
                raise ValueError(f"its line {number} has {len(rows[-1])} columns, and the first {len(rows[0])}")
            if len(rows) * len(rows[0]) > schema.MOST_VALUES:
                raise ValueError(f"its values are more than {schema.MOST_VALUES:,}")
    if not rows:
        raise ValueError("it has no numbers")
    values = np.stack(rows)
    return (_facts(tags), values) if _MAP in tags else values


def _numbers(values: Grid) -> tuple[NDArray[np.uint16], dict[str, Any]]:
    """Return values as numbers from 0 to 65535, with what restores them."""
    wide, holes = values.astype(np.float64), np.isnan(values)
    first = int(holes.any())
    low, high = (float(np.nanmin(wide)), float(np.nanmax(wide))) if not holes.all() else (0.0, 0.0)
    scale = (high - low) / (_STEPS - first)
    levels = np.zeros(values.shape) if scale == 0 else (wide - low) / scale
    numbers = np.where(holes, _HOLE, np.nan_to_num(levels).round() + first)
    return numbers.astype(np.uint16), {"scale": scale, "offset": low - first * scale, "nodata": _HOLE if first else None}


def _is_number(value: Any) -> TypeGuard[float]:  # noqa: ANN401 - of a file
    return type(value) in (int, float) and abs(value) < _LARGEST


def _table(values: Grid, tags: Tags) -> bytes:
    rows, columns = values.shape
    about = f"a map of {rows} x {columns} cells, {tags[_MAP]['meaning']}: a line for each row of the grid, from top to bottom"
    head = [f"visattn {about}", *(f"{name}: {json.dumps(tags[name])}" for name in (_MADE_BY, _MAP))]
    lines = [",".join("NaN" if math.isnan(value) else f"{value:.9g}" for value in row) for row in values.tolist()]
    return "".join(f"{line}\n" for line in [*(f"# {printable(line)}" for line in head), *lines]).encode()


def _row(text: str, number: int) -> Grid:
    try:
        if "_" in text:  # `float` would take 1_000
            raise ValueError
        cells = map(str.strip, text.split(",")) if "," in text else text.split()
        return np.array([float(cell or "nan") for cell in cells], np.float32)
    except ValueError as error:
        raise ValueError(f"its line {number} has something else than numbers and commas or spaces") from error


def _png(numbers: NDArray[np.uint16], scaling: Tags, tags: Tags) -> bytes:
    info = PngInfo()
    for name, value in (scaling | tags).items():
        if value is not None:
            info.add_text(name, json.dumps(value))
    stream = io.BytesIO()
    Image.fromarray(numbers).save(stream, "PNG", pnginfo=info)
    return stream.getvalue()


def _tiff(numbers: NDArray[np.uint16], scaling: Tags, tags: Tags) -> bytes:
    """Serialize an image with JSON as its description, and the scaling also as GDAL and so rasterio and QGIS read it."""
    items = "".join(
        f'<Item name="{name.upper()}" sample="0" role="{name}">{scaling[name]!r}</Item>' for name in ("offset", "scale")
    )
    texts = {_DESCRIPTION: json.dumps(scaling | tags), _GDAL_METADATA: f"<GDALMetadata>{items}</GDALMetadata>"}
    if scaling["nodata"] is not None:
        texts[_GDAL_NODATA] = str(scaling["nodata"])
    directory = ImageFileDirectory_v2()
    for tag, text in texts.items():
        directory.tagtype[tag] = _ASCII
        directory[tag] = text
    stream = io.BytesIO()
    Image.fromarray(numbers).save(stream, "TIFF", tiffinfo=directory)
    return stream.getvalue()


def _has_more_pages(image: Image.Image) -> bool:
    try:
        image.seek(1)
    except EOFError:
        return False
    return True


def _tags_of_png(image: Image.Image) -> Tags | None:
    """Return the tags of a map; None for an image without them."""
    texts: dict[str, Any] = getattr(image, "text", {})
    if _MAP not in texts:
        return None
    return {
        name: decoded(texts[name], Anything, name, most=_MOST_TEXT, lax=True)
        for name in (*_SCALING, _MADE_BY, _MAP)
        if name in texts
    }


def _tags_of_tiff(image: Image.Image) -> Tags | None:
    text = getattr(image, "tag_v2", {}).get(_DESCRIPTION, "")
    if not isinstance(text, str) or f'"{_MAP}"' not in text:
        return None
    return dict(decoded(text, dict[str, Any], "its description", most=_MOST_TEXT, lax=True))


def _facts(tags: Tags) -> schema.Facts:
    """Return the facts of a map, after checking them."""
    stated = converted(tags.get(_MAP), dict[str, Any], "its facts")
    facts = converted({**stated, "provenance": tags.get(_MADE_BY)}, schema.Facts, "its facts")
    schema.check_places(facts)
    return facts
