"""`visattn batch`: folders of images, failures, shards, and options that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests import tiny
from tests.cli.test_commands import TINY, Run, run
from visattn.batch import Asked, Wanted, Work
from visattn.batch.batch_command import batch_command
from visattn.batch.settings import settings_of
from visattn.batch.statistics import in_turn
from visattn.core.maps import load_map
from visattn.core.pipeline.preprocessing import Preprocessing
from visattn.core.pipeline.question import ask
from visattn.core.pipeline.targets import Target

__all__ = ["run"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Write three photos and a damaged one."""
    random = np.random.default_rng(0)
    (tmp_path / "photos" / "more").mkdir(parents=True)
    for name in ("a.png", "b.jpg", "more/c.png"):
        Image.fromarray(random.integers(0, 256, (60, 90, 3), dtype=np.uint8)).save(tmp_path / "photos" / name)
    (tmp_path / "photos" / "d.png").write_bytes(b"\x89PNG nothing")
    return tmp_path / "photos"


def test_a_folder_is_drawn_and_failures_are_told(run: Run, photos: Path) -> None:
    code, out, err = run("batch", photos, *TINY, "--method", "rollout", "--maps", "-o", "out", "--batch-size", "2")
    assert code == 1
    assert out.strip() == "out/journal.jsonl"
    made = sorted(str(path.relative_to(photos.parent / "out")) for path in (photos.parent / "out").rglob("*.*"))
    assert made == sorted(
        ["journal.jsonl", *(f"{name}.rollout.{end}" for name in ("a", "b", "more/c") for end in ("png", "npz"))]
    )
    lines = [line for line in err.splitlines() if line.startswith("visattn: error")]
    assert len(lines) == 1
    assert "d.png" in lines[0]
    assert "3 images, 1 failed, 3 with warnings; journal.jsonl names each" in err
    (photos / "d.png").unlink()
    code, out, err = run("batch", photos, *TINY, "--method", "rollout", "--maps", "-o", "out", "--batch-size", "2", "--json")
    assert code == 0, err
    assert json.loads(out) == {"output": "out", "written": 1, "kept": 2, "failed": 0}


@pytest.mark.parametrize(
    ("given", "raw"),
    [
        (["--maps", "-o", "out"], "a.rollout.npz"),
        (["-o", "out", "--maps", "--stats"], "a.rollout.npz"),
        (["--maps", "--map-format", "tif", "-o", "out"], "a.rollout.tif"),
        (["--maps", "--map-format=csv", "-o", "out"], "a.rollout.csv"),
        (["-o", "out", "--maps", "--map-format", "npy"], "a.rollout.npy"),
        (["--maps", "--map-format", "png", "-o", "out"], "a.rollout.map.png"),
        (["-o", "out"], None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_maps_names_a_format(given: list[str], raw: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, Any] = {}
    monkeypatch.setattr(batch_command, "callback", lambda **options: kept.update(options))
    batch_command.main([*given, "photos"], standalone_mode=False)
    assert kept["images"] == ("photos",)
    wanted = Wanted(Path("out"), "rollout", raw=kept["maps"], raw_ending=kept["map_format"])
    assert wanted.of_image("a") == {"picture": "a.rollout.png"} | ({"raw": raw} if raw else {})


@pytest.mark.parametrize("ending", ["npz", "npy", "csv", "tif", "png"])
def test_maps_are_written_in_the_format_that_is_named(ending: str, run: Run, photos: Path) -> None:
    rolled = (*TINY, "--method", "rollout", "--batch-size", "1")
    code, _, err = run("batch", photos / "a.png", *rolled, "--maps", "--map-format", ending, "-o", "out")
    assert code == 0, err
    assert run("overlay", photos / "a.png", *rolled[:-2], "--save-map", f"alone.{ending}")[0] == 0
    written, alone = load_map(f"out/a.rollout.{'map.' * (ending == 'png')}{ending}"), load_map(f"alone.{ending}")
    if isinstance(written, tuple) and isinstance(alone, tuple):
        assert written[1] == alone[1]
        written, alone = written[0].numpy(), alone[0].numpy()
    np.testing.assert_allclose(np.asarray(written), np.asarray(alone), atol=1e-7)


def test_heads_in_a_format_of_one_grid_end_the_run(run: Run, photos: Path) -> None:
    (photos / "d.png").unlink()
    code, _, err = run("batch", photos, *TINY, "--method", "attention", "--maps", "--map-format", "tif", "-o", "out")
    assert code != 0
    assert ".tif holds one grid, but the map has one for each head. Save it as .npz." in err
    assert not [*Path("out").rglob("*.tif")]


def test_maps_in_another_format_are_refused(run: Run, photos: Path) -> None:
    code, _, err = run("batch", photos, *TINY, "--maps", "--map-format", "pdf", "-o", "out")
    assert code == 2
    assert "'pdf' is not one of 'npz', 'npy', 'csv', 'tif', 'png'" in err
    code, _, err = run("batch", photos, *TINY, "--map-format", "csv", "-o", "out")
    assert code == 2
    assert "--map-format has no effect with no --maps" in err


def test_parts_of_a_run(run: Run, photos: Path) -> None:
    (photos / "d.png").unlink()
    for part in ("0/2", "1/2"):
        code, out, err = run("batch", photos, *TINY, "-o", "out", "--batch-size", "1", "--shard", part)
        assert code == 0, err
        assert out.strip() == f"out/journal.{part.replace('/', '-of-')}.jsonl"
    assert len(list((photos.parent / "out").rglob("*.png"))) == 3


def test_a_part_of_another_list_of_images_is_told(run: Run, photos: Path) -> None:
    (photos / "d.png").unlink()
    options = [*TINY, "-o", "out", "--batch-size", "1", "--shard"]
    assert "another list" not in run("batch", photos, *options, "0/2")[2]
    (photos / "0.png").write_bytes((photos / "a.png").read_bytes())
    code, _, err = run("batch", photos, *options, "1/2")
    assert code == 2
    assert (
        "out/a.overlay.png: is of another part of this run, which had another list of images or another number of parts. Choose"
        in err
    )
    (photos / "0.png").unlink()
    (photos / "a.png").rename(photos / "0.png")
    code, _, err = run("batch", photos, *options, "1/2")
    assert code == 0
    assert "warning: out/journal.0-of-2.jsonl: is of another list of images (its image 0 is " in err


def test_statistics_of_all_parts_are_in_the_tables(run: Run, photos: Path) -> None:
    (photos / "d.png").unlink()
    for part in ("0/2", "1/2"):
        code, _, err = run(
            "batch", photos, *TINY, "-o", "out", "--batch-size", "1", "--shard", part, "--no-pictures", "--stats", "--pack-maps"
        )
        assert code == 0, err
    assert "statistics of 3 images in heads.csv, layers.csv, photos.csv, stats.json" in err
    out = photos.parent / "out"
    assert len((out / "photos.csv").read_text().splitlines()) == 4
    assert len(list((out / "maps").iterdir())) == len(list((out / "statistics").iterdir())) == 3
    assert not list(out.rglob("*.overlay.png"))
    code, _, err = run("stats", photos, *TINY, "-o", "stats")
    assert code == 0, err
    for table in ("heads.csv", "layers.csv"):
        assert (out / table).read_text() == (photos.parent / "stats" / table).read_text()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--shard", "2/2"], "--shard must be I/N"),
        (["--no-pictures"], "leaves nothing to write"),
        (["--actors", "2"], "are options of --engine ray"),
        (["--gpus-per-actor", "0.5"], "are options of --engine ray"),
        (
            ["--engine", "ray", "--gpus-per-actor", "1.5"],
            "must be a part of a GPU, such as 0.5, or a whole number of them, got 1.5",
        ),
        (["--engine", "ray", "--gpus-per-actor", "nan"], "must be a part of a GPU"),
        (["--method", "rolout"], "rollout"),
        (["--method", "rollout", "--query", "cls", "--layer", "3"], "no parameter"),
    ],
)
def test_bad_options_are_refused(given: list[str], message: str, run: Run, photos: Path) -> None:
    code, _, err = run("batch", photos, *TINY, "-o", "out", *given)
    assert code != 0
    assert message in err
    assert not (photos.parent / "out").exists()


def test_a_name_that_is_wrong_is_told_before_anything_is_made(run: Run, photos: Path) -> None:
    code, _, err = run("batch", photos.parent / "fotos", *TINY, "-o", "out")
    assert code == 3
    assert err.strip().endswith("fotos: no such file; check the path")
    code, _, err = run("batch", photos, *TINY, "-o", photos / "a.png" / "out")
    assert code == 2
    assert "a.png/out: cannot be written (" in err
    code, _, err = run("batch", photos, *TINY, "-o", "out", "--mass", "7")
    assert code == 2
    assert "mass must be a number from 0 to 1, got 7" in err
    assert not (photos.parent / "out").exists()


def test_an_option_that_fits_no_image_ends_the_run(run: Run, photos: Path) -> None:
    code, _, err = run("batch", photos, *TINY, "-o", "out", "--method", "gradcam", "--target", "99999")
    assert code == 2
    assert err.count("99999") == 1
    assert run("batch", photos, *TINY, "-o", "out", "--method", "gradcam", "--target", "1")[0] == 1


def test_results_of_another_run_are_not_replaced(run: Run, photos: Path) -> None:
    assert run("batch", photos / "a.png", *TINY, "-o", "out")[0] == 0
    (photos / "more" / "c.png").rename(photos / "more" / "a.png")
    code, _, err = run("batch", photos / "more", *TINY, "-o", "out")
    assert code == 2
    assert "out/a.overlay.png: is of another image, " in err
    code, _, err = run("batch", photos / "a.png", *TINY, "-o", photos)
    assert code == 0
    (photos / "journal.jsonl").unlink()
    code, _, err = run("batch", photos / "a.png", *TINY, "-o", photos)
    assert "a.overlay.png: exists already, and no journal of this run names it" in err


def test_a_warning_of_all_images_is_told_once(run: Run, photos: Path) -> None:
    for _ in range(2):
        _, _, err = run("batch", photos, *TINY, "-o", "out")
        assert [line for line in err.splitlines() if line.startswith("visattn: warning")] == [
            "visattn: warning: the weights are random; the map shows nothing about a trained model"
        ]
        assert "1 failed, 3 with warnings; journal.jsonl names each" in err


def test_what_decides_the_files_is_in_the_journal(photos: Path) -> None:
    model: Any = tiny.vit()
    wanted = Wanted(photos, "overlay")

    def settings(model: Any, **target: Any) -> Any:
        asked = Asked(ask("gradcam", {}, Target(**target)), Preprocessing())
        return settings_of(Work(asked, wanted), model, "own", 2)

    usual = settings(model, prompt="a photo of a small brown dog on a green sofa")
    assert json.loads(json.dumps(usual)) == usual
    assert usual != settings(model, prompt="a photo of a small brown dog on a green lawn")
    names = [str(number) for number in range(9)]
    assert settings(model, labels=names) != settings(model, labels=[*names[:-1], "9x"])
    model.pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "input_size": (3, 32, 32)}
    assert usual["input"] != settings(model, prompt="a photo of a small brown dog on a green sofa")["input"]


def test_tables_of_parts_are_written_in_turn(tmp_path: Path) -> None:
    began, ended = Event(), Event()

    def other() -> None:
        began.set()
        with in_turn(tmp_path):
            ended.set()

    with in_turn(tmp_path):
        thread = Thread(target=other)
        thread.start()
        began.wait()
        assert not ended.wait(0.2)
    assert ended.wait(5)
    thread.join()


def test_other_settings_and_a_file_as_output_are_refused(run: Run, photos: Path) -> None:
    run("batch", photos / "a.png", *TINY, "-o", "out", "--method", "rollout")
    code, _, err = run("batch", photos / "a.png", *TINY, "-o", "out", "--method", "attention")
    assert code != 0
    assert "is of a run with other settings (method rollout -> attention, " in err
    code, _, err = run("batch", photos / "a.png", *TINY, "-o", photos / "a.png")
    assert code != 0
    assert "is a file, not a folder" in err
