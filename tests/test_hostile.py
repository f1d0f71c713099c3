"""A few hostile inputs of each kind. `python -m tests.hostile` runs any number of them with the same judge."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile import KINDS

pytestmark = pytest.mark.full

COUNT = len(KINDS)


@pytest.mark.parametrize("net", [True, False], ids=["with the nets", "without the nets"])
def test_hostile_inputs_give_a_result_or_a_one_line_error(net: bool) -> None:
    """Run in a separate process, since it forks children, which a process with threads must not do."""
    options = ["--count", str(COUNT), "--seed", str(2 - net), *([] if net else ["--no-net"])]
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile", *options],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{COUNT} hostile inputs with{'' if net else 'out'} the nets (seed {2 - net}): 0 wrong")


def test_oracles_of_the_hostile_inputs_can_fail() -> None:
    """Run in a separate process, since it forks and takes a file system of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.oracles"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stdout + done.stderr
