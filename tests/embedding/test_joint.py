"""Joint space of queries and keys: attention unchanged, scales, correlations against slow loops, components against scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.decomposition import PCA
from torch import Tensor

from tests.conftest import Figures
from visattn import embedding
from visattn.embedding.joint import FACTORS
from visattn.errors import OptionError, ShapeError

Array = NDArray[np.float64]


def head(seed: int, queries: int = 40, keys: int = 30, width: int = 8) -> tuple[Tensor, Tensor]:
    """Return queries and keys with offsets, of unlike norms."""
    random = np.random.default_rng(seed)
    first, second = (
        random.normal(random.normal(size=width), spread, (count, width)) for spread, count in ((2, queries), (0.5, keys))
    )
    return torch.from_numpy(first), torch.from_numpy(second)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("factor", [None, 0.2, 5.0])
def test_translation_and_scale_change_no_attention(seed: int, factor: float | None, figures: Figures) -> None:
    queries, keys = head(seed)
    both = embedding.joined(queries, keys, factor)
    error = float(((both.queries @ both.keys.T).softmax(1) - (queries @ keys.T).softmax(1)).abs().max())
    figures("softmax in the joint space", error, "<= 1e-12")
    assert error <= 1e-12
    assert torch.allclose(both.queries.mean(0), both.keys.mean(0))


def test_queries_and_keys_get_the_same_median_norm() -> None:
    queries, keys = head(0)
    factor = embedding.factor_of(queries, keys)
    assert float((queries * factor).norm(dim=1).median()) == pytest.approx(float((keys / factor).norm(dim=1).median()))


def distance(one: Array, other: Array) -> float:
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(one, other, strict=True)))


def product(one: Array, other: Array) -> float:
    return float(sum(a * b for a, b in zip(one, other, strict=True)))


def pearson(one: list[float], other: list[float], weights: list[float] | None = None) -> float:
    weights = weights or [1.0] * len(one)
    total = sum(weights)
    means = [sum(w * x for w, x in zip(weights, each, strict=True)) / total for each in (one, other)]
    both = sum(w * (x - means[0]) * (y - means[1]) for w, x, y in zip(weights, one, other, strict=True))
    squares = [
        sum(w * (x - mean) ** 2 for w, x in zip(weights, each, strict=True))
        for each, mean in zip((one, other), means, strict=True)
    ]
    return both / math.sqrt(squares[0] * squares[1])


def ranked(values: list[float]) -> list[float]:
    return [sum(x < value for x in values) + (sum(x == value for x in values) + 1) / 2 for value in values]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("within", [False, True])
def test_correlations_of_rows_equal_slow_loops(seed: int, within: bool) -> None:
    queries, keys = head(seed)
    keys[3] = keys[4]  # a tie
    images = torch.arange(40) % 3, torch.arange(30) % 3
    rows: dict[str, list[float]] = {"pearson": [], "spearman": []}
    for query, image in zip(queries.numpy(), images[0], strict=True):
        seen = [key for key, other in zip(keys.numpy(), images[1], strict=True) if not within or image == other]
        dots, apart = [product(query, key) for key in seen], [distance(query, key) for key in seen]
        rows["pearson"].append(pearson(dots, apart))
        rows["spearman"].append(pearson(ranked(dots), ranked(apart)))
    given = images if within else None
    assert embedding.row_pearson(queries, keys, given) == pytest.approx(np.mean(rows["pearson"]), abs=1e-12)
    assert embedding.row_spearman(queries, keys, given) == pytest.approx(np.mean(rows["spearman"]), abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_the_weighted_correlation_equals_a_slow_loop(seed: int) -> None:
    queries, keys = head(seed, 60, 50)
    pairs = [(product(q, k), distance(q, k)) for q in queries.numpy() for k in keys.numpy()]
    limit = float(np.quantile([apart for _, apart in pairs], 0.005))
    close = [(dot, apart) for dot, apart in pairs if apart < limit]
    expected = pearson([dot for dot, _ in close], [apart for _, apart in close], [(limit - apart) ** 2 for _, apart in close])
    assert embedding.weighted_correlation(queries, keys) == pytest.approx(expected, abs=1e-10)


def test_the_factor_is_the_one_whose_weighted_correlation_is_closest_to_minus_one() -> None:
    queries, keys = head(3, 80, 60)
    values = {}
    for factor in FACTORS:
        both = embedding.joined(queries, keys, factor)
        values[factor] = embedding.weighted_correlation(both.queries, both.keys)
    assert embedding.factor_of(queries, keys, "weighted") == min(values, key=lambda one: abs(values[one] + 1))
    assert embedding.factor_of(queries, keys, "shared") in FACTORS


def test_the_correlation_of_rows_of_centered_queries_tends_to_minus_one_for_any_data_and_is_refused() -> None:
    for seed in range(5):
        queries, keys = head(seed)
        queries -= queries.mean(0)
        found = [embedding.row_pearson(*embedding.joined(queries, keys, factor)[:2]) for factor in (1.0, 100.0)]
        assert found[1] < -0.999
        assert found[1] < found[0]
    with pytest.raises(OptionError, match="the correlation tends to -1"):
        embedding.factor_of(queries, keys, "row_pearson")  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(5))
def test_components_of_parts_equal_those_of_scikit_learn(seed: int, figures: Figures) -> None:
    heads = [head(10 * seed + number, 70, 50) for number in range(3)]
    moments = embedding.Moments.empty(3, 8), embedding.Moments.empty(3, 8)
    for each, part in zip(moments, range(2), strict=True):
        tokens = torch.stack([one[part] for one in heads])
        for some in torch.split(tokens, [1, 9, tokens.shape[1] - 10], dim=1):
            each.add(some)
    factors = torch.tensor([embedding.factor_of(*one) for one in heads])
    axes, shares = embedding.joint_axes(*moments, factors.double(), 3)
    for number, one in enumerate(heads):
        both = embedding.joined(*one, float(factors[number]))
        points = torch.cat(both[:2])
        known = PCA(3, svd_solver="full").fit(points.numpy())
        found = (points - points.mean(0)) @ axes[number].T
        expected = known.transform(points.numpy())
        signs = np.sign((found.numpy() * expected).sum(0))
        error = float(np.abs(found.numpy() * signs - expected).max() / np.abs(expected).max())
        figures("components against scikit-learn, relative", error, "<= 1e-6")
        assert error <= 1e-6
        assert shares[number].numpy() == pytest.approx(known.explained_variance_ratio_)


def test_bad_inputs_are_refused() -> None:
    queries, keys = head(0)
    with pytest.raises(ShapeError, match=r"must be \(N, D\) and \(M, D\)"):
        embedding.joined(queries, keys[:, :3])
    with pytest.raises(OptionError, match="factor must be a finite number above 0"):
        embedding.joined(queries, keys, 0.0)
    with pytest.raises(OptionError, match="median norm of the queries or of the keys is zero"):
        embedding.joined(torch.zeros_like(queries), keys)
    with pytest.raises(OptionError, match="no factor leaves close pairs of queries and keys to compare"):
        embedding.factor_of(torch.ones_like(queries), torch.ones_like(keys), "weighted")
    with pytest.raises(ShapeError, match="must name 40 and 30 images"):
        embedding.row_pearson(queries, keys, (torch.arange(3), torch.arange(30)))
    with pytest.raises(ShapeError, match="with \\(2, 8\\) heads and D"):
        embedding.Moments.empty(2, 8).add(queries[None])
    with pytest.raises(OptionError, match="axes need two or more tokens"):
        embedding.joint_axes(embedding.Moments.empty(2, 8), embedding.Moments.empty(2, 8), torch.ones(2))
