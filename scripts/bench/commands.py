"""CPU time of whole commands as JSON: `python -m bench.commands ROUNDS`. `by_hand.py` is what `visattn overlay` is compared with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median
from typing import Any

import numpy as np

from bench.shared import THREADS
from visattn import data

SIDES = 224, 518
VISATTN = str(Path(sys.executable).parent / "visattn")
_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}  # as users run it


def cpu_time(*command: str, status: int = 0) -> float:
    """Run a command and return its CPU seconds, user and system.

    Raises:
        RuntimeError: If it ends with another status.
    """
    before = getrusage(RUSAGE_CHILDREN)  # to the microsecond; `os.times` counts hundredths
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**_ENVIRONMENT, "OMP_NUM_THREADS": str(THREADS)}
    )
    after = getrusage(RUSAGE_CHILDREN)
    if done.returncode != status:
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}: {done.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(rounds: int) -> dict[str, Any]:
    """Return CPU seconds of each command, and the largest difference of the two maps of each size, relative to the largest value."""
    photo, weights = str(data.photo_path("coffee")), str(data.offline_weights())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commands: dict[str, tuple[list[str], int]] = {
            "python": ([sys.executable, "-c", "pass"], 0),
            "--help": ([VISATTN, "--help"], 0),
            "list": ([VISATTN, "list", "vit_*"], 0),
            "doctor": ([VISATTN, "doctor"], 0),
            "refused input": ([VISATTN, "overlay", str(folder / "missing.png")], 3),
        }
        for side in SIDES:
            hand = [str(Path(__file__).with_name("by_hand.py")), photo, weights, str(side)]
            commands[f"by hand {side}"] = [sys.executable, *hand, str(folder / "hand.png"), str(folder / f"hand_{side}.npy")], 0
            ours = [
                "overlay",
                photo,
                "--model",
                data.OFFLINE_MODEL,
                "--weights",
                weights,
                "--method",
                "attention",
                "--fusion",
                "mean",
            ]
            ours += ["--img-size", str(side), "--resize", "model", "--quiet", "--overwrite", "-o", str(folder / "ours.png")]
            commands[f"overlay {side}"] = [VISATTN, *ours], 0
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for turn in range(rounds + 1):  # the first fills the caches
            for name, (command, status) in commands.items():
                spent = cpu_time(*command, status=status)
                if turn:
                    seconds[name].append(spent)
        differs = {}
        for side in SIDES:
            command = commands[f"overlay {side}"][0]
            cpu_time(*command[:-1], str(folder / f"ours_{side}.png"), "--save-map", str(folder / f"ours_{side}.npz"))
            differs[side] = difference(np.load(folder / f"ours_{side}.npz")["values"], np.load(folder / f"hand_{side}.npy"))
    pairs = {f"overlay {side}": f"by hand {side}" for side in SIDES}
    return {
        "seconds": {name: median(values) for name, values in seconds.items()},
        "ratios": {
            name: median(one / other for one, other in zip(seconds[name], seconds[base], strict=True))
            for name, base in pairs.items()
        },
        "differs": differs,
    }


def difference(one: np.ndarray, other: np.ndarray) -> float:
    """Return the largest difference of two maps, relative to the largest value."""
    return float(np.abs(one.squeeze() - other).max() / np.abs(other).max())


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))
