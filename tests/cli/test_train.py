"""Command `visattn train classify` as a user runs it: options, files, output and exit codes."""

from __future__ import annotations

import json
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from tests.cli.test_commands import Run, run
from tests.training.small import pictures, recipe, written
from visattn.training import Config

__all__ = ["run"]

QUICK = (
    "--epochs",
    "0.4",
    "--batch-size",
    "4",
    "--img-size",
    "16",
    "--model",
    "visattn_resnet14",
    "--device",
    "cpu",
    "--augment",
    "none",
)
NARROW = ("--widths", "4", "--widths", "4", "--widths", "8")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return pictures(tmp_path / "data")


def test_help_lists_every_setting(run: Run) -> None:
    code, out, _ = run("train", "classify", "--help")
    assert code == 0
    for setting in fields(Config):
        assert f"--{setting.name.replace('_', '-')}" in out


def test_run_folder_contains_all_documented_files(run: Run, data: Path, tmp_path: Path) -> None:
    code, out, err = run("train", "classify", "--data", data, *QUICK, *NARROW, "-q", "-o", "run")
    assert (code, err) == (0, "")
    assert out.startswith("run: test accuracy ")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"config.toml", "log.jsonl", "log.csv", "speed.jsonl", "checkpoints", "final", "README.md", "result.json"} <= names
    assert not [name for name in names if name.startswith(".visattn")]
    assert run("train", "classify", "--data", data, *QUICK, *NARROW, "-q", "-o", "run") == (0, out, "")


@pytest.mark.parametrize("options", [("--seeds", "2"), ("--compare", "se", "--force"), ("--compare", "se", "--overwrite")])
def test_conflicting_options_are_refused(run: Run, data: Path, options: tuple[str, ...]) -> None:
    code, out, err = run("train", "classify", "--data", data, *QUICK, *options, "-o", "run")
    assert (code, out) == (2, "")
    assert "--compare" in err
    assert not Path("run").exists()


def test_a_comparison_under_torchrun_is_refused(run: Run, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = run("train", "classify", "--data", data, *QUICK, "--compare", "se", "-o", "run")
    assert code == 2
    assert "in a single process" in err


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "x"}, "RANK must be a whole number from 0 to 0, got 'x'."),
        ({"RANK": "3"}, "RANK must be a whole number from 0 to 0, got '3'."),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be a whole number from 1 to 65536, got 'two'."),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be a whole number from 1 to 65536, got '0'."),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE must be a whole number from 1 to 65536, got '9"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK must be a whole number from 0 to 1, got '2'."),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK must be a whole number from 0 to 1, got '-1'."),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "\x1b"}, "LOCAL_RANK must be a whole number from 0 to 1, got '\\x1b'."),
        ({"WORLD_SIZE": "2"}, "cannot connect to the other 1 processes ("),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "x"}, "cannot connect to the other 1 processes ("),
    ],
    ids=str,
)
def test_invalid_torchrun_environment_gives_a_one_line_error(
    run: Run, data: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    code, out, err = run("train", "classify", "--data", data, *QUICK, "-o", "run")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not Path("run").exists()


def test_device_without_values_is_refused(run: Run, data: Path) -> None:
    code, _, err = run("train", "classify", "--data", data, *QUICK, "--device", "meta", "-o", "run")
    assert code == 4
    assert "device 'meta' does not work on this machine" in err


def test_json_output_is_the_result(run: Run, data: Path, tmp_path: Path) -> None:
    code, out, _ = run("train", "classify", "--data", data, *QUICK, *NARROW, "-q", "--json", "-o", "run")
    assert code == 0
    assert json.loads(out) == json.loads((tmp_path / "run" / "result.json").read_text())
    assert json.loads(out)["steps"] == 1


def test_options_override_the_file_and_a_dry_run_prints_the_merged_config(run: Run, data: Path, tmp_path: Path) -> None:
    file = written(recipe(data, lr=0.3, ema=0.5), tmp_path / "recipe.toml")
    options = ("--lr", "0.2", "--model-kwargs", "act=relu", "--model-kwargs", "rate=0.5", "--channels-last", *NARROW)
    code, out, _ = run("train", "classify", "--config", file, *options, "--dry-run", "-o", "run")
    assert code == 0
    values = tomllib.loads(out)
    assert (values["lr"], values["ema"], values["channels_last"]) == (0.2, 0.5, True)
    assert values["widths"] == [4, 4, 8]
    assert values["model_kwargs"] == {"act": "relu", "rate": 0.5}
    assert not (tmp_path / "run").exists()
    (tmp_path / "again.toml").write_text(out)
    assert run("train", "classify", "--config", "again.toml", "--dry-run", "-o", "run")[1] == out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model-kwargs", "act"), "--model-kwargs must be KEY=VALUE, got 'act'."),
        (("--model-kwargs", "act=null"), "model_kwargs must be numbers, strings, booleans or lists of these, got act=None."),
        (("--lr", "0"), "lr must be a finite number above 0, at most 1e9, got 0.0."),
        (("--attention", "cbm"), "unknown attention 'cbm'"),
        (("--augment", "flop"), "'flop' is not one of"),
        (("--config", "none.toml"), "none.toml: cannot be read (no such file or directory). Check the path (--config)."),
        (("--seeds", "0"), "--seeds"),
        (("--device", "tpu9"), "unknown device 'tpu9'. Choose auto, cpu, cuda or cuda:N."),
        (("--data", "cifar11"), "did you mean 'cifar10'?"),
        (("--crop-scale", "0.5", "1"), "--crop-scale needs --augment imagenet, got flip. Change one of them."),
        (("--opt", "sdg"), "unknown opt 'sdg'; did you mean 'sgd'?"),
        (
            ("--opt", "adam", "--momentum", "0.5"),
            "--momentum needs an optimizer that has one, got 0.5 for adam. Leave it out.",
        ),
        (("--opt", "adahessian"), "opt must be a first-order optimizer, got adahessian"),
        (
            ("--root", "photos"),
            "root needs one of the datasets fashion-mnist, fashion-mnist-cluttered, fashion-mnist-turned, cifar10, cifar100, got ",
        ),
        (
            ("--data", "scenes", "--root", "photos"),
            "root needs one of the datasets fashion-mnist, fashion-mnist-cluttered, fashion-mnist-turned, cifar10, cifar100, got scenes.",
        ),
        (
            ("--compare", "se", "--attention", "cbam"),
            "--compare names the attention of each variant, got --attention cbam too.",
        ),
        (("--compare", ""), "a comparison needs a variant besides the plain network and at least one seed, got []"),
        (
            ("--force", "--overwrite"),
            "--overwrite starts a new run and --force resumes one, so they cannot be combined. Leave one out.",
        ),
        (("--model", "visattn_ram", "--mixup", "0.5"), "visattn_ram needs hard labels for its reward"),
    ],
)
def test_bad_options_exit_with_code_2_and_a_one_line_error(run: Run, data: Path, options: tuple[str, ...], message: str) -> None:
    code, out, err = run("train", "classify", "--data", data, "--batch-size", "4", "-q", "-o", "run", *options)
    assert (code, out) == (2, "")
    assert not Path("run").exists()
    assert err.startswith("visattn: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_output_folder_without_a_run_is_refused(run: Run, data: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.png").write_bytes(b"")
    for more in ((), ("--overwrite",)):
        code, _, err = run("train", "classify", "--data", data, *QUICK, "-q", "-o", "photos", *more)
        assert code == 2
        assert "photos: holds files that do not belong to a run; choose another folder (-o/--output)" in err
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["me.png"]


def test_output_option_is_required(run: Run) -> None:
    code, _, err = run("train", "classify", "--data", "scenes")
    assert code == 2
    assert "'-o' / '--output'" in err


def test_deeply_nested_model_option_gives_a_one_line_error(run: Run, data: Path) -> None:
    for value in ("[" * 50_000, "[" * 900 + "]" * 900):
        code, out, err = run("train", "classify", "--data", data, *QUICK, "-q", "-o", "run", "--model-kwargs", f"a={value}")
        assert code in (2, 4)
        assert (out, err.count("\n")) == ("", 1)
        assert len(err) < 1000


def test_control_characters_of_names_are_escaped(run: Run, data: Path, tmp_path: Path) -> None:
    name = "r\x1b]0;x\x07\x9b\u202e"
    code, out, err = run("train", "classify", "--data", data, *QUICK, *NARROW, "-q", "-o", name)
    assert (code, err) == (0, "")
    assert out.startswith("r\\x1b]0;x\\x07\\x9b\\u202e: test accuracy ")
    for more in (("--data", name, "--dry-run"), ("--model-kwargs", f"{name}={name}", "--dry-run")):
        _, out, _ = run("train", "classify", *more, "-o", "x")
        assert all(c.isprintable() or c == "\n" for c in out)
        (tmp_path / "again.toml").write_text(out)
        assert run("train", "classify", "--config", "again.toml", "--dry-run", "-o", "x")[1] == out
