"""Journal of an evaluation: a line for each map of each photo."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from visattn._support.checks import printable
from visattn.errors import OutputError
from visattn.evaluation.journal_file import JournalFile
from visattn.evaluation.map_numbers import Curves, MapNumbers

_Number = float | None  # JSON lacks NaN


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """Line of one map of one photo; see `MapNumbers`."""

    source: str
    place: int
    photo: str
    target: str
    map: str
    own: dict[str, _Number]
    nulls: dict[str, dict[str, list[_Number]]]
    curves: dict[str, Curves]
    seconds: tuple[float, float]
    left_out: str


class EvaluationJournal:
    """Numbers that are known from an earlier run, and the file that new ones are added to."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any], *, anew: bool = False) -> None:
        """Read what an earlier run has written; see `JournalFile`.

        Raises:
            OutputError: See `JournalFile`.
        """
        self._file = JournalFile(path, "evaluation", settings, _Line, anew=anew)
        lengths = dict[str, int]()  # of the curves of each metric
        for number, line in enumerate(self._file.lines, 2):
            if not _is_whole(line, set(settings["metrics"]), lengths):
                raise OutputError(f"{printable(str(path))}: line {number} is not whole; pass another file")
        self._known = {(line.place, line.source, line.map): _numbers(line) for line in self._file.lines}

    def known(self, place: int, source: str, name: str) -> MapNumbers | None:
        """Return the numbers of a map of a photo, if they are known; `source` is a digest of photo, mask and map."""
        return self._known.get((place, source, name))

    def add(self, source: str, numbers: MapNumbers) -> MapNumbers:
        """Keep the numbers of a map of a photo, and return them.

        Raises:
            OutputError: If the file cannot be written.
        """
        self._file.add(_Line(source, **vars(numbers)))
        return numbers


def _is_whole(line: _Line, metrics: set[str], lengths: dict[str, int]) -> bool:
    """Check that a line holds all metrics, and curves as long as those of other lines, whose lengths are noted."""
    if not line.left_out and not line.own.keys() == line.nulls.keys() == metrics:
        return False
    for name, curve in line.curves.items():
        length = lengths.setdefault(name, len(curve.scores))
        if {len(curve.scores), len(curve.fractions), len(curve.nulls) or length} != {length}:
            return False
    return line.curves.keys() <= metrics


def _numbers(line: _Line) -> MapNumbers:
    nulls = {
        metric: {kind: [_float(value) for value in values] for kind, values in kinds.items()}
        for metric, kinds in line.nulls.items()
    }
    own = {metric: _float(value) for metric, value in line.own.items()}
    return MapNumbers(line.place, line.photo, line.target, line.map, own, nulls, line.curves, line.seconds, line.left_out)


def _float(value: _Number) -> float:
    return math.nan if value is None else value
