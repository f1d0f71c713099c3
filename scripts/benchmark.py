"""Speed and memory, compared with the plain forward pass and with other libraries; exits 1 if a bound is exceeded.

`benchmark.py [--only PART,PART] [--quick] [--write-docs] [--timm-train FILE]`. Each part runs in its own processes
(`python -m bench.timing` and so on). Peers that no extra of visattn installs have their own environment, `.bench/peers`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.page import DOCS, protocol, write
from bench.parts import PARTS
from bench.parts.part import Options
from bench.parts.processes import ROOT, NotMeasured

from visattn._support.tables import Row, to_text
from visattn.errors import VisattnError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; return 0 if all bounds hold, 1 if one is exceeded, 2 if a part could not be measured."""
    parser = argparse.ArgumentParser(description="Measure speed and memory of visattn, and check the bounds.")
    parser.add_argument("--only", type=parts, default=list(PARTS), metavar="PART,PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="skip 1778 px (some minutes), and run fewer rounds")
    parser.add_argument("--write-docs", action="store_true", help=f"write {DOCS.relative_to(ROOT)} and its tables from this run")
    parser.add_argument(
        "--timm-train",
        type=Path,
        metavar="FILE",
        help="path of train.py from timm's repository, which the wheel does not contain",
    )
    options = parser.parse_args(arguments)
    if options.write_docs and options.quick:
        parser.error("--write-docs needs every size. Leave out --quick.")
    print("\n".join([*protocol(), *(f"{part.title}: {' '.join(part.protocol)}" for part in PARTS.values())]), flush=True)
    measured: dict[str, list[Row]] = {}
    missing = False
    for name in options.only:
        print(f"\n{PARTS[name].title}", flush=True)
        try:
            rows = list(PARTS[name].rows(Options(options.quick, options.timm_train)))
        except (NotMeasured, VisattnError) as error:
            print(f"benchmark: error: {name}: {error}", file=sys.stderr)
            missing = True
            continue
        measured[name] = rows
        print(to_text(rows), end="", flush=True)
    entries = [entry for rows in measured.values() for entry in rows if entry["bound"]]
    over = sum(entry["verdict"] == "over" for entry in entries)
    print(f"\n{over} of {len(entries)} bounds exceeded")
    if options.write_docs and not missing:
        write(measured)
        print(f"wrote {DOCS.relative_to(ROOT)}")
    return 2 if missing else int(bool(over))


def parts(text: str) -> list[str]:
    """Split a comma-separated list of parts, and check the names."""
    chosen = text.split(",")
    for part in chosen:
        if part not in PARTS:
            raise argparse.ArgumentTypeError(f"no part is called '{part}'. Choose from {', '.join(PARTS)}.")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
