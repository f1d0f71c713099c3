"""Heads composed at random: a layer before, several poolings with coefficients, and layers after."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.capturing.heads.averages import MEANS, SOME
from tests.capturing.heads.mixtures import MIXTURES
from tests.capturing.heads.model import AFTER, BEFORE, Head
from tests.capturing.heads.single import SINGLE
from tests.capturing.heads.weighted import ATTENTION, EXTREMES, WEIGHTS

Term = Callable[[Any, Tensor], Tensor]
TERMS: dict[str, Term] = {
    "cls": lambda k, t: t[:, 0],
    "mean": lambda k, t: t[:, k.prefix :].mean(1),
    "all": lambda k, t: t.mean(1),
    "max": lambda k, t: t[:, k.prefix :].amax(1),
    "half": lambda k, t: (t[:, k.prefix :] * k.part[:, None]).mean(1) * 2,
    "weights": lambda k, t: k.w.softmax(0) @ t[:, k.prefix :],
}
COEFFICIENTS = (1.0, 1.0, 1.0, -1.0, 0.5, 0.02, 0.0)
JOINS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "sum": lambda parts: torch.stack(parts).sum(0),
    "cat": lambda parts: torch.cat(parts, -1),
    "product": lambda parts: torch.stack([1 + part for part in parts]).prod(0),
}


def _pool(terms: list[tuple[float, str, bool]], join: str) -> Callable[[Any, Tensor], Tensor]:
    def pool(k: Any, t: Tensor) -> Tensor:
        parts = [factor * (TERMS[name](k, t).detach() if cut else TERMS[name](k, t)) for factor, name, cut in terms]
        return JOINS[join](parts)

    return pool


def composed(seed: int) -> tuple[str, Head]:
    """Compose a head; return its name and the head."""
    choose = random.Random(seed)
    prefix = choose.choice([0, 1, 1, 1, 2, 5])
    known = [name for name in TERMS if prefix or name not in ("cls", "all")]
    names = choose.sample([*known, "mean", "mean"], choose.choice([1, 2, 2, 3]))
    if prefix:
        names[0] = choose.choice(["cls", names[0]])
    terms = [(choose.choice(COEFFICIENTS), name, choose.random() < 0.1 and i > 0) for i, name in enumerate(dict.fromkeys(names))]
    join, before = choose.choice([*JOINS]), choose.choice([name for name in BEFORE if name != "scores above 0"])
    after = choose.choice([name for name in AFTER if name != "none"])
    text = f" {join} ".join(f"{factor:g} {name}{' detached' if cut else ''}" for factor, name, cut in terms)
    name = f"composed {seed}: {text} of {prefix} + 96 tokens, {before} before, {after} after"
    return name, Head(_pool(terms, join), before=before, after=after, prefix=prefix)


COMPOSED = dict(composed(seed) for seed in range(60))
HEADS: dict[str, Head] = SINGLE | MEANS | SOME | WEIGHTS | EXTREMES | ATTENTION | MIXTURES | COMPOSED
GROUPS = {
    "single tokens": SINGLE,
    "means": MEANS,
    "some patches": SOME,
    "weights": WEIGHTS,
    "extremes": EXTREMES,
    "attention": ATTENTION,
    "mixtures": MIXTURES,
    "composed": COMPOSED,
}
