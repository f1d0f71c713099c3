"""Mutation testing: do the tests notice a small fault in the code?

    python scripts/mutation.py maps                      150 mutants of a group, drawn with seed 0
    python scripts/mutation.py capturing --part 1/4      the first quarter of them
    python scripts/mutation.py maps --list               what is drawn; nothing runs

Each mutant is put into a copy of the project, and the tests that run its line are asked; which these are is found once for a tree. Results
are kept in `out/mutation` as they come, so a run that was interrupted goes on, and the parts of a run add up. At the end stand the share of
the mutants that were killed and those that survived. Mutants that do the same as the source are listed in `mutation_equivalents.toml`, and
left out of the share. Exits 1 if all were tried and the share is less than the bound of the group.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from mutants.copies import Digests, contents
from mutants.drawing import drawn
from mutants.equivalents import Equivalents
from mutants.groups import GROUPS, sources, tests
from mutants.maps import mapped
from mutants.trying import Results, Trial, summary
from mutants.workshops import Workshop

ROOT = Path(__file__).parents[1]
OUT = ROOT / "out" / "mutation"


def main() -> int:
    """Try the mutants, print what came of them, and return 1 if too many survived."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    whole = GROUPS[options.group]
    group = whole._replace(sources=options.sources or whole.sources, tests=options.tests or whole.tests)
    files = contents(ROOT)
    mutants = drawn(ROOT, sources(ROOT, group.sources), options.count, options.seed)
    equivalents = Equivalents()
    if outdated := equivalents.outdated(ROOT):
        print(
            "mutation: not in the source any more, so to be removed from the equivalents:", *outdated, sep="\n", file=sys.stderr
        )
        return 1
    counted = [mutant for mutant in mutants if mutant not in equivalents]
    if options.list:
        print(*mutants, sep="\n")
        return 0
    digests, asked = Digests(files), tests(ROOT, group.tests)
    results = Results(OUT / f"{options.group}.results.jsonl", digests, asked)
    part = [mutant for mutant in counted[options.part[0] - 1 :: options.part[1]] if mutant.name not in results.valid()]
    if part:
        with Workshop(files, OUT) as workshop:
            workshop.compile(asked, 600.0)
            known = mapped(OUT / f"{options.group}.map.jsonl", digests, workshop, asked, sources(ROOT, whole.sources))
            print(
                f"{known.count} tests are asked; {len(known.bad)} are not, as they were skipped or fail without a fault",
                flush=True,
            )
            Trial(workshop, known, results).run(part)
    left_out = [mutant.name for mutant in mutants if mutant in equivalents]
    lines, share = summary(mutants, left_out, results.valid())
    print(*lines, sep="\n")
    if share is None:
        return 0 if options.part[1] > 1 else 1
    print(f"{options.group}: {share:.3f} of the mutants were killed, at least {group.least:.2f} must be")
    return int(share < group.least)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", choices=list(GROUPS), help="sources and their tests")
    parser.add_argument("--count", type=int, default=150, metavar="N", help="how many mutants are drawn (default: 150)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (default: 0)")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="K/M", help="try only the K-th of M parts")
    parser.add_argument("--list", action="store_true", help="print what is drawn, and run nothing")
    parser.add_argument("--sources", type=_places, metavar="PATH,PATH", help="draw from these files and folders only")
    parser.add_argument("--tests", type=_places, metavar="PATH,PATH", help="ask these files and folders of tests only")
    return parser.parse_args()


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"must be K/M with K from 1 to M, such as 2/4, got '{text}'")
    return int(part), int(parts)


def _places(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


if __name__ == "__main__":
    sys.exit(main())
