"""Memory against the plain forward pass."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from statistics import median

from bench.parts.part import Options, Part, megabytes, row
from bench.parts.processes import progress, run_json
from visattn._support.tables import Row

PROCESSES = 3  # processes per peak at 1036 px
PEAK_RATIO = 1.3
KEPT, SPARE = 1.15, 64e6  # growth may exceed the plain forward's by 1.15 x queries and keys + 64 MB
PEAK_1778 = 3e9
KEEPS = "limit: queries and keys of each layer"
FITS = "promise: a laptop has room for it"


def rows(options: Options) -> Iterator[Row]:
    """Measure the peak memory of fresh processes, and the growth over the loaded model."""
    series: dict[str, list[dict[str, int]]] = {"plain": [], "rollout": []}
    for turn in range(PROCESSES):
        progress(f"1036 px, processes {turn + 1} of {PROCESSES}")
        for name, sizes_of in series.items():
            sizes_of.append(run_json(sys.executable, "bench.memory", name, "1036", allocator="apart"))
    (peak, growth), (peak_rollout, growth_rollout) = (
        [median(one[key] for one in series[name]) for key in ("peak", "growth")] for name in ("plain", "rollout")
    )
    ratio = peak_rollout / peak
    text = f"{megabytes(peak_rollout)} / {megabytes(peak)} MB = {ratio:.3f} x"
    yield row(
        {"px": 1036, "what": "peak of rollout / peak of plain forward"}, text, ratio, PEAK_RATIO, f"<= {PEAK_RATIO:g} x", KEEPS
    )
    kept = series["rollout"][0]["kept"]
    bound = growth + KEPT * kept + SPARE
    limit = f"<= {megabytes(growth)} + {KEPT:g} x {megabytes(kept)} + {megabytes(SPARE)} = {megabytes(bound)} MB"
    head: Row = {"px": 1036, "what": "growth of rollout <= growth of plain + 1.15 x queries and keys + 64 MB"}
    yield row(head, f"{megabytes(growth_rollout)} MB", growth_rollout, bound, limit, KEEPS)
    if not options.quick:
        progress("1778 px")
        largest = run_json(sys.executable, "bench.memory", "rollout", "1778", allocator="apart")["peak"]
        head = {"px": 1778, "what": "peak of rollout"}
        yield row(head, f"{megabytes(largest)} MB", largest, PEAK_1778, f"<= {megabytes(PEAK_1778)} MB", FITS)


PART = Part(
    "Memory",
    rows,
    protocol=(
        f"Peak of resident memory (VmHWM) of a fresh process; at 1036 px the median of {PROCESSES} processes, run in turn.",
    ),
    headlines=(("memory of rollout against the plain forward pass, 1036 px", r"1036 \| peak of rollout / .*?"),),
)
