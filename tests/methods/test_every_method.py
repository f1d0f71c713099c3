"""Properties that the map of every method must have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import tiny
from tests.methods.truths import BATCH, EXACT, PRECISE, ROWS, graded, run
from tests.oracles.maps import Array, array
from visattn.core import methods
from visattn.core.operators import MatrixGradient, OuterGradient, SoftmaxOperator
from visattn.core.records import AttentionRecord, Recording

ALL: dict[str, Callable[[Recording, Any], Array]] = {
    **{name: partial(run, name) for name in ROWS},
    "norms of heads": lambda made, query: array(methods.norm_attention(made, keep_heads=True, query=query, **PRECISE).values),
    "legrad": lambda made, _: array(methods.legrad(made, **PRECISE).values),
    "gradcam": lambda made, _: array(methods.gradcam(made, **PRECISE).values),
    "flow": lambda made, query: array(methods.attention_flow(made, query=query).values),
}


every = pytest.mark.parametrize("name", list(ALL))


def slack(name: str) -> Any:
    return {"atol": 1e-5, "rtol": 0} if name == "flow" else EXACT


def taken(made: Recording, images: slice, order: Tensor) -> Recording:
    """Select images of a recording and permute its tokens."""

    def part(x: Any) -> Tensor:
        result: Tensor = x[images][..., order, :]
        return result

    records, features = [], []
    for record, feature in zip(made, made.features, strict=True):
        operator, given = record.operator, record.operator.gradient
        assert isinstance(operator, SoftmaxOperator)
        assert isinstance(given, OuterGradient)
        fresh = SoftmaxOperator(part(operator.query[:, :, 0]), part(operator.key[:, :, 0]), scale=operator.scale)
        fresh = fresh.with_gradient(OuterGradient(part(given.out[:, :, 0]), part(given.value[:, :, 0])))
        records.append(replace(record, operator=fresh, value=part(record.value), residual=part(record.residual)))
        features.append(replace(feature, value=part(feature.value), gradient=part(feature.gradient)))
    return replace(made, records=records, features=features)


@every
@pytest.mark.parametrize("place", ["0 + 3 x 5", "2 + 2 x 3"])
def test_batch_equals_single_images(name: str, place: str) -> None:
    made = graded(place)
    order = torch.arange(len(made[0].keys))
    for query in ("auto", "patch:1,2"):
        alone = [ALL[name](taken(made, slice(b, b + 1), order), query) for b in range(BATCH)]
        np.testing.assert_allclose(ALL[name](made, query), np.concatenate(alone), **EXACT)


@every
@pytest.mark.parametrize("place", ["0 + 3 x 5", "5 + 2 x 3"])
def test_map_moves_with_its_patches(name: str, place: str) -> None:
    made = graded(place)
    layout = made[0].keys
    prefix = len(layout.prefix)
    order = torch.cat([torch.arange(prefix), prefix + torch.randperm(layout.cells)])
    query = F.softmax(2 * torch.randn(len(layout)), 0)
    found = ALL[name](taken(made, slice(None), order), query[order]).reshape(BATCH, -1, layout.cells)
    expected = ALL[name](made, query).reshape(BATCH, -1, layout.cells)[..., order[prefix:] - prefix]
    np.testing.assert_allclose(found, expected, **slack(name))
    assert np.abs(found - ALL[name](made, query).reshape(found.shape)).max() > 1e-3


MASS = [name for name in ROWS if "ollout" in name]


@pytest.mark.parametrize("name", MASS)
@pytest.mark.parametrize("place", ["0 + 2 x 3", "0 + 3 x 5"])
def test_rows_without_prefix_sum_to_one(name: str, place: str) -> None:
    made = graded(place)
    for query in ("auto", "patch:1,2", F.softmax(torch.randn(len(made[0].keys), dtype=torch.float64), 0)):
        values = run(name, made, query)
        assert values.min() >= 0
        np.testing.assert_allclose(values.sum((1, 2)), 1, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in MASS if "discard" not in name and "gradient" not in name])
@pytest.mark.parametrize("place", ["1 + 2 x 3", "2 + 3 x 5", "5 + 2 x 3"])
def test_patches_and_prefix_sum_to_one(name: str, place: str) -> None:
    """Draw every token as if it were a patch: the row sums to 1, and its patches are the map."""
    made = graded(place)
    tokens, prefix = len(made[0].keys), len(made[0].keys.prefix)
    flat = tiny.layout((), (1, tokens))
    drawn = replace(made, records=[replace(record, queries=flat, keys=flat) for record in made])
    query = F.one_hot(torch.tensor(tokens - 1), tokens).float()
    whole = run(name, drawn, query).reshape(BATCH, tokens)
    np.testing.assert_allclose(whole.sum(1), 1, **EXACT)
    assert whole[:, :prefix].sum(1).min() > 1e-3
    np.testing.assert_allclose(run(name, made, query).reshape(BATCH, -1), whole[:, prefix:], **EXACT)


def graded_by(made: Recording, gradient: Callable[[AttentionRecord], Tensor]) -> Recording:
    return replace(
        made,
        records=[replace(r, operator=r.operator.with_gradient(MatrixGradient(gradient(r)))) for r in made],
    )


@pytest.mark.parametrize("name", ["relevance", "attention x gradient", "attention x gradient, signed", "legrad"])
def test_gradient_of_zero_gives_a_map_of_zero(name: str) -> None:
    none = graded_by(graded(), lambda record: torch.zeros(record.operator.shape, dtype=torch.float64))
    for query in ("auto", "patch:1,2"):
        assert not ALL[name](none, query).any()


@pytest.mark.parametrize("name", ["relevance", "attention x gradient", "legrad"])
def test_gradient_against_the_target_gives_a_map_of_zero(name: str) -> None:
    against = graded_by(graded(), lambda record: -torch.rand(record.operator.shape, dtype=torch.float64))
    assert not ALL[name](against, "auto").any()


@pytest.mark.parametrize("name", [name for name in MASS if "gradient" in name])
def test_gradient_rollout_of_zero_gradients_is_the_query(name: str) -> None:
    none = graded_by(graded(), lambda record: torch.zeros(record.operator.shape, dtype=torch.float64))
    values = run(name, none, "patch:1,2")
    assert np.argwhere(values).tolist() == [[b, 1, 2] for b in range(BATCH)]
    assert (values[:, 1, 2] == 1).all()
