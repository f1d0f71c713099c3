"""Shuffled attention weights: the answer changes where attention decides, and stays where it is even."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import visattn
from visattn.errors import OptionError, ShapeError
from visattn.evaluation import attention_permutation

TOKENS, WIDTH = 9, 6


class Pooling(nn.Module):
    """One query attends to nine patches, with weights that are even or sharp; its result is classified."""

    def __init__(self, sharpness: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Conv2d(3, WIDTH, 4, 4)
        self.query, self.head, self.sharpness = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Linear(WIDTH, 4), sharpness

    def weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.embed(x).flatten(2).mT
        return (self.sharpness * self.query @ tokens.mT).softmax(-1), tokens

    def forward(self, x: Tensor) -> Tensor:
        weights, tokens = self.weights(x)
        out: Tensor = self.head((weights @ tokens)[:, 0])
        return out


def picture() -> Tensor:
    return torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(1))


def test_distances_equal_a_loop() -> None:
    model, x = Pooling(3.0).eval(), picture()
    found = attention_permutation(model, x, count=4, seed=7)
    with torch.no_grad():
        weights, tokens = model.weights(x)
        before = F.softmax(model(x).double(), -1)[0]
        for number in range(4):
            order = torch.rand((1, 1, 1, 1, TOKENS), generator=torch.Generator().manual_seed(7 + number)).argsort(-1).flatten()
            pooled = sum(float(weights[0, 0, order[key]]) * tokens[0, key] for key in range(TOKENS))
            after = F.softmax(model.head(pooled).double(), -1)
            assert found.every[number] == pytest.approx(float((after - before).abs().sum() / 2), abs=1e-6)
    assert found.distances.shape == (1, 4)
    assert np.allclose(found.distances[0], found.every)


def test_even_attention_has_no_place_to_lose() -> None:
    assert attention_permutation(Pooling(0.0).eval(), picture()).every.max() < 1e-6
    assert attention_permutation(Pooling(3.0).eval(), picture()).every.mean() > 0.01


def test_layers_of_a_trained_network() -> None:
    model = visattn.load_model("scenes_vit")
    pixels = visattn.prepare("scene:7", model).pixels
    state = torch.get_rng_state()
    found = attention_permutation(model, pixels, count=3)
    assert torch.equal(state, torch.get_rng_state())
    assert found.layers == tuple(f"blocks.{number}.attn" for number in range(4))
    assert found.distances.shape == (4, 3)
    assert found.every.mean() > 0.3  # the trained network needs its attention
    assert (found.distances >= 0).all()
    assert (found.distances <= 1).all()


def test_wrong_models_are_named() -> None:
    with pytest.raises(OptionError, match="no attention"):
        attention_permutation(
            visattn.load_model("scenes_cnn"), visattn.prepare("scene:7", visattn.load_model("scenes_cnn")).pixels
        )
    with pytest.raises(ShapeError, match="scores of classes"):
        attention_permutation(nn.Conv2d(3, 2, 3).eval(), picture())
