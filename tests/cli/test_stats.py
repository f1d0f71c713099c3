"""Command `visattn stats`: statistics of a small random model over tiny images, compared with a computation photo by photo."""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import visattn
from tests.cli.test_commands import TINY, Run, python, run
from visattn._support.tables import STATISTICS
from visattn.core.pipeline.passes import look
from visattn.evaluation.heads import HeadStatistics, head_divergence, statistics
from visattn.nn import ATTENTION

__all__ = ["run"]

SHARES = ("cls", "self", "patches", "padding")
Row = dict[str, str]


FILES = tuple(name for name in STATISTICS if name != "gates.csv")  # of models with attention and without gates


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Write four images of noise, one of them in a subfolder, and a text file."""
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    (folder / "README.md").write_text("not a photo")
    for number, name in enumerate(("a.png", "b.JPG", "c.webp", "more/d.png")):
        save(folder / name, number)
    return folder


def save(path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    small = random.integers(0, 256, (4, 6, 3), dtype=np.uint8)
    Image.fromarray(small).resize((90, 60), Image.Resampling.NEAREST).save(path)


def table(path: str) -> list[Row]:
    with Path(path).open(newline="") as lines:
        return list(csv.DictReader(lines))


def number(row: Row, name: str) -> float:
    return float(row[name]) if row[name] else math.nan


@pytest.fixture(scope="module")
def model() -> Any:
    """Load the model named in TINY."""
    return visattn.load_model("vit_tiny_patch16_224", weights="none", img_size=64)


def by_hand(model: Any, paths: list[Path]) -> tuple[list[list[HeadStatistics]], list[torch.Tensor]]:
    """Compute the statistics of each photo, and the divergence of the heads of each layer."""
    found, apart = [], []
    for path in paths:
        recording = look(model, visattn.prepare(visattn.load_image(path), model, resize="fit", img_size=64))
        found.append(statistics(recording))
        apart.append(torch.stack([head_divergence(recording, layer=layer)[0] for layer in recording.layers]))
    return found, apart


def test_head_statistics_are_means_over_photos(run: Run, photos: Path, model: Any) -> None:
    code, out, err = run("stats", photos, *TINY)
    assert (code, out.split()) == (0, [f"stats/{name}" for name in FILES])
    assert sorted(path.name for path in Path("stats").iterdir()) == sorted(FILES)
    assert "warning: " in err
    assert "the weights are random" in err
    found, apart = by_hand(model, [photos / name for name in ("a.png", "b.JPG", "c.webp", "more/d.png")])
    rows = table("stats/heads.csv")
    assert len(rows) == 12 * 3
    for row in rows:
        layer, head = int(row["layer"].split(".")[1]), int(row["head"])
        each = [one[layer] for one in found]
        columns: dict[str, list[torch.Tensor | None]] = {
            "entropy": [one.entropy for one in each],
            "effective_keys": [one.effective_keys for one in each],
            "max_weight": [one.max_weight for one in each],
            "collapsed": [one.collapsed for one in each],
            "uniform": [one.uniform for one in each],
            "distance_px": [one.distance for one in each],
            **{share: [one.mass[share] for one in each] for share in SHARES},
        }
        for name, tensors in columns.items():
            values = [float(tensor[0, head]) for tensor in tensors if tensor is not None]
            assert len(values) == 4
            assert number(row, name) == pytest.approx(np.mean(values), rel=1e-5, abs=1e-9)
            assert min(values) - 1e-6 <= number(row, f"{name}_low") <= number(row, name) + 1e-6
            assert number(row, name) - 1e-6 <= number(row, f"{name}_high") <= max(values) + 1e-6
        ratios = [float(one.distance[0, head]) / one.uniform_distance for one in each if one.distance is not None]  # type: ignore[operator]
        assert number(row, "distance_of_uniform") == pytest.approx(np.mean(ratios), rel=1e-5)
        assert number(row, "keys") == np.mean([one.keys for one in each])
    layers = table("stats/layers.csv")
    assert len(layers) == 12
    for place, row in enumerate(layers):
        own = [other for other in rows if other["layer"] == row["layer"]]
        for name in ("entropy", "distance_px", "patches"):
            assert number(row, name) == pytest.approx(np.mean([number(other, name) for other in own]), rel=1e-9)
        pairs = [float(photo[place, i, j]) for photo in apart for i in range(3) for j in range(i)]
        assert number(row, "head_divergence") == pytest.approx(np.mean(pairs), rel=1e-4, abs=1e-9)
        assert number(row, "to_sinks") == 0
        assert sum(number(row, share) for share in SHARES) == pytest.approx(1, abs=1e-5)


def test_photos_are_named_with_size_and_sinks(run: Run, photos: Path, model: Any) -> None:
    assert run("stats", photos, *TINY)[0] == 0
    rows = table("stats/photos.csv")
    assert [row["photo"] for row in rows] == ["a.png", "b.JPG", "c.webp", "more/d.png"]
    assert [(row["height"], row["width"]) for row in rows] == [("60", "90")] * 4
    assert len({row["sha256"] for row in rows}) == 4
    found, _ = by_hand(model, [photos / "b.JPG"])
    assert number(rows[1], "entropy") == pytest.approx(float(np.mean([one.entropy.mean() for one in found[0]])), rel=1e-5)
    assert [row["sinks"] for row in rows] == ["0"] * 4


def test_json_output_and_file_contain_all_tables_and_provenance(run: Run, photos: Path) -> None:
    code, out, _ = run("stats", photos, *TINY, "--json", "-o", "here")
    told = json.loads(out)
    assert code == 0
    assert told.pop("output") == [f"here/{name}" for name in FILES]
    assert told == json.loads(Path("here/stats.json").read_text())
    assert [row["head"] for row in told["heads"][:3]] == [0, 1, 2]
    assert len(told["layers"]) == 12
    assert len(told["photos"]) == 4
    facts = told["provenance"]
    assert facts["random"] is True
    assert facts["method"] == "statistics"
    assert facts["parameters"] == {"photos": 4, "resize": "fit", "confidence": 0.95, "resamples": 2000, "seed": 0}
    for name in ("distance.png", "entropy.png", "mass.png"):
        with Image.open(Path("here", name)) as picture:
            assert json.loads(picture.info["visattn"]) == facts


@pytest.mark.full
def test_intervals_shrink_with_more_photos_and_are_reproducible(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for seed in range(24):
        save(folder / f"{seed:02d}.png", seed)
    widths = {}
    for limit in ("6", "24"):
        code, _, err = run("stats", folder, *TINY, "--limit", limit, "-o", f"stats{limit}")
        assert code == 0
        assert ("intervals of 6 photos are too narrow; take 10 or more" in err) == (limit == "6")
        rows = table(f"stats{limit}/heads.csv")
        widths[limit] = np.mean([number(row, "distance_px_high") - number(row, "distance_px_low") for row in rows])
    assert 1.4 < widths["6"] / widths["24"] < 2.8  # the square root of 4
    assert [row["photo"] for row in table("stats6/photos.csv")] == [f"{seed:02d}.png" for seed in (0, 4, 8, 12, 16, 20)]
    assert run("stats", folder, *TINY, "--limit", "6", "-o", "again")[0] == 0
    assert Path("again/heads.csv").read_bytes() == Path("stats6/heads.csv").read_bytes()


def test_one_photo_has_no_intervals_and_warns(run: Run, photos: Path) -> None:
    code, _, err = run("stats", photos / "more", *TINY)
    assert code == 0
    assert "warning: " in err
    assert "one photo says little about these heads and has no interval" in err
    for row in table("stats/heads.csv"):
        assert {row[name] for name in row if name.endswith(("_low", "_high"))} == {""}
        assert number(row, "entropy") > 0
    assert Path("stats/distance.png").exists()


@pytest.mark.full
def test_window_attention_has_its_own_baselines_and_no_sinks(run: Run, photos: Path) -> None:
    swin = ("--model", "swin_tiny_patch4_window7_224", "--weights", "none")
    code, _, err = run("stats", photos, *swin, "--limit", "2")
    assert code == 0
    assert "sinks are not counted: that needs consecutive layers over one set of tokens" in err
    layers = table("stats/layers.csv")
    assert [row["heads"] for row in layers] == ["3"] * 2 + ["6"] * 2 + ["12"] * 6 + ["24"] * 2
    assert [round(number(row, "distance_nearest_px")) for row in layers] == [4] * 2 + [8] * 2 + [16] * 6 + [32] * 2
    for row in layers:  # random weights attend almost uniformly, also with masks
        assert number(row, "distance_of_uniform") == pytest.approx(1, abs=0.02)
        assert number(row, "effective_keys") == pytest.approx(number(row, "keys"), rel=0.05)
        assert row["to_sinks"] == ""
    assert {row["sinks"] for row in table("stats/photos.csv")} == {""}


def test_layers_without_token_distributions_are_skipped_with_a_note(run: Run, photos: Path) -> None:
    small = ("--weights", "none", "--img-size", "64", "--resize", "fit", "--limit", "1", "--overwrite")
    code, _, err = run("stats", photos, "--model", "cait_xxs24_224", *small)
    assert code == 0
    assert {row["layer"] for row in table("stats/layers.csv")} == {"blocks_token_only.0.attn", "blocks_token_only.1.attn"}
    assert "left out, as rows do not sum to 1: blocks.0.attn, blocks.1.attn" in err
    assert not Path("stats/distance.png").exists()  # the class token has no position on the grid
    code, _, err = run("stats", photos, "--model", "xcit_nano_12_p16_224", *small)
    assert code == 0
    assert "left out, as channels attend to channels: blocks.0.attn" in err
    code, _, err = run("stats", photos, "--model", "resnet18", "--weights", "none", "-o", "none")
    assert code == 4
    assert "no attention captured" in err
    assert not Path("none").exists()


def test_tables_and_a_one_line_note_without_matplotlib(run: Run, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visattn._support.extras.find_spec", lambda _: None)
    code, out, err = run("stats", photos, *TINY, "--limit", "1")
    assert code == 0
    assert [Path(line).suffix for line in out.split()] == [".csv", ".csv", ".csv", ".json"]
    assert (
        "visattn: only tables are written: a plot needs matplotlib, which is not installed. "
        'In the source folder of visattn, run: pip install -e ".[figures]"' in err.splitlines()
    )


@pytest.mark.full
def test_matplotlib_backend_is_kept_and_pyplot_not_imported(photos: Path, tmp_path: Path) -> None:
    code = (
        "import sys, matplotlib; matplotlib.use('svg'); from visattn.cli.commands import _run\n"
        f"assert _run(['stats', {str(photos)!r}, *{TINY!r}, '--limit', '1', '-q', '-o', {str(tmp_path / 'out')!r}], False) == 0\n"
        "print(matplotlib.get_backend(), 'matplotlib.pyplot' in sys.modules)"
    )
    done = python("-c", code)
    assert done.stdout.splitlines()[-1:] == ["svg False"], done.stderr


# ---- bad input --------------------------------------------------------------------------------------------------------------------


def test_bad_photo_is_reported_and_skipped(run: Run, photos: Path) -> None:
    (photos / "bad.png").write_bytes(b"")
    code, out, err = run("stats", photos, *TINY)
    assert code == 1
    assert f"visattn: error: {photos / 'bad.png'}: empty file; check the download or the copy\n" in err
    assert err.count("visattn: error: ") == 1
    assert len(out.split()) == len(FILES)
    assert [row["photo"] for row in table("stats/photos.csv")] == ["a.png", "b.JPG", "c.webp", "more/d.png"]
    assert json.loads(Path("stats/stats.json").read_text())["provenance"]["parameters"]["photos"] == 4


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda folder: None, "no such folder; check the path"),
        (lambda folder: folder.write_text("x"), "a file, not a folder; pass the folder that contains it"),
        (lambda folder: folder.mkdir(), "no visible photos (PNG, JPEG, "),
        (lambda folder: (folder.mkdir(), (folder / "notes.txt").write_text("x")), "in this folder or its subfolders"),
        (lambda folder: (folder.mkdir(), (folder / "a.png").write_text("x")), "not an image (starts with 'x')"),
    ],
    ids=["missing", "file", "empty", "texts", "unreadable"],
)
def test_folder_without_a_photo_exits_with_code_3(run: Run, tmp_path: Path, make: Any, cause: str) -> None:
    make(tmp_path / "in")
    code, out, err = run("stats", tmp_path / "in", "--model", "no_such_model")  # reported before the model is loaded
    assert (code, out) == (3, "")
    assert err.startswith(f"visattn: error: {tmp_path / 'in'}")
    assert cause in err
    assert err.count("\n") == 1
    assert not Path("stats").exists()


@pytest.mark.full
def test_existing_output_is_refused_and_overwrite_replaces_it_completely(run: Run, photos: Path) -> None:
    assert run("stats", photos, *TINY, "--limit", "1")[0] == 0
    before = Path("stats/heads.csv").read_bytes()
    code, _, err = run("stats", photos, "--model", "no_such_model")
    assert code == 2
    assert err == "visattn: error: stats: exists already; pass --overwrite to replace it or choose another name (-o/--output)\n"
    assert run("stats", photos, *TINY, "--limit", "2", "--overwrite")[0] == 0
    assert Path("stats/heads.csv").read_bytes() != before
    Path("stats/mine.txt").write_text("mine")
    code, _, err = run("stats", photos, *TINY, "--overwrite")
    assert code == 2
    assert "stats: holds mine.txt, which would be lost" in err
    assert Path("stats/mine.txt").read_text() == "mine"


def test_the_photos_are_never_the_output(run: Run, photos: Path) -> None:
    code, _, err = run("stats", photos, *TINY, "-o", photos, "--overwrite")
    assert (code, Path(photos, "a.png").exists()) == (2, True)
    assert "which would be lost" in err


@pytest.mark.full
def test_own_plots_and_hidden_files_are_not_read_as_photos(run: Run, photos: Path) -> None:
    (photos / ".thumbnails").mkdir()
    save(photos / ".thumbnails" / "t.png", 9)
    save(photos / "._a.png", 9)
    (photos / "loop").symlink_to(photos)
    for _ in range(2):
        assert run("stats", photos, *TINY, "-o", photos / "stats", "--overwrite")[0] == 0
        assert len(table(str(photos / "stats" / "photos.csv"))) == 4


def test_wrong_limit_is_a_usage_error(run: Run, photos: Path) -> None:
    code, _, err = run("stats", photos, *TINY, "--limit", "0")
    assert code == 2
    assert "'--limit'" in err


def test_progress_bar_is_hidden_without_a_terminal(run: Run, photos: Path) -> None:
    _, _, err = run("stats", photos, *TINY, "--limit", "1")
    assert not [line for line in err.splitlines() if not line.startswith("visattn: ")]
    assert "tqdm" in sys.modules


GATED = "--model", "visattn_cbam_resnet18", "--weights", "none", "--img-size", "64"


def test_gates_of_a_photo_are_what_the_module_multiplies_by(run: Run, photos: Path) -> None:
    code, out, err = run("stats", photos, *GATED, "--limit", "1")
    assert code == 0, err
    assert out.split() == [f"stats/{name}" for name in ("gates.csv", "photos.csv", "stats.json")]
    net, seen = visattn.load_model("visattn_cbam_resnet18", weights="none"), dict[str, torch.Tensor]()
    net.get_submodule("layer2.0.attention").register_forward_hook(lambda _, given, made: seen.update(gate=made / given[0]))
    with torch.no_grad():
        net(visattn.prepare(visattn.load_image(photos / "a.png"), net, img_size=64).pixels)
    rows = {(row["layer"], row["gate"]): row for row in table("stats/gates.csv")}
    assert len(rows) == 16
    channel, spatial = (rows["layer2.0.attention", kind] for kind in ("channel_gate", "spatial_gate"))
    for name, value in (("mean", seen["gate"].mean()), ("least", seen["gate"].min()), ("largest", seen["gate"].max())):
        assert float(channel[name]) * float(spatial[name]) == pytest.approx(float(value), rel=1e-4)  # one after the other


def test_gates_of_photos_have_intervals(run: Run, photos: Path) -> None:
    assert run("stats", photos, *GATED)[0] == 0
    for row in table("stats/gates.csv"):
        for name in ("mean", "deviation", "least", "largest"):
            assert float(row[f"{name}_low"]) <= float(row[name]) <= float(row[f"{name}_high"])
        assert 0 <= float(row["least"]) <= float(row["mean"]) <= float(row["largest"]) <= 1


def test_a_model_with_neither_attention_nor_gates_is_refused(run: Run, photos: Path) -> None:
    code, _, err = run("stats", photos, "--model", "resnet18", "--weights", "random", "--img-size", "64")
    assert code != 0
    assert err.splitlines()[-1].startswith("visattn: error: ")


def test_a_loop_of_links_is_no_folder(run: Run, photos: Path) -> None:
    (photos.parent / "loop").symlink_to(photos.parent / "loop")
    code, _, err = run("stats", photos, *TINY, "-o", "loop")
    assert code == 2
    assert "loop: cannot be a folder" in err


def test_gates_of_a_module_that_is_called_twice_are_counted_apart() -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.gate = torch.nn.Conv2d(3, 16, 3, 2, 1), ATTENTION["se"](16)

        def forward(self, x: Any) -> Any:
            return self.gate(-self.gate(self.stem(x))).mean((2, 3))

    survey = visattn.Survey(Twice().eval(), img_size=32)
    survey.add(visattn.load_image("photo:coffee"), "a")
    rows = survey.gates()
    assert [row["layer"] for row in rows] == ["gate", "gate #1"]
    assert rows[0]["mean"] != rows[1]["mean"]
