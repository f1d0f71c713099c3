"""Seconds of `visattn --help`, and of a command that needs weights and reaches no network; exits 1 if a bound is exceeded."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from visattn._support.tables import to_text


def main() -> int:
    """Print each figure with its bound; return 1 if one is exceeded."""
    rows = [
        {"figure": "visattn --help, median of 20, ms", "seen": round(help_time() * 1000), "bound": 150},
        {"figure": "overlay without hub and cache ends, s", "seen": round(offline_time(), 1), "bound": 10},
    ]
    print(to_text(rows))
    return int(any(float(str(row["seen"])) > float(str(row["bound"])) for row in rows))


def help_time() -> float:
    """Measure the median time of `visattn --help` in seconds."""
    command = [str(Path(sys.executable).parent / "visattn"), "--help"]
    times = []
    for _ in range(20):
        started = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def offline_time() -> float:
    """Measure the seconds until `visattn overlay` fails without a network and with an empty cache."""
    with tempfile.TemporaryDirectory() as empty:
        nowhere = {**os.environ, "HF_HOME": empty, "HF_ENDPOINT": "http://127.0.0.1:9"}
        started = time.perf_counter()
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "visattn",
                "overlay",
                "photo:coffee",
                "--model",
                "vit_tiny_patch16_224",
                "-o",
                f"{empty}/out.png",
            ],
            env=nowhere,
            capture_output=True,
            text=True,
            check=False,
        )
        print(f"exit {done.returncode}: {done.stderr.strip()}")
        return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
