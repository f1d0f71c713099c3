"""Signals that end a command: nothing is left beside the output, and the exit code names the signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.samples import sampled

COMMAND = [
    "video",
    "photo:chelsea",
    "--walk",
    "400",
    "--model",
    "vit_tiny_patch16_224",
    "--weights",
    "none",
    "--method",
    "attention",
]


@pytest.mark.parametrize("how", sampled([signal.SIGTERM, signal.SIGHUP, signal.SIGINT], 3))
def test_a_film_that_is_ended_leaves_nothing(how: signal.Signals, tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp"), "OMP_NUM_THREADS": "1"}
    (tmp_path / "tmp").mkdir()
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-m", "visattn", *COMMAND, "-o", str(tmp_path / "out" / "walk.gif")]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not list((tmp_path / "out").glob(".visattn-*")) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(how)
        try:
            _, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 128 + how, err
    assert "Traceback" not in err
    assert not list((tmp_path / "out").iterdir())
    assert not list((tmp_path / "tmp").iterdir())
