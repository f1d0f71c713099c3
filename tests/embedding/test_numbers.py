"""Numbers of the heads of a space against slow loops, and layouts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import pearsonr, spearmanr

import visattn
from tests import tiny, zoo
from visattn import embedding
from visattn.embedding.correlations import row_correlation
from visattn.embedding.numbers_of_heads import _spread
from visattn.errors import OptionError, OutputError
from visattn.evaluation import find_heads

PHOTOS = [Image.fromarray(np.random.default_rng(seed).integers(0, 256, (32, 48, 3), dtype=np.uint8)) for seed in range(3)]


@pytest.fixture(scope="module")
def space() -> embedding.Space:
    return embedding.gather(tiny.vit(reg_tokens=2), PHOTOS, points=9, groups=[0, 0, 1])


def rows_of(states: embedding.LayerStates, head: int, image: int, both: Any) -> list[tuple[list[float], list[float]]]:
    """Return products and distances of each query of an image, by loops over its patches."""
    count = states.tokens.per_image
    prefix = len(states.tokens.names)
    plain = [i for i in range(image * count + prefix, (image + 1) * count) if not bool(states.tokens.sink[i])]
    found = []
    for i in plain:
        q = both.queries[i].tolist()
        pairs = [(both.keys[j].tolist()) for j in plain]
        products = [sum(a * b for a, b in zip(q, k, strict=True)) for k in pairs]
        apart = [math.sqrt(sum((a - b) ** 2 for a, b in zip(q, k, strict=True))) for k in pairs]
        found.append((products, apart))
    return found


def test_correlations_within_images_equal_loops_and_intervals_are_over_photos(space: embedding.Space) -> None:
    rows = {(row["layer"], row["head"]): row for row in embedding.head_numbers(space)}
    assert len(rows) == sum(len(states.queries) for states in space.layers)
    for states in space.layers[:2]:
        both = space.joint(states.layer, 1)
        pearson, spearman = [], []
        for image in range(3):
            each = rows_of(states, 1, image, both)
            pearson.append(np.mean([pearsonr(*pair).statistic for pair in each]))
            spearman.append(np.mean([spearmanr(*pair).statistic for pair in each]))
        row = rows[states.layer, 1]
        for name, each in (("row_pearson", pearson), ("row_spearman", spearman)):  # two images are of one photo
            assert row[name] == pytest.approx(np.mean([np.mean(each[:2]), each[2]]), abs=1e-9)
        ends = sorted([np.mean(pearson[:2]), pearson[2]])
        assert (row["low"], row["high"]) == pytest.approx(ends)  # the means of samples of two photos
        norms = [states.head(1)[side].double()[states.tokens.plain].norm(dim=1).median() for side in (0, 1)]
        assert row["norm_ratio"] == pytest.approx(float(norms[1] / norms[0]))


def test_attention_of_drawn_queries_is_kept_and_counted(space: embedding.Space) -> None:
    rows = embedding.head_numbers(space)
    number = 0
    for states in space.layers:
        per, prefix = states.tokens.per_image, len(states.tokens.names)
        assert prefix == 3
        for head in range(len(states.queries)):
            queries, keys = (each.double() for each in states.head(head))
            lost, ranks = [], []
            for place, at in enumerate(states.some.tolist()):
                image = at // per
                own = slice(image * per, (image + 1) * per)
                weights = (queries[at] @ keys[own].T / math.sqrt(queries.shape[1])).softmax(0)
                assert torch.allclose(states.rows[head, place].double(), weights, atol=2e-3)
                if at % per < prefix or bool(states.tokens.sink[at]):
                    continue
                plain = states.tokens.plain[own]
                lost.append(float(weights[~plain].sum()))
                both = space.joint(states.layer, head)
                apart = (both.queries[at] - both.keys[own][plain]).norm(dim=1)
                ranks.append(spearmanr(states.rows[head, place].double()[plain].numpy(), apart.numpy()).statistic)
            assert rows[number]["null_attention"] == pytest.approx(np.mean(lost), abs=2e-3)
            assert rows[number]["attention_spearman"] == pytest.approx(np.mean(ranks), abs=1e-9)
            number += 1


def test_drawn_tokens_are_the_same_in_all_layers_and_hold_the_named_ones(space: embedding.Space) -> None:
    first = space.layers[0].some
    assert all(torch.equal(first, states.some) for states in space.layers)
    of = space.layers[0].tokens
    assert len(first) == 3 * (3 + 3)  # three patches of each image, and its three named tokens
    assert (of.row[first] < 0).sum() == 9


def test_scores_of_a_space_are_those_of_each_image(space: embedding.Space) -> None:
    found = {one.name: one for one in space.scores}
    assert set(found) == {"hue", "brightness", "row", "column", "neighbor"}
    other = find_heads(tiny.vit(reg_tokens=2), PHOTOS, "brightness", groups=[0, 0, 1], resize="model")
    assert torch.allclose(found["brightness"].values, other.values, atol=1e-6)
    assert found["brightness"].rows()[0]["layer"] == other.rows()[0]["layer"]


def test_a_head_without_norms_has_no_numbers_and_the_others_have(tmp_path: Path) -> None:
    model: Any = tiny.vit()
    heads, width = tiny.HEADS, 32 // tiny.HEADS
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight.view(3, heads, width, -1)[0, 1] = 0
        model.blocks[1].attn.qkv.bias.view(3, heads, width)[0, 1] = 0
    space = embedding.gather(model, PHOTOS, points=6)
    rows = {(row["layer"], row["head"]): row for row in embedding.head_numbers(space)}
    dead = rows["blocks.1.attn", 1]
    assert dead["factor"] == 1
    assert math.isnan(dead["row_pearson"])
    assert dead["low"] is None
    assert all(math.isfinite(row["row_pearson"]) for key, row in rows.items() if key != ("blocks.1.attn", 1))
    for criterion in ("norms", "weighted", "shared"):
        embedding.save_html(space, tmp_path / "space.html", criterion=criterion)


def test_layers_of_one_patch_are_left_out_and_named() -> None:
    photos = [photo.resize((16, 16)) for photo in PHOTOS]
    space = embedding.gather(zoo.FAMILIES["swin"].build((16, 16)), photos, img_size=16, points=6)
    assert min(states.tokens.grid[0] * states.tokens.grid[1] for states in space.layers) > 1
    (note,) = (note for note in space.provenance.notes if "left out" in note)
    assert "layers.2.blocks.0.attn" in note
    assert all(math.isfinite(row["row_pearson"]) for row in embedding.head_numbers(space))


def test_a_transform_takes_the_place_of_the_resize() -> None:
    def transform(photo: Image.Image) -> torch.Tensor:
        return torch.from_numpy(np.asarray(photo.resize((48, 32)), np.float32).copy()).permute(2, 0, 1) / 255

    space = embedding.gather(tiny.vit(), PHOTOS, points=6, transform=transform)
    assert len(space.images) == 3


def test_correlated_images_are_spread_over_the_photos() -> None:
    assert _spread(range(100), 5) == [0, 25, 50, 74, 99]
    assert _spread([0, 0, 0, 1, 1, 1, 2, 2, 2], 3) == [0, 3, 6]
    assert _spread([0, 0, 0, 1, 1, 1, 2, 2, 2], 5) == [0, 1, 3, 6, 7]
    assert _spread([0, 0], 9) == [0, 1]


def test_rows_that_do_not_vary_have_no_correlation() -> None:
    flat = 0.1 + 1e-16 * torch.randn(2, 50, dtype=torch.float64)
    assert row_correlation(flat, torch.randn(2, 50, dtype=torch.float64)).isnan().all()


@pytest.mark.parametrize("method", ["tsne", pytest.param("umap", marks=pytest.mark.full)])  # UMAP compiles itself for 20 s
def test_layouts_keep_neighbors_and_leave_named_tokens_out(method: Any, space: embedding.Space) -> None:
    found = embedding.lay_out(space, method, heads=[1], seed=3)
    again = embedding.lay_out(space, method, heads=[1], seed=3)
    for one, other, states in zip(found, again, space.layers, strict=True):
        assert one.heads == (1,)
        assert one.queries.shape == (1, len(states.some), 2)
        assert torch.equal(one.queries.nan_to_num(0), other.queries.nan_to_num(0))
        assert torch.equal(one.queries[0, :, 0].isfinite(), states.tokens.plain[states.some])
        assert one.shares.isnan().all()


def test_images_are_laid_out_by_their_class_tokens(space: embedding.Space) -> None:
    model: Any = tiny.vit(reg_tokens=2)
    for photo, code in zip(PHOTOS, space.codes, strict=True):
        kept: list[torch.Tensor] = []
        handle = model.blocks[-1].register_forward_hook(lambda _m, _a, output, kept=kept: kept.append(output))
        with torch.no_grad():
            model(visattn.prepare(photo, model, resize="model").pixels)
        handle.remove()
        assert torch.allclose(model.norm(kept[0])[0, 0], code, atol=1e-5)
    points = embedding.lay_out_images(space)
    assert torch.allclose(torch.pdist(points), torch.pdist(space.codes), atol=1e-4)  # three images lie in a plane


def test_equal_images_are_laid_out_at_one_point() -> None:
    space = embedding.gather(tiny.vit(), [PHOTOS[0]] * 6, points=6)
    assert not embedding.lay_out_images(space, "tsne").any()


def test_principal_components_of_the_drawn_tokens_are_those_of_all(space: embedding.Space) -> None:
    every = space.project(3)
    for one, whole, states in zip(embedding.lay_out(space, dimensions=3, heads=[0]), every, space.layers, strict=True):
        assert torch.equal(one.queries[0], whole.queries[0, states.some])
        assert torch.equal(one.keys[0], whole.keys[0, states.some])


def test_points_are_written_with_their_tokens(space: embedding.Space, tmp_path: Path) -> None:
    points, numbers = embedding.lay_out(space), embedding.head_numbers(space)
    file = embedding.save_npz(space, tmp_path / "points.npz")
    with np.load(file) as held:
        facts = json.loads(str(held["facts"]))
        assert np.array_equal(held["1/queries"], points[1].queries.numpy())
        assert np.array_equal(held["1/row"], space.layers[1].tokens.row[space.layers[1].some].numpy())
        assert held["0/color"].shape == (18, 3)
        assert {name for name in held.files if "/" not in name} == {"facts"}
    assert facts["scores"]["row"][0]["layer"] == next(one for one in space.scores if one.name == "row").rows()[0]["layer"]
    assert facts["provenance"]["parameters"]["criterion"] == "norms"
    assert [layer["name"] for layer in facts["layers"]] == [states.layer for states in space.layers]
    assert facts["numbers"] == [pytest.approx(row) for row in numbers]
    with pytest.raises(OutputError, match="exists already"):
        embedding.save_npz(space, file, overwrite=False)


def test_windows_are_gathered_too() -> None:
    photos = [photo.resize((96, 64)) for photo in PHOTOS[:2]]
    space = embedding.gather(zoo.FAMILIES["swin"].build((64, 96)), photos, img_size=(64, 96), points=8)
    rows = embedding.head_numbers(space)
    assert all(math.isfinite(row["attention_spearman"]) for row in rows)
    assert len({len(states.tokens.image) for states in space.layers}) > 1


def test_crops_are_parts_of_the_photo() -> None:
    photo = PHOTOS[0].resize((200, 100))
    parts = embedding.crops_of(photo, 5, seed=1)
    array = np.asarray(photo)
    for part in parts:
        small = np.asarray(part)
        assert 0.2 <= part.width * part.height / 20_000 <= 0.85
        places = [
            (top, left)
            for top in range(101 - part.height)
            for left in range(201 - part.width)
            if np.array_equal(array[top, left : left + 3], small[0, :3])
        ]
        assert any(np.array_equal(array[t : t + part.height, left : left + part.width], small) for t, left in places)
    assert len({part.tobytes() for part in parts}) == 5
    assert embedding.crops_of(photo, 5, seed=1)[3].tobytes() == parts[3].tobytes()
    assert embedding.crops_of(photo, 0) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"points": 0}, "points must be 1 or more"),
        ({"labels": ["a"]}, "labels must have an entry for each of the 3 images, got 1"),
        ({"masks": []}, "masks must have an entry"),
    ],
)
def test_bad_arguments_of_gathering_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        embedding.gather(tiny.vit(), PHOTOS, **options)


def test_iterables_and_arrays_are_lists_of_images() -> None:
    lists = embedding.gather(tiny.vit(), PHOTOS, points=6, labels=["a", "b", "a"], groups=[0, 0, 1])
    arrays = np.stack([np.asarray(photo) for photo in PHOTOS])
    for images in ((photo for photo in PHOTOS), arrays):
        given = {"labels": np.array(["a", "b", "a"]), "groups": np.array([0, 0, 1])}
        found = embedding.gather(tiny.vit(), images, points=6, **given)  # type: ignore[arg-type]
        assert torch.equal(found.layers[0].queries, lists.layers[0].queries)
        assert (found.labels, found.groups) == (lists.labels, lists.groups)


def test_bad_layouts_are_refused(space: embedding.Space) -> None:
    for options, message in (
        ({"method": "mds"}, "pca"),
        ({"dimensions": 4}, "dimensions must be 2 or 3"),
        ({"dimensions": 2.0}, "dimensions must be a whole number, got 2.0"),
        ({"heads": 1}, "heads must be a list or None"),
        ({"heads": [7]}, "has heads 0 to"),
    ):
        with pytest.raises(OptionError, match=message):
            embedding.lay_out(space, **options)
    with pytest.raises(OptionError, match="save_html has no option perplexity"):
        embedding.save_html(space, "space.html", perplexity=3)  # type: ignore[call-arg]
    with pytest.raises(OptionError, match="images must be 1 or more"):
        embedding.head_numbers(space, images=0)
    with pytest.raises(OptionError, match="0 or more"):
        embedding.crops_of(PHOTOS[0], -1)
