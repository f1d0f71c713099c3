"""The heavier proofs, all of them even if one fails: `proofs.py [--only NAME,NAME] [--bench OPTIONS] [--write-docs]`.

The bench runs first, and alone. Proofs on one thread then run beside each other, as many as there are CPUs. Those that use all CPUs or
measure seconds come last, one after the other. The output of each is printed when it ends, with the minutes that it took.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TABLES = "library_coverage"  # the proof that --write-docs concerns


class Proof(NamedTuple):
    """A command, and whether others may run beside it."""

    command: str
    alone: bool = False


PROOFS = {  # the longest of those that run beside others come first
    "benchmark": Proof("scripts/benchmark.py", alone=True),
    "hostile": Proof("-m tests.hostile"),
    "hostile without a network": Proof("-m tests.hostile --no-net"),
    "kills while saving": Proof("-m tests.training.kills saves 200"),
    "kills of trainings": Proof("-m tests.training.kills runs 20"),
    "kills of runs over images": Proof("-m tests.batch.kills 300"),
    "a run on a cluster": Proof("-m tests.batch.cluster 500", alone=True),
    "many images": Proof("scripts/many_images.py"),
    "captions of scenes": Proof("scripts/captions.py"),
    "gradients of hard attention": Proof("scripts/estimator.py"),
    "wheel": Proof("scripts/wheel.py"),
    "installs": Proof("-m tests.pages.installs"),
    "coverage": Proof("scripts/model_coverage.py"),
    "known_truth": Proof("scripts/known_truth.py"),
    "many_photos": Proof("scripts/many_photos.py"),
    "localization": Proof("scripts/localization.py"),
    "cam_layers": Proof("scripts/cam_layers.py"),
    "attach_sweep": Proof("scripts/attach_sweep.py"),
    "oldest_transformers": Proof("scripts/oldest_transformers.py"),
    TABLES: Proof("scripts/library_coverage.py", alone=True),
    "startup": Proof("scripts/startup.py", alone=True),
}


class Outcome(NamedTuple):
    """Status and minutes of a proof."""

    name: str
    status: int
    minutes: float


def main() -> int:
    """Run the proofs; return 1 if one failed."""
    parser = argparse.ArgumentParser(description="Run the heavier proofs.")
    parser.add_argument("--only", type=_names, default=list(PROOFS), metavar="NAME,NAME", help=f"of {', '.join(PROOFS)}")
    parser.add_argument("--bench", default="", metavar="OPTIONS", help="options of scripts/benchmark.py")
    parser.add_argument("--write-docs", action="store_true", help="put the tables of other libraries into the docs")
    options = parser.parse_args()
    more = {"benchmark": options.bench, TABLES: "--write-docs" if options.write_docs else ""}
    commands = {name: [*shlex.split(PROOFS[name].command), *shlex.split(more.get(name, ""))] for name in options.only}
    outcomes = [_run(name, commands[name]) for name in options.only if name == "benchmark"]
    beside = [name for name in options.only if not PROOFS[name].alone]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes += pool.map(lambda name: _run(name, commands[name], threads=1), beside)
    outcomes += [_run(name, commands[name]) for name in options.only if PROOFS[name].alone and name != "benchmark"]
    for name, status, minutes in outcomes:
        print(f"{'ok' if status == 0 else f'status {status}':10} {minutes:5.1f} min  {name}")
    failed = [name for name, status, _ in outcomes if status]
    if failed:
        print(f"evidence: failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def _names(text: str) -> list[str]:
    chosen = text.split(",")
    for name in chosen:
        if name not in PROOFS:
            raise argparse.ArgumentTypeError(f"no proof is called '{name}'. Choose from {', '.join(PROOFS)}.")
    return chosen


def _run(name: str, command: Sequence[str], threads: int | None = None) -> Outcome:
    """Run one proof and print its output: of one that runs beside others when it ends, else as it comes."""
    env = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    started = time.perf_counter()
    print(f"== {name}: began", flush=True)
    captured = subprocess.PIPE if threads else None
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=env, stdout=captured, stderr=subprocess.STDOUT, text=True, check=False
    )
    outcome = Outcome(name, done.returncode, (time.perf_counter() - started) / 60)
    print(f"{done.stdout or ''}== {name}: ended with status {outcome.status} after {outcome.minutes:.1f} min", flush=True)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
