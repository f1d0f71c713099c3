"""Entry point of `python -m tests.capturing.within`: judge all programs and print a table."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from tests.capturing.within import FAMILIES, generated, verdicts
from tests.capturing.within.judge import BAD, OUTCOMES, Verdict, as_json


def main() -> None:
    """Judge the programs; the exit status is 1 if one is wrong, missed, failed or changed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=FAMILIES)
    parser.add_argument("--list", action="store_true", help="print the names of the programs alone")
    parser.add_argument("--json", type=Path, help="file of all verdicts")
    parser.add_argument("--times", action="store_true", help="print the slowest programs")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.list:
        for program in generated(given.only):
            print(f"{program.family}: {program.name}")
        return
    found, times, start = list[Verdict](), list[tuple[float, str]](), time.monotonic()
    last = start
    for one in verdicts(generated(given.only)):
        found.append(one)
        times.append((time.monotonic() - last, f"{one.family}: {one.name}"))
        last = time.monotonic()
    _table(found)
    if given.times:
        print("\n".join(f"{seconds:.2f} s {name}" for seconds, name in sorted(times, reverse=True)[:20]))
    if given.json is not None:
        given.json.write_text(json.dumps(as_json(found), indent=1), encoding="utf-8")
    print(f"{len(found)} programs in {time.monotonic() - start:.0f} s")
    sys.exit(any(one.outcome in BAD for one in found))


def _table(found: list[Verdict]) -> None:
    print(f"{'':14}", "programs", *(f"{outcome:>9}" for outcome in OUTCOMES), "  blank", "placed of placeable")
    for family in [*FAMILIES, "all"]:
        of = [one for one in found if family in ("all", one.family)]
        if not of:
            continue
        counts = Counter(one.outcome for one in of)
        placeable = [one for one in of if one.placeable]
        placed = sum(one.outcome == "right" for one in placeable)
        share = f"{placed}/{len(placeable)} = {placed / len(placeable):.1%}" if placeable else "-"
        columns = [f"{counts[outcome]:{max(9, len(outcome))}}" for outcome in OUTCOMES]
        print(f"{family:14} {len(of):8}", *columns, f"{sum(one.blank > 0 for one in of):7} {share}")
    for outcome in BAD:
        for one in found:
            if one.outcome == outcome:
                print(f"{outcome}: {one.family}: {one.name}: {one.detail}")


if __name__ == "__main__":
    main()
