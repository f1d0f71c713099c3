"""The ways through the package grow no longer: functions, files and depth of a photo and of an attention call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WALK = Path(__file__).parents[1] / "scripts" / "walk.py"


def test_no_way_is_longer_than_its_budget() -> None:
    ways = "a photo through overlay", "an attention call, first forward", "an attention call, third forward"
    only = [word for way in ways for word in ("--only", way)]
    done = subprocess.run([sys.executable, str(WALK), *only], capture_output=True, text=True, check=False)
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [*ways], done.stdout + done.stderr
    assert done.returncode == 0
