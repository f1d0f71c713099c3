"""Sanity checks: cascading randomization, the equivariance to a flip, and rank correlations beside scipy's."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from visattn.errors import ShapeError
from visattn.evaluation import cascading_randomization, edge_map, flip_equivariance
from visattn.evaluation.randomization import spearman

SIDE = 16


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, 3, SIDE, SIDE))  # without initial values of its own
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.GELU()) for _ in range(3)))
        self.head = nn.Linear(3 * SIDE * SIDE, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(x + self.bias).flatten(1))
        return out


def model() -> nn.Module:
    torch.manual_seed(0)
    return Small().eval()


def saliency(of: nn.Module, pixels: Tensor) -> Tensor:
    pixels = pixels.clone().requires_grad_()
    return torch.autograd.grad(of(pixels)[0, 2], pixels)[0][0].sum(0)


def picture() -> Tensor:
    return torch.randn(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


def test_parts_become_random_from_the_output_to_the_input() -> None:
    of, x = model(), picture()
    before = copy.deepcopy(of.state_dict())
    state = torch.get_rng_state()
    found = cascading_randomization(of, x, saliency, seed=5)
    assert found.parts == ("head", "blocks.2.0", "blocks.1.0", "blocks.0.0", "(the model itself)")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in of.state_dict().items())

    torch.manual_seed(5)
    other, expected = copy.deepcopy(of), list[float]()
    own = saliency(of, x).flatten().tolist()
    for layer in (other.head, other.blocks[2][0], other.blocks[1][0], other.blocks[0][0]):  # type: ignore[index]
        layer.reset_parameters()  # type: ignore[operator,union-attr]
        expected.append(spearmanr(own, saliency(other, x).flatten().tolist()).statistic)
    bias = other.bias
    with torch.no_grad():
        bias.copy_(bias.flatten()[torch.randperm(bias.numel())].view_as(bias))  # type: ignore[arg-type,operator]
    expected.append(spearmanr(own, saliency(other, x).flatten().tolist()).statistic)
    assert found.correlations == pytest.approx(expected, abs=1e-9)
    assert found.last == found.correlations[-1]


def test_an_edge_map_does_not_change_and_a_constant_map_has_no_correlation() -> None:
    of, x = model(), picture()
    edges = cascading_randomization(of, x, lambda _, pixels: edge_map(np.zeros((8, 8)), pixels))
    assert edges.correlations == pytest.approx(np.ones(5))
    assert np.isnan(cascading_randomization(of, x, lambda *_: np.ones((4, 4))).correlations).all()


def test_maps_of_other_grids_are_refused() -> None:
    grids = iter([(3, 3), (4, 4)])
    with pytest.raises(ShapeError, match="one grid"):
        cascading_randomization(model(), picture(), lambda *_: np.random.default_rng(0).random(next(grids)))


def test_a_map_that_follows_the_flip_has_the_correlation_1() -> None:
    assert flip_equivariance(picture(), lambda pixels: pixels[0].sum(0)) == pytest.approx(1)
    ramp = torch.arange(12.0).view(3, 4)
    assert flip_equivariance(picture(), lambda _: ramp) == pytest.approx(spearman(ramp.numpy()[:, ::-1], ramp.numpy()))
    assert math.isnan(flip_equivariance(picture(), lambda _: torch.ones(3, 4)))


@pytest.mark.parametrize("seed", range(8))
def test_rank_correlations_equal_those_of_scipy(seed: int) -> None:
    random = np.random.default_rng(seed)
    one, two = random.integers(0, 3 + seed * 9, (2, 5, 7)).astype(float)
    assert spearman(one, two) == pytest.approx(spearmanr(one.ravel(), two.ravel()).statistic, abs=1e-12)
