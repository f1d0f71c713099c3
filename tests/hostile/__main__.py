"""Entry point of `python -m tests.hostile`: run the generator and print the failures."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.hostile import FULL, KINDS, outcomes


def main() -> None:
    """Run `--count` cases over the chosen kinds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, help="cases of all chosen kinds together; by default those of a full run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(KINDS))
    parser.add_argument("--no-net", action="store_true", help="without the nets around the commands")
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()
    kinds = [given.only] if given.only else list(KINDS)
    codes: Counter[int] = Counter()
    wrong, slowest, count = [], 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            share = FULL[kind]
            if given.count is not None:
                share = given.count // len(kinds) + (kinds.index(kind) < given.count % len(kinds))
            for found in outcomes(kind, given.seed, share, Path(folder), net=not given.no_net):
                codes[found.code] += 1
                slowest, count = max(slowest, found.seconds), count + 1
                if given.verbose:
                    print(found, flush=True)
                if found.wrong:
                    wrong.append(found)
                    print(found, flush=True)
    net = "without the nets" if given.no_net else "with the nets"
    ends = f"slowest {slowest:.1f} s; codes {dict(sorted(codes.items()))}"
    print(f"{count} hostile inputs {net} (seed {given.seed}): {len(wrong)} wrong; {ends}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
