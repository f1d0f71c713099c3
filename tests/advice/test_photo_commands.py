"""Commands on photos: what the message says to do works."""

from __future__ import annotations

from pathlib import Path

import pytest

import visattn
from tests import tiny
from tests.advice.packing import PHOTO, owner
from tests.captioning import test_folder as captioners
from tests.cli.test_commands import TINY, Run, run
from visattn.batch import items_of
from visattn.batch.beside import masks_of, texts_of
from visattn.data.scenes import Scenes
from visattn.errors import ImageError, OptionError

__all__ = ["run"]


@pytest.fixture
def masked(tmp_path: Path) -> Path:
    """Write two photos and a folder with a mask for each."""
    for folder in ("photos", "masks"):
        (tmp_path / folder).mkdir()
        for name in ("a", "b"):
            PHOTO.convert("L" if folder == "masks" else "RGB").save(tmp_path / folder / f"{name}.png")
    return tmp_path


def test_a_folder_holds_one_mask_for_each_photo(masked: Path) -> None:
    items, masks = items_of([masked / "photos"]), masked / "masks"
    with pytest.raises(ImageError, match=r"masks/a\.png: is one mask for 2 photos\. Pass a folder with a mask for each\.$"):
        masks_of(items, masks / "a.png")
    assert len(masks_of(items, masks)) == 2
    (masks / "b.png").rename(masks / "c.png")
    with pytest.raises(ImageError, match=r"must hold one mask named b\.png, got none\. Add it, or remove the others\.$"):
        masks_of(items, masks)
    (masks / "c.png").rename(masks / "b.png")
    PHOTO.save(masks / "b.bmp")
    with pytest.raises(ImageError, match=r"must hold one mask named b\.png, got 2\. Add it, or remove the others\.$"):
        masks_of(items, masks)
    (masks / "b.bmp").unlink()
    assert [mask.shape for mask in masks_of(items, masks)] == [(48, 64)] * 2


def test_a_folder_with_a_captioner_is_named(run: Run, tmp_path: Path) -> None:
    Scenes(1)[0][0].save(tmp_path / "scene.png")
    (tmp_path / "empty").mkdir()
    captioners.kept(tmp_path / "run" / "final")
    for wrong, message in (
        ("none", "none: no such folder. Pass one that `visattn train caption` wrote.\n"),
        ("empty", "empty: contains no captioner; pass a folder that `visattn train caption` wrote.\n"),
    ):
        code, _, err = run("caption", "scene.png", "--checkpoint", wrong)
        assert (code, err) == (4, f"visattn: error: {message}")
    assert run("caption", "scene.png", "--checkpoint", "run")[0] == 0


def test_a_map_of_another_size_is_computed_again(run: Run, tmp_path: Path) -> None:
    PHOTO.save(tmp_path / "p.png")
    photo = visattn.load_image(tmp_path / "p.png").resize((32, 24))  # keeps the facts of the file
    visattn.explain(tiny.vit(), photo, method="rollout").save_map(tmp_path / "map.npz")
    code, _, err = run("overlay", "p.png", "--map", "map.npz", "-o", "out.png")
    assert (code, err.endswith("with 32 x 24 pixels, got 64 x 48. Compute the map again.\n")) == (4, True)
    visattn.explain(tiny.vit(), tmp_path / "p.png", method="rollout").save_map(tmp_path / "map.npz")
    assert run("overlay", "p.png", "--map", "map.npz", "-o", "out.png")[0] == 0


def test_a_folder_of_photos_is_named_for_statistics(run: Run, tmp_path: Path) -> None:
    for folder in ("photos", "empty"):
        (tmp_path / folder).mkdir()
    PHOTO.save(tmp_path / "photos" / "a.png")
    for wrong, message in (
        ("foto", "foto: no such folder; check the path\n"),
        ("photos/a.png", "photos/a.png: a file, not a folder; pass the folder that contains it\n"),
        ("empty", "in this folder or its subfolders; pass another folder\n"),
    ):
        code, _, err = run("stats", wrong, *TINY)
        assert code == 3
        assert err.endswith(message)
    assert run("stats", "photos", *TINY, "-q")[0] == 0


def test_a_path_of_masks_that_is_not_there_is_corrected(masked: Path) -> None:
    for count in (1, 2):
        with pytest.raises(ImageError, match=r"missing: no such file or folder\. Check the path\.$"):
            masks_of(items_of([masked / "photos"])[:count], masked / "missing")


def test_masks_of_names_that_begin_alike_are_told_apart(masked: Path) -> None:
    for folder in ("photos", "masks"):
        PHOTO.save(masked / folder / "a.b.png")
    assert len(masks_of(items_of([masked / "photos"]), masked / "masks")) == 3


@pytest.mark.usefixtures("ordinary_user")
def test_permissions_of_a_text_are_corrected(public_folder: Path) -> None:
    with owner():
        PHOTO.save(public_folder / "a.png")
        (public_folder / "a.txt").write_text("a dog", encoding="utf-8-sig")
        (public_folder / "a.txt").chmod(0)
    items = items_of([public_folder / "a.png"])
    with pytest.raises(
        OptionError, match=r"a\.txt: cannot be read \(permission denied\)\. Check its permissions and those of its folder\.$"
    ):
        texts_of(items, public_folder)
    with owner():
        (public_folder / "a.txt").chmod(0o644)
    assert texts_of(items, public_folder) == ["a dog"]
