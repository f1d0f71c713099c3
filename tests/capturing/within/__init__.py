"""Programs that move tokens within one forward pass, and an independent judge of where a recording says that they are.

`python -m tests.capturing.within` runs all of them and prints the verdicts of each family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.capturing.within.aten import calls_of_aten
from tests.capturing.within.calls import calls
from tests.capturing.within.common import common
from tests.capturing.within.exchanges import of_python
from tests.capturing.within.judge import Verdict, verdict
from tests.capturing.within.mixes import mixes
from tests.capturing.within.model import Program
from tests.capturing.within.resampling import resampled
from tests.capturing.within.seconds import batches, second_inputs
from tests.capturing.within.writes import written

SOURCES: dict[str, Callable[[], Iterator[Program]]] = {
    "writes": written,
    "numbers numpy constants": of_python,
    "mixing copies choices": mixes,
    "numbers mixing": common,
    "sampling transposed pooling padding interpolation": resampled,
    "two inputs": second_inputs,
    "batches": batches,
    "calls": calls,
    "aten foreach": calls_of_aten,
}
FAMILIES = (
    *("writes", "numbers", "numpy", "constants", "mixing", "copies", "choices", "sampling", "transposed", "pooling", "padding"),
    *("interpolation", "two inputs", "batches", "calls", "aten", "foreach"),
)


def generated(only: str | None = None, by_hand: bool = False) -> Iterator[Program]:
    """Yield all programs, those of one family, or those written by hand."""
    for families, source in SOURCES.items():
        if (only is None or only in families) and not (by_hand and source in (calls, calls_of_aten)):
            yield from (program for program in source() if only in (None, program.family))


def verdicts(programs: Iterator[Program]) -> Iterator[Verdict]:
    """Judge programs without and with a residual."""
    for program in programs:
        for residual in (False, True)[: 1 + program.residual]:
            found = verdict(program, residual)
            if found is not None:
                yield found
