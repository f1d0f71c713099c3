"""Entry point of `python -m tests.capturing.heads`: judge all heads, print a table and the wrong ones."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch

from tests.capturing.heads import cases, timm_and_transformers
from tests.capturing.heads.composed import GROUPS
from tests.capturing.heads.judge import WORST, Verdict


def main() -> None:
    """Judge the heads and print what was found; exit 1 if a query is wrong or a head fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="NAME", help="only heads whose group or name contains this")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all verdicts")
    parser.add_argument("--verbose", action="store_true", help="print each head")
    given = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    groups = {group: dict.fromkeys(heads, cases.judge) for group, heads in GROUPS.items()}
    groups |= {
        group: dict.fromkeys(models, timm_and_transformers.judge) for group, models in timm_and_transformers.GROUPS.items()
    }
    found: dict[str, tuple[str, Verdict]] = {}
    for group, members in groups.items():
        for name, judge in members.items():
            if given.only is None or given.only in group or given.only in name:
                found[name] = group, judge(name)
                if given.verbose:
                    print(f"{name}: {found[name][1]}", flush=True)
    if not found:
        parser.error(f"no head is called {given.only}")
    _table(found)
    if given.json:
        given.json.write_text(
            json.dumps({name: {"group": group} | asdict(one) for name, (group, one) in found.items()}, indent=1)
        )
    print(f"{len(found)} heads in {time.perf_counter() - start:.0f} s")
    sys.exit(any(one.verdict in ("wrong", "failed") or one.read.startswith("wrong") for _, one in found.values()))


def _table(found: dict[str, tuple[str, Verdict]]) -> None:
    order = [*reversed(WORST)]
    print(f"{'':<24}" + "".join(f"{name:>27}" for name in order))
    for group in [*dict.fromkeys(group for group, _ in found.values()), "all"]:
        counts = Counter(one.verdict for member, one in found.values() if group in (member, "all"))
        print(f"{group:<24}" + "".join(f"{counts[name]:>27}" for name in order))
    for kind in WORST[:3]:
        named = [(name, one) for name, (_, one) in found.items() if one.verdict == kind]
        if named:
            print(f"\n{kind}:")
        for name, one in named:
            reason = one.wrong[0] if one.wrong else f"{one.provable} is right"
            print(f"  {name} [{one.share}]: {reason}")
    reads = Counter(one.read.split(":")[0] for _, one in found.values())
    print("\nquery='read': " + ", ".join(f"{name or 'not judged'}: {count}" for name, count in reads.most_common()))
    for name, (_, one) in found.items():
        if one.read.startswith("wrong"):
            print(f"  {name}: {one.read}")


if __name__ == "__main__":
    main()
