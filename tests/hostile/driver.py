"""Driver of hostile cases: each runs in a process forked from one warm parent, and its outcome is checked."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

LONGEST = 10.0  # CPU seconds; on a slow machine `SLOWER` times those of a usual command
SLOWER = 6.0
HANGS = 60.0  # wall-clock seconds, on a machine with other load; more on a slow one
CODES = {0, 1, 2, 3, 4, 5}
_USUAL = "overlay photo:chelsea --model vit_tiny_patch16_224 --weights none --method rollout -o out.png"


@dataclass(frozen=True)
class Case:
    """Hostile input of a command.

    Attributes:
        name: Description, with the seed that it was generated from.
        prepare: Function that writes the inputs to an empty folder and returns the command's arguments. The command runs in it.
        outputs: Files and folders that the command may write, relative to that folder; a file also as a pattern.
        prints: Whether the result is printed, so that no file has to exist.
        judge: Function of folder, arguments and exit code that describes what is wrong afterward; it replaces the check of all files.
    """

    name: str
    prepare: Callable[[Path], list[str]]
    outputs: tuple[str, ...] = ()
    prints: bool = False
    judge: Callable[[Path, list[str], int], list[str]] | None = None


@dataclass
class Outcome:
    """Outcome of a case.

    Attributes:
        case: The case.
        arguments: Arguments of the command.
        code: Exit code; negative is a signal.
        seconds: CPU seconds.
        out: Output on stdout.
        err: Output on stderr.
        wrong: Descriptions of failures.
    """

    case: Case
    arguments: list[str]
    code: int
    seconds: float
    out: str
    err: str
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Format the outcome as two lines."""
        return f"{self.case.name}: {'; '.join(self.wrong)}\n    {self.arguments} -> {self.code}: {self.err.strip()[-300:]}"


def run(cases: Iterable[Case], folder: Path, *, net: bool = True) -> Iterator[Outcome]:
    """Run each case in its own child process.

    Args:
        cases: Cases to run.
        folder: An empty folder; each case gets a subfolder.
        net: Whether the handlers that turn an unexpected error into one line are active.

    Yields:
        The checked outcomes.
    """
    usual = folder / "usual"
    (usual / "work").mkdir(parents=True)
    longest = max(LONGEST, SLOWER * _child(_USUAL.split(), usual / "work", True, HANGS)[1])
    for number, case in enumerate(cases):
        place = folder / str(number)
        work = place / "work"
        work.mkdir(parents=True)
        arguments = case.prepare(work)
        before = _files(place)
        code, seconds = _child(arguments, work, net, HANGS * longest / LONGEST)
        out, err = ((place / name).read_text(errors="replace") for name in ("out", "err"))
        found = Outcome(case, arguments, code, seconds, out, err)
        _judge(found, work, before, _files(place), longest)
        yield found


def _judge(found: Outcome, work: Path, before: dict[Path, str], after: dict[Path, str], longest: float) -> None:
    case = found.case
    if "Traceback (most recent call last)" in found.err + found.out:
        found.wrong.append("traceback")
    if found.seconds > longest:
        found.wrong.append(f"{found.seconds:.0f} seconds")
    if found.code not in CODES:
        found.wrong.append(f"exit code {found.code}")
    if found.code and not found.err.strip():
        found.wrong.append("failed without a word")
    if case.judge is not None:
        found.wrong += case.judge(work, found.arguments, found.code)
        return
    allowed = [work / name for name in case.outputs]
    streams = {work.parent / "out", work.parent / "err"}
    for path in sorted({*before, *after} - streams):
        named = any(path == one or one in path.parents or fnmatchcase(str(path), str(one)) for one in allowed)
        if before.get(path) != after.get(path) and not named:
            found.wrong.append(f"wrote {path.relative_to(work.parent)}")
    if found.code == 0:
        missing = [] if case.prints else [one.name for one in allowed if not one.exists()]
        if missing or (case.prints and not found.out.strip()):
            found.wrong.append(f"exit 0 without {', '.join(missing) or 'a word'}")


def _files(folder: Path) -> dict[Path, str]:
    """Return all files and links below a folder, each with a digest of its content or of its target."""
    found = {}
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in names):
            if path.is_symlink():
                found[path] = str(path.readlink())
            elif path.is_file():
                with contextlib.suppress(OSError):
                    found[path] = hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()
    return found


def _child(arguments: list[str], work: Path, net: bool, hangs: float) -> tuple[int, float]:
    """Run the command in a fork; return its exit code (or the negative signal that ended it) and its CPU seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os._exit(_command(arguments, work, net))
    deadline = time.monotonic() + hangs
    while not (ended := os.wait4(child, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    if not ended[0]:
        os.kill(child, signal.SIGKILL)
        ended = os.wait4(child, 0)
    _, status, used = ended
    return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime


def _command(arguments: list[str], work: Path, net: bool) -> int:
    """Redirect streams to files and run the command, inside the child process."""
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(work.parent / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    code = 99
    try:
        os.chdir(work)
        from visattn.batch import work as batches
        from visattn.cli import commands, each

        if not net:
            commands._fault = each.fault = batches._fault = _raised  # type: ignore[assignment, attr-defined]
        try:
            commands.main(arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def _raised(error: Exception, *_: object) -> str:
    raise error
