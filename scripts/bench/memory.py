"""Peak memory of one run in its own process, as JSON: `python -m bench.memory plain|rollout SIDE`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from bench.measuring import load, pixels, plain, rollout


def status(field: str) -> int:
    """Return a memory size of this process in bytes: `VmRSS` is resident memory, `VmHWM` its peak (`ru_maxrss` may be the parent's)."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit(f"bench.memory: error: /proc/self/status has no {field}; memory is measured on Linux only.")
    return int(found[1]) * 1024


def forget_peak() -> None:
    """Reset the peak to the current resident memory, if the kernel allows it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        print("bench.memory: the peak could not be reset; growth includes loading", file=sys.stderr)


def main(run: str, side: int) -> dict[str, int]:
    """Return bytes: peak of the process, growth over the loaded model, and size of all stored queries and keys."""
    model = load()
    image = pixels(model, side)
    before = status("VmHWM")
    forget_peak()
    loaded = status("VmRSS")
    kept = 0
    if run == "plain":
        plain(model, image)
    else:
        recording = rollout(model, image)
        kept = sum(tensor.nbytes for record in recording for tensor in (record.operator.query, record.operator.key))  # type: ignore[attr-defined]
    peak = status("VmHWM")
    return {"peak": max(before, peak), "growth": peak - loaded, "kept": kept}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
