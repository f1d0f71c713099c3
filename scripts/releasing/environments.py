"""New environments of each Python of the machine, in which distributions are installed and tried."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_OLDEST = (3, 11)


class Outcome(NamedTuple):
    """What a command did.

    Attributes:
        name: What is shown for it.
        status: Exit status.
        seconds: Time that it took.
        last: Its last line.
    """

    name: str
    status: int
    seconds: float
    last: str

    def row(self) -> str:
        """Return a line of a table."""
        state, why = ("ok", "") if self.status == 0 else (f"exit {self.status}", f": {self.last}")
        return f"{state:8} {self.seconds:6.0f} s  {self.name}{why}"


def pythons() -> dict[str, str]:
    """Return the interpreters from 3.11 of this machine by their version: on the path, and those of pyenv."""
    roots = [Path(part) for part in os.environ.get("PATH", "").split(os.pathsep)]
    roots += sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/*/bin"))
    found: dict[str, str] = {}
    for root in roots:
        for file in sorted(root.glob("python3.*")):
            if re.fullmatch(r"python3\.\d+", file.name) and (version := _version(file)):
                found.setdefault(version, str(file))
    return dict(sorted(found.items(), key=lambda one: [int(part) for part in one[0].split(".")]))


def _version(python: Path) -> str:
    """Return major and minor version of an interpreter that works and is not too old, else nothing."""
    code = "import sys, venv, ssl; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    version = done.stdout.strip()
    return version if done.returncode == 0 and tuple(map(int, version.split("."))) >= _OLDEST else ""


class Environment:
    """A virtual environment."""

    def __init__(self, folder: Path, python: str = sys.executable, base: Environment | None = None) -> None:
        """Make it; with `base`, the packages of another one are seen in it."""
        self.folder = folder
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        if base is not None:
            (self._packages() / "base.pth").write_text(f"{base._packages()}\n", encoding="utf-8")

    def install(self, *words: str) -> Outcome:
        """Install with pip."""
        return self.run(
            f"pip install {' '.join(Path(word).name for word in words)}", "python", "-m", "pip", "install", "--quiet", *words
        )

    def run(self, name: str, program: str, *words: str, folder: Path | None = None) -> Outcome:
        """Run one of its programs in a folder."""
        own = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        own["PATH"] = f"{self.folder / 'bin'}{os.pathsep}{own['PATH']}"
        started = time.monotonic()
        done = subprocess.run(
            [str(self.folder / "bin" / program), *words], cwd=folder, env=own, capture_output=True, text=True, check=False
        )
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        outcome = Outcome(name, done.returncode, time.monotonic() - started, said[-1] if said else "")
        print(outcome.row(), flush=True)
        return outcome

    def remove(self) -> None:
        """Delete it."""
        shutil.rmtree(self.folder)

    def _packages(self) -> Path:
        return next((self.folder / "lib").glob("python3.*/site-packages"))


def failed(outcomes: Sequence[Outcome]) -> bool:
    """Return whether one of them failed."""
    return any(one.status for one in outcomes)
