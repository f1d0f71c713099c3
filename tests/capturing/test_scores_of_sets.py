"""Scores of patches and members of a set: shifted by a number that all have in common, read in both directions, behind moved samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capturing.moving import GRID, WIDTH, Moving, image, see
from visattn.core.records import Recording

SLOTS = 5
NAMES = tuple(f"query{i}" for i in range(SLOTS))
Both = Callable[[Any, Tensor, Tensor], Tensor]  # takes the model, patches (B, N, C) and members (B, M, C)


class Slots(Moving):
    """Model of patches and learned tokens."""

    def __init__(self, attend: Both) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.slots, self.layer = nn.Parameter(torch.randn(SLOTS, WIDTH)), nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.attend = [attend]

    def forward(self, x: Tensor) -> Tensor:
        return self.attend[0](self, self.tokens(x), self.slots.expand(len(x), -1, -1))


def run(attend: Both, batch: int = 2) -> Recording:
    return see(Slots(attend), image(batch=batch))


def shifted(scores: Tensor) -> Tensor:
    """Subtract the largest score of the batch, as Grounding DINO does."""
    return (scores - scores.max()).clamp(-50000, 50000)


def by_row(scores: Tensor) -> Tensor:
    return scores - scores.amax(-1, keepdim=True)


@pytest.mark.parametrize("batch", [1, 2])
def test_patches_that_ask_members_are_placed_behind_a_common_shift(batch: int) -> None:
    (record,) = run(lambda _, t, s: shifted(t @ s.mT).softmax(-1) @ s, batch)
    assert (record.kind, record.queries.grid, record.keys.prefix) == ("cross", GRID, NAMES)


@pytest.mark.parametrize("batch", [1, 2])
def test_members_that_ask_patches_are_placed_behind_a_common_shift(batch: int) -> None:
    (record,) = run(lambda _, t, s: by_row(shifted(t @ s.mT).mT).softmax(-1) @ t, batch)
    assert (record.kind, record.queries.prefix, record.keys.grid) == ("pool", NAMES, GRID)


def asked(query: Tensor, key: Tensor | None = None, written: bool = False) -> Tensor:
    key = query if key is None else key
    if written:
        return (query @ key.mT).softmax(-1) @ key
    return F.scaled_dot_product_attention(query[:, None], key[:, None], key[:, None])[:, 0]


def layer(m: Any, t: Tensor) -> Tensor:
    """Return the weights of a layer for each image; its channels could be members of a set."""
    return m.layer.mT.expand(len(t), -1, -1)  # type: ignore[no-any-return]


ATTACKS: dict[str, Both] = {
    # a layer, written as a product with its weights for each image, makes tokens and no scores
    "a layer and a number": lambda m, t, _: asked(shifted(t @ layer(m, t))),
    "a layer and a number, then another layer": lambda m, t, _: asked(m.part(shifted(t @ layer(m, t)))),
    "a layer and a number, then a product": lambda m, t, _: asked(shifted(t @ layer(m, t)) @ torch.rand(WIDTH, WIDTH)),
    "a layer and a number, then a product for each image": lambda m, t, _: asked(
        shifted(t @ layer(m, t)) @ torch.rand(len(t), WIDTH, 1)
    ),
    "a layer and a number, then one of the image": lambda m, t, _: asked(shifted(t @ layer(m, t)) @ t.mean(1)[:, :, None]),
    "a layer and a number, then their sum": lambda m, t, _: asked(shifted(t @ layer(m, t)).sum(-1, keepdim=True)),
    "a layer and a number, then the largest": lambda m, t, _: asked(0.01 * t + shifted(t @ layer(m, t)).amax(-1, keepdim=True)),
    "a layer and a number, normalized": lambda m, t, _: asked(m.norm(shifted(t @ layer(m, t)))),
    "a layer and a number, added": lambda m, t, _: asked(0.01 * t + shifted(t @ layer(m, t))),
    "values of other members": lambda _, t, s: shifted(t @ s.mT).softmax(-1) @ s.flip(1),
    "values of other patches": lambda _, t, s: by_row(shifted(t @ s.mT).mT).softmax(-1) @ t.flip(1),
    "a number for each patch": lambda m, t, _: asked(t @ layer(m, t) - t.flip(0).amax(-1, keepdim=True)),
    "transposed scores of patches": lambda m, t, _: (m.part(t) @ t.flip(1).mT).softmax(-1).mT @ t,
}


@pytest.mark.parametrize("name", ATTACKS)
def test_no_token_is_placed_by_scores_that_are_none(name: str) -> None:
    assert all(record.kind == "unplaced" for record in run(ATTACKS[name]))


# --- values that members read at points that they compute


def sampled(maps: Tensor, asking: Tensor) -> Tensor:
    """Read maps `(B, C, rows, columns)` at points that tokens `(B, M, C)` compute, far from their cells."""
    return F.grid_sample(maps, asking[:, None, :, :2].tanh(), align_corners=False)[:, :, 0].mT


def planes(t: Tensor) -> Tensor:
    return t.mT.reshape(len(t), -1, *GRID)


def moved(t: Tensor) -> Tensor:
    """Return patches that hold values from elsewhere."""
    return t + sampled(planes(t), t)


@pytest.mark.parametrize("written", [False, True])
def test_members_that_ask_what_was_read_elsewhere_are_themselves(written: bool) -> None:
    first, second = run(lambda _, t, s: asked(s + asked(s, moved(t), written)))
    assert (first.kind, second.kind, second.queries.prefix) == ("unplaced", "self", NAMES)


READ_ELSEWHERE: dict[str, Both] = {
    "patches": lambda _, t, s: asked(moved(t)),
    "patches, by members": lambda _, t, s: asked(sampled(planes(t), s)),
    "patches, by members that are added": lambda _, t, s: asked(s + sampled(planes(t), asked(s))),
    "patches, asked by members": lambda _, t, s: asked(s, moved(t)),
    "patches, asked by members that are mixed": lambda _, t, s: asked(asked(torch.rand(SLOTS, SLOTS) @ s, moved(t))),
    "another member": lambda _, t, s: asked(
        sampled(F.scaled_dot_product_attention(s, t, t).mT[:, :, None], F.scaled_dot_product_attention(s, t, t))
    ),
}


@pytest.mark.parametrize("name", READ_ELSEWHERE)
def test_what_was_read_elsewhere_has_no_place(name: str) -> None:
    assert list(run(READ_ELSEWHERE[name]))[-1].kind == "unplaced"
