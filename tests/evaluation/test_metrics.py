"""Metrics of maps beside slow loops from the papers, and on an additive model whose ranking is exact."""

from __future__ import annotations

import inspect
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from visattn.core.geometry import Box
from visattn.core.maps import AttentionMap
from visattn.core.provenance import Provenance
from visattn.core.records import TokenLayout
from visattn.errors import MapError, OptionError, ShapeError
from visattn.evaluation import (
    deletion,
    infidelity,
    insertion,
    max_sensitivity,
    perturbation,
    road,
    saco,
    sensitivity_n,
    shifted_copies,
    smooth_random,
)

SIDE = 24
Metric = Callable[..., Any]


def network() -> Callable[[Tensor], Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 5, 2), nn.GELU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 8 * 8, 4)).eval()
    model.requires_grad_(requires_grad=False)
    return lambda x: model(x).softmax(-1)[:, 1]


def picture(seed: int = 0) -> Tensor:
    return torch.randn(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


def cells(rows: int, columns: int, seed: int = 0) -> NDArray[np.float64]:
    return np.random.default_rng(seed).standard_normal((rows, columns))


def unit_at(y: int, x: int, grid: tuple[int, int]) -> tuple[int, int]:
    """Return the cell under the center of a pixel."""
    return int((y + 0.5) / SIDE * grid[0]), int((x + 0.5) / SIDE * grid[1])


def ordered(values: NDArray[np.float64]) -> list[tuple[int, ...]]:
    """Return the cells from the largest value to the smallest."""
    return sorted(np.ndindex(*values.shape), key=lambda cell: -values[cell])


def gray_of(x: Tensor, baseline: Any) -> Tensor:
    if baseline == "image mean":
        out = torch.empty_like(x)
        for channel in range(x.shape[1]):
            out[0, channel] = sum(float(value) for value in x[0, channel].flatten()) / SIDE**2
        return out
    if baseline == "blur":
        out = torch.zeros_like(x)
        for channel, y, at in itertools.product(range(x.shape[1]), range(SIDE), range(SIDE)):
            total = weights = 0.0
            for down, across in itertools.product(range(-5, 6), range(-5, 6)):
                if 0 <= y + down < SIDE and 0 <= at + across < SIDE:
                    weight = math.exp(-(down**2 + across**2) / 50)
                    total += weight * float(x[0, channel, y + down, at + across])
                    weights += weight
            out[0, channel, y, at] = total / weights
        return out
    return torch.full_like(x, baseline)


def loop(
    score: Callable[[Tensor], Tensor],
    x: Tensor,
    values: NDArray[np.float64],
    counts: list[int],
    other: Tensor,
    *,
    inserts: bool = False,
) -> list[float]:
    """Return the score after the first cells of the map were replaced, one input at a time."""
    order, scores = ordered(values), list[float]()
    for count in counts:
        changed = other.clone() if inserts else x.clone()
        for y, at in itertools.product(range(SIDE), range(SIDE)):
            if unit_at(y, at, values.shape) in order[:count]:
                changed[0, :, y, at] = (x if inserts else other)[0, :, y, at]
        scores.append(float(score(changed)[0]))
    return scores


GRIDS = [(4, 4), (6, 3), (5, 7), (SIDE, SIDE)]


@pytest.mark.parametrize("baseline", [0.0, 0.7, "image mean", "blur"])
@pytest.mark.parametrize("grid", GRIDS[:3])
def test_curves_equal_loops(grid: tuple[int, int], baseline: Any) -> None:
    score, x, values = network(), picture(), cells(*grid)
    steps, units = 5, values.size
    counts = [round(step * units / steps) for step in range(steps + 1)]
    other = gray_of(x, baseline)
    for metric, inserts in ((deletion, False), (insertion, True)):
        curve = metric(score, x, values, steps=steps, baseline=baseline, by="cells", batch_size=4)
        expected = loop(score, x, values, counts, other, inserts=inserts)
        assert curve.scores == pytest.approx(expected, abs=1e-5)
        assert curve.fractions == pytest.approx([count / units for count in counts])
        area = sum((counts[i + 1] - counts[i]) / units * (expected[i] + expected[i + 1]) / 2 for i in range(steps))
        assert curve.area == pytest.approx(area, abs=1e-5)


def test_pixels_are_ranked_by_values_between_cells() -> None:
    score, x, values = network(), picture(), cells(4, 3)
    dense = F.interpolate(torch.from_numpy(values)[None, None], (SIDE, SIDE), mode="bilinear")[0, 0]
    removed = deletion(score, x, values, steps=1000, batch_size=64)
    exact = deletion(score, x, dense.numpy(), steps=1000, by="cells", batch_size=64)
    assert removed.fractions == pytest.approx(exact.fractions)
    assert removed.area == pytest.approx(exact.area, abs=2e-3)  # pixels of the same value come in random order


def test_dense_maps_equal_loops_by_pixels() -> None:
    score, x, values = network(), picture(), cells(SIDE, SIDE)
    counts = [round(step * SIDE**2 / 4) for step in range(5)]
    found = deletion(score, x, values, steps=4).scores
    assert found == pytest.approx(loop(score, x, values, counts, torch.zeros_like(x)), abs=1e-5)


@pytest.mark.parametrize("sign", ["positive", "negative"])
def test_perturbation_equals_a_loop_with_the_area_of_the_authors(sign: Any) -> None:
    model, x, values = network(), picture(), cells(5, 4)
    fractions = [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    counts = [round(fraction * 20) for fraction in fractions]
    ranked = values if sign == "positive" else -values
    limit = float(np.median(loop(model, x, ranked, counts, torch.zeros_like(x))))
    score = lambda inputs: (model(inputs) > limit).float()  # noqa: E731
    curve = perturbation(score, x, values, sign=sign, by="cells")
    expected = loop(score, x, ranked, counts, torch.zeros_like(x))
    assert curve.scores.tolist() == expected
    assert curve.area == pytest.approx(np.trapezoid(expected, fractions))
    assert 0 < curve.area < 0.9
    mean_of_nine = sum(expected[1:]) / 9
    assert abs(curve.area - mean_of_nine) > 1e-3  # another number, as the docstring says


@pytest.mark.parametrize("baseline", ["image mean", 0.0])
@pytest.mark.parametrize(("grid", "groups"), [((5, 4), 10), ((5, 7), 10), ((4, 4), 3)])
def test_saco_equals_a_loop(grid: tuple[int, int], groups: int, baseline: Any) -> None:
    score, x, values = network(), picture(), cells(*grid)
    other, order = gray_of(x, baseline), ordered(values)
    base, extra = divmod(len(order), groups)
    parts = list[list[tuple[int, ...]]]()
    start = 0
    for group in range(groups):
        size = base + (group < extra)
        parts.append(order[start : start + size])
        start += size
    losses = list[float]()
    for part in parts:
        changed = x.clone()
        for y, at in itertools.product(range(SIDE), range(SIDE)):
            if unit_at(y, at, grid) in part:
                changed[0, :, y, at] = other[0, :, y, at]
        losses.append(float(score(x)[0]) - float(score(changed)[0]))
    sums = [math.fsum(float(values[cell]) for cell in part) / len(part) for part in parts]  # of groups of one size
    total = weights = 0.0
    for i in range(groups - 1):
        for j in range(i + 1, groups):
            weight = sums[i] - sums[j]
            if losses[i] < losses[j]:
                weight = -weight
            total += weight
            weights += abs(weight)
    found = saco(score, x, values, groups=groups, baseline=baseline, by="cells")
    assert found == pytest.approx(total / weights, abs=1e-6)
    assert -1 < found < 1


def test_sensitivity_n_equals_a_loop_over_all_subsets_of_a_size() -> None:
    score, x, values = network(), picture(), cells(2, 3)
    sums, losses = list[float](), list[float]()
    for chosen in itertools.combinations(np.ndindex(2, 3), 3):
        changed = x.clone()
        for y, at in itertools.product(range(SIDE), range(SIDE)):
            if unit_at(y, at, (2, 3)) in chosen:
                changed[0, :, y, at] = 0
        sums.append(math.fsum(float(values[cell]) for cell in chosen))
        losses.append(float(score(x)[0] - score(changed)[0]))
    expected = float(np.corrcoef(sums, losses)[0, 1])
    found = sensitivity_n(score, x, values, fractions=(0.5,), subsets=4000, batch_size=500)
    assert found.correlations == pytest.approx([expected], abs=0.03)  # random sets instead of all 20
    assert found.fractions.tolist() == [0.5]


def additive(values: NDArray[np.float64]) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Return a model that sums the values of the cells that are not replaced by 0, and its input."""
    rows, columns = values.shape
    weights = torch.from_numpy(values).repeat_interleave(SIDE // rows, 0).repeat_interleave(SIDE // columns, 1)
    area = (SIDE // rows) * (SIDE // columns)
    return lambda x: (x.mean(1) * weights).sum((-1, -2)) / area, torch.ones(1, 3, SIDE, SIDE, dtype=torch.float64)


COUNT = 12


@pytest.mark.parametrize("seed", range(4))
def test_no_order_beats_the_truth_of_an_additive_model(seed: int) -> None:
    truth = cells(3, 4, seed)
    score, x = additive(truth)
    kept: dict[str, Any] = {"by": "cells", "baseline": 0.0}
    better: dict[str, Callable[[NDArray[np.float64]], float]] = {
        "insertion": lambda values: insertion(score, x, values, steps=COUNT, **kept).area,
        "deletion": lambda values: -deletion(score, x, values, steps=COUNT, **kept).area,
        "positive": lambda values: -perturbation(score, x, values, **kept).area,
        "negative": lambda values: perturbation(score, x, values, sign="negative", **kept).area,
        "saco": lambda values: saco(score, x, values, groups=COUNT, **kept),
    }
    random = np.random.default_rng(seed)
    others = [random.permutation(truth.ravel()).reshape(truth.shape) for _ in range(200)]
    for name, metric in better.items():
        best, worst = metric(truth), metric(-truth)
        numbers = [metric(values) for values in others]
        assert best >= max(numbers) - 1e-12, name
        assert worst <= min(numbers) + 1e-12, name
        assert best > worst, name


@pytest.mark.parametrize("seed", range(3))
def test_values_of_an_additive_model_add_up(seed: int) -> None:
    truth = cells(3, 4, seed)
    score, x = additive(truth)
    assert sensitivity_n(score, x, truth).correlations == pytest.approx(np.ones(8), abs=1e-12)
    assert sensitivity_n(score, x, -truth).correlations == pytest.approx(-np.ones(8), abs=1e-12)
    assert infidelity(score, x, truth, scaled=False) < 1e-24
    assert infidelity(score, x, 3 * truth) < 1e-12
    assert infidelity(score, x, cells(3, 4, 9)) > 0.1

    def slope(inputs: Tensor) -> Tensor:
        inputs = inputs.clone().requires_grad_()
        return torch.autograd.grad(score(inputs).sum(), inputs)[0][0].sum(0)

    assert max_sensitivity(slope, x) == 0
    assert max_sensitivity(lambda inputs: inputs[0].mean(0), x, radius=0.1) > 0.01


def test_infidelity_equals_a_loop() -> None:
    score, x, values = network(), picture().double(), cells(2, 2)

    def model(inputs: Tensor) -> Tensor:
        return score(inputs.float()).double()

    squares = list[float]()
    for size in range(5):
        for chosen in itertools.combinations(np.ndindex(2, 2), size):
            changed = x.clone()
            for y, at in itertools.product(range(SIDE), range(SIDE)):
                if unit_at(y, at, (2, 2)) in chosen:
                    changed[0, :, y, at] = 0
            total = math.fsum(float(values[cell]) for cell in chosen)
            squares.append((total - float(model(x)[0] - model(changed)[0])) ** 2)
    found = infidelity(model, x, values, scaled=False, samples=20000, batch_size=1000)
    assert found == pytest.approx(np.mean(squares), rel=0.03)  # random sets instead of all 16


def test_max_sensitivity_equals_a_loop() -> None:
    x = picture()

    def explain(inputs: Tensor) -> Tensor:
        return (inputs[0] ** 2).sum(0)

    generator = torch.Generator().manual_seed(3)
    own, largest = explain(x).double(), 0.0
    for _ in range(6):
        noise = 0.05 * (torch.rand(x.shape, generator=generator, dtype=torch.float64) * 2 - 1)
        largest = max(largest, float((explain(x + noise.float()).double() - own).norm() / own.norm()))
    assert max_sensitivity(explain, x, radius=0.05, samples=6, seed=3) == pytest.approx(largest, rel=1e-6)


def test_road_fills_pixels_from_their_neighbors() -> None:
    """Every filled pixel is the weighted mean of its neighbors, and the scores are those of the filled inputs."""
    x, values = picture().double(), cells(SIDE, SIDE)
    seen = list[Tensor]()

    def score(inputs: Tensor) -> Tensor:
        seen.append(inputs)
        return inputs.mean((1, 2, 3))

    found = road(score, x, values, fractions=(0.3, 0.6), noise=0, by="cells")
    images, order = torch.cat(seen), ordered(values)
    counts = [round(0.3 * SIDE**2), round(0.6 * SIDE**2)]
    sets = [set(order[: counts[0]]), set(order[: counts[1]]), set(order[-counts[0] :]), set(order[-counts[1] :])]
    for image, removed in zip(images, sets, strict=True):
        for y, at in itertools.product(range(SIDE), range(SIDE)):
            if (y, at) not in removed:
                assert torch.equal(image[:, y, at], x[0, :, y, at])
                continue
            total, weights = torch.zeros(3, dtype=torch.float64), 0.0
            for down, across in itertools.product((-1, 0, 1), (-1, 0, 1)):
                if (down, across) != (0, 0) and 0 <= y + down < SIDE and 0 <= at + across < SIDE:
                    weight = 1 / 6 if 0 in (down, across) else 1 / 12
                    total += weight * image[:, y + down, at + across]
                    weights += weight
            assert torch.allclose(image[:, y, at], total / weights, atol=1e-9)
    scores = images.mean((1, 2, 3)).tolist()
    assert found.most.tolist() == scores[:2]
    assert found.least.tolist() == scores[2:]
    assert found.combined == pytest.approx((scores[2] - scores[0] + scores[3] - scores[1]) / 4)


def test_road_equals_the_imputation_of_grad_cam() -> None:
    from pytorch_grad_cam.metrics.road import NoisyLinearImputer

    x, values = picture(), cells(SIDE, SIDE)
    seen = list[Tensor]()

    def score(inputs: Tensor) -> Tensor:
        seen.append(inputs)
        return inputs.mean((1, 2, 3))

    road(score, x, values, fractions=(0.25, 0.75), noise=0)
    order = ordered(values)
    for image, share in zip(torch.cat(seen)[:2], (0.25, 0.75), strict=True):
        mask = torch.ones(SIDE, SIDE)
        for cell in order[: round(share * SIDE**2)]:
            mask[cell] = 0
        with warnings.catch_warnings():  # of NumPy, for the package
            warnings.simplefilter("ignore")
            theirs = NoisyLinearImputer(noise=0)(x[0], mask)
        assert torch.allclose(image, theirs.to(image), atol=1e-5)


NUMBERS: dict[str, Callable[..., float]] = {
    "deletion": lambda *given: deletion(*given, steps=36, by="cells").area,
    "insertion": lambda *given: insertion(*given, steps=36, by="cells").area,
    "positive": lambda *given: perturbation(*given, by="cells").area,
    "saco": lambda *given: saco(*given, by="cells"),
    "sensitivity_n": lambda *given: sensitivity_n(*given, subsets=20).mean,
    "road": lambda *given: road(*given, fractions=(0.5,)).combined,
}


@pytest.mark.parametrize("kind", ["shifted", "smooth"])
@pytest.mark.parametrize("name", list(NUMBERS))
def test_a_map_that_knows_nothing_lies_inside_the_range_of_200_others(name: str, kind: str) -> None:
    score, x, values = network(), picture(), cells(SIDE, SIDE)
    make = shifted_copies if kind == "shifted" else smooth_random
    copies = make(values, 201).numpy()
    assert len({copy.tobytes() for copy in copies}) == 201
    one, *others = (NUMBERS[name](score, x, copy) for copy in copies)
    assert min(others) < one < max(others)


METRICS: dict[str, Metric] = {
    "deletion": deletion,
    "insertion": insertion,
    "perturbation": perturbation,
    "saco": saco,
    "sensitivity_n": sensitivity_n,
    "road": road,
    "infidelity": infidelity,
}
every = pytest.mark.parametrize("name", list(METRICS))


@every
def test_results_do_not_depend_on_batches(name: str) -> None:
    score, x, values = network(), picture(), cells(5, 4)
    numbers = [METRICS[name](score, x, values, batch_size=size) for size in (3, 64)]
    leaves = [
        [one] if isinstance(one, float) else [v for v in vars(one).values() if isinstance(v, np.ndarray)] for one in numbers
    ]
    for one, two in zip(*leaves, strict=True):
        assert one == pytest.approx(two, abs=1e-5)


@every
@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"shown": np.zeros((2, 3, 3))}, ShapeError, "rows, columns"),
        ({"pixels": torch.zeros(2, 3, SIDE, SIDE)}, ShapeError, "one input"),
        ({"score": lambda x: x.mean((1, 2))}, ShapeError, "one finite number"),
        ({"score": lambda x: x.mean((1, 2, 3)) / 0}, ShapeError, "one finite number"),
        ({"by": "patches"}, OptionError, "unit"),
        ({"batch_size": 0}, OptionError, "batch_size"),
        ({"baseline": "black"}, OptionError, "baseline"),
        ({"baseline": torch.zeros(2, 7)}, ShapeError, "broadcast"),
        ({"baseline": None}, ShapeError, "broadcast"),
        ({"seed": -1}, OptionError, "seed"),
        ({"pixels": torch.full((3, SIDE, SIDE), float("nan"))}, ShapeError, "pixels hold NaN"),
        ({"score": lambda x: x.mean((1, 2, 3)).to(torch.complex64)}, ShapeError, "one finite number"),
        ({"score": lambda _: 0.5}, ShapeError, "score must return a tensor, got float"),
        ({"shown": None}, ShapeError, "a map must be"),
        ({"shown": "map"}, ShapeError, "a map must be"),
        ({"shown": [[1.0, 2.0], [3.0]]}, ShapeError, "a map must be"),
        ({"shown": cells(SIDE + 1, 4)}, MapError, "more than the input has pixels"),
    ],
)
def test_wrong_input_is_named(name: str, change: dict[str, Any], error: type[Exception], text: str) -> None:
    given: dict[str, Any] = {"score": network(), "pixels": picture(), "shown": cells(4, 4)} | change
    if "baseline" in change and name == "road":
        assert "baseline" not in inspect.signature(road).parameters
        return
    with pytest.raises(error, match=text) as raised:
        METRICS[name](given.pop("score"), given.pop("pixels"), given.pop("shown"), **given)
    assert "\n" not in str(raised.value)


@every
def test_a_score_may_write_into_its_input(name: str) -> None:
    x, values, whole = picture(), cells(5, 4), network()
    before = x.clone()
    numbers = []
    for score in (lambda given: whole(given * 0.5 + 0.1), lambda given: whole(given.mul_(0.5).add_(0.1))):
        found = METRICS[name](score, x, values)
        numbers.append(found if isinstance(found, float) else found.mean if name == "sensitivity_n" else vars(found))
        assert (x == before).all()
    assert repr(numbers[0]) == repr(numbers[1])


@every
def test_a_score_may_say_yes_or_no(name: str) -> None:
    whole, values = network(), cells(5, 4)
    bound = whole(picture()).item()
    found = [
        METRICS[name](score, picture(), values) for score in (lambda x: whole(x) >= bound, lambda x: (whole(x) >= bound).double())
    ]
    assert repr(found[0]) == repr(found[1])


def test_constant_maps_have_no_agreement() -> None:
    score, x = network(), picture()
    for value in (0.1, 1 / 3, 7.3):
        assert math.isnan(saco(score, x, np.full((5, 4), value)))
    assert math.isnan(saco(score, x, np.ones((5, 4)), by="cells"))
    for value in (1.0, 0.1, 1 / 3, 1e300, 1e-320):
        assert np.isnan(sensitivity_n(score, x, np.full((5, 4), value)).correlations).all()


def test_a_score_that_does_not_change_agrees_with_no_map() -> None:
    def same(x: Tensor) -> Tensor:
        return torch.ones(len(x))

    assert math.isnan(saco(same, picture(), cells(5, 4)))
    assert math.isnan(sensitivity_n(same, picture(), cells(5, 4)).mean)


def test_a_large_value_does_not_blur_the_order_of_the_others() -> None:
    score, x, values = network(), picture(), cells(5, 4)
    values[0, 0] = 10
    areas = []
    for sink in (10.0, 1e8):
        values[0, 0] = sink
        dense = np.kron(values, np.ones((5, 6)))[:SIDE]
        areas.append([deletion(score, x, dense, by="pixels", steps=24, seed=seed).area for seed in range(3)])
    assert areas[0] == pytest.approx(areas[1])


def test_ties_come_in_the_order_of_the_seed() -> None:
    score, x = network(), picture()
    curves = [deletion(score, x, np.ones((5, 4)), by="cells", steps=20, seed=seed).scores for seed in (0, 0, 1)]
    assert (curves[0] == curves[1]).all()
    assert not (curves[0] == curves[2]).all()


def test_maps_of_another_input_are_refused() -> None:
    import visattn

    explained = visattn.explain("scenes_vit", "scene:7")
    side = explained.map.layout.box.bottom
    with pytest.raises(MapError, match="input pixels"):
        deletion(network(), picture(), explained)
    assert side != SIDE


@pytest.mark.parametrize("metric", [deletion, insertion])
def test_pixels_that_the_map_does_not_cover_stay(metric: Metric) -> None:
    """A map of 56 x 56 of 64 x 64 pixels leaves the others as they are, from the first point to the last."""
    layout = TokenLayout("tokens", (), (7, 7), Box(0, 0, 56, 56))
    shown = AttentionMap(torch.from_numpy(cells(7, 7)), (), layout, {}, "attention", Provenance(), signed=True)
    seen = list[Tensor]()

    def score(inputs: Tensor) -> Tensor:
        seen.append(inputs)
        return inputs.mean((1, 2, 3))

    pixels = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    curve = metric(score, pixels, shown, steps=4, baseline=7.0)
    inputs = torch.cat(seen)
    assert torch.equal(inputs[:, :, 56:], pixels[:, :, 56:].expand(5, -1, -1, -1))
    assert torch.equal(inputs[:, :, :, 56:], pixels[:, :, :, 56:].expand(5, -1, -1, -1))
    whole, none = (inputs[-1], inputs[0]) if metric is insertion else (inputs[0], inputs[-1])
    assert torch.equal(whole, pixels[0])
    assert bool((none[:, :56, :56] == 7).all())
    assert curve.scores[0 if metric is deletion else -1] == pytest.approx(float(pixels.mean()))


def test_fractions_that_are_no_numbers_are_named() -> None:
    with pytest.raises(OptionError, match="ascending numbers from 0 to 1"):
        perturbation(network(), picture(), cells(4, 4), fractions=["a", "b"])  # type: ignore[list-item]
