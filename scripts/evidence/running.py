"""Run proofs: those without a kept result for this tree, and a table of all."""

from __future__ import annotations

import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import date
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from evidence.results import Result, keep, kept
from evidence.tree import Tree, changed, part, read_by, tree_of
from visattn.core.provenance import processor

WATCH = Path(__file__).parent / "watch"
_LAST = 40  # lines of output that are kept
_LIBRARIES = "torch", "torchvision", "timm", "transformers", "numpy", "pillow", "opencv-python", "msgspec"
_NATIVE = (".safetensors",)
_HOURS = 4.0  # for all proofs together
_TICK = 0.2  # seconds; a signal that comes just before the main thread waits without a limit would not end the run


class Proof(NamedTuple):
    """A command of Python.

    Attributes:
        command: Script or module with its options.
        alone: Whether nothing may run beside it.
        whole: Whether it depends on all files, as it runs copies of the project whose reads are not seen.
    """

    command: str
    alone: bool = False
    whole: bool = False


class Evidence:
    """Proofs of a checkout, and the folder of their results."""

    def __init__(self, proofs: Mapping[str, Proof], root: Path, folder: Path) -> None:
        """Note what to run; nothing runs yet."""
        self._proofs, self._root, self._folder = proofs, root.resolve(), folder
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped, self._starting = threading.Event(), threading.Lock()

    def run(self, names: Sequence[str]) -> None:
        """Run those of the proofs whose result is not kept. Proofs on one thread run beside each other, the others follow one by one."""
        tree = self._tree()
        missing = [name for name in names if self._state(name, tree) != "ok"]
        beside = [name for name in missing if not self._proofs[name].alone]
        previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                try:
                    _finished([pool.submit(self._prove, name, threads=1) for name in beside])
                except BaseException:
                    self._stop()
                    raise
            for name in missing:
                if self._proofs[name].alone:
                    self._prove(name)
        except BaseException:
            self._stop()
            raise
        finally:
            signal.signal(signal.SIGTERM, previous)

    def table(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the lines of the table, and the names of proofs without a result for this tree."""
        tree, lines, missing, together, alone = self._tree(), [], [], 0.0, 0.0
        for name in names:
            result, state = kept(self._folder, name), self._state(name, tree)
            if state != "ok":
                missing.append(name)
            minutes, facts = (result.minutes, f"{result.commit} {result.day}, {result.machine}") if result else (0.0, "")
            if self._proofs[name].alone:
                alone += minutes
            else:
                together += minutes
            lines.append(f"{name:38} {state:24} {minutes:6.1f} min  {facts}".rstrip())
        processors = os.cpu_count() or 1
        waiting = together / processors + alone
        lines.append(
            f"{len(names) - len(missing)} of {len(names)} proofs hold for this tree, {together + alone:.0f} minutes in all; "
            f"{processors} beside each other, so about {waiting:.0f} minutes of waiting"
        )
        if waiting > 60 * _HOURS:
            lines.append(f"they take more than {_HOURS:g} hours: draw large grids by a seed")
        return lines, missing

    def _tree(self) -> dict[str, str]:
        return tree_of(self._root, self._folder.resolve())

    def _state(self, name: str, tree: Tree) -> str:
        result = kept(self._folder, name)
        return "never run" if result is None else result.state(self._proofs[name].command, tree, _libraries())

    def _prove(self, name: str, threads: int | None = None) -> None:
        """Run one proof and keep its result, unless files that it read were changed meanwhile."""
        if self._stopped.is_set():
            return
        proof, before, started = self._proofs[name], self._tree(), time.perf_counter()
        print(f"== {name}: began", flush=True)
        with tempfile.TemporaryDirectory() as place:
            log = Path(place, "read")
            status, output = self._executed(proof.command, log, threads)
            read = set(before) if proof.whole else read_by(log, self._root, before) | _always(before)
        minutes = (time.perf_counter() - started) / 60
        if self._stopped.is_set():
            return
        edited = changed(part(before, read), self._tree())
        print(f"{output if threads else ''}== {name}: ended with status {status} after {minutes:.1f} min", flush=True)
        if edited:
            print(f"== {name}: not kept, as {edited[0]} was changed meanwhile", flush=True)
            return
        machine, last = f"{os.cpu_count()} x {processor()}", tuple(output.splitlines()[-_LAST:])
        facts = _commit(self._root), machine, _libraries(), date.today().isoformat(), last
        keep(self._folder, Result(name, proof.command, status, round(minutes, 2), *facts, part(before, read)))

    def _executed(self, command: str, log: Path, threads: int | None) -> tuple[int, str]:
        """Run a command; print its output as it comes, if nothing runs beside it."""
        paths = os.pathsep.join(filter(None, (str(WATCH), os.environ.get("PYTHONPATH"))))
        env = os.environ | {
            "PYTHONPATH": paths,
            "VISATTN_EVIDENCE_LOG": str(log),
            "VISATTN_EVIDENCE_ROOT": f"{self._root}{os.sep}",
        }
        if threads:
            env["OMP_NUM_THREADS"] = str(threads)
        with self._starting:
            if self._stopped.is_set():
                return 1, ""
            process = subprocess.Popen(
                [sys.executable, *shlex.split(command)],
                cwd=self._root,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # so that it can be ended with all its children
            )
            self._running.add(process)
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        lines = []
        for line in process.stdout:
            lines.append(line)
            if not threads:
                print(line, end="", flush=True)
        status = process.wait()
        self._running.discard(process)
        return status, "".join(lines)

    def _stop(self) -> None:
        """End all proofs that run, with their children."""
        with self._starting:
            self._stopped.set()
        for process in list(self._running):
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _finished(futures: Sequence[Future[None]]) -> None:
    """Wait until all have ended, or one has failed; it raises its error here."""
    left = set(futures)
    while left:
        ended, left = wait(left, _TICK, FIRST_EXCEPTION)
        for future in ended:
            future.result()


def _commit(root: Path) -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()

    results = ":!assets/evidence"  # the results themselves
    return git("rev-parse", "--short=10", "HEAD") + "+" * bool(git("status", "--porcelain", "--", ".", results))


@cache
def _libraries() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _always(tree: Tree) -> set[str]:
    """Return what native code may read unseen, and the names in the root folder, where tools look for their settings."""
    return {name for name in tree if name.endswith(_NATIVE)} | {"./", "pyproject.toml"} & tree.keys()
