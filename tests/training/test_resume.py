"""Resumed runs are bit-identical to uninterrupted ones. Other failures are in `test_bad_training.py`."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Figures
from tests.training import kills
from tests.training.small import (
    EVERYTHING,
    before_step,
    begun,
    command,
    content,
    different,
    ended,
    fork,
    forked,
    recipe,
    states,
    written,
)
from visattn.errors import OptionError
from visattn.training import Config, train

pytestmark = pytest.mark.full

DROPOUT = """
from torch import nn

def small(num_classes, in_channels):
    return nn.Sequential(nn.Conv2d(in_channels, 4, 3), nn.Dropout(0.3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, num_classes))
"""


@pytest.fixture(scope="module")
def unbroken(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the content of an uninterrupted run with default settings."""
    run = tmp_path_factory.mktemp("unbroken") / "run"
    train(recipe(data), run)
    return content(run)


def test_kills_during_a_save_lose_no_checkpoint(tmp_path: Path, figures: Figures) -> None:
    seen = kills.saves(25, tmp_path)
    figures("training states lost by 25 kills while saving", 0, f"0; {seen['in a save']} in a save")
    assert seen["in a save"] > 0


def test_killed_and_resumed_training_is_bit_identical(tmp_path: Path, figures: Figures) -> None:
    places, compared = kills.runs(6, tmp_path)
    figures("trainings that 6 kills changed", 0, f"0 of {compared}; {kills._told(places)}")
    assert places.total() == 6


def test_comparison_of_runs_detects_one_bit(data: Path, unbroken: dict[str, Any], tmp_path: Path) -> None:
    train(recipe(data, lr=0.05000000000000001), tmp_path / "run")
    wrong = different(content(tmp_path / "run"), unbroken)
    assert {"facts", "log.jsonl"} <= set(wrong)
    name = "model conv1.weight"
    kind, shape, bits = unbroken[name]
    assert different({**unbroken, name: (kind, shape, bytes([bits[0] ^ 1]) + bits[1:])}, unbroken) == [name]


@pytest.mark.parametrize("steps", [0, 3, 7])
def test_crash_after_any_step_does_not_change_the_result(
    data: Path, unbroken: dict[str, Any], tmp_path: Path, steps: int
) -> None:
    train(recipe(data), begun(recipe(data), tmp_path / "run", steps))
    assert not different(content(tmp_path / "run"), unbroken)


def test_dropout_random_state_is_resumed(data: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(DROPOUT)
    config = recipe(data, model=f"{tmp_path}/own.py:small", widths=())
    train(config, tmp_path / "unbroken")
    train(config, begun(config, tmp_path / "run"))
    assert not different(content(tmp_path / "run"), content(tmp_path / "unbroken"))


@pytest.mark.parametrize("place", ["final", "result.json", "log.csv"])
def test_crash_at_the_end_does_not_change_the_result(data: Path, unbroken: dict[str, Any], tmp_path: Path, place: str) -> None:
    run = tmp_path / "run"
    train(recipe(data), run)
    (run / "result.json").unlink()
    for path in (run / place, run / "final" / "model.json"):  # removed, or partly removed
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    train(recipe(data), run)
    assert not different(content(run), unbroken)


def test_result_does_not_depend_on_worker_count(data: Path, tmp_path: Path) -> None:
    config = recipe(data, **EVERYTHING)
    train(config, tmp_path / "two")
    begun(config, tmp_path / "mixed", 3)
    train(replace(config, workers=0), tmp_path / "mixed")
    assert not different(content(tmp_path / "mixed"), content(tmp_path / "two"))


def test_resume_with_another_batch_size_is_refused(data: Path, tmp_path: Path) -> None:
    run = begun(recipe(data), tmp_path / "run")
    with pytest.raises(
        OptionError,
        match=r"was started with other settings: batch_size 4 -> 6\. Choose another folder, or pass force=True",
    ):
        train(recipe(data, batch_size=6), run)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"])
def test_signal_saves_a_checkpoint_and_resume_is_bit_identical(
    data: Path, unbroken: dict[str, Any], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    file, run = written(recipe(data), tmp_path / "config.toml"), tmp_path / "run"

    def interrupted() -> int:
        with before_step(4, lambda: os.kill(os.getpid(), number)):
            return command("--config", file, "-o", run)

    stopped = ended(fork(interrupted, tmp_path / "log"), tmp_path / "log")
    assert stopped == (code, "visattn: stopped at step 5; run the same command to resume\n")
    assert states(run)[-1].name == "step_00000005"
    assert not (run / "result.json").exists()
    assert forked("--config", file, "-o", run).code == 0
    assert not different(content(run), unbroken)


def test_second_signal_exits_at_once(data: Path, tmp_path: Path) -> None:
    file, run = written(recipe(data), tmp_path / "config.toml"), tmp_path / "run"

    def twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)

    def impatient() -> int:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with before_step(4, twice):
            return command("--config", file, "-o", run)

    found = ended(fork(impatient, tmp_path / "log"), tmp_path / "log")
    assert found.code == 128 + signal.SIGTERM
    assert "stopped at step" not in found.text, "it did not wait for the end of the step"


def test_signal_to_the_process_group_keeps_workers_until_the_save(data: Path, tmp_path: Path) -> None:
    file, run = written(recipe(data, workers=2), tmp_path / "config.toml"), tmp_path / "run"

    def interrupted() -> int:
        os.setpgrp()
        with before_step(1, lambda: os.killpg(0, signal.SIGTERM)):
            return command("--config", file, "-o", run)

    assert ended(fork(interrupted, tmp_path / "log"), tmp_path / "log").code == 143
    assert states(run)[-1].name == "step_00000002"


def test_signal_handlers_are_restored(data: Path, tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    begun(recipe(data), tmp_path / "run", 1)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_training_works_in_a_thread(data: Path, unbroken: dict[str, Any], tmp_path: Path) -> None:
    thread = threading.Thread(target=train, args=(recipe(data), tmp_path / "run"))
    thread.start()
    thread.join()
    assert not different(content(tmp_path / "run"), unbroken)


@pytest.mark.parametrize("spoil", [lambda log: log.write_bytes(log.read_bytes() + b'{"step": 6, "lo'), lambda log: log.unlink()])
def test_truncated_log_is_repaired(data: Path, unbroken: dict[str, Any], tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    run = begun(recipe(data), tmp_path / "run")
    spoil(run / "speed.jsonl")
    train(recipe(data), run)
    assert all(line.endswith("}") for line in (run / "speed.jsonl").read_text().splitlines())
    assert not different(content(run), unbroken)


def test_a_finished_run_is_not_trained_again(data: Path, tmp_path: Path) -> None:
    config, run = recipe(data), tmp_path / "run"
    result = train(config, run)
    with before_step(0, lambda: pytest.fail("trained again")):
        assert train(config, run) == result


def test_overwrite_restarts_a_killed_run(data: Path, unbroken: dict[str, Any], tmp_path: Path) -> None:
    run = begun(recipe(data, lr=0.5), tmp_path / "run")
    (run / ".visattn-a").mkdir()
    (run / ".visattn-b").write_text("half")
    train(recipe(data), run, overwrite=True)
    assert not different(content(run), unbroken)
    assert not list(run.glob(".visattn-*"))


def test_overwrite_refuses_a_folder_with_other_files(data: Path, tmp_path: Path) -> None:
    run = begun(recipe(data), tmp_path / "run")
    (run / "thesis.txt").write_text("mine")
    with pytest.raises(OSError, match=r"holds thesis\.txt, which would be lost"):
        train(recipe(data), run, overwrite=True)
    assert (run / "thesis.txt").read_text() == "mine"
    assert states(run)


def test_force_resumes_with_a_changed_config(data: Path, tmp_path: Path) -> None:
    config: Config = recipe(data, lr=0.01)
    result = train(config, begun(recipe(data), tmp_path / "run"), force=True)
    assert result.steps == 8
    assert "lr = 0.01" in (tmp_path / "run" / "config.toml").read_text()
