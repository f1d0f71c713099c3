"""Runs of `gather` that go on give what a whole one gives, and what was kept of something else is computed anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import visattn
from tests import tiny
from visattn import embedding
from visattn.embedding import one_image
from visattn.embedding.keeping import Kept
from visattn.errors import OutputError

PHOTOS = [Image.fromarray(np.random.default_rng(seed).integers(0, 256, (32, 48, 3), dtype=np.uint8)) for seed in range(3)]


def test_interrupted_runs_go_on_and_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.vit()
    whole = embedding.gather(model, PHOTOS, points=6)
    calls = []
    original = one_image.image_states

    def stopping(*args: Any, **options: Any) -> Any:
        calls.append(0)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*args, **options)

    monkeypatch.setattr("visattn.embedding.gathering.image_states", stopping)
    with pytest.raises(KeyboardInterrupt):
        embedding.gather(model, PHOTOS, points=6, keep=tmp_path / "kept")
    again = embedding.gather(model, PHOTOS, points=6, keep=tmp_path / "kept")
    assert len(calls) == 3 + 2  # the first image tells about the model, the third was not kept
    for one, other in zip(whole.layers, again.layers, strict=True):
        assert torch.equal(one.queries, other.queries)
        assert torch.equal(one.rows, other.rows)
        assert torch.equal(one.tokens.color.nan_to_num(-1), other.tokens.color.nan_to_num(-1))
    assert whole.pictures == again.pictures
    for score, second in zip(whole.scores, again.scores, strict=True):
        assert torch.equal(score.values, second.values)
        assert torch.equal(score.nulls, second.nulls)
        assert score.heads == second.heads


def same(one: embedding.Space, other: embedding.Space) -> bool:
    """Compare all that a space holds."""
    layers = [
        torch.equal(getattr(a, name), getattr(b, name))
        for a, b in zip(one.layers, other.layers, strict=True)
        for name in ("queries", "keys", "some", "rows")
    ]
    objects = [states.tokens.object.nan_to_num(-1) for states in (*one.layers, *other.layers)]
    half = len(one.layers)
    layers += [torch.equal(a, b) for a, b in zip(objects[:half], objects[half:], strict=True)]
    scores = [torch.equal(a.values.nan_to_num(9), b.values.nan_to_num(9)) for a, b in zip(one.scores, other.scores, strict=True)]
    return all([*layers, *scores, one.images == other.images, one.pictures == other.pictures])


MASKS = [np.random.default_rng(seed).random(PHOTOS[0].size[::-1]) > 0.5 for seed in range(3)]


@pytest.mark.parametrize(
    "changed",
    [
        {"images": [PHOTOS[0], PHOTOS[2], PHOTOS[1]]},
        {"model": tiny.vit(seed=1)},
        {"model": tiny.vit(num_heads=1)},  # the same weights
        {"points": 9},
        {"layers": "blocks.1.*"},
        {"seed": 5},
        {"masks": None},
        {"masks": [MASKS[1], MASKS[0], MASKS[2]]},
        {"resize": "fit"},
        {"mean": 0.1},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_was_kept_of_something_else_is_computed_anew(changed: dict[str, Any], tmp_path: Path) -> None:
    given: dict[str, Any] = {"model": tiny.vit(), "images": PHOTOS, "points": 6, "masks": MASKS}
    embedding.gather(**given, keep=tmp_path)
    other = given | changed
    assert same(embedding.gather(**other, keep=tmp_path), embedding.gather(**other))
    assert same(embedding.gather(**given, keep=tmp_path), embedding.gather(**given))


def test_another_rule_without_weights_is_computed_anew(tmp_path: Path) -> None:
    model: Any = tiny.vit()
    embedding.gather(model, PHOTOS, points=6, keep=tmp_path)
    model.blocks[-1].mlp.act = torch.nn.ReLU()
    again, alone = embedding.gather(model, PHOTOS, points=6, keep=tmp_path), embedding.gather(model, PHOTOS, points=6)
    assert same(again, alone)
    assert torch.equal(again.codes, alone.codes)


def test_photos_of_equal_bytes_and_another_shape_are_others(tmp_path: Path) -> None:
    flat = [Image.new("RGB", size, "gray") for size in ((40, 80), (80, 40))]
    keys = [Kept(tmp_path).key(visattn.prepare(photo, tiny.vit(), resize="fit"), None) for photo in flat]
    assert keys[0] != keys[1]


def test_a_kept_photo_takes_its_new_name(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "c.png"):
        PHOTOS[ord(name[0]) - ord("a")].save(tmp_path / name)
    files, kept = [tmp_path / name for name in ("a.png", "b.png", "c.png")], tmp_path / "kept"
    embedding.gather(tiny.vit(), files, points=6, keep=kept)
    renamed = files[2].rename(tmp_path / "new.png")
    found = embedding.gather(tiny.vit(), [*files[:2], renamed], points=6, keep=kept)
    assert found.images == ("a.png", "b.png", "new.png")
    PHOTOS[2].save(renamed, compress_level=1)  # the same pixels in another file
    again = embedding.gather(tiny.vit(), [*files[:2], renamed], points=6, keep=kept)
    assert again.digests == embedding.gather(tiny.vit(), [*files[:2], renamed], points=6).digests != found.digests


def test_damaged_files_among_the_kept_ones_are_computed_anew(tmp_path: Path) -> None:
    whole = embedding.gather(tiny.vit(), PHOTOS, points=6, keep=tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    for damage in (b"", b"nothing", files[1].read_bytes()[:-9], files[0].read_bytes()):
        files[1].write_bytes(damage)
        assert same(embedding.gather(tiny.vit(), PHOTOS, points=6, keep=tmp_path), whole)


@pytest.mark.parametrize("name", ["file", "file/kept"])
def test_a_folder_that_cannot_be_made_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="file"):
        embedding.gather(tiny.vit(), PHOTOS, points=6, keep=tmp_path / name)
