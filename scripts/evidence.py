"""Checks that are too slow or too demanding for the tests: start-up time, runs without a network, a clean installation."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from visattn._support.tables import to_text
from visattn.data import photo_path

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Print each figure with its bound; return 1 if one is exceeded."""
    rows = [
        {"figure": "visattn --help, median of 20, ms", "seen": round(help_time() * 1000), "bound": 150},
        {"figure": "overlay without hub and cache ends, s", "seen": round(offline_time(), 1), "bound": 10},
    ]
    if "--quick" not in sys.argv:
        rows.append({"figure": "wheel in a clean environment: commands that failed", "seen": clean_install(), "bound": 0})
        rows.append(
            {"figure": "200 kills while saving, then 20 of trainings: loops that lost something", "seen": kills(), "bound": 0}
        )
        for figure, name in (
            ("gradients of hard attention against all paths: bounds exceeded", "estimator.py"),
            ("captions of 2,000 scenes: bounds missed", "captions.py"),
        ):
            status = subprocess.run([sys.executable, str(ROOT / "scripts" / name)], check=False).returncode
            rows.append({"figure": figure, "seen": status, "bound": 0})
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


def kills() -> int:
    """Kill training runs at random moments, print the results, and return the number of loops in which data was lost."""
    loops = (("saves", "200"), ("runs", "20"))
    return sum(
        subprocess.run([sys.executable, "-m", "tests.training.kills", *loop], cwd=ROOT, check=False).returncode != 0
        for loop in loops
    )


def clean_install() -> int:
    """Build the wheel, install it with all dependencies into a new environment, and run it from another folder."""
    failed = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tracked = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
        (folder / "source").mkdir()
        subprocess.run(["tar", "-x", "-C", str(folder / "source")], input=tracked, check=True)
        subprocess.run([sys.executable, "-m", "build", "--wheel", str(folder / "source")], check=True, capture_output=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True)
        python = str(folder / "env" / "bin" / "python")
        wheel = str(next((folder / "source" / "dist").glob("*.whl")))
        subprocess.run([python, "-m", "pip", "install", "--quiet", wheel], check=True, capture_output=True)
        photo = str(photo_path("rocket"))
        for command in (
            ["-c", "import visattn.models"],
            ["-m", "visattn", "demo", "-q", "-o", str(folder / "demo")],
            [
                "-m",
                "visattn",
                "overlay",
                photo,
                "--model",
                "vit_tiny_patch16_224",
                "--weights",
                "none",
                "-q",
                "-o",
                str(folder / "o.png"),
            ],
        ):
            done = subprocess.run([python, *command], cwd=folder, capture_output=True, text=True, check=False)
            print(
                f"exit {done.returncode}: {' '.join(command[:3])} {done.stderr.strip().splitlines()[-1:] if done.returncode else ''}"
            )
            failed += done.returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
