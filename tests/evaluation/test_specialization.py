"""Specialization of heads: slow loops from the definitions, and heads that were made to attend by one property."""

from __future__ import annotations

import colorsys
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from tests import tiny
from visattn.core.geometry import Box, Geometry
from visattn.core.operators import MatrixOperator
from visattn.core.provenance import Provenance
from visattn.core.records import AttentionRecord, TokenLayout
from visattn.errors import OptionError, ShapeError
from visattn.evaluation import find_heads
from visattn.evaluation.patches import Patches, patches_of
from visattn.evaluation.specialization import PROPERTIES, HeadScores, score_heads

ROWS, COLUMNS = 5, 6
CELLS = [(row, column) for row in range(ROWS) for column in range(COLUMNS)]
Array = NDArray[np.float64]


def record_of(weights: Array, prefix: int = 1) -> AttentionRecord:
    """Return a call with one head whose attention among patches is given; all also attend to the prefix."""
    count = len(weights)
    whole = np.full((prefix + count, prefix + count), 1 / (prefix + count))
    whole[prefix:, :prefix] = 0.3 / max(prefix, 1)
    whole[prefix:, prefix:] = weights / weights.sum(1, keepdims=True) * (0.7 if prefix else 1)
    place = tiny.layout(tuple(f"register{i}" for i in range(prefix)), (ROWS, COLUMNS))
    return tiny.record(MatrixOperator(torch.from_numpy(whole)[None, None]), place)


def colored(seed: int) -> Patches:
    random = np.random.default_rng(seed)
    return Patches(random.random((ROWS, COLUMNS, 3)), random.random((ROWS, COLUMNS)))


def r2(one: list[complex], other: list[complex]) -> float:
    """Return the squared correlation, by loops."""
    mean, second = sum(one) / len(one), sum(other) / len(other)
    both = sum((a - mean) * (b - second).conjugate() for a, b in zip(one, other, strict=True))
    spread = sum(abs(a - mean) ** 2 for a in one) * sum(abs(b - second) ** 2 for b in other)
    return abs(both) ** 2 / spread


def hue_of(color: Array) -> complex:
    hue, _, _ = colorsys.rgb_to_hsv(*color)
    return complex((max(color) - min(color)) * np.exp(2j * math.pi * hue))


def luma(color: Array) -> complex:
    return complex(0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2])


def seen_by(weights: Array, values: list[complex]) -> list[complex]:
    return [
        sum(weights[i, j] * values[j] for j in range(len(values))) / sum(weights[i, j] for j in range(len(values)))
        for i in range(len(values))
    ]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["hue", "brightness", "object"])
def test_scores_of_content_and_their_nulls_equal_loops(name: str, seed: int) -> None:
    weights = np.random.default_rng(50 + seed).random((len(CELLS), len(CELLS))) ** 4
    patches = colored(seed)
    values = [
        complex(patches.object[cell]) if name == "object" else (hue_of if name == "hue" else luma)(patches.color[cell])  # type: ignore[index]
        for cell in CELLS
    ]
    score, null = score_heads(record_of(weights), patches, (name,), draws=25)[name]  # type: ignore[arg-type, index]
    assert float(score[0]) == pytest.approx(r2(seen_by(weights, values), values), abs=1e-6)  # weights are float32
    possible = []
    for down in range(ROWS):
        for across in range(COLUMNS):
            moved = [values[CELLS.index(((row - down) % ROWS, (column - across) % COLUMNS))] for row, column in CELLS]
            possible.append(r2(seen_by(weights, moved), moved))
    for value in null[:, 0].tolist():
        assert min(abs(value - one) for one in possible[1:]) < 1e-6
    assert len({round(value, 12) for value in null[:, 0].tolist()}) > 5


def test_scores_of_lines_and_neighbors_equal_loops() -> None:
    weights = np.random.default_rng(3).random((len(CELLS), len(CELLS))) ** 4
    found = score_heads(record_of(weights), colored(0), draws=4000)
    rows, columns = ([complex(cell[axis]) for cell in CELLS] for axis in (0, 1))
    by_row, by_column = (r2(seen_by(weights, line), line) for line in (rows, columns))
    assert float(found["row"][0][0]) == pytest.approx(by_row - by_column, abs=1e-6)
    assert float(found["column"][0][0]) == pytest.approx(by_column - by_row, abs=1e-6)
    shares = weights / weights.sum(1, keepdims=True)
    near = [[max(abs(one[0] - other[0]), abs(one[1] - other[1])) == 1 for other in CELLS] for one in CELLS]
    own = sum(shares[i, j] for i in range(len(CELLS)) for j in range(len(CELLS)) if near[i][j]) / len(CELLS)
    assert float(found["neighbor"][0][0]) == pytest.approx(own, abs=1e-6)
    anyone = sum(shares[k, j] for k in range(len(CELLS)) for i in range(len(CELLS)) for j in range(len(CELLS)) if near[i][j])
    assert float(found["neighbor"][1].mean()) == pytest.approx(anyone / len(CELLS) ** 2, rel=0.01)  # any query, on average


def line_head(axis: int) -> Array:
    return np.array([[float(one[axis] == other[axis]) for other in CELLS] for one in CELLS])


def test_heads_that_attend_along_lines_or_nearby_are_told_apart() -> None:
    near = np.array([[math.exp(-2 * ((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2)) * (a != b) for b in CELLS] for a in CELLS])
    found = {
        name: score_heads(record_of(weights), colored(1))
        for name, weights in (("row", line_head(0)), ("column", line_head(1)), ("near", near))
    }
    assert float(found["row"]["row"][0]) == pytest.approx(1)
    assert float(found["row"]["column"][0]) == pytest.approx(-1)
    assert float(found["column"]["column"][0]) == pytest.approx(1)
    assert abs(float(found["near"]["row"][0])) < 0.1
    assert float(found["near"]["neighbor"][0]) > 2 * float(found["near"]["neighbor"][1].max())


def test_a_head_that_attends_by_hue_is_found_and_one_that_attends_nearby_is_not() -> None:
    y, x = np.mgrid[:ROWS, :COLUMNS]
    smooth = np.stack([0.5 + 0.5 * np.sin(2 * math.pi * (y / ROWS + k / 3 + x / COLUMNS)) for k in range(3)], -1)
    patches = Patches(smooth, None)
    hues = np.array([hue_of(smooth[cell]) for cell in CELLS])
    by_hue = np.exp(4 * np.real(hues[:, None] * hues[None].conj()) / np.abs(hues).max() ** 2)
    near = np.array(
        [
            [
                math.exp(
                    -2
                    * (
                        min((a[0] - b[0]) % ROWS, (b[0] - a[0]) % ROWS) ** 2
                        + min((a[1] - b[1]) % COLUMNS, (b[1] - a[1]) % COLUMNS) ** 2
                    )
                )
                for b in CELLS
            ]
            for a in CELLS
        ]
    )  # around the edges, as the content is
    for weights, least, most in ((by_hue, 0, 1 / 4), (near, 0.5, 1)):
        score, null = score_heads(record_of(weights), patches, ("hue",))["hue"]
        assert float(score) > 0.8
        rank = float((null[:, 0] >= score - 1e-9).double().mean())
        assert least <= rank <= most, (rank, least, most)


def test_gray_images_have_no_hue_and_do_not_count() -> None:
    found = score_heads(record_of(line_head(0)), Patches(np.full((ROWS, COLUMNS, 3), 0.3), None))
    assert found.keys() == set(PROPERTIES) - {"object"}
    assert math.isnan(float(found["hue"][0]))
    values = torch.tensor([[0.5, 0.1], [math.nan, math.nan], [0.7, 0.3]])
    nulls = torch.full((9, 3, 2), 0.2)
    made = HeadScores("hue", (("a", 0), ("a", 1)), values, nulls, (0, 1, 2), Provenance())
    first, second = made.rows()
    assert (first["head"], second["head"]) == (0, 1)
    assert first["score"] == pytest.approx(0.6)
    assert first["p"] == pytest.approx(0.1)
    assert second["p"] == pytest.approx(1.0)
    assert first["low"] == pytest.approx(0.3)
    assert first["high"] == pytest.approx(0.5)


def test_crops_of_a_photo_count_as_one() -> None:
    values = torch.tensor([[0.9], [0.9], [0.9], [0.1]])
    made = HeadScores("row", (("a", 0),), values, torch.zeros(3, 4, 1), (0, 0, 0, 1), Provenance())
    assert made.rows()[0]["score"] == pytest.approx(0.5)
    alone = HeadScores("row", (("a", 0),), values[:3], torch.zeros(3, 3, 1), (0, 0, 0), Provenance())
    assert alone.rows()[0]["low"] is None


@pytest.mark.parametrize(
    "window", [Box(0, 0, 40, 60), Box(4, 10, 36, 50), Box(-8, 0, 48, 60), Box(1.5, 2.25, 33.5, 52.25)], ids=str
)
def test_mean_colors_are_those_of_the_pixels_of_each_patch(window: Box) -> None:
    random = np.random.default_rng(1)
    array = random.integers(0, 256, (40, 60, 3), dtype=np.uint8)
    mask = random.random((40, 60)) > 0.5
    geometry = Geometry((40, 60), (32, 48), window, "test")
    layout = TokenLayout("patches", (), (4, 3), Box(0, 0, 32, 48))
    found = patches_of(Image.fromarray(array), geometry, layout, mask)
    fine = 20  # parts of a photo pixel
    for row in range(4):
        for column in range(3):
            edges = [window.top + row * window.height / 4, window.left + column * window.width / 3]
            sides = window.height / 4, window.width / 3
            ys, xs = (start + side * (np.arange(16 * fine) + 0.5) / (16 * fine) for start, side in zip(edges, sides, strict=True))
            inside = np.logical_and.outer((ys >= 0) & (ys < 40), (xs >= 0) & (xs < 60))
            rows, columns = (np.clip(np.floor(at).astype(int), 0, most) for at, most in ((ys, 39), (xs, 59)))
            color = (array[np.ix_(rows, columns)] * inside[..., None]).mean((0, 1)) / 255
            assert found.color[row, column] == pytest.approx(color, abs=1.5 / 255)
            assert found.object is not None
            assert found.object[row, column] == pytest.approx((mask[np.ix_(rows, columns)] & inside).mean(), abs=1.5 / 255)


def test_every_head_of_a_model_is_scored_with_the_mask_of_each_image() -> None:
    model: Any = tiny.vit(reg_tokens=2)
    size: tuple[int, int] = model.patch_embed.img_size
    random = np.random.default_rng(0)
    photos = [Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)) for _ in range(3)]
    masks = [255 * (random.random(size) > 0.5).astype(np.uint8) for _ in photos]
    found = find_heads(model, photos, "object", masks=masks, draws=9)
    assert found.values.shape == (3, len(found.heads))
    assert found.nulls.shape == (9, 3, len(found.heads))
    assert found.heads == tuple(
        (f"blocks.{block}.attn", head) for block in range(len(model.blocks)) for head in range(tiny.HEADS)
    )
    other = find_heads(model, photos[1:2], "object", masks=masks[1:2], draws=9)
    assert torch.equal(other.values[0], found.values[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "shape"}, "hue"),
        ({"name": "object"}, "need a mask"),
        ({"name": "object", "masks": []}, "masks must have an entry for each of the 1 images, got 0"),
        ({"name": "row", "groups": [1, 2]}, "groups must have an entry"),
        ({"name": "row", "draws": 0}, "draws must be 1 or more"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        find_heads(tiny.vit(), [Image.new("RGB", (48, 32))], **options)  # type: ignore[arg-type]


def test_a_mask_of_another_size_and_a_model_without_attention_are_refused() -> None:
    photo = Image.new("RGB", (48, 32))
    with pytest.raises(ShapeError, match="photo's size"):
        find_heads(tiny.vit(), [photo], "object", masks=[np.zeros((48, 32), bool)])
    with pytest.raises(OptionError, match="no images"):
        find_heads(tiny.vit(), [], "row")


def test_a_mask_that_covers_all_gives_no_score() -> None:
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8))
    found = find_heads(tiny.vit(), [photo], "object", masks=[np.ones((32, 48), bool)])
    assert found.values.isnan().all()
    assert all(math.isnan(row["p"]) for row in found.rows())
