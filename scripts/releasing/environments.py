"""New environments of each Python of the machine, in which distributions are installed and tried."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from releasing.record import Outcome

_OLDEST = (3, 11)
_LIMIT = 1800.0  # seconds of a command
_CODE = "import sys, venv, ssl; print('%d.%d.%d' % sys.version_info[:3])"


class Python(NamedTuple):
    """An interpreter of the machine."""

    path: str
    version: str


def pythons() -> dict[str, Python]:
    """Return the interpreters from 3.11 of this machine by major and minor version: on the path, and those of pyenv."""
    roots = [Path(part) for part in os.environ.get("PATH", "").split(os.pathsep)]
    roots += sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/*/bin"))
    found: dict[str, Python] = {}
    for root in roots:
        for file in sorted(root.glob("python3.*")):
            if re.fullmatch(r"python3\.\d+", file.name) and file.name[6:] not in found and (version := _version(file)):
                found[file.name[6:]] = Python(str(file), version)
    return dict(sorted(found.items(), key=lambda one: _numbers(one[0])))


def _version(python: Path) -> str:
    """Return the version of an interpreter that works and is not too old, else nothing."""
    done = subprocess.run([str(python), "-c", _CODE], capture_output=True, text=True, check=False)
    version = done.stdout.strip()
    return version if done.returncode == 0 and _numbers(version)[:2] >= _OLDEST else ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


class Environment:
    """A virtual environment, which is deleted at the end of the `with` block."""

    def __init__(self, folder: Path, python: str, base: Environment | None = None) -> None:
        """Make it; with `base`, the packages of another one are seen in it."""
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", str(folder)], check=True, capture_output=True)
        if base is not None:
            (self._packages() / "base.pth").write_text(f"{base._packages()}\n", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def install(self, *words: str) -> Outcome:
        """Install with pip."""
        name = f"pip install {' '.join(Path(word).name for word in words)}"
        return self.run(name, "python", "-m", "pip", "install", "--quiet", *words)

    def run(self, name: str, program: str, *words: str) -> Outcome:
        """Run one of its programs in a folder beside it."""
        own = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        own["PATH"] = f"{self.folder / 'bin'}{os.pathsep}{own['PATH']}"
        self._files.mkdir(exist_ok=True)
        started = time.monotonic()
        command = [str(self.folder / "bin" / program), *words]
        try:
            done = subprocess.run(
                command, cwd=self._files, env=own, capture_output=True, text=True, errors="replace", timeout=_LIMIT, check=False
            )
        except subprocess.TimeoutExpired:
            return Outcome(name, 124, _LIMIT, f"still ran after {_LIMIT:.0f} s")
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        return Outcome(name, done.returncode, time.monotonic() - started, said[-1] if said else "")

    def tidy(self) -> None:
        """Delete the files that its programs wrote."""
        shutil.rmtree(self._files, ignore_errors=True)

    @property
    def _files(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}-files")

    def _packages(self) -> Path:
        return next((self.folder / "lib").glob("python3.*/site-packages"))
