"""Heads that a model mixes by an einsum, before or after the softmax (talking heads)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import visattn
from visattn.errors import NoAttentionCaptured

HEADS, WIDTH = 4, 32
Mix = Callable[["Talking", Tensor, Tensor], Tensor]  # takes the model, weights (B, heads, q, k) and tokens (B, N, D)


class Talking(nn.Module):
    """Attention on a 4 x 6 grid that mixes its heads after the softmax."""

    def __init__(self, mix: Mix, before: Mix = lambda _, weights, __: weights) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.patch, self.qkv = nn.Conv2d(3, WIDTH, 8, 8), nn.Linear(WIDTH, 3 * WIDTH)
            self.heads, self.keys = nn.Parameter(torch.randn(HEADS, HEADS)), nn.Parameter(torch.randn(24, 24))
            self.gate, self.head = nn.Linear(WIDTH, HEADS * HEADS), nn.Linear(WIDTH, 5)
        self.mix, self.before = mix, before
        self.used = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).mT
        query, key, value = self.qkv(tokens).view(len(x), -1, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        weights = self.before(self, query @ key.mT, tokens).softmax(-1)
        self.used = self.mix(self, weights, tokens)
        return self.head((tokens + (self.used @ value).transpose(1, 2).flatten(2)).mean(1))  # type: ignore[no-any-return]


def by_heads(m: Talking, weights: Tensor, _: Tensor) -> Tensor:
    return torch.einsum("bhqk,hg->bgqk", weights, m.heads)


def by_heads_first(m: Talking, weights: Tensor, _: Tensor) -> Tensor:
    return torch.einsum("hg,bhqk->bgqk", m.heads, weights)


def by_the_image(m: Talking, weights: Tensor, tokens: Tensor) -> Tensor:
    gate = m.gate(tokens.mean(1)).view(-1, HEADS, HEADS)
    return torch.einsum("bhqk,bhg->bgqk", weights, gate)


def over_keys(m: Talking, weights: Tensor, _: Tensor) -> Tensor:
    return torch.einsum("bhqk,kn->bhqn", weights, m.keys)


def over_queries(m: Talking, weights: Tensor, _: Tensor) -> Tensor:
    return torch.einsum("bhqk,qn->bhnk", weights, m.keys)


def captured(model: Talking, batch: int = 2) -> visattn.Recording:
    with torch.no_grad(), visattn.capture(model.eval()) as recording:
        model(torch.randn(batch, 3, 32, 48, generator=torch.Generator().manual_seed(1)))
    return recording


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("mix", [by_heads, by_heads_first])
def test_mixed_weights_are_those_that_meet_the_values(mix: Mix, batch: int) -> None:
    model = Talking(mix, before=mix)
    for _ in range(3):
        (record,) = captured(model, batch)
        assert (record.kind, record.reason, record.keys.grid) == ("self", None, (4, 6))
        assert torch.equal(record.operator.dense(), model.used)


@pytest.mark.parametrize("mix", [over_keys, over_queries, by_the_image])
def test_weights_that_were_mixed_in_another_way_have_no_place(mix: Mix) -> None:
    try:
        recording = captured(Talking(mix))
    except NoAttentionCaptured:
        return
    assert all(record.reason is not None for record in recording)
