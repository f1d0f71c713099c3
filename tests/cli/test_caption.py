"""Command `visattn caption` as a user runs it: captions, filmstrips, and one-line errors."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.captioning.test_folder import kept
from tests.cli.test_commands import Run, run
from visattn.captioning import load_captioner
from visattn.core.command_line.questions import short_name
from visattn.data.scenes import Scenes
from visattn.models.show_attend_tell import Attention

__all__ = ["run"]

FOLDERS: dict[str, tuple[Attention, float]] = {"soft": ("soft", 0), "hard": ("hard", 0), "silent": ("soft", 1e3)}


@pytest.fixture(scope="module")
def captioners(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("captioners")
    return {name: kept(place / name, attention, end=end) for name, (attention, end) in FOLDERS.items()}


@pytest.fixture
def soft(captioners: dict[str, Path]) -> tuple[str, Path]:
    return "--checkpoint", captioners["soft"]


@pytest.fixture
def hard(captioners: dict[str, Path]) -> tuple[str, Path]:
    return "--checkpoint", captioners["hard"]


def scene(path: Path, number: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Scenes(4, seed=5)[number][0].save(path)
    return path


@pytest.fixture
def image(tmp_path: Path) -> Path:
    return scene(tmp_path / "scene.png")


def error(err: str) -> str:
    """Check that the output is a single error line, and return it."""
    assert err.startswith("visattn: error: ")
    assert err.count("\n") == 1
    return err


def files(folder: Path) -> set[str]:
    return {str(item.relative_to(folder)) for item in folder.rglob("*") if item.is_file()}


def test_caption_is_printed_with_a_note_for_each_word(run: Run, image: Path, soft: Any) -> None:
    (caption,) = load_captioner(soft[1]).generate([Image.open(image)], max_length=51)
    code, out, err = run("caption", image, *soft)
    assert (code, out) == (0, f"{caption.text}\n")
    assert len(caption.words) > 1
    lines = err.splitlines()
    assert lines == [f"visattn: {word:<12} {fact}" for word, fact in zip(caption.words, caption.word_notes, strict=True)]
    assert run("caption", image, *soft, "--quiet") == (0, out, "")


def test_several_captions_are_printed_by_name_and_json_keeps_their_order(run: Run, tmp_path: Path, hard: Any) -> None:
    images = [scene(tmp_path / f"{number}.png", number) for number in range(3)]
    captions = load_captioner(hard[1]).generate([Image.open(image) for image in images])
    code, out, _ = run("caption", *images, *hard, "-q")
    assert code == 0
    assert out.splitlines() == [f"{image}: {caption.text}" for image, caption in zip(images, captions, strict=True)]
    code, out, err = run("caption", *images, *hard, "-q", "--json", "-o", "out.json")
    assert (code, err) == (0, "")
    rows = json.loads(out)
    assert json.loads(Path("out.json").read_text()) == rows
    for image, row, caption in zip(images, rows, captions, strict=True):
        assert list(row) == ["image", "caption", "log_probability", "finished", "words", "notes", "warnings", "filmstrip"]
        assert (row["image"], row["caption"], row["finished"]) == (str(image), caption.text, True)
        assert row["log_probability"] == pytest.approx(caption.score, abs=1e-5)
        assert [word["word"] for word in row["words"]] == list(caption.words)
        assert [tuple(word["cell"]) for word in row["words"]] == list(caption.chosen_cells)
        assert [word["beta"] for word in row["words"]] == pytest.approx(caption.betas)
        assert [word["entropy"] for word in row["words"]] == pytest.approx(caption.entropies, abs=1e-5)
        assert (row["notes"], row["filmstrip"]) == ([], None)


def test_more_images_than_one_batch_are_captioned(run: Run, tmp_path: Path, soft: Any) -> None:
    images = [scene(tmp_path / f"{number}.png", number % 4) for number in range(18)]
    images[17].write_bytes(b"")
    code, out, err = run("caption", *images, *soft, "-q", "--json")
    rows = json.loads(out)
    assert [row["image"] for row in rows] == [str(image) for image in images[:17]]
    assert rows[16]["log_probability"] == pytest.approx(rows[0]["log_probability"], abs=1e-5)
    assert code == 1
    assert "17.png: empty file" in error(err)


def test_too_narrow_photo_is_reported_and_the_others_are_captioned(
    run: Run, image: Path, tmp_path: Path, soft: tuple[str, Path]
) -> None:
    Image.new("RGB", (10, 400), "red").save(tmp_path / "narrow.png")
    code, out, err = run("caption", "narrow.png", image, *soft, "--filmstrip", "strips", "-o", "told.json", "--json", "-q")
    assert code == 1
    assert err.count("visattn: error: ") == 1
    assert "narrow.png: a photo of 10 x 400 pixels is too narrow" in err
    assert [row["filmstrip"] is None for row in json.loads(out)] == [True, False]
    assert len(json.loads((tmp_path / "told.json").read_text())) == 2


def test_broken_image_is_reported_and_the_good_one_is_captioned(run: Run, image: Path, tmp_path: Path, soft: Any) -> None:
    broken = tmp_path / "broken.png"
    broken.write_text("<html>")
    code, out, err = run("caption", broken, image, *soft, "-q", "--filmstrip", "strips")
    assert code == 1
    assert out.startswith(f"{image}: ")
    assert f"{broken}: not an image" in error(err)
    assert files(tmp_path / "strips") == {f"scene.{short_name(str(soft[1]))}.caption.png"}
    code, out, err = run("caption", broken, *soft)
    assert (code, out) == (3, "")
    error(err)


def test_folder_as_image_is_refused(run: Run, tmp_path: Path, soft: Any) -> None:
    (tmp_path / "photos").mkdir()
    code, out, err = run("caption", tmp_path / "photos", *soft)
    assert (code, out) == (3, "")
    assert "is a directory" in error(err)


def test_filmstrip_names_are_unique(run: Run, tmp_path: Path, soft: Any) -> None:
    mixed = [scene(tmp_path / name, number) for number, name in enumerate(("a.png", "a.jpg", "b.png"))]
    assert run("caption", *mixed, *soft, "-q", "--filmstrip", "one")[0] == 0
    captioner = short_name(str(soft[1]))
    assert files(tmp_path / "one") == {f"{name}.{captioner}.caption.png" for name in ("a.png", "a.jpg", "b")}
    same = [scene(tmp_path / name, number) for number, name in enumerate(("x/a.png", "y/a.png", "y/b.png"))]
    code, out, _ = run("caption", *same, *soft, "-q", "--filmstrip", "two", "--json")
    assert code == 0
    rows = json.loads(out)
    assert {str(Path(row["filmstrip"]).relative_to("two")) for row in rows} == files(tmp_path / "two")
    assert len(files(tmp_path / "two")) == 3
    for row, file in zip(rows, same, strict=True):
        with Image.open(row["filmstrip"]) as strip:
            told = json.loads(strip.info["visattn"])
        assert told["image_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("given", [("--filmstrip", "strip.png"), ("-o", "out.json"), ("--filmstrip", "strips")])
def test_existing_outputs_are_replaced_only_with_overwrite(run: Run, image: Path, soft: Any, given: tuple[str, str]) -> None:
    target = Path(given[1]) if "." in given[1] else Path(given[1]) / f"scene.{short_name(str(soft[1]))}.caption.png"
    target.parent.mkdir(exist_ok=True)
    target.write_text("old")
    code, out, err = run("caption", image, *soft, *given)
    assert (code, out) == (2, "")
    assert f"{target}: exists already; pass --overwrite" in error(err)
    assert target.read_text() == "old"
    assert run("caption", image, *soft, *given, "--overwrite", "-q")[0] == 0
    assert target.read_bytes() != b"old"
    assert not list(Path().rglob(".visattn-*"))


def test_outputs_are_checked_before_anything_is_read(run: Run, image: Path, tmp_path: Path) -> None:
    Path("strip.png").write_text("old")
    code, _, err = run(
        "caption", image, tmp_path / "missing.png", "--checkpoint", tmp_path / "nothing", "--filmstrip", "strip.png"
    )
    assert code == 2
    error(err)
    code, _, err = run("caption", image, "--checkpoint", tmp_path / "nothing", "--filmstrip", "strip.png", "-o", "new.json")
    assert code == 2
    error(err)
    assert not Path("new.json").exists()


OUTPUTS = {
    "text": (
        ("--filmstrip", "scene.txt"),
        "scene.txt: --filmstrip must be a .png or .webp file for one image, or a folder for several",
    ),
    "picture-as-json": (("-o", "scene.jpg"), "writes JSON. Choose a name that ends in .json"),
    "the-image": (("--filmstrip", "scene.png", "--overwrite"), "the output is the input itself"),
    "in-a-file": (("--filmstrip", "scene.png/x.png"), "is a file, not a folder"),
}


@pytest.mark.parametrize(("given", "message"), OUTPUTS.values(), ids=list(OUTPUTS))
def test_invalid_outputs_are_refused(
    run: Run, image: Path, tmp_path: Path, soft: Any, given: tuple[str, ...], message: str
) -> None:
    before = image.read_bytes()
    code, out, err = run("caption", image, *soft, *given)
    assert (code, out) == (2, "")
    assert message in error(err)
    assert (files(tmp_path), image.read_bytes()) == ({"scene.png"}, before)


def test_animation_of_several_images_is_refused(run: Run, image: Path, tmp_path: Path, soft: Any) -> None:
    other = scene(tmp_path / "other.png", 1)
    code, _, err = run("caption", image, other, *soft, "--filmstrip", "both.webp")
    assert code == 2
    assert "both.webp: --filmstrip must be a .png or .webp file for one image, or a folder for several" in error(err)
    (tmp_path / "v1.0").mkdir()
    assert run("caption", image, other, *soft, "-q", "--filmstrip", "v1.0")[0] == 0
    captioner = short_name(str(soft[1]))
    assert files(tmp_path / "v1.0") == {f"scene.{captioner}.caption.png", f"other.{captioner}.caption.png"}


def test_captioner_files_are_not_overwritten(run: Run, image: Path, tmp_path: Path) -> None:
    folder = kept(tmp_path / "final")
    before = (folder / "model.json").read_bytes()
    code, _, err = run("caption", image, "--checkpoint", folder, "-o", folder / "model.json", "--overwrite")
    assert code == 2
    assert "the output is the input itself" in error(err)
    assert (folder / "model.json").read_bytes() == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_without_write_permission_is_refused(run: Run, image: Path, tmp_path: Path, soft: Any) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    code, _, err = run("caption", image, *soft, "--filmstrip", "locked/strip.png")
    assert code == 2
    assert "cannot be written" in error(err)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a folder that takes no files is known on Linux only")
def test_folder_that_cannot_hold_files_is_refused(run: Run, image: Path, soft: Any) -> None:
    code, _, err = run("caption", image, *soft, "--filmstrip", "/proc/strip.png")
    assert code == 2
    assert "/proc/strip.png: cannot be written" in error(err)


def test_filmstrip_stores_its_provenance(run: Run, image: Path, captioners: dict[str, Path]) -> None:
    given = (
        "--checkpoint",
        captioners["hard"],
        "--sampling",
        "sample",
        "--seed",
        "3",
        "--beam-size",
        "2",
        "--filmstrip",
        "strip.png",
    )
    code, out, _ = run("caption", image, *given, "--json", "-q")
    (row,) = json.loads(out)
    assert (code, row["filmstrip"]) == (0, "strip.png")
    with Image.open("strip.png") as strip:
        told = json.loads(strip.info["visattn"])
        assert strip.width > 2 * 160
    facts = json.loads((captioners["hard"] / "model.json").read_text())
    assert told["parameters"] | {"seed": 3} == told["parameters"]
    assert (told["parameters"]["sampling"], told["parameters"]["caption"]) == ("sample", row["caption"])
    assert (told["weights"], told["weights_sha256"]) == ("hard", facts["sha256"])
    assert (told["image"], told["method"]) == ("scene.png", "caption attention")
    assert told["geometry"]["input"] == [64, 64]


def test_sampling_is_reproducible_with_a_seed(run: Run, image: Path, hard: Any) -> None:
    def cells(seed: int) -> Any:
        words = json.loads(run("caption", image, *hard, "--sampling", "sample", "--seed", str(seed), "--json", "-q")[1])[0][
            "words"
        ]
        return [word["cell"] for word in words]

    assert cells(3) == cells(3)
    assert len({json.dumps(cells(seed)) for seed in range(4)}) > 1


def test_an_animation_has_a_frame_for_the_photo_and_each_word(run: Run, image: Path, soft: Any) -> None:
    code, out, _ = run("caption", image, *soft, "--filmstrip", "strip.webp", "-q")
    assert code == 0
    with Image.open("strip.webp") as strip:
        assert getattr(strip, "n_frames", 1) == 1 + len(out.split())


def test_given_caption_is_shown_and_unknown_words_are_reported(run: Run, image: Path, soft: Any) -> None:
    code, out, err = run("caption", image, *soft, "--caption", "A red zebra, okapi", "--filmstrip", "strip.png", "--json")
    assert code == 0
    (row,) = json.loads(out)
    note = "words outside the vocabulary, read as <unknown>: zebra, okapi"
    assert [word["word"] for word in row["words"]] == ["a", "red", "zebra", "okapi"]
    assert row["notes"] == [note]
    assert err.splitlines()[-1] == f"visattn: {image}: {note}"
    assert [line.split()[1] for line in err.splitlines()[:4]] == ["a", "red", "zebra", "okapi"]
    assert Path("strip.png").exists()


def test_empty_caption_is_not_an_error(run: Run, image: Path, tmp_path: Path, captioners: dict[str, Path]) -> None:
    given = ("--checkpoint", captioners["silent"])
    code, out, err = run("caption", image, *given, "--filmstrip", "strip.png")
    assert (code, out) == (0, "\n")
    assert err == f"visattn: warning: {image}: the generated caption is empty; no filmstrip is drawn\n"
    (row,) = json.loads(run("caption", image, *given, "--json", "-q")[1])
    assert (row["caption"], row["words"], row["filmstrip"], row["finished"]) == ("", [], None, True)
    assert files(tmp_path) == {"scene.png"}


BAD = {
    "beam-size-0": (("--beam-size", "0"), "'--beam-size': 0 is not in the range"),
    "max-length-0": (("--max-length", "0"), "'--max-length': 0 is not in the range"),
    "seed": (("--seed", "-1"), "'--seed': -1 is not in the range"),
    "no-caption": (("--caption", ""), "has no word. Give one or more"),
    "sampling-of-soft": (("--sampling", "sample"), "sampling needs hard attention, got 'sample' for soft attention"),
    "device": (("--device", "gpu"), "gpu"),
    "panel": (("--panel", "10"), "'--panel': 10 is not in the range"),
}


@pytest.mark.parametrize(("given", "message"), BAD.values(), ids=list(BAD))
def test_invalid_options_are_refused(
    run: Run, image: Path, tmp_path: Path, soft: Any, given: tuple[str, ...], message: str
) -> None:
    code, out, err = run("caption", image, *soft, "--filmstrip", "strip.png", *given)
    assert (code, out) == (2, "")
    assert message in error(err)
    assert files(tmp_path) == {"scene.png"}


@pytest.mark.parametrize("damage", ["missing", "empty", "classifier", "sha256", "words"])
def test_invalid_checkpoint_is_refused(run: Run, image: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "final"
    if damage == "empty":
        folder.mkdir()
    elif damage != "missing":
        kept(folder)
        facts = folder / "model.json"
        told = json.loads(facts.read_text())
        told |= {"classifier": {"kind": None}, "sha256": {"sha256": ""}, "words": {"words": [1]}}[damage]
        facts.write_text(json.dumps(told))
    code, out, err = run("caption", image, "--checkpoint", folder, "--filmstrip", "strip.png")
    assert (code, out) == (4, "")
    assert str(folder) in error(err)
    assert not Path("strip.png").exists()


def test_images_of_every_mode_are_captioned_upright_in_color(run: Run, image: Path, tmp_path: Path, soft: Any) -> None:
    upright = Image.open(image)
    exif = Image.Exif()
    exif[0x0112] = 6  # stored rotated a quarter turn to the left
    turned, clear, gray, dark = (tmp_path / f"{name}.png" for name in ("turned", "clear", "gray", "dark"))
    upright.transpose(Image.Transpose.ROTATE_90).save(turned, exif=exif)
    upright.convert("RGBA").save(clear)
    upright.convert("L").save(gray)
    upright.convert("L").convert("RGB").save(dark)
    code, out, err = run("caption", image, turned, clear, gray, dark, *soft, "--json")
    assert code == 0
    likely = [row["log_probability"] for row in json.loads(out)]
    assert likely[1:3] == pytest.approx([likely[0]] * 2, abs=1e-5)
    assert likely[3] == pytest.approx(likely[4], abs=1e-5)
    notes = [row["notes"] for row in json.loads(out)]
    assert (notes[0], notes[4]) == ([], [])
    assert all(f"visattn: {turned}: {text}" in err for text in notes[1])
    assert notes[1] + notes[2]


def test_center_of_a_long_photo_is_used_and_recorded(run: Run, tmp_path: Path, soft: Any) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (64, 200, 3), dtype=np.uint8)
    wide, middle = tmp_path / "wide.png", tmp_path / "middle.png"
    Image.fromarray(pixels).save(wide)
    Image.fromarray(pixels[:, 68:132]).save(middle)
    code, out, _ = run("caption", wide, middle, *soft, "--json", "-q", "--filmstrip", "strips")
    whole, part = json.loads(out)
    assert code == 0
    assert whole["caption"] == part["caption"]
    assert whole["log_probability"] == pytest.approx(part["log_probability"], abs=1e-5)
    with Image.open(whole["filmstrip"]) as strip:
        assert json.loads(strip.info["visattn"])["geometry"]["window"] == [0, 68, 64, 132]


def test_names_are_safe_to_print(run: Run, tmp_path: Path, soft: Any) -> None:
    bad = scene(tmp_path / "a\x1b[2Jb\nc.png")
    other = scene(tmp_path / "d.png")
    code, out, err = run("caption", bad, other, *soft, "--filmstrip", "strips")
    assert code == 0
    assert "\x1b" not in out + err
    assert len(out.splitlines()) == 2
    assert r"a\x1b[2Jb\nc.png: " in out


def test_no_network_is_needed(run: Run, image: Path, soft: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: Any, **_options: Any) -> None:
        pytest.fail("a connection was made")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert run("caption", image, *soft, "-q")[0] == 0


def test_captioners_that_come_with_visattn_have_names(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    by_name, by_folder = (
        run("caption", "scene:7", "--checkpoint", one, "-q")
        for one in ("captions_soft", Path(__file__).parents[2] / "models" / "captions_soft")
    )
    assert by_name == by_folder
    assert by_name[0] == 0
    assert by_name[1].startswith("a ")
    (tmp_path / "captions_soft").mkdir()
    assert "contains no captioner" in run("caption", "scene:7", "--checkpoint", "captions_soft")[2]


@pytest.mark.parametrize(
    ("image", "checkpoint", "code"), [("nothing.png", "models/captions_soft", 3), ("visattn/core/shipped/photos", "nothing", 4)]
)
def test_missing_files_are_reported_before_torch_is_imported(image: str, checkpoint: str, code: int) -> None:
    root = Path(__file__).parents[2]
    script = f"""
import sys
from visattn.cli.commands import _run
code = _run(["caption", {str(root / image)!r}, "--checkpoint", {str(root / checkpoint)!r}], False)
print(code, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.split() == [str(code), "False"]
    assert done.stderr.count("\n") == 1
