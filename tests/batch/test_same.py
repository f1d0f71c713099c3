"""A run that goes on: it notices other settings, another model and other versions, and says so."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests import tiny
from tests.cli.test_commands import Run, run
from visattn.batch import Asked, Batches, Journal, Ledger, Outcome, Wanted, Work, items_of, run as run_batches, settings
from visattn.batch.map_samples import TOLERANCE, distance
from visattn.batch.settings import plain, settings_of, structure_of
from visattn.core.pipeline.preprocessing import Preprocessing
from visattn.core.pipeline.question import ask
from visattn.core.provenance import versions
from visattn.errors import OutputError

__all__ = ["run"]

MODEL = """
import timm, torch
def vit():
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32)
    return change(model)
def change(model):
    return model
"""
OPTIONS = "--model", "own.py:vit", "--method", "rollout", "--batch-size", "1", "-o", "out"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a model, two photos, and go there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(MODEL)
    (tmp_path / "photos").mkdir()
    for number, color in enumerate(("red", "lime")):
        Image.radial_gradient("L").resize((40, 40)).convert("RGB").rotate(90 * number, fillcolor=color).save(
            tmp_path / "photos" / f"{number}.png"
        )
    return tmp_path


def changed(line: str) -> str:
    return MODEL.replace("    return model\n", f"    {line}\n    return model\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("model.blocks[1].norm1.eps = 1e-3", "modules.blocks.*.norm* LayerNorm((192,), eps=1e-06"),
        ("model.blocks[0].attn.num_heads, model.blocks[0].attn.head_dim = 6, 32", "num_heads=6"),
        ("model.head.weight.data += 1", "weights "),
        (
            "model.blocks[0].attn.forward = (lambda f: lambda x, **k: f(2 * x, **k))(model.blocks[0].attn.forward)",
            "computes something else",
        ),
    ],
)
def test_another_model_behind_the_same_name_is_refused(line: str, message: str, run: Run, place: Path) -> None:
    assert run("batch", "photos", *OPTIONS)[0] == 0
    before = {path: path.read_bytes() for path in (place / "out").rglob("*.*")}
    (place / "own.py").write_text(changed(line))
    (place / "photos" / "1.png").write_bytes((place / "photos" / "0.png").read_bytes())
    code, _, err = run("batch", "photos", *OPTIONS)
    assert code == 2, err
    assert len(err.strip().splitlines()) == 1
    assert "--accept-changes" in err
    assert message in err
    assert "all modules" not in err
    assert {path: path.read_bytes() for path in (place / "out").rglob("*.*")} == before
    code, _, err = run("batch", "photos", *OPTIONS, "--accept-changes")
    assert code == 0, err
    assert "accepted: " in err
    lines = map(json.loads, (place / "out" / "journal.jsonl").read_text().splitlines())
    heads = [line for line in lines if isinstance(line, dict) and "settings" in line]
    assert len(heads) == 2
    assert heads[1]["changed"]
    code, _, err = run("batch", "photos", *OPTIONS)
    assert code == 0, err
    assert "0 images, 2 from an earlier run" in err


def test_another_version_with_equal_results_goes_on_and_says_so(run: Run, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("batch", "photos", *OPTIONS)[0] == 0
    own = versions
    monkeypatch.setattr(settings, "versions", lambda: {**own(), "torch": "9.9"})
    monkeypatch.setattr(settings, "processor", lambda: "another")
    code, _, err = run("batch", "photos", *OPTIONS)
    assert code == 0, err
    assert f"torch {torch.__version__.split('+')[0]}" in err
    assert "-> 9.9" in err
    assert "-> another" in err
    assert "is equal within 0.001 of the largest value" in err
    code, _, err = run("batch", "photos", *OPTIONS)
    assert code == 0
    assert "9.9" not in err, "it was written down"


def test_another_version_with_other_results_is_refused(run: Run, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("batch", "photos", *OPTIONS)[0] == 0
    journal = place / "out" / "journal.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    lines[0]["made_by"]["torch"] = "1.0"
    (first, *_) = [line for line in lines if isinstance(line, list)]
    first[7][0] *= 1 + 2 * TOLERANCE
    journal.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    code, _, err = run("batch", "photos", *OPTIONS)
    assert code == 2
    assert "differs by 0.002 of its largest value (torch 1.0 -> " in err
    first[7][0] *= (1 + TOLERANCE / 2) / (1 + 2 * TOLERANCE)
    journal.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert run("batch", "photos", *OPTIONS)[0] == 0


def test_a_field_that_is_added_to_the_request_is_a_setting(place: Path) -> None:
    """Add a field to `Wanted`, with no other change: a run with another value keeps nothing of the former one."""
    more: Any = dataclasses.make_dataclass("More", [("sharp", bool, False)], bases=(Wanted,), frozen=True, eq=False)
    model, items = tiny.vit(), items_of([place / "photos"])
    (place / "out").mkdir()

    def go(kind: Callable[..., Any], **given: Any) -> Outcome:
        work = Work(Asked(ask("rollout"), Preprocessing()), kind(place / "out", "rollout", **given))
        with Journal(place / "out" / "journal.jsonl", settings_of(work, model, "tiny", 1)) as journal:
            return run_batches(model, Ledger(items, journal, Batches(1)), work)

    assert go(more) == Outcome(2, 0, 0)
    assert go(more) == Outcome(0, 2, 0)
    with pytest.raises(OutputError, match=r"other settings \(sharp false -> true\)"):
        go(more, sharp=True)
    with pytest.raises(OutputError, match=r"other settings \(sharp false -> null\)"):
        go(Wanted)


def test_every_field_of_the_request_decides_but_those_that_say_so() -> None:
    work = Work(Asked(ask("rollout"), Preprocessing()), Wanted(Path("out"), "rollout"))
    told = json.dumps(plain(work))
    names = {
        field.name
        for part in (work, work.wanted, work.asked.question, work.asked.question.target, work.asked.how)
        for field in dataclasses.fields(part)
    }
    assert {name for name in names if f'"{name}"' not in told} == {"folder", "method", "threads", "max_bytes", "max_pixels"}


def test_structure_tells_each_module_and_nothing_of_one_run() -> None:
    model: Any = tiny.vit()
    before, made_by = structure_of(model), settings.maker(model)
    assert structure_of(tiny.vit()) == before
    assert settings.maker(tiny.vit()) == made_by
    for module in list(model.modules())[1:]:
        module.an_own_number = 3
        assert settings.maker(model) != made_by
        del module.an_own_number
        module.extra_repr = lambda: "another"
        assert structure_of(model) != before
        del module.extra_repr
    assert structure_of(model) == before


def test_distance_of_samples() -> None:
    assert distance((1.0, None, 2.0), (1.0, None, 2.002)) == pytest.approx(0.001, rel=1e-2)
    assert distance((0.0,), (0.0,)) == 0
    assert distance((1.0,), (1.0, 2.0)) == distance((1.0,), (None,)) == float("inf")


def test_a_refused_run_leaves_nothing_behind(run: Run, place: Path) -> None:
    (place / "deep").mkdir()
    (place / "deep" / "0.rollout.png").write_bytes(b"mine")
    options = [*OPTIONS[:-1]]
    assert run("batch", "photos", *options, "deep")[0] == 2
    assert [path.name for path in (place / "deep").iterdir()] == ["0.rollout.png"]
    assert run("batch", "photos", *options, "photos/new/inner", "--method", "gradcam", "--target", "99999")[0] == 2
    assert not (place / "photos" / "new").exists()


def test_files_of_somebody_else_are_not_replaced_by_a_later_run(run: Run, place: Path) -> None:
    assert run("batch", "photos", *OPTIONS)[0] == 0
    (place / "out" / "2.rollout.png").write_bytes(b"precious")
    (place / "photos" / "2.png").write_bytes((place / "photos" / "0.png").read_bytes())
    code, _, err = run("batch", "photos", *OPTIONS)
    assert code == 2
    assert "out/2.rollout.png: exists already, and no journal of this run names it" in err
    assert (place / "out" / "2.rollout.png").read_bytes() == b"precious"


def test_a_higher_limit_goes_on(run: Run, place: Path) -> None:
    code, _, err = run("batch", "photos", *OPTIONS, "--max-pixels", "1000")
    assert code == 1
    assert "raise --max-pixels" in err
    assert run("batch", "photos", *OPTIONS, "--max-pixels", "100000")[0] == 0


@pytest.mark.parametrize(
    "line",
    [
        "import uuid; model.token = uuid.uuid4().hex",
        "import time; model.built = time.time()",
        "import tempfile; model.folder = tempfile.gettempdir()",
        "model.own = id(model)",
        "import random; model.blocks[0].attn.scale *= random.random()",  # which its fused kernel does not read
        "model.names = tuple({'alpha', 'beta', 'gamma', 'delta'})",
        "model.extra_repr = lambda: repr(lambda: 0)",
    ],
)
def test_what_differs_between_two_loads_of_one_model_does_not_end_a_run(line: str, run: Run, place: Path) -> None:
    (place / "own.py").write_text(changed(line))
    assert run("batch", "photos", *OPTIONS)[0] == 0
    code, _, err = run("batch", "photos", *OPTIONS)
    assert code == 0, err
    assert "0 images, 2 from an earlier run" in err


def test_buffers_that_are_not_saved_are_settings(run: Run, place: Path) -> None:
    line = "model.register_buffer('own', torch.tensor([{}.0]), persistent=False)"
    (place / "own.py").write_text(changed(line.format(1)))
    assert run("batch", "photos", *OPTIONS)[0] == 0
    (place / "own.py").write_text(changed(line.format(2)))
    code, _, err = run("batch", "photos", *OPTIONS)
    assert code == 2
    assert "other settings (buffers " in err
