"""Driver of hostile cases: each runs in a process forked from one warm parent, and its outcome is checked."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import unicodedata
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from tests.hostile.watch import State, Watch, state

LONGEST = 10.0  # CPU seconds; on a slow machine `SLOWER` times those of a usual command
SLOWER = 6.0
HANGS = 60.0  # wall-clock seconds, on a machine with other load; more on a slow one
CODES = {0, 1, 2, 3, 4, 5}
MEMORY = 4 << 30  # bytes that a command may reserve, beyond those of the driver
LARGEST = 1 << 30  # bytes of the largest file that it may write
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
        check: Function of folder and outcome that describes what else is wrong.
        stop: Signal that ends the command, and the seconds before it.
        clear: Whether what is printed must be free of control characters.
    """

    name: str
    prepare: Callable[[Path], list[str]]
    outputs: tuple[str, ...] = ()
    prints: bool = False
    judge: Callable[[Path, list[str], int], list[str]] | None = None
    check: Callable[[Path, Outcome], list[str]] | None = None
    stop: tuple[int, float] | None = None
    clear: bool = False


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
    with Watch(folder / "watch") as watch:
        usual = folder / "usual"
        longest = max(LONGEST, SLOWER * _child(_USUAL.split(), _place(usual), watch, True, HANGS)[1])
        for number, case in enumerate(cases):
            place = folder / str(number)
            work = _place(place)
            arguments = case.prepare(work)
            before = state(place)
            code, seconds = _child(arguments, work, watch, net, HANGS * longest / LONGEST, case.stop)
            out, err = ((place / name).read_text(errors="replace") for name in ("out", "err"))
            found = Outcome(case, arguments, code, seconds, out, err)
            found.wrong += [change for change in watch.changes(place) if not _of_fonts(change)]
            _judge(found, work, before, state(place), longest)
            yield found
            shutil.rmtree(place, ignore_errors=True)


def _place(place: Path) -> Path:
    """Make the folders of a case; return the one in which its command runs."""
    for name in ("work", "home", "tmp", "cache"):
        (place / name).mkdir(parents=True)
    for name in ("out", "err"):
        (place / name).touch()  # a signal may end the command before it opens them
    return place / "work"


def _of_fonts(change: str) -> bool:
    return "MPLCONFIGDIR" in os.environ and change.partition(" ")[2].startswith(os.environ["MPLCONFIGDIR"])


def _judge(found: Outcome, work: Path, before: State, after: State, longest: float) -> None:
    case, place = found.case, work.parent
    if "Traceback (most recent call last)" in found.err + found.out:
        found.wrong.append("traceback")
    if found.seconds > longest:
        found.wrong.append(f"{found.seconds:.0f} seconds")
    stopped = {-case.stop[0], 128 + case.stop[0]} if case.stop else set()
    if found.code not in CODES | stopped:
        found.wrong.append(f"exit code {found.code}")
    if found.code and not found.err.strip() and found.code not in stopped:
        found.wrong.append("failed without a word")
    if case.clear and any(unicodedata.category(letter) in ("Cc", "Cf") for letter in (found.out + found.err) if letter != "\n"):
        found.wrong.append("printed control characters")
    if case.judge is not None:
        found.wrong += case.judge(work, found.arguments, found.code)
        return
    allowed = [work / name for name in case.outputs]
    free = {place / "out", place / "err"}

    def is_named(path: Path) -> bool:
        return any(
            path == one or one in path.parents or path in one.parents or fnmatchcase(str(path), str(one)) for one in allowed
        )

    holding = {
        above for path in {*after} - {*before} if is_named(path) for above in path.parents
    }  # folders that mirror the inputs'
    for path in sorted({*before, *after} - free):
        named = is_named(path) or (path not in before and path in holding)
        if before.get(path) != after.get(path) and not named and place / "cache" not in path.parents:
            found.wrong.append(f"{_what(path, before, after)} {ascii(str(path.relative_to(place)))[1:-1]}")
    if found.code == 0:
        missing = [] if case.prints else [one.name for one in allowed if not one.exists()]
        if missing or (case.prints and not found.out.strip()):
            found.wrong.append(f"exit 0 without {', '.join(missing) or 'a word'}")
    if case.check is not None:
        found.wrong += case.check(work, found)


def _what(path: Path, before: State, after: State) -> str:
    return "made" if path not in before else "removed" if path not in after else "changed"


def _child(
    arguments: list[str], work: Path, watch: Watch, net: bool, hangs: float, stop: tuple[int, float] | None = None
) -> tuple[int, float]:
    """Run the command in a fork; return its exit code (or the negative signal that ended it) and its CPU seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    watch.begin(work.parent)
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        os._exit(_command(arguments, work, watch, net))
    while not (ended := os.wait4(child, os.WNOHANG))[0] and time.monotonic() < begun + hangs:
        if stop and time.monotonic() > begun + stop[1]:
            os.kill(child, stop[0])
            stop = None
        time.sleep(0.01)
    if not ended[0]:
        os.kill(child, signal.SIGKILL)
        ended = os.wait4(child, 0)
    with contextlib.suppress(OSError):  # what the command started and left
        os.killpg(child, signal.SIGKILL)
    _, status, used = ended
    return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime


def _command(arguments: list[str], work: Path, watch: Watch, net: bool) -> int:
    """Redirect streams to files and run the command, inside the child process."""
    code = 99
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of this function
    for ours in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        ours.atexit = False  # the temporary folders of the driver
    try:
        for name, number in (("out", 1), ("err", 2)):
            os.dup2(os.open(work.parent / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        os.setsid()
        _limits()
        _environment(work.parent)
        watch.enter(work.parent)
        os.chdir(work)
        from visattn.batch import image_work as batches
        from visattn.cli import commands
        from visattn.core.command_line import each

        if not net:
            commands._fault = each.fault = batches._fault = _raised  # type: ignore[assignment, attr-defined]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            commands.main(arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(Exception):
        weakref.finalize._exitfunc()  # type: ignore[attr-defined] # as at the end of a process
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def _limits() -> None:
    """Bound what one command can take from the machine."""
    reserved = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (reserved + MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST,) * 2)


def _environment(place: Path) -> None:
    """Give a command its own home, temporary folder and cache."""
    sys.dont_write_bytecode = True
    os.environ |= {"HOME": str(place / "home"), "TMPDIR": str(place / "tmp"), "XDG_CACHE_HOME": str(place / "cache")}
    os.environ.pop("VISATTN_CACHE", None)
    tempfile.tempdir = None


def _raised(error: Exception, *_: object) -> str:
    raise error
