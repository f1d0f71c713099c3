"""`visattn embed`: a page or numbers from the photos of a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.cli.test_commands import TINY, Run, run
from tests.pipeline.test_prompts import saved
from visattn import load_image
from visattn.core.command_line.number_lists import numbers_of
from visattn.errors import OptionError

__all__ = ["run"]
SMALL = (*TINY[:-2], "--points", "8")  # without --resize fit


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Write two folders with two photos each."""
    random = np.random.default_rng(0)
    for name in ("cats/a", "cats/b", "dogs/c", "dogs/d"):
        file = tmp_path / "photos" / f"{name}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (70, 90, 3), dtype=np.uint8)).save(file)
    return tmp_path / "photos"


def test_a_page_of_a_folder_with_classes_and_crops(run: Run, photos: Path) -> None:
    code, out, err = run("embed", photos, *SMALL, "--crops", "1", "-o", "space.html")
    assert code == 0, err
    assert out.strip() == "space.html"
    page = (photos.parent / "space.html").read_text()
    facts = json.loads(page.split('id="facts">')[1].split("</script>")[0])
    names = ["a.jpg", "a.jpg crop 1", "b.jpg", "b.jpg crop 1", "c.jpg", "c.jpg crop 1", "d.jpg", "d.jpg crop 1"]
    assert [image["name"] for image in facts["images"]] == names
    assert [image["label"] for image in facts["images"]] == ["cats"] * 4 + ["dogs"] * 4
    assert len(facts["layers"]) == 12
    assert "8 images: embedding (method pca, dimensions 2, criterion norms, seed 0, layers *, points 8)" in err
    assert "of each image 1 patch at random, and cls" in facts["about"]
    assert sorted(path.name for path in photos.parent.iterdir()) == ["photos", "space.html"]  # what was kept is gone


def test_numbers_of_some_heads(run: Run, photos: Path) -> None:
    code, _, err = run(
        "embed", photos / "cats", *SMALL, "-o", "space.npz", "--layers", "blocks.1*.attn", "--heads", "0,2", "--dimensions", "3"
    )
    assert code == 0, err
    with np.load(photos.parent / "space.npz") as held:
        facts = json.loads(str(held["facts"]))
        assert [layer["name"] for layer in facts["layers"]] == ["blocks.1.attn", "blocks.10.attn", "blocks.11.attn"]
        assert held["2/queries"].shape[0] == 2
        assert held["2/queries"].shape[2] == 3
    assert [(row["layer"], row["head"]) for row in facts["numbers"]][:2] == [("blocks.1.attn", 0), ("blocks.1.attn", 2)]


def test_an_interrupted_run_goes_on(run: Run, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from visattn.embedding import one_image

    done = []
    original = one_image.image_states

    def stopping(*args: object, **options: object) -> object:
        done.append(0)
        if len(done) == 3:
            raise MemoryError
        return original(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("visattn.embedding.gathering.image_states", stopping)
    assert run("embed", photos, *SMALL)[0] != 0
    kept = photos.parent / "space.html.states"
    assert len(list(kept.glob("first/*.safetensors"))) == 2
    code, _, err = run("embed", photos, *SMALL)
    assert code == 0, err
    assert len(done) == 3 + 3
    assert not kept.exists()


def test_a_run_that_is_ended_before_its_first_image_leaves_nothing(
    run: Run, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object, **_options: object) -> object:
        raise KeyboardInterrupt  # so does the command at SIGTERM

    before = set(photos.parent.iterdir())
    monkeypatch.setattr("visattn.embedding.gathering.image_states", ended)
    assert run("embed", photos, *SMALL)[0] == 130
    assert set(photos.parent.iterdir()) == before


def test_files_of_somebody_else_stay(run: Run, photos: Path) -> None:
    folder = photos.parent / "space.html.states"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    code, _, err = run("embed", photos / "cats", *SMALL, "--layers", "blocks.1.*")
    assert code == 0, err
    assert [path.name for path in folder.rglob("*")] == ["notes.txt"]


def test_a_run_with_other_options_begins_anew(run: Run, photos: Path) -> None:
    assert run("embed", photos, *SMALL, "--max-mb", "0.1")[0] != 0
    assert (photos.parent / "space.html.states").exists()
    code, _, err = run("embed", photos, *SMALL, "--layers", "blocks.1.*", "--points", "12")
    assert code == 0, err
    assert not (photos.parent / "space.html.states").exists()


def test_a_file_where_the_states_are_kept_is_refused(run: Run, photos: Path) -> None:
    (photos.parent / "space.html.states").write_text("mine")
    code, _, err = run("embed", photos, *SMALL, "-q")
    assert code != 0
    assert "space.html.states" in err
    assert "Traceback" not in err


def test_masks_of_photos_with_one_name_lie_in_subfolders(run: Run, photos: Path) -> None:
    (photos / "dogs" / "c.jpg").rename(photos / "dogs" / "a.jpg")
    random = np.random.default_rng(1)
    masks = photos / "masks"
    for name in ("cats/a", "cats/b", "dogs/a", "dogs/d"):
        file = masks / f"{name}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((random.random((70, 90)) < (0.9 if name == "dogs/a" else 0.1)).astype(np.uint8) * 255).save(file)
    code, _, err = run("embed", photos, *SMALL, "--masks", masks, "-o", "space.npz", "--layers", "blocks.1.*")
    assert code == 0, err  # the masks are no photos, although they lie in their folder
    with np.load(photos.parent / "space.npz") as held:
        share = [float(np.nanmean(held["0/object"][held["0/image"] == image])) for image in range(4)]
    assert share[2] > 0.8
    assert max(share[0], share[1], share[3]) < 0.2
    (masks / "cats" / "a.png").rename(masks / "a.png")
    code, _, err = run("embed", photos, *SMALL, "--masks", masks, "--overwrite", "-q")
    assert code != 0
    assert "must hold one mask named cats/a.png, got none" in err


def test_texts_beside_the_photos_are_words_of_the_space(run: Run, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("models") / "clip"
    saved(folder)
    for file, text in zip(sorted(photos.rglob("*.jpg")), ("a dog", "a cat", "a photo of a dog", "dog"), strict=True):
        file.with_suffix(".txt").write_text(text)
    given = (photos, "--model", f"hf:{folder}", "--points", "8", "--texts", photos)
    code, _, err = run("embed", *given, "-o", "space.npz", "--heads", "1")
    assert code == 0, err
    with np.load(photos.parent / "space.npz") as held:
        facts = json.loads(str(held["facts"]))
    assert [layer["name"].partition("_")[0] for layer in facts["layers"]] == ["vision"] * 3 + ["text"] * 3
    assert facts["layers"][5]["words"][3] == ["<s>", "dog", "</s>"]
    (photos / "dogs" / "d.txt").write_text("")
    code, _, err = run("embed", *given, "-q", "--overwrite")
    assert code != 0
    assert "d.txt: is empty" in err
    (photos / "dogs" / "d.txt").write_bytes(b"\xff\xfe")
    assert "d.txt: cannot be read as text" in run("embed", *given, "-q", "--overwrite")[2]
    (photos / "dogs" / "d.txt").unlink()
    assert "must hold one text named d.txt, got none" in run("embed", *given, "-q", "--overwrite")[2]


def test_a_photo_is_read_once_for_all_its_crops(run: Run, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    read: list[Path] = []
    original = load_image

    def counted(path: str, **options: Any) -> Image.Image:
        read.append(Path(path))
        return original(path, **options)

    monkeypatch.setattr("visattn.batch.items.load_image", counted)
    code, _, err = run("embed", photos, *SMALL, "--crops", "3", "--layers", "blocks.1.*")
    assert code == 0, err
    assert [path.stem for path in read] == ["a", "b", "c", "d"]


def test_two_checkpoints_are_compared(run: Run, photos: Path) -> None:
    code, _, err = run(
        "embed", photos / "cats", *SMALL, "--compare", TINY[1], "--compare-weights", "none", "--layers", "blocks.1.*"
    )
    assert code == 0, err
    page = (photos.parent / "space.html").read_text()
    facts = json.loads(page.split('id="facts">')[1].split("</script>")[0])
    assert len(facts["blocks"]) == 2
    assert [layer["block"] for layer in facts["layers"]] == [0, 1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["-o", "space.png"], "a page is .html, and points .npz"),
        (["--heads", "x"], "--heads must be numbers and rising ranges"),
        (["--heads", "9"], "has heads 0 to 2, got 9"),
        (["--layers", "nothing"], "no layer that fits 'nothing'"),
        (["--masks", "photos", "--crops", "2"], "--crops has no effect with --masks"),
        (["--masks", "photos"], "must hold one mask named a.png, got none"),
        (["--max-mb", "0.1"], "MB"),
        (["--compare-weights", "none"], "--compare-weights has no effect with one model"),
        (["--compare", TINY[1], "-o", "a.npz"], "--compare has no effect with -o NAME.npz"),
    ],
)
def test_bad_options_are_refused_in_one_line(given: list[str], message: str, run: Run, photos: Path) -> None:
    code, _, err = run("embed", photos, *SMALL, *given, "-q")
    assert code != 0
    assert message in err
    assert len([line for line in err.strip().splitlines() if "warning" not in line]) == 1


def test_photos_that_cannot_be_read_are_named(run: Run, photos: Path) -> None:
    (photos / "cats" / "b.jpg").write_bytes(b"\xff\xd8\xff nothing")
    code, _, err = run("embed", photos, *SMALL)
    assert code != 0
    assert "b.jpg" in err
    assert not (photos.parent / "space.html").exists()


def test_lists_of_heads() -> None:
    assert numbers_of("0,2-4, 3 ,0-1") == [0, 2, 3, 4, 1]
    assert numbers_of(None) is None
    for text in ("5-3", "", "a", "1-", "-1"):
        with pytest.raises(OptionError, match="must be numbers and rising ranges"):
            numbers_of(text)
