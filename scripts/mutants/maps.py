"""Which tests run which lines, found once for a tree and kept, and from it the tests that are asked about a mutant."""

from __future__ import annotations

import fcntl
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mutants.code import Code
from mutants.copies import Digests
from mutants.drawing import Mutant
from mutants.groups import matching
from mutants.kept import appended, entries
from mutants.workshops import Workshop

_LIMIT = 1200.0  # seconds for a file of tests
_OTHERS = 20.0  # seconds for tests that do not run the line themselves


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold a lock that other runs wait for."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


class CoverageMap:
    """Tests that ran each line of the sources, in files of tests that passed."""

    def __init__(self, found: Iterable[dict[str, Any]]) -> None:
        """Take what was found for each file of tests."""
        self._found = {entry["file"]: entry for entry in found}

    @property
    def bad(self) -> list[str]:
        """Tests that did not pass without a fault, so that they are not asked: skipped, or in need of what the copy lacks."""
        return [name for entry in self._found.values() for name in entry["bad"]]

    @property
    def count(self) -> int:
        """Tests that passed."""
        return sum(len(entry["tests"]) for entry in self._found.values())

    def asked(self, mutant: Mutant, source: str, seconds: float) -> list[str]:
        """Return the tests that are asked about a mutant, in the order in which they run.

        First come those that run its statement; else, as for a line that runs at import, in whichever test comes first, those that run
        the function around it, else those that run anything of its file, else those of the matching folder. If they take longer than
        `seconds`, some of each file are taken, in turns: first the fastest of those that run the same lines of the mutated file, so that
        each way through it has a test. Some of the time that is left is given to the other tests of the same files, as fixtures and
        caches let only the first test run a line. Tests of one file run together, and the file that takes least time is first.

        Args:
            mutant: The mutant.
            source: Text of its file without the fault.
            seconds: Most seconds that the tests may take.
        """
        direct = self._direct(mutant, Code(source))
        queues = {file: self._queue(file, tests, mutant.place.file) for file, tests in direct.items()}
        others = {
            file: self._queue(file, set(self._found[file]["tests"]) - tests, mutant.place.file) for file, tests in direct.items()
        }
        taken, left = _within(queues, seconds)
        more, _ = _within(others, min(left, _OTHERS))
        together = {file: [*taken.get(file, ()), *more.get(file, ())] for file in direct}
        return [name for file in sorted(direct, key=lambda file: self._time(file, together[file])) for name in together[file]]

    def _direct(self, mutant: Mutant, code: Code) -> dict[str, set[str]]:
        """Return the tests to begin with, by file."""
        source, line = mutant.place.file, mutant.place.start[0]
        statement = range(0) if code.is_imported(line) else code.statement(line)
        for lines in (statement, code.function(line), None):
            if tests := self._running(source, lines):
                return tests
        return {file: set(self._found[file]["tests"]) for file in matching(source, list(self._found))}

    def _running(self, source: str, lines: range | None) -> dict[str, set[str]]:
        """Return the tests that run one of the lines of a source, or any line."""
        found = {}
        for file, entry in self._found.items():
            names = list(entry["tests"])
            executed = entry["lines"].get(source, {})
            chosen = {number for line, numbers in executed.items() if lines is None or int(line) in lines for number in numbers}
            if chosen:
                found[file] = {names[number] for number in chosen}
        return found

    def _queue(self, file: str, tests: Set[str], source: str) -> list[tuple[str, float]]:
        """Return tests of a file with their seconds: the fastest of those that run the same lines of a source, then the second, ..."""
        entry = self._found[file]
        ways: dict[str, list[str]] = {name: [] for name in entry["tests"]}
        names = list(entry["tests"])
        for line, numbers in entry["lines"].get(source, {}).items():
            for number in numbers:
                ways[names[number]].append(line)
        passed: Counter[str] = Counter()
        ranked = []
        for name in sorted(tests, key=lambda name: (entry["tests"][name], name)):
            way = " ".join(ways[name])
            ranked.append((passed[way], entry["tests"][name], name))
            passed[way] += 1
        return [(name, time) for _, time, name in sorted(ranked)]

    def _time(self, file: str, names: Sequence[str]) -> float:
        return sum((float(self._found[file]["tests"][name]) for name in names), 0.0)


def _within(queues: dict[str, list[tuple[str, float]]], seconds: float) -> tuple[dict[str, list[str]], float]:
    """Take tests of each file in turns until the time is used, at least one; return them by file, and what is left of the time."""
    taken: dict[str, list[str]] = {}
    for turn in range(max(map(len, queues.values()), default=0)):
        for file, queue in queues.items():
            if turn < len(queue) and (not taken or queue[turn][1] <= seconds):
                taken.setdefault(file, []).append(queue[turn][0])
                seconds -= queue[turn][1]
    return taken, seconds


def mapped(kept: Path, digests: Digests, workshop: Workshop, files: Sequence[str], sources: Sequence[str]) -> CoverageMap:
    """Return the map of some files of tests; those that are not in the file `kept` are run first.

    Raises:
        RuntimeError: The tests of a file do not end.
    """
    with locked(kept.with_suffix(".lock")):
        known = {entry["file"]: entry for entry in entries(kept) if entry["digest"] == digests.of(entry["file"])}
        for number, file in enumerate(files, 1):
            if file in known:
                continue
            found = workshop.lines(file, sources, _LIMIT)
            if found is None:
                raise RuntimeError(f"the tests of {file} did not end within {_LIMIT:.0f} s:\n{workshop.log[-2000:]}")
            known[file] = {"file": file, "digest": digests.of(file), **found}
            appended(kept, known[file])
            print(
                f"map {number}/{len(files)}: {file}, {len(found['tests'])} tests, {sum(found['tests'].values()):.0f} s",
                flush=True,
            )
    return CoverageMap(known[file] for file in files)
