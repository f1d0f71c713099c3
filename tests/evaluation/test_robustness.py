"""Robustness of maps: those that follow the input keep their correlation, and loops over single changes give the same numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch import Tensor

from visattn.errors import MapError, OptionError, ShapeError
from visattn.evaluation import robustness

SIDE, CELLS = 32, 8


def picture() -> Tensor:
    return torch.randn(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


def local(pixels: Tensor) -> Tensor:
    """Return a map of what each cell holds: it moves with the input, and a change elsewhere changes nothing."""
    return F.avg_pool2d(pixels[0].mean(0)[None], SIDE // CELLS)[0]


def test_a_map_of_single_cells_follows_every_change() -> None:
    found = robustness(local, picture(), noise=0.01)
    assert found.flip == pytest.approx(1)
    assert found.shift == pytest.approx(np.ones(4))
    assert found.brightness == pytest.approx(np.ones(2))
    assert found.patch == pytest.approx(np.ones(5))
    assert (found.noise > 0.99).all()
    assert (found.noise < 1).any()


def test_a_map_of_one_place_does_not_move() -> None:
    fixed = torch.rand(CELLS, CELLS, generator=torch.Generator().manual_seed(1))
    found = robustness(lambda _: fixed, picture())
    assert found.noise == pytest.approx(np.ones(5))
    assert found.patch == pytest.approx(np.ones(5))
    rows, values = range(CELLS), fixed.numpy()
    moved = {
        (1, 0): (values[:-1], values[1:]),
        (-1, 0): (values[1:], values[:-1]),
        (0, 1): (values[:, :-1], values[:, 1:]),
        (0, -1): (values[:, 1:], values[:, :-1]),
    }
    expected = [float(spearmanr(one.ravel(), two.ravel()).statistic) for one, two in moved.values()]
    assert found.shift == pytest.approx(expected)
    mirrored = [float(values[row, CELLS - 1 - column]) for row in rows for column in rows]
    assert found.flip == pytest.approx(float(spearmanr(mirrored, values.ravel()).statistic))


def test_changes_are_what_they_say() -> None:
    seen = list[Tensor]()

    def explain(pixels: Tensor) -> Tensor:
        seen.append(pixels.clone())
        return local(pixels)

    pixels = picture()
    robustness(explain, pixels, noise=0.5, brightness=0.3, patch=0.25, samples=3)
    unit, (own, *changed) = float(pixels.std()), seen
    assert torch.equal(own, pixels)
    for noisy in changed[:3]:
        assert float((noisy - pixels).std()) == pytest.approx(0.5 * unit, rel=0.05)
    assert torch.allclose(changed[3], pixels + 0.3 * unit)
    assert torch.allclose(changed[4], pixels - 0.3 * unit)
    for pasted in changed[5:8]:
        differs = (pasted != pixels).all(1)[0].nonzero()
        (top, left), (bottom, right) = differs.amin(0).tolist(), differs.amax(0).tolist()
        assert (bottom - top + 1, right - left + 1, len(differs)) == (8, 8, 64)
    step = SIDE // CELLS
    assert torch.equal(changed[8][..., step:, :], pixels[..., :-step, :])
    assert torch.equal(changed[9][..., :-step, :], pixels[..., step:, :])
    assert torch.equal(changed[10][..., step:], pixels[..., :-step])
    assert torch.equal(changed[11][..., :-step], pixels[..., step:])
    assert torch.equal(changed[12], pixels.flip(-1))
    assert len(changed) == 13


def test_constant_maps_and_wrong_input() -> None:
    assert math.isnan(robustness(lambda _: torch.ones(4, 4), picture()).flip)
    with pytest.raises(MapError, match="two rows and columns"):
        robustness(lambda _: torch.ones(1, 4), picture())
    with pytest.raises(ShapeError, match="one input"):
        robustness(local, picture()[0, 0])
    for options in ({"samples": 0}, {"patch": 0.9}, {"noise": -1}):
        with pytest.raises(OptionError):
            robustness(local, picture(), **options)


def test_a_square_that_touches_all_cells_has_no_number() -> None:
    """Of 2 x 2 cells of 32 pixels, a square of 8 pixels touches 1, 2 or 4: with fewer than two cells left there is no correlation."""
    random = np.random.default_rng(0)
    found = robustness(lambda _: random.random((2, 2)), picture(), samples=40)
    touched = np.isnan(found.patch)
    assert 0 < touched.sum() < 40
    assert np.abs(found.patch[~touched]).max() <= 1 + 1e-12
