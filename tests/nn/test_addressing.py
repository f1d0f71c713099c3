"""Addressing by content and location against loops written from the paper."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from visattn.errors import OptionError, ShapeError
from visattn.nn import ContentLocationAddressing, attend

Numbers = list[float]


def lively(axes: int = 1, reach: int = 1) -> ContentLocationAddressing:
    torch.manual_seed(0)
    module = ContentLocationAddressing(4, 3, reach=reach, axes=axes).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def normalized(numbers: Numbers) -> Numbers:
    return [number / sum(numbers) for number in numbers]


def by_loops(
    module: ContentLocationAddressing, query: Tensor, keys: Tensor, grid: tuple[int, ...], previous: Numbers
) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Address with one query `(dq,)` and keys `(N, dk)`."""

    def affine(name: str) -> Numbers:
        layer = getattr(module, name)
        return (layer.weight @ query + layer.bias).tolist()  # type: ignore[no-any-return]

    key, (beta,), (gate,), (gamma,) = affine("key"), affine("strength"), affine("gate"), affine("sharpness")
    beta, gate, gamma = softplus(beta), 1 / (1 + math.exp(-gate)), 1 + softplus(gamma)
    powers = []
    for row in keys.tolist():
        dot = sum(a * b for a, b in zip(key, row, strict=True))
        powers.append(math.exp(beta * dot / math.hypot(*key) / math.hypot(*row)))
    content = normalized(powers)
    mixed = [gate * one + (1 - gate) * other for one, other in zip(content, previous, strict=True)]
    shares = normalized([math.exp(x) for x in affine("shift")])
    places = list(itertools.product(*map(range, grid)))
    shifted = []
    for place in places:
        total = 0.0
        for other, weight in zip(places, mixed, strict=True):
            for shift, share in zip(module.shifts, shares, strict=True):
                total += (
                    weight * share * all((a + b) % side == c for a, b, side, c in zip(other, shift, grid, place, strict=True))
                )
        shifted.append(total)
    return content, mixed, shifted, normalized([weight**gamma for weight in shifted])


@torch.no_grad()
@pytest.mark.parametrize("given", [False, True], ids=["first step", "later step"])
@pytest.mark.parametrize(("axes", "reach", "grid"), [(1, 1, (7,)), (1, 3, (7,)), (2, 1, (3, 4)), (2, 2, (5, 3))], ids=str)
def test_every_step_equals_loops(axes: int, reach: int, grid: tuple[int, ...], given: bool) -> None:
    module, count = lively(axes, reach), math.prod(grid)
    query, keys = noise(2, 3, 4), noise(2, count, 3, seed=1)
    previous = noise(2, 3, count, seed=2).softmax(-1) if given else None
    steps = module.steps(query, keys, grid, previous)
    for image, row in itertools.product(range(2), range(3)):
        before = [1 / count] * count if previous is None else previous[image, row].tolist()
        expected = by_loops(module, query[image, row], keys[image], grid, before)
        for found, wanted in zip(steps, expected, strict=True):
            assert found[image, row].tolist() == pytest.approx(wanted, abs=1e-12)
    values = noise(2, count, 5, seed=3)
    out, weights = attend(module(query, keys, grid, previous), values)
    torch.testing.assert_close(weights, steps.weights)
    torch.testing.assert_close(out, steps.weights @ values)


@torch.no_grad()
def test_a_shift_alone_moves_the_last_focus_around_the_border() -> None:
    module = lively()
    for name in ("gate", "shift", "sharpness"):
        getattr(module, name).weight.zero_()
    module.gate.bias.fill_(-50.0)  # the last weights alone
    module.shift.bias.copy_(torch.tensor([50.0 * (shift == (1,)) for shift in module.shifts]))
    module.sharpness.bias.fill_(-50.0)
    previous = torch.zeros(1, 1, 5, dtype=torch.float64)
    previous[..., 4] = 1
    weights = module.steps(noise(1, 1, 4), noise(1, 5, 3), (5,), previous).weights
    assert weights[0, 0].tolist() == pytest.approx([1, 0, 0, 0, 0], abs=1e-12)


def test_half_precision_gives_finite_weights_and_gradients() -> None:
    module = lively().bfloat16()
    query, keys = noise(1, 2, 4).bfloat16().requires_grad_(), noise(1, 7, 3).bfloat16()
    scores = module(query, keys, (7,))
    assert scores.isfinite().all()
    scores.softmax(-1).square().sum().backward()
    assert query.grad is not None
    assert query.grad.isfinite().all()


def test_wrong_shapes_are_refused() -> None:
    module = lively(2)
    with pytest.raises(OptionError, match="axes must be 1 or 2, got 3"):
        ContentLocationAddressing(4, 3, axes=3)
    with pytest.raises(ShapeError, match="the grid must have 2 axes"):
        module(noise(1, 2, 4), noise(1, 6, 3), (6,))
    with pytest.raises(ShapeError, match=r"the grid must have the 6 positions of the keys, got \(2, 4\)"):
        module(noise(1, 2, 4), noise(1, 6, 3), (2, 4))
    with pytest.raises(ShapeError, match=r"the previous weights must be \(1, 2, 6\)"):
        module(noise(1, 2, 4), noise(1, 6, 3), (2, 3), noise(1, 2, 5))
