"""Scores of explanations, arrays and masks of image files equal those of maps and boolean masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import visattn
from visattn import evaluation
from visattn.core.geometry import Box
from visattn.errors import OptionError, ShapeError

SCORES = evaluation.auroc, evaluation.average_precision, evaluation.pointing_game, evaluation.lift, evaluation.energy_inside


@pytest.fixture(scope="module")
def explained() -> visattn.Explanation:
    torch.manual_seed(0)
    return visattn.explain(timm.create_model("deit_tiny_patch16_224", depth=2).eval(), "photo:chelsea", method="rollout")


@pytest.fixture(scope="module")
def mask(explained: visattn.Explanation) -> np.ndarray[Any, np.dtype[np.bool_]]:
    made = np.zeros((explained.photo.height, explained.photo.width), bool)
    made[60:200, 130:300] = True
    return made


@pytest.mark.parametrize("score", SCORES, ids=lambda score: score.__name__)
def test_explanations_and_masks_of_files_are_taken(score: Callable[..., Any], explained: visattn.Explanation, mask: Any) -> None:
    own = score(explained.map, mask, explained.geometry)
    assert score(explained, mask) == own
    assert score(explained.map, mask) == own, "the map knows its geometry"
    for given in (
        255 * mask.astype(np.uint8),
        mask.astype(float),
        torch.from_numpy(mask),
        Image.fromarray(255 * mask.astype(np.uint8)),
        Image.fromarray(mask),
    ):
        assert score(explained, given) == own


def test_an_array_covers_the_whole_photo() -> None:
    random = np.random.default_rng(0)
    values, mask = random.integers(0, 5, (6, 8)).astype(float), random.random((6, 8)) < 0.3
    on, off = values[mask], values[~mask]
    wins = sum((a > b) + (a == b) / 2 for a in on for b in off)
    assert evaluation.auroc(values, mask) == pytest.approx(wins / len(on) / len(off))
    assert evaluation.energy_inside(values, mask) == pytest.approx(values[mask].sum() / values.sum())
    wide = np.kron(mask, np.ones((10, 20))) > 0
    for score in SCORES:
        assert score(values, wide) == pytest.approx(float(score(values, mask))), score.__name__
        assert score(torch.from_numpy(values), wide) == score(values, wide)


def test_an_array_with_a_geometry_covers_the_model_s_input(explained: visattn.Explanation, mask: Any) -> None:
    values = explained.map.values.numpy()
    for score in SCORES:
        assert score(values, mask, explained.geometry) == pytest.approx(float(score(explained, mask))), score.__name__


def test_baselines_take_explanations_and_arrays(explained: visattn.Explanation) -> None:
    for shown in (explained, explained.map.values.numpy()):
        for made in (evaluation.center_prior, evaluation.smooth_random, evaluation.shifted_copies):
            assert torch.equal(made(shown).values, made(explained.map).values.to(made(shown).values))


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda e, m: evaluation.auroc(e, 3 * m.astype(int)), ShapeError, "boolean, or hold 0 and 1, or 0 and 255; got int64"),
        (lambda e, m: evaluation.auroc(e, m[:5]), ShapeError, "of the photo's size"),
        (lambda e, m: evaluation.auroc(np.zeros((2, 3, 4)), m), ShapeError, r"an array must be numbers \(rows, columns\)"),
        (lambda e, m: evaluation.auroc(e, m, visattn.Geometry((1, 1), (1, 1), Box(0, 0, 1, 1))), OptionError, "its own geometry"),
        (lambda e, m: evaluation.auroc(evaluation.given.as_map(np.ones((3, 4))), m), OptionError, "geometry is missing"),
    ],
    ids=range(5),
)
def test_other_inputs_are_refused_in_one_line(
    call: Callable[..., Any], kind: type[Exception], said: str, explained: visattn.Explanation, mask: Any
) -> None:
    with pytest.raises(kind, match=said) as caught:
        call(explained, mask)
    assert "\n" not in str(caught.value)
