"""Maps in the formats of other programs: what these programs read, what `load_map` restores, and what is refused."""

from __future__ import annotations

import csv
import io
import json
import struct
import warnings
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from PIL import Image

from tests.maps.making import WINDOWS, make_map
from visattn._support.opencv import cv2
from visattn._support.types import MapFormat
from visattn.core.geometry import Box, Geometry
from visattn.core.maps import AttentionMap, load_map, map_schema as schema, save_map
from visattn.core.pipeline.explanation import Explanation
from visattn.core.provenance import Provenance
from visattn.core.records import TokenLayout
from visattn.errors import MapError, OptionError, OutputError

Ending = MapFormat
PLACED: tuple[Ending, ...] = ("npz", "csv", "tif", "png")  # formats that store where the map lies
IMAGES: tuple[Ending, ...] = ("tif", "png")
PLACE = WINDOWS["crop"]
MADE_BY = Provenance(model="vit", method="rollout", image='Löwe, "#1".png\n,NaN', notes=("a note",), versions={"torch": "2"})
RANDOM = np.random.default_rng(5).normal(size=(3, 5)).astype(np.float32)
EXTREMES = np.array([[3.4e38, -3.4e38], [1e-45, 0]], np.float32)
VALUES = {
    "signed": RANDOM,
    "positive": np.abs(RANDOM) + 7,
    "constant": np.full((3, 5), -0.3, np.float32),
    "zero": np.zeros((3, 5), np.float32),
    "one cell": np.array([[2.5]], np.float32),
    "extremes": EXTREMES,
    "nearly nothing": np.array([[0, 1e-45, 3e-45]], np.float32),
    "a column": RANDOM.reshape(-1, 1),
}


def with_holes(values: NDArray[Any], holes: tuple[int, ...]) -> AttentionMap:
    rows, columns = values.shape
    layout = TokenLayout("tokens", ("cls",), (rows, columns), Box(0, 0, 32, 48), holes)
    return AttentionMap(torch.as_tensor(values), (), layout, {}, "rollout", MADE_BY)


def saved(values: NDArray[Any] | AttentionMap, ending: Ending, folder: Path) -> Path:
    one = values if isinstance(values, AttentionMap) else make_map(values, meaning="rollout", provenance=MADE_BY)
    path = folder / f"map.{ending}"
    path.write_bytes(save_map(one, PLACE, ending))
    return path


def placed(path: Path) -> tuple[AttentionMap, Geometry]:
    found = load_map(path)
    assert isinstance(found, tuple)
    return found


def half_a_step(values: NDArray[Any], steps: int = 65535) -> float:
    """Return the stated precision, with the rounding to float32."""
    wide = values.astype(np.float64)
    span = float(np.nanmax(wide) - np.nanmin(wide))
    return span / steps / 2 * (1 + 1e-9) + float(np.spacing(np.float32(np.nanmax(np.abs(wide)))))


def scaled(numbers: NDArray[Any], tags: dict[str, Any]) -> NDArray[np.float64]:
    return float(tags["offset"]) + float(tags["scale"]) * numbers.astype(np.float64)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("ending", PLACED)
def test_a_map_is_restored_with_its_place_and_provenance(ending: Ending, values: NDArray[Any], tmp_path: Path) -> None:
    back, place = placed(saved(values, ending, tmp_path))
    assert place == PLACE
    assert back.provenance == replace(MADE_BY, geometry=PLACE)
    assert (back.meaning, back.layout.grid, back.signed) == ("rollout", values.shape, bool((values < 0).any()))
    limit = half_a_step(values) if ending in IMAGES else 0
    assert float(np.abs(back.numpy().astype(np.float64) - values).max()) <= limit


def test_an_npy_file_holds_the_values_alone_with_any_axes(tmp_path: Path) -> None:
    heads = make_map(torch.rand(4, 2, 3), ("head",))
    path = saved(heads, "npy", tmp_path)
    np.testing.assert_array_equal(np.load(path), heads.numpy(), strict=True)
    found = load_map(saved(RANDOM, "npy", tmp_path))
    np.testing.assert_array_equal(found, RANDOM, strict=True)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_tables_are_read_by_numpy_pandas_and_csv(values: NDArray[Any], tmp_path: Path) -> None:
    path = saved(values, "csv", tmp_path)
    np.testing.assert_array_equal(np.loadtxt(path, delimiter=",", dtype=np.float32, ndmin=2), values, strict=True)
    lines = [line for line in path.read_text(encoding="ascii").splitlines() if not line.startswith("#")]
    np.testing.assert_array_equal(np.array([*csv.reader(lines)], np.float32), values, strict=True)
    pandas = pytest.importorskip("pandas")
    found = pandas.read_csv(path, comment="#", header=None).to_numpy().astype(np.float32)
    np.testing.assert_array_equal(found, values, strict=True)


def test_a_table_states_provenance_in_its_comments(tmp_path: Path) -> None:
    comments = [line for line in saved(RANDOM, "csv", tmp_path).read_text().splitlines() if line.startswith("#")]
    assert comments[0] == "# visattn a map of 3 x 5 cells, rollout: a line for each row of the grid, from top to bottom"
    stated = json.loads(comments[1].removeprefix("# visattn: "))
    assert (stated["image"], stated["geometry"]["photo"]) == (MADE_BY.image, [40, 64])


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_a_tiff_is_read_by_tifffile(values: NDArray[Any], tmp_path: Path) -> None:
    tifffile = pytest.importorskip("tifffile")
    with tifffile.TiffFile(saved(values, "tif", tmp_path)) as file:
        (page,) = file.pages
        numbers, stated = page.asarray(), json.loads(page.description)
        gdal, nodata = page.tags[42112].value, page.tags.get(42113)
    assert (numbers.dtype, numbers.shape, nodata) == (np.uint16, values.shape, None)
    assert np.abs(scaled(numbers, stated) - values).max() <= half_a_step(values)
    assert stated["visattn"]["image"] == MADE_BY.image
    for name in ("scale", "offset"):
        assert f'<Item name="{name.upper()}" sample="0" role="{name}">{stated[name]!r}</Item>' in gdal
    if np.ptp(values.astype(np.float64)):
        assert (numbers.min(), numbers.max()) == (0, 65535)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_a_png_is_read_by_pillow(values: NDArray[Any], tmp_path: Path) -> None:
    with Image.open(saved(values, "png", tmp_path)) as image:
        numbers, text = np.asarray(image), {str(name): value for name, value in image.info.items()}
    assert numbers.dtype == np.uint16
    assert numbers.shape == values.shape
    assert np.abs(scaled(numbers, text) - values).max() <= half_a_step(values)
    assert json.loads(text["visattn"])["image"] == MADE_BY.image
    assert "nodata" not in text


def test_a_png_of_a_map_is_read_by_opencv(tmp_path: Path) -> None:
    numbers = cv2.imread(str(saved(RANDOM, "png", tmp_path)), cv2.IMREAD_UNCHANGED)
    assert numbers is not None
    with Image.open(tmp_path / "map.png") as image:
        np.testing.assert_array_equal(numbers, np.asarray(image), strict=True)


@pytest.mark.parametrize("holes", [(1,), (0, 14), tuple(range(14)), tuple(range(15))], ids=len)
@pytest.mark.parametrize("ending", PLACED)
def test_holes_stay_holes(ending: Ending, holes: tuple[int, ...], tmp_path: Path) -> None:
    one = with_holes(RANDOM, holes)
    back, _ = placed(saved(one, ending, tmp_path))
    there = np.isnan(one.numpy())
    np.testing.assert_array_equal(np.isnan(back.numpy()), there)
    assert back.layout.holes == holes
    if len(holes) < RANDOM.size:
        limit = half_a_step(one.numpy(), 65534) if ending in IMAGES else 0
        assert np.abs(back.numpy() - one.numpy())[~there].max() <= limit


def test_strangers_are_told_of_holes(tmp_path: Path) -> None:
    one = with_holes(RANDOM, (3, 4))
    there = np.isnan(one.numpy())
    with Image.open(saved(one, "png", tmp_path)) as image:
        assert image.info["nodata"] == "0"
        np.testing.assert_array_equal(np.asarray(image) == 0, there)
    with Image.open(saved(one, "tif", tmp_path)) as image:
        assert image.tag_v2[42113] == "0"  # type: ignore[attr-defined] # of TIFF files
        np.testing.assert_array_equal(np.asarray(image) == 0, there)
    table = saved(one, "csv", tmp_path)
    np.testing.assert_array_equal(np.isnan(np.loadtxt(table, delimiter=",")), there)
    pandas = pytest.importorskip("pandas")
    np.testing.assert_array_equal(pandas.read_csv(table, comment="#", header=None).isna(), there)


@settings(max_examples=40, derandomize=True, deadline=None, database=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9))
def test_any_values_are_restored(tmp_path_factory: pytest.TempPathFactory, numbers: list[float]) -> None:
    values, folder = np.array([numbers], np.float32), tmp_path_factory.mktemp("maps")
    for ending in PLACED:
        back = placed(saved(values, ending, folder))[0].numpy()
        assert np.abs(back.astype(np.float64) - values).max() <= (half_a_step(values) if ending in IMAGES else 0)


@pytest.mark.parametrize("ending", ["csv", "tif", "png"])
@pytest.mark.parametrize("axes", [("head",), ("component",), ("layer", "head")], ids=" ".join)
def test_a_format_of_one_grid_refuses_a_map_of_several(axes: tuple[str, ...], ending: Ending, tmp_path: Path) -> None:
    one = make_map(torch.rand(*(2,) * len(axes), 2, 3), axes)
    found = Explanation(Image.new("RGB", (64, 40)), PLACE, one)
    with pytest.raises(
        OptionError, match=rf"^\.{ending} holds one grid, but the map has one for each {' and '.join(axes)}\. Save it as .npz"
    ):
        found.save_map(tmp_path / f"map.{ending}")
    assert not [*tmp_path.iterdir()]
    assert found.save_map(tmp_path / "map.npz").exists()


@pytest.mark.parametrize("name", ["map.pdf", "map", "map.", "map.npz.zip", ".png", "map.jpg"])
def test_other_endings_are_refused(name: str, tmp_path: Path) -> None:
    found = Explanation(Image.new("RGB", (64, 40)), PLACE, make_map(RANDOM))
    with pytest.raises(OptionError, match=r"maps are saved as .*csv.* Choose a name with one of these"):
        found.save_map(tmp_path / "new" / name)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(OptionError, match="unknown ending 'pdf'"):
        save_map(found.map, PLACE, "pdf")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("a.npz", b"PK\3\4"),
        ("a.NPY", b"\x93NUMPY"),
        ("a.csv", b"# visattn a map"),
        ("a.tif", b"II*\0"),
        ("a.TIFF", b"II*\0"),
        ("a.png", b"\x89PNG"),
    ],
)
def test_the_ending_decides_the_format(name: str, start: bytes, tmp_path: Path) -> None:
    found = Explanation(Image.new("RGB", (64, 40)), PLACE, make_map(RANDOM))
    path = found.save_map(tmp_path / "new" / name)
    assert path.read_bytes().startswith(start)
    assert np.asarray(load_map(path)[0] if isinstance(load_map(path), tuple) else load_map(path)).shape == RANDOM.shape
    with pytest.raises(OutputError, match="exists already"):
        found.save_map(path, overwrite=False)


@pytest.mark.parametrize("ending", get_args(MapFormat))
def test_equal_maps_give_equal_files(ending: Ending) -> None:
    assert save_map(make_map(RANDOM), PLACE, ending) == save_map(make_map(RANDOM.copy()), PLACE, ending)


def image_bytes(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


GRAY = np.array([[0, 200, 3], [4, 5, 6]], np.uint8)
FOREIGN: dict[str, tuple[str, bytes, NDArray[Any]]] = {
    "8 bits": ("a.png", image_bytes(Image.fromarray(GRAY), "PNG"), GRAY),
    "16 bits": ("a.png", image_bytes(Image.fromarray(GRAY.astype(np.uint16) * 300), "PNG"), GRAY.astype(np.uint16) * 300),
    "numbers with a point": ("a.tif", image_bytes(Image.fromarray(GRAY / np.float32(7)), "TIFF"), GRAY / np.float32(7)),
    "a table of Windows": ("a.csv", b"\xef\xbb\xbf0,200,3\r\n 4, 5,6\r\n\r\n", GRAY),
    "another comment": ("a.csv", b"# made: by hand\n0,200,3\n4,5,6", GRAY),
    "a table with a gap": ("a.csv", b"1,,3\n", np.array([[1, np.nan, 3]])),
}


@pytest.mark.parametrize(("name", "content", "values"), FOREIGN.values(), ids=FOREIGN)
def test_files_of_other_programs_are_arrays(name: str, content: bytes, values: NDArray[Any], tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    found = load_map(tmp_path / name)
    np.testing.assert_array_equal(found, values.astype(np.float32), strict=True)


def edited(ending: Ending, edit: Callable[[dict[str, Any]], Any]) -> bytes:
    """Return a saved map with other tags."""
    with Image.open(io.BytesIO(save_map(make_map(RANDOM, provenance=MADE_BY), PLACE, ending))) as image:
        image.load()
        if ending == "tif":
            directory = image.tag_v2  # type: ignore[attr-defined] # of TIFF files
            tags = json.loads(directory[270])
            edit(tags)
            directory[270] = json.dumps(tags)
            return image_bytes(image, "TIFF", tiffinfo=directory)
        from PIL.PngImagePlugin import PngInfo

        tags = {name: json.loads(text) for name, text in image.info.items()}
        edit(tags)
        chunks = PngInfo()
        for name, value in tags.items():
            chunks.add_text(name, json.dumps(value))
        return image_bytes(image, "PNG", pnginfo=chunks)


EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no scale": lambda tags: tags.pop("scale"),
    "text as scale": lambda tags: tags.update(scale="1"),
    "a scale without end": lambda tags: tags.update(scale=float("inf")),
    "no number": lambda tags: tags.update(offset=float("nan")),
    "a boolean": lambda tags: tags.update(offset=True),
    "digits without end": lambda tags: tags.update(offset=10**400),
    "values beyond float32": lambda tags: tags.update(scale=9e38),
    "another hole": lambda tags: tags.update(nodata=7),
    "a hole that the layout lacks": lambda tags: tags.update(nodata=0),
    "no provenance": lambda tags: tags.pop("visattn"),
    "no geometry": lambda tags: tags["visattn"].pop("geometry"),
    "facts as a list": lambda tags: tags.update(visattn_map=[]),
    "another grid": lambda tags: tags["visattn_map"]["layout"].update(grid=[5, 3]),
    "an endless grid": lambda tags: tags["visattn_map"]["layout"].update(grid=[10**9, 10**9]),
    "an axis": lambda tags: tags["visattn_map"].update(axes=["head"]),
    "an unknown fact": lambda tags: tags["visattn"].update(modle="vit"),
    "an empty box": lambda tags: tags["visattn_map"]["layout"].update(box=[0, 0, 0, 0]),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("ending", IMAGES)
def test_a_map_with_one_wrong_tag_is_refused(ending: Ending, edit: Callable[[dict[str, Any]], Any], tmp_path: Path) -> None:
    path = tmp_path / f"map.{ending}"
    path.write_bytes(edited(ending, lambda tags: None))
    assert isinstance(load_map(path), tuple)
    path.write_bytes(edited(ending, edit))
    with pytest.raises(MapError, match=rf"^.*map\.{ending}: ") as refused:
        load_map(path)
    assert len(str(refused.value).splitlines()) == 1


def a_bomb() -> bytes:
    """Return a PNG that claims 2 ** 34 pixels."""
    head = struct.pack(">IIBBBBB", 2**17, 2**17, 16, 0, 0, 0, 0)
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")]
    chunks = (struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


COLORS = Image.new("RGB", (3, 2), "red")
NOT_MAPS: dict[str, tuple[str, bytes, str]] = {
    "colors": ("a.png", image_bytes(COLORS, "PNG"), "a map is an image of one gray channel; this one has colors"),
    "a palette": ("a.png", image_bytes(COLORS.convert("P"), "PNG"), "this one has colors"),
    "pages": ("a.tif", image_bytes(COLORS.convert("L"), "TIFF", save_all=True, append_images=[COLORS.convert("L")]), "one page"),
    "a bomb": ("a.png", a_bomb(), "not a map"),
    "a cut image": ("a.png", save_map(make_map(RANDOM), PLACE, "png")[:-40], "not a map"),
    "a cut TIFF": ("a.tif", save_map(make_map(RANDOM), PLACE, "tif")[:100], "not a map"),
    "the start of an image": ("a.tif", b"II*\0", "not a map"),
    "an empty table": ("a.csv", b"", "it has no numbers"),
    "a table of comments": ("a.csv", b"# 1,2\n", "it has no numbers"),
    "a header": ("a.csv", b"a,b\n1,2\n", "its line 1 has something else than numbers and commas"),
    "other separators": ("a.csv", b"1;2\n", "its line 1 has something else"),
    "a formula": ("a.csv", b"=1+1,2\n", "its line 1 has something else"),
    "underscores": ("a.csv", b"1_000,2\n", "its line 1 has something else"),
    "a ragged table": ("a.csv", b"1,2\n3\n", "its line 2 has 1 columns, and the first 2"),
    "bytes": ("a.csv", b"\xff\xfe\0", "not a map"),
    "a long line": ("a.csv", b"1," * 2**23 + b"1", "its line 1 has more than 16,777,216 characters"),
    "facts that are none": ("a.csv", b"# visattn_map: {\n1,2\n", "not a map"),
    "nested facts": ("a.csv", b"# visattn_map: " + b"[" * 10**6 + b"\n1,2\n", "not a map"),
    "facts alone": ("a.csv", b"# visattn_map: {}\n1,2\n", "not a map"),
}


@pytest.mark.parametrize(("name", "content", "message"), NOT_MAPS.values(), ids=NOT_MAPS)
def test_what_is_no_map_is_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's of the bomb
        with pytest.raises(MapError, match=rf"{name}: .*{message}") as refused:
            load_map(tmp_path / name)
    assert len(str(refused.value).splitlines()) == 1


def test_too_many_values_are_refused_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "MOST_VALUES", 14)
    for ending in ("csv", "tif", "png"):
        with pytest.raises(MapError, match=r"values are more than 14"):
            load_map(saved(RANDOM, ending, tmp_path))


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(
    st.sampled_from(("csv", "tif", "png")),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4),
)
def test_a_damaged_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, ending: Ending, edits: list[tuple[float, int]]
) -> None:
    data = bytearray(save_map(make_map(RANDOM, provenance=MADE_BY), PLACE, ending))
    for place, value in edits:
        data[int(place * len(data))] = value
    path = tmp_path_factory.getbasetemp() / f"damaged.{ending}"
    path.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's of broken tags
        try:
            load_map(path)
        except MapError as error:
            refusal = str(error)
        else:
            refusal = ""
    assert not refusal or (f"damaged.{ending}: " in refusal and refusal.isprintable())
