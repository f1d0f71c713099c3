"""Tokens that a model picks by their content from several grids: photos in which it picks others are not traced again."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import visattn
from tests.capturing.moving import GRID, WIDTH, Moving, image, see
from visattn.core.capturing import forget
from visattn.core.records import Recording


class TwoStage(Moving):
    """Detector that picks tokens from two grids by a score, and by a second score: the same, or the negative."""

    def __init__(self, sign: float) -> None:
        super().__init__()
        self.sign = nn.Buffer(torch.tensor(sign))

    def forward(self, x: Tensor) -> Tensor:
        t = self.tokens(x)
        coarse = F.avg_pool2d(t.mT.reshape(len(x), WIDTH, *GRID), 2).flatten(2).mT
        every = self.norm(torch.cat([t, coarse], 1))
        score = self.part(every)[..., 0]
        picked, others = (self._picked(every, one) for one in (score, score * self.sign))
        return attended(attended(picked, others), t)

    @staticmethod
    def _picked(every: Tensor, score: Tensor) -> Tensor:
        return every.gather(1, score.topk(6, 1).indices[..., None].expand(-1, -1, WIDTH))


def attended(queries: Tensor, keys: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(queries[:, None], keys[:, None], keys[:, None])[:, 0]


def facts(recording: Recording) -> list[object]:
    return [(r.kind, r.queries.prefix, r.queries == r.keys, r.keys.grid, r.reason) for r in recording]


def rows(recording: Recording) -> list[Tensor]:
    return [record.operator.block(0) for record in recording]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_photos_in_which_other_tokens_are_picked_are_not_traced_again(sign: float, followed: list[None]) -> None:
    model = TwoStage(sign)
    for seed in range(4):
        later = see(model, image(seed, batch=2))
        assert [record.kind for record in later] == ["self" if sign > 0 else "cross", "pool"]
        assert later[0].queries.grid == later[0].keys.grid == ()
    assert len(followed) == 1
    forget()
    traced = see(model, image(3, batch=2))
    assert facts(traced) == facts(later)
    assert all(map(torch.equal, rows(traced), rows(later)))


def test_photo_in_which_two_choices_differ_is_traced_if_they_were_equal(followed: list[None]) -> None:
    model = TwoStage(1.0)
    for seed in range(6):
        model.sign.fill_(1 - 2 * (seed % 2))
        assert see(model, image(seed))[0].kind == ("cross" if seed % 2 else "self")
    assert len(followed) == 2


@pytest.mark.full
def test_two_stage_detector_of_transformers_is_traced_once(followed: list[None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    made: tuple[nn.Module, dict[str, Any]] = import_module("libraries.transformers_models").build("RTDetrForObjectDetection")
    model, inputs = made
    for seed in range(4):
        pixels = torch.randn(inputs["pixel_values"].shape, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad(), visattn.capture(model) as recording:
            model(**inputs | {"pixel_values": pixels})
        assert all(record.reason is None for record in recording)
    assert len(followed) <= 2  # constants that the model's code keeps are made in the first pass
