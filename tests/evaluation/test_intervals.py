"""Bootstrap interval of a mean over images, compared with closed forms."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from visattn.errors import ShapeError
from visattn.evaluation.intervals import mean_interval


def test_interval_of_many_images_equals_the_normal_approximation() -> None:
    """Compare with mean +- 1.96 standard errors, also for skewed values. With 20,000 resamples, chance is 2 % of the width."""
    random = np.random.default_rng(0)
    for values in (random.normal(3, 2, 400), random.exponential(1, 400), random.integers(0, 2, 400)):
        low, high = mean_interval(values, resamples=20_000)
        half = 1.959964 * values.std() / math.sqrt(400)
        assert float(high - low) == pytest.approx(2 * half, rel=0.03)
        assert float(low) == pytest.approx(values.mean() - half, abs=0.1 * half)


def test_interval_of_three_images_equals_that_of_all_27_resamples() -> None:
    values = np.array([0.0, 1.0, 10.0])
    means = sorted(sum(sample) / 3 for sample in itertools.product(values, repeat=3))
    low, high = mean_interval(values, confidence=0.8, resamples=20_000)
    assert float(low) == pytest.approx(means[2])  # one mean is 0, three are 1/3: the tenth percentile is 1/3
    assert float(high) == pytest.approx(means[-3])


def test_interval_has_the_documented_coverage() -> None:
    """Test normal values: coverage is 84 % for 5 images, 90 % for 10, 94 % for 30, from the t distribution of the standard error."""
    for photos, expected in ((5, 0.845), (10, 0.904), (30, 0.936)):
        values = np.random.default_rng(photos).normal(size=(photos, 20, 1000))
        inside = []
        for seed in range(20):
            low, high = mean_interval(values[:, seed], resamples=500, seed=seed)
            inside.append(float(((low < 0) & (high > 0)).mean()))
        assert np.mean(inside) == pytest.approx(expected, abs=0.02)


def test_interval_shrinks_with_the_square_root_of_the_number_of_images() -> None:
    values = np.random.default_rng(0).normal(size=6400)
    few, many = (np.subtract(*mean_interval(values[:count])) for count in (400, 6400))
    assert few / many == pytest.approx(4, rel=0.15)


def test_the_same_seed_resamples_the_same_images_for_every_number() -> None:
    values = np.random.default_rng(0).normal(size=(7, 3, 2))
    low, high = mean_interval(values)
    assert low.shape == high.shape == (3, 2)
    again, alone = mean_interval(values)[0], mean_interval(values[:, 1, 1])[0]
    assert (again == low).all()
    assert float(alone) == pytest.approx(float(low[1, 1]), rel=1e-12)
    assert (mean_interval(values, seed=1)[0] != low).any()
    assert (low <= values.mean(0)).all()
    assert (values.mean(0) <= high).all()


def test_images_are_resampled_and_not_single_heads() -> None:
    """Use two numbers per image that cancel; they must cancel in every resample."""
    values = np.random.default_rng(0).normal(size=20)
    low, high = mean_interval(np.stack([values, -values], axis=1))
    assert low[0] == pytest.approx(-high[1], rel=1e-12)


def test_missing_values_give_a_missing_interval() -> None:
    values = np.ones((5, 2))
    values[:, 1] = np.nan
    low, high = mean_interval(values)
    assert (low[0], high[0]) == (1, 1)
    assert np.isnan(low[1])
    assert np.isnan(high[1])


def test_interval_of_one_image_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"at least two images, got \(1, 3\)\. One image has no interval\."):
        mean_interval(np.ones((1, 3)))
