"""Cases of the judge: each head with two batches of two images, or two masks; composed ones also with other weights."""

from __future__ import annotations

from torch import Tensor

from tests.capturing.heads.composed import HEADS
from tests.capturing.heads.judge import Verdict, verdict
from tests.capturing.heads.model import Head, Model, images, masks
from tests.capturing.heads.truth import Case


def case(head: Head, seed: int = 0) -> Case:
    """Return a head as a case, with one run for each batch or mask."""
    model, first, second = Model(head, seed), images(2 * seed), images(2 * seed + 1)
    runs: list[tuple[Tensor, ...]] = [(first, mask) for mask in masks(head.masks)] or [(first,), (second,)]
    return Case(model, runs, model.read, model.order, head.prefix, model.stream, model.kit.latents)


def judge(name: str) -> Verdict:
    """Judge a head by its name."""
    return verdict(*(case(HEADS[name], seed) for seed in range(1 + name.startswith("composed"))))
