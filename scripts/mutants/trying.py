"""Ask the tests about mutants, keep what came of each, and sum it up."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mutants.copies import Digests
from mutants.drawing import Mutant
from mutants.kept import appended, entries
from mutants.maps import CoverageMap
from mutants.workshops import Workshop

LIMITS = 60.0, 420.0  # seconds for the first tests of a mutant, and for more of them if it survives
_SHARE = 3  # a mutant that runs into a limit is killed only if its tests take less than this part of the limit without it
_START = 10.0  # seconds of that part for what comes before the first test


@dataclass(frozen=True)
class Tried:
    """Result of a mutant.

    Attributes:
        name: Name of the mutant.
        outcome: `killed`, `timeout` (killed too), `slow` (not killed: its tests take long without it too) or `survived`.
        by: Test that failed first, or empty.
        tests: Tests that were asked.
        seconds: Time that it took.
        busy: Time of the processor.
        digest: Digest of what decided: the file of the test that failed, else everything.
    """

    name: str
    outcome: str
    by: str
    tests: int
    seconds: float
    busy: float
    digest: str


class Results:
    """Results in a file, each of which is valid while what decided is unchanged."""

    def __init__(self, file: Path, digests: Digests, asked: Sequence[str]) -> None:
        """Note the file, the digests of the present tree, and the files of tests that are asked."""
        self._file, self._digests, self._asked = file, digests, asked

    def digest(self, by: str) -> str:
        """Return the digest of what decides if a test fails, or if none does."""
        test_file = by.partition("::")[0]
        return self._digests.of(test_file) if test_file in self._asked else " ".join((self._digests.whole, *self._asked))

    def add(self, found: Tried) -> None:
        """Keep a result; it replaces a former one of the mutant."""
        appended(self._file, asdict(found))

    def valid(self) -> dict[str, Tried]:
        """Return the valid results, by the name of the mutant."""
        latest = {entry["name"]: Tried(**entry) for entry in entries(self._file)}
        return {name: found for name, found in latest.items() if found.digest == self.digest(found.by)}


class Trial:
    """Tests that are asked about mutants, and the results that are kept."""

    def __init__(self, workshop: Workshop, known: CoverageMap, results: Results) -> None:
        """Note these; nothing runs yet."""
        self._workshop, self._known, self._results = workshop, known, results

    def run(self, mutants: Sequence[Mutant]) -> None:
        """Try the mutants that have no result yet, and then the tests that killed, without a fault."""
        done = self._results.valid()
        for number, mutant in enumerate(mutants, 1):
            if mutant.name in done:
                continue
            found = self._one(mutant)
            self._results.add(found)
            print(f"{number}/{len(mutants)} {found.outcome} in {found.seconds:.1f} s: {mutant}", flush=True)
        self._check({mutant.name for mutant in mutants})

    def _one(self, mutant: Mutant) -> Tried:
        """Ask some seconds of tests first, and if none of them fails, more."""
        started, busy = time.monotonic(), 0.0
        source = (self._workshop.copy.folder / mutant.place.file).read_text(encoding="utf-8")
        asked: list[str] = []
        outcome, by = "survived", ""
        for limit in LIMITS:
            names = [name for name in self._known.asked(mutant, source, limit / _SHARE - _START) if name not in {*asked}]
            if outcome != "survived" or not names:
                break
            asked += names
            outcome, by, used = self._outcome(mutant, names, limit)
            busy += used
        seconds = round(time.monotonic() - started, 1)
        return Tried(mutant.name, outcome, by, len(asked), seconds, round(busy, 1), self._results.digest(by))

    def _outcome(self, mutant: Mutant, names: Sequence[str], limit: float) -> tuple[str, str, float]:
        """Return the outcome of some tests, the first that failed, and the processor's time."""
        rounds = _rounds(names)
        with self._workshop.copy.changed(mutant.place.file, mutant.text):
            ran = self._workshop.run(rounds, limit)
            alone = self._workshop.run([ran.failed[:1]], limit) if "::" in "".join(ran.failed[:1]) else ran
        busy = ran.busy + alone.busy * (alone is not ran)
        if ran.ended and not ran.failed:
            return "survived", "", busy
        if not ran.ended or not alone.failed:  # does the fault do it, or the order of the tests?
            plain = self._workshop.run(rounds, limit / _SHARE)
            if not plain.ended or plain.failed:
                return ("survived" if ran.ended else "slow"), "", busy + plain.busy
        return ("killed" if ran.ended else "timeout"), "".join(ran.failed[:1]), busy

    def _check(self, mutants: set[str]) -> None:
        """Run the tests that killed without a fault; what one that fails has killed counts as survived."""
        by = {found.by for name, found in self._results.valid().items() if name in mutants and "::" in found.by}
        files: dict[str, list[str]] = {}
        for test in sorted(by):
            files.setdefault(test.partition("::")[0], []).append(test)
        for tests in files.values():
            ran = self._workshop.run([tests], max(LIMITS), everything=True)
            failed = set(ran.failed) if ran.ended and ran.ran else set(tests)
            for found in self._results.valid().values():
                if found.by in failed & set(tests):
                    print(f"{found.by} fails without a fault too, so it kills nothing", flush=True)
                    self._results.add(replace(found, outcome="survived", by="", digest=self._results.digest("")))


def _rounds(names: Sequence[str]) -> list[list[str]]:
    """Return the tests of the first file, and then all others: most mutants need no other file to be loaded."""
    first = [name for name in names if name.partition("::")[0] == names[0].partition("::")[0]]
    return [first, list(names[len(first) :])] if len(first) < len(names) else [first]


def summary(mutants: Sequence[Mutant], equivalent: Iterable[str], found: Mapping[str, Tried]) -> tuple[list[str], float | None]:
    """Return lines that sum up, survivors last, and the share that was killed, or None if not all were tried.

    Args:
        mutants: All that were drawn.
        equivalent: Names of those that count as equivalent.
        found: What came of the others.
    """
    left_out = set(equivalent)
    counted = [mutant for mutant in mutants if mutant.name not in left_out]
    done = [mutant for mutant in counted if mutant.name in found]
    outcomes = [found[mutant.name].outcome for mutant in done]
    dead = outcomes.count("killed") + outcomes.count("timeout")
    told = ", ".join(f"{outcomes.count(word)} {word}" for word in ("killed", "timeout", "survived", "slow"))
    seconds = sum(found[mutant.name].seconds for mutant in done) / max(len(done), 1)
    lines = [
        f"{len(mutants)} mutants: {told}, {len(left_out)} equivalent, {len(counted) - len(done)} not tried; {seconds:.1f} s each"
    ]
    alive = [mutant for mutant in done if found[mutant.name].outcome in ("survived", "slow")]
    lines += [f"{found[mutant.name].outcome}: {mutant}" for mutant in alive]
    return lines, dead / len(done) if done and len(done) == len(counted) else None
