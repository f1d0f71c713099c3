"""The GPU benchmark: it says that there is no GPU, and its code runs on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench_gpu.py"


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.full
def test_it_says_that_there_is_no_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    done = bench()
    assert done.returncode == 2
    assert done.stdout == ""
    assert "no GPU here, so nothing was measured" in done.stderr


@pytest.mark.full
def test_its_code_runs_on_the_cpu() -> None:
    done = bench("--device", "cpu", "--smoke")
    assert done.returncode in (0, 1), done.stderr  # speed differs between machines
    rows = done.stdout.splitlines()[2:-1]
    assert [line.split("  ")[0] for line in rows[:2]] == [
        f"attention x values against the kernel's output, {name}" for name in ("float32", "bfloat16")
    ]
    assert all("  ok  " in line for line in rows[:2])
    assert [line.split("  ")[0] for line in rows[2:6]] == [
        f"{run}, 224 px / forward pass" for run in ("empty function mode", "capture", "explain, attention", "explain, rollout")
    ]
    assert len(rows) == 8
