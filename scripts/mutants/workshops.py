"""A copy of the project with a warm process that runs its tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from mutants.copies import Copy

_COPY = "copy-"
_SCRIPTS = Path(__file__).parents[1]


class Ran(NamedTuple):
    """Result of tests.

    Attributes:
        ended: Whether they ended within the limit.
        busy: Time of the processor that they took.
        failed: Those that failed; a word if the process crashed.
        ran: Tests that ran.
    """

    ended: bool
    busy: float
    failed: tuple[str, ...]
    ran: int


class Workshop(AbstractContextManager["Workshop"]):
    """Copy of the project in a folder that is removed at the end, and its warm process."""

    def __init__(self, files: dict[str, bytes], under: Path) -> None:
        """Write the copy into a new folder and start the process."""
        under.mkdir(parents=True, exist_ok=True)
        _swept(under)
        self._folder = tempfile.TemporaryDirectory(prefix=f"{_COPY}{os.getpid()}-", dir=under)
        self._place = Path(self._folder.name)
        self.copy = Copy(self._place / "tree", files)
        self._process = self._started()

    def __enter__(self) -> Self:
        """Return the workshop."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the process and remove the copy."""
        with self._process as process:  # closes its pipes and waits for it
            process.kill()
        self._folder.cleanup()

    def compile(self, files: Sequence[str], limit: float) -> None:
        """Load files of tests once, so that Python keeps them and what they import compiled; later runs write nothing."""
        self._asked({"kind": "compile", "files": list(files), "limit": limit})

    def lines(self, file: str, sources: Sequence[str], limit: float) -> dict[str, Any] | None:
        """Return which lines the tests of a file run, as `mutants.asking` does, or None if they do not end."""
        return self._asked({"kind": "lines", "file": file, "sources": list(sources), "limit": limit})[1]

    def run(self, rounds: Sequence[Sequence[str]], limit: float, *, everything: bool = False) -> Ran:
        """Run tests on the copy as it is, in rounds, until one fails, or all of them; the tests of a round are loaded together."""
        facts, found = self._asked(
            {"kind": "tests", "rounds": [list(names) for names in rounds], "limit": limit, "all": everything}
        )
        if not facts["ended"]:
            return Ran(False, facts["busy"], (), 0)
        if found is None:
            return Ran(True, facts["busy"], ("the process crashed",), 0)
        return Ran(True, facts["busy"], tuple(found["failed"]), found["count"])

    def _started(self) -> subprocess.Popen[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("VISATTN_EVIDENCE")}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        env |= {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
        env["PYTHONPATH"] = os.pathsep.join((str(self.copy.folder), str(_SCRIPTS)))
        command = [sys.executable, "-m", "mutants.warm"]
        return subprocess.Popen(
            command, cwd=self.copy.folder, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def _asked(self, job: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
        answer = self._place / "answer.json"
        answer.unlink(missing_ok=True)
        job |= {"answer": str(answer), "log": str(self._place / "log"), "place": str(self._place / "temporary")}
        assert self._process.stdin is not None  # noqa: S101 - they are pipes
        assert self._process.stdout is not None  # noqa: S101
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process that runs the tests ended; its error is above")
        try:
            found = json.loads(answer.read_text())
        except (FileNotFoundError, ValueError):
            found = None
        return json.loads(line), found

    @property
    def log(self) -> str:
        """Output of the last job."""
        return (self._place / "log").read_text(errors="replace")


def _swept(under: Path) -> None:
    """Remove the copies of runs that were killed."""
    for folder in under.glob(f"{_COPY}*"):
        number = folder.name.removeprefix(_COPY).partition("-")[0]
        if not Path("/proc", number).exists():
            shutil.rmtree(folder, ignore_errors=True)
