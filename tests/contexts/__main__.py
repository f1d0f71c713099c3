# ruff: noqa: T201 - a program
"""Entry point of `python -m tests.contexts`: run contexts and print a table.

The grid is every mode of every model with every method on three photos, and pairs of modes drawn by the seed. `--draw N` takes N pairs of a
model and a mode with six questions each. Fails if an answer is wrong, if an error is raw, if something is not as it was, or if fewer
than 90 % of the contexts whose plain answer exists are answered.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.contexts.asking import Answer
from tests.contexts.judge import Question, Verdict, all_questions, judge, preload
from tests.contexts.models import MODELS
from tests.contexts.modes import MODES, NotHere

LEAST = 0.9


def drawn_pairs(name: str, count: int, seed: int) -> list[str]:
    """Draw pairs of modes for a model."""
    chosen = random.Random(f"{seed} {name}")
    names = [mode for mode in MODES if mode not in ("plain", "scripted")]
    return [" + ".join(chosen.sample(names, 2)) for _ in range(count)]


def of_model(name: str, modes: list[str], seed: int, most: int) -> tuple[list[Verdict], list[str]]:
    """Judge contexts of one model, at most so many in each mode; return them, and the modes that it cannot have."""
    plain: dict[Question, Answer] = {}
    verdicts: list[Verdict] = []
    missing = []
    for number, mode in enumerate(modes):
        try:
            verdicts += judge(name, mode, all_questions(seed + number)[:most], plain)
        except NotHere as error:
            missing.append(f"{mode}: {str(error).splitlines()[0][:80]}")
    return verdicts, missing


def drawn(count: int, seed: int) -> dict[str, list[str]]:
    """Draw models and modes, a pair of modes each third time."""
    chosen = random.Random(seed)
    jobs: dict[str, list[str]] = {}
    for number in range(count):
        name = chosen.choice([*MODELS])
        jobs.setdefault(name, []).append(drawn_pairs(name, 1, seed + number)[0] if number % 3 == 2 else chosen.choice([*MODES]))
    return jobs


def main() -> int:
    """Run the grid, and print the table."""
    parser = argparse.ArgumentParser(description="Explanations inside anybody's program.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pairs", type=int, default=6, help="pairs of modes for each model")
    parser.add_argument(
        "--draw", type=int, default=0, help="instead of the grid: so many models and modes, with six questions each"
    )
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--model", action="append", help="only this model")
    parser.add_argument("--mode", action="append", help="only this mode, or FIRST + SECOND")
    given = parser.parse_args()
    if given.draw:
        jobs, most = drawn(given.draw, given.seed), 6
    else:
        jobs = {name: given.mode or [*MODES, *drawn_pairs(name, given.pairs, given.seed)] for name in given.model or MODELS}
        most = len(all_questions(0))
    verdicts: list[Verdict] = []
    preload(jobs)
    with ProcessPoolExecutor(given.workers, get_context("fork")) as pool:
        asked = {name: pool.submit(of_model, name, modes, given.seed, most) for name, modes in jobs.items()}
        for name, future in asked.items():
            found, missing = future.result()
            verdicts += found
            bad = sum(bool(one.wrong) for one in found)
            print(f"{name}: {len(jobs[name]) - len(missing)} modes, {len(found)} contexts, {bad} wrong", flush=True)
            for text in missing:
                print(f"  not here: {text}")
    return report(verdicts)


def report(verdicts: list[Verdict]) -> int:
    """Print what is wrong, the reasons of refusals, and the shares; return 1 if a promise is broken."""
    wrong = [one for one in verdicts if one.wrong]
    for one in wrong[:100]:
        print(f"WRONG {one.model} | {one.mode} | {one.method} | photo {one.photo}: {one.wrong} {one.text[:300]}")
    usual = [one for one in verdicts if "scripted" not in one.mode]
    possible = [one for one in usual if one.plain]
    answered = [one for one in possible if one.kind == "answered"]
    refused = Counter((one.mode, one.text[:220]) for one in verdicts if one.kind == "refused" and (one.plain or one not in usual))
    for (mode, text), count in refused.most_common():
        print(f"refused {count:4} {mode}: {text}")
    share = len(answered) / max(len(possible), 1)
    modes = {one.mode for one in verdicts}
    print(
        f"{len(verdicts)} contexts of {len({one.model for one in verdicts})} models in {len(modes)} modes: {len(wrong)} wrong, "
        f"{sum(one.kind == 'raw' for one in verdicts)} raw errors; {len(answered)} of {len(possible)} whose plain answer exists are "
        f"answered ({share:.1%}, at least {LEAST:.0%})"
    )
    return int(bool(wrong) or share < LEAST)


if __name__ == "__main__":
    sys.exit(main())
