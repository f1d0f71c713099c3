"""Mean ranks and critical differences beside slow loops and the example of the paper."""

from __future__ import annotations

import math

import numpy as np
import pytest

from visattn.errors import OptionError
from visattn.evaluation import Evaluation, MapNumbers, mean_ranks


def evaluation(table: dict[str, list[float]], metric: str = "saco") -> Evaluation:
    """Return an evaluation of maps with these numbers of each photo."""
    count = len(next(iter(table.values())))
    numbers = [
        MapNumbers(photo, f"photo {photo}", "", name, {metric: values[photo]}, {})
        for photo in range(count)
        for name, values in table.items()
    ]
    return Evaluation(numbers, [metric])


def test_critical_difference_of_the_paper() -> None:
    """Four classifiers on 14 data sets: 2.569 sqrt(4 x 5 / (6 x 14)) = 1.25, and 1.12 at the level 0.1 (Demsar, section 3.2.5)."""
    random = np.random.default_rng(0)
    found = evaluation({name: random.random(14).tolist() for name in "abcd"})
    assert round(mean_ranks(found, "saco").critical, 2) == 1.25
    assert round(mean_ranks(found, "saco", level=0.1).critical, 2) == 1.12


@pytest.mark.parametrize("metric", ["saco", "deletion"])
@pytest.mark.parametrize("seed", range(4))
def test_ranks_equal_a_loop(seed: int, metric: str) -> None:
    random = np.random.default_rng(seed)
    table = {name: random.integers(0, 4, 9).astype(float).tolist() for name in "abcde"}
    expected = dict.fromkeys(table, 0.0)
    for photo in range(9):
        for name, values in table.items():
            better = [
                other[photo] > values[photo] if metric == "saco" else other[photo] < values[photo] for other in table.values()
            ]
            equal = [other[photo] == values[photo] for other in table.values()]
            expected[name] += (1 + sum(better) + (sum(equal) - 1) / 2) / 9
    found = mean_ranks(evaluation(table, metric), metric)
    assert dict(zip(found.maps, found.ranks, strict=True)) == pytest.approx(expected)
    assert found.ranks.tolist() == sorted(found.ranks)


def test_groups_that_chance_may_explain() -> None:
    steps = {name: [float(place)] * 60 for place, name in enumerate("dcba")}
    apart = mean_ranks(evaluation(steps), "saco")
    assert (apart.maps, apart.alike()) == (("a", "b", "c", "d"), [])
    few = mean_ranks(evaluation({name: values[:7] for name, values in steps.items()}), "saco")
    assert 1 < few.critical < 2
    assert few.alike() == [("a", "b"), ("b", "c"), ("c", "d")]
    none = mean_ranks(evaluation({name: values[:1] for name, values in steps.items()}), "saco")
    assert none.alike() == [("a", "b", "c", "d")]


def test_numbers_that_are_not_defined() -> None:
    nan = math.nan
    found = mean_ranks(evaluation({"a": [1, 2, nan], "b": [2, 1, 3], "flat": [nan, nan, nan]}), "saco")
    assert (found.maps, found.photos) == (("a", "b"), 2)
    assert found.ranks.tolist() == [1.5, 1.5]
    often = mean_ranks(evaluation({"a": [1, 2, 3, 4], "b": [4, 3, 2, nan], "c": [5, nan, nan, nan]}), "saco")
    assert (often.maps, often.photos) == (("b", "a"), 3)
    for table in ({"a": [1.0]}, {"a": [nan], "b": [nan]}, {"a": [1, nan], "b": [nan, 1]}):
        with pytest.raises(OptionError, match="nothing is ranked"):
            mean_ranks(evaluation(table), "saco")
    with pytest.raises(OptionError, match="must be one of saco"):
        mean_ranks(evaluation({"a": [1.0], "b": [2.0]}), "deletion")
