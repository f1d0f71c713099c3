"""Calls of functions and reads of values per explanation: counts, which no machine changes, stay within the bounds of the benchmark."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[1] / "scripts" / "benchmark.py"


def test_counts_are_within_their_bounds() -> None:
    done = subprocess.run([sys.executable, str(BENCHMARK), "--only", "counts"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n0 of 8 bounds exceeded" in done.stdout
