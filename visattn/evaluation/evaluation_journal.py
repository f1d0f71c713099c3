"""Journal of an evaluation: a line for each map of each photo, so that a run that was interrupted goes on where it stopped."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from visattn._support.checks import printable
from visattn._support.json_files import decoded
from visattn._support.tables import without_nan
from visattn._support.whole_files import refusal
from visattn.errors import OutputError
from visattn.evaluation.map_numbers import Curves, MapNumbers

_FIRST = "visattn evaluation"
_Number = float | None


class Head(msgspec.Struct, forbid_unknown_fields=True):
    """First line.

    Attributes:
        version: Version of the format.
        settings: What decides the numbers.
    """

    version: int = msgspec.field(name=_FIRST)
    settings: dict[str, Any]


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """Line of one map of one photo; see `MapNumbers`."""

    place: int
    sha256: str
    photo: str
    target: str
    map: str
    own: dict[str, _Number]
    nulls: dict[str, dict[str, list[_Number]]]
    curves: dict[str, Curves]
    seconds: tuple[float, float]
    left_out: str


class Journal:
    """Numbers that are known from an earlier run, and the file that new ones are added to."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        """Read what an earlier run has written; None: nothing is kept.

        Raises:
            OutputError: If the file is no journal, is of a run with other settings, or cannot be read or written.
        """
        self._path, self._known = path, dict[tuple[int, str, str], MapNumbers]()
        if path is None:
            return
        settings = json.loads(json.dumps(settings))
        try:
            content = path.read_bytes() if path.exists() else b""
            whole = content[: content.rfind(b"\n") + 1]  # the last line may be torn
            if whole:
                self._read(whole.splitlines(), settings)
                with path.open("r+b") as file:
                    file.truncate(len(whole))
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps({_FIRST: 1, "settings": settings}) + "\n")
        except OutputError:
            raise
        except OSError as error:
            refused = refusal(error, path)
            raise refused from error
        except ValueError as error:
            raise OutputError(f"{printable(str(path))}: not a journal of an evaluation ({error}); pass another file") from error

    def _read(self, lines: list[bytes], settings: Mapping[str, Any]) -> None:
        earlier = decoded(lines[0], Head, "the first line").settings
        other = [name for name in {**earlier, **settings} if earlier.get(name) != settings.get(name)]
        if other:
            told = "; ".join(f"{name} was {earlier.get(name)}, now {settings.get(name)}" for name in other[:3])
            raise OutputError(f"{printable(str(self._path))}: of a run with other settings ({told:.300}); pass another file")
        for number, content in enumerate(lines[1:], 2):
            line = decoded(content, Line, f"line {number}")
            self._known[line.place, line.sha256, line.map] = MapNumbers(
                line.photo,
                line.target,
                line.map,
                {metric: _float(value) for metric, value in line.own.items()},
                {
                    metric: {kind: [_float(value) for value in values] for kind, values in kinds.items()}
                    for metric, kinds in line.nulls.items()
                },
                line.curves,
                line.seconds,
                line.left_out,
            )

    def known(self, place: int, sha256: str, name: str) -> MapNumbers | None:
        """Return the numbers of a map of a photo, if they are known."""
        return self._known.get((place, sha256, name))

    def add(self, place: int, sha256: str, numbers: MapNumbers) -> MapNumbers:
        """Keep the numbers of a map of a photo, and return them.

        Raises:
            OutputError: If the file cannot be written.
        """
        if self._path is not None:
            line = without_nan({"place": place, "sha256": sha256, **vars(numbers)})
            try:
                with self._path.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            except OSError as error:
                refused = refusal(error, self._path)
                raise refused from error
        return numbers


def _float(value: _Number) -> float:
    return math.nan if value is None else value
