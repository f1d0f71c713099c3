"""The parts of a release: each Python, and the tests of the source distribution."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

from releasing.building import Distributions
from releasing.environments import Environment, Python
from releasing.record import Outcome, failed

_SCENE = "import visattn; visattn.explain('scenes_vit', 'scene:7').save('scene.png')"
QUICK = (
    ("visattn doctor", "visattn", "doctor", "--imports"),
    ("visattn demo", "visattn", "demo", "-q", "-o", "demo"),
    ("visattn overlay", "visattn", "overlay", "photo:chelsea", "--model", "tf_efficientnet_lite0", "-q", "-o", "chelsea.png"),
    ("three lines of Python", "python", "-c", _SCENE),
)
_SUITE = ("-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-m", "not full and not evidence", "-p", "no:cacheprovider")
_NONE_CHOSEN = 5  # status of pytest if a folder has only slow tests


def with_python(python: Python, files: Distributions, folder: Path) -> list[Outcome]:
    """Install the wheels in an empty environment and run the first commands; then the same with the source distributions in their place."""
    with Environment(folder / f"python-{python.version}", python.path) as own:
        tried = [_named("wheel", own.install(str(files.wheel)))]
        if failed(tried):
            return tried
        tried += _first_commands(own, "wheel", own.install("--no-deps", str(files.networks)))
        tried.append(own.run("pip uninstall", "python", "-m", "pip", "uninstall", "--quiet", "-y", "visattn", "visattn-networks"))
        source = own.install("--no-deps", str(files.source), str(files.networks_source))
        return tried + _first_commands(own, "source", source)


def _first_commands(environment: Environment, kind: str, installed: Outcome) -> list[Outcome]:
    environment.tidy()
    return [_named(kind, one) for one in (installed, *(environment.run(*command) for command in QUICK))]


def _named(kind: str, outcome: Outcome) -> Outcome:
    return outcome._replace(name=f"{kind}: {outcome.name}")


def unpacked(source: Path, folder: Path) -> Path:
    """Unpack the source distribution; return its folder."""
    with tarfile.open(source) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    return next((folder / "unpacked").iterdir())


def suites(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the parts of the quick tests, and what pytest is told to run for each."""
    tests = root / "tests"
    yield "tests/test_*.py", sorted(f"tests/{file.name}" for file in tests.glob("test_*.py"))
    for place in sorted(tests.iterdir()):
        if any(place.rglob("test_*.py")):
            yield f"tests/{place.name}", [f"tests/{place.name}"]


def tests_pass(name: str, words: list[str], place: Path) -> Outcome:
    """Run quick tests of the source distribution, with the packages of this environment."""
    started = time.monotonic()
    own = {**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *_SUITE, *words], cwd=place, env=own, capture_output=True, text=True, check=False)
    said = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))] or done.stdout.splitlines()[-1:]
    status = 0 if done.returncode == _NONE_CHOSEN else done.returncode
    return Outcome(name, status, time.monotonic() - started, said[0] if said else done.stderr[-200:])
