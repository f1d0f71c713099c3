"""Scores, local windows, soft and hard attention: against slow loops, against each other, and statistically."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.conftest import Figures
from visattn import nn as ours
from visattn.errors import OptionError, ShapeError


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def lively(module: nn.Module) -> Any:
    """Return the module in float64 with weights far from their initialization."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.6)
    return module.double()


def close(found: Tensor, expected: Tensor, bound: float = 1e-12) -> None:
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=0, atol=bound)


# scores, number by number


def dot(one: Tensor, other: Tensor) -> float:
    return math.fsum(a * b for a, b in zip(one.tolist(), other.tolist(), strict=True))


def product(matrix: Tensor, vector: Tensor) -> list[float]:
    return [dot(row, vector) for row in matrix.detach()]


def additive(score: Any, q: Tensor, k: Tensor) -> float:
    bias = [0.0] * len(score.key.weight) if score.key.bias is None else score.key.bias.tolist()
    hidden = zip(product(score.query.weight, q), product(score.key.weight, k), bias, strict=True)
    return math.fsum(v * math.tanh(sum(parts)) for v, parts in zip(score.vector.weight[0].tolist(), hidden, strict=True))


def cosine(score: Any, q: Tensor, k: Tensor) -> float:
    beta = 2.5 if score.raw is None else math.log1p(math.exp(score.raw.item()))
    return beta * dot(q, k) / math.sqrt(dot(q, q) * dot(k, k))


SCORES: dict[str, tuple[nn.Module, int, int, Callable[[Any, Tensor, Tensor], float]]] = {
    "additive": (ours.AdditiveScore(6, 5, attention_dim=4), 6, 5, additive),
    "concat": (ours.AdditiveScore(6, 5, attention_dim=4, bias=False), 6, 5, additive),
    "dot": (ours.DotScore(), 5, 5, lambda _, q, k: dot(q, k)),
    "scaled dot": (ours.ScaledDotScore(), 5, 5, lambda _, q, k: dot(q, k) / math.sqrt(5)),
    "general": (ours.GeneralScore(6, 5), 6, 5, lambda score, q, k: dot(score.query.weight.detach() @ q, k)),
    "cosine": (ours.CosineScore(2.5), 5, 5, cosine),
    "cosine, learned": (ours.CosineScore(2.5, learned=True), 5, 5, cosine),
}


@pytest.mark.parametrize("name", list(SCORES))
def test_a_score_equals_its_formula(name: str) -> None:
    build, query_width, key_width, formula = SCORES[name]
    score, query, keys = lively(build), noise(2, 3, query_width), noise(2, 4, key_width, seed=1)
    found = score(query, keys)
    for b, t, n in itertools.product(range(2), range(3), range(4)):
        assert float(found[b, t, n].detach()) == pytest.approx(formula(score, query[b, t], keys[b, n]), abs=1e-12)


def test_a_location_score_does_not_depend_on_the_keys() -> None:
    score, query = lively(ours.LocationScore(6, 4)), noise(2, 3, 6)
    found = score(query, noise(2, 4, 9, seed=1))
    assert torch.equal(found, score(query, noise(2, 4, 2, seed=2)))
    for b, t in itertools.product(range(2), range(3)):
        assert found[b, t].tolist() == pytest.approx(product(score.place.weight, query[b, t]), abs=1e-12)


def test_an_additive_score_without_a_bias_is_luongs_concat() -> None:
    score, query, keys = lively(ours.AdditiveScore(6, 5, attention_dim=4, bias=False)), noise(2, 3, 6), noise(2, 7, 5, seed=1)
    pairs = torch.cat([query[:, :, None].expand(-1, -1, 7, -1), keys[:, None].expand(-1, 3, -1, -1)], -1)
    both = torch.cat([score.query.weight, score.key.weight], 1)
    close(score(query, keys), (pairs @ both.T).tanh() @ score.vector.weight[0])


def test_a_general_score_of_the_identity_is_the_dot_score() -> None:
    general = ours.GeneralScore(5, 5).double()
    nn.init.eye_(general.query.weight)
    close(general(noise(2, 3, 5), noise(2, 4, 5, seed=1)), ours.DotScore()(noise(2, 3, 5), noise(2, 4, 5, seed=1)))


def test_attending_by_the_scaled_dot_score_is_pytorchs_attention() -> None:
    query, keys, value = noise(2, 3, 6), noise(2, 4, 6, seed=1), noise(2, 4, 6, seed=2)
    mask = noise(2, 3, 4, seed=3) > -0.5
    mask[..., 0] = True
    out, weights = ours.attend(ours.ScaledDotScore()(query, keys), value, mask)
    close(out, F.scaled_dot_product_attention(query, keys, value, mask))
    theirs = nn.MultiheadAttention(6, 1, bias=False, batch_first=True).double()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.eye(6, dtype=torch.float64).repeat(3, 1))
        theirs.out_proj.weight.copy_(torch.eye(6, dtype=torch.float64))
    other, other_weights = theirs(query, keys, value, attn_mask=~mask)
    close(out, other)
    close(weights, other_weights)


def test_a_learned_cosine_scale_starts_at_the_given_beta() -> None:
    for beta in (1e-3, 1.0, 5.0, 200.0):
        assert torch.as_tensor(ours.CosineScore(beta, learned=True).beta).tolist() == pytest.approx(beta, rel=1e-5)


def test_a_cosine_with_zeros_is_zero() -> None:
    assert ours.CosineScore(3.0)(torch.zeros(1, 1, 4), torch.ones(1, 2, 4)).tolist() == [[[0.0, 0.0]]]


# attending


def test_attending_equals_loops() -> None:
    scores, value, mask = noise(2, 3, 5), noise(2, 5, 4, seed=1), noise(2, 3, 5, seed=2) > 0
    mask[..., 1] = True
    out, weights = ours.attend(scores, value, mask)
    for b, t in itertools.product(range(2), range(3)):
        exps = [math.exp(float(scores[b, t, n])) if mask[b, t, n] else 0.0 for n in range(5)]
        shares = [one / sum(exps) for one in exps]
        assert weights[b, t].tolist() == pytest.approx(shares, abs=1e-12)
        expected = [sum(shares[n] * float(value[b, n, c]) for n in range(5)) for c in range(4)]
        assert out[b, t].tolist() == pytest.approx(expected, abs=1e-12)


def test_a_fully_masked_query_gets_zero_output() -> None:
    scores, value = noise(2, 3, 5).requires_grad_(), noise(2, 5, 4, seed=1).requires_grad_()
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1] = False
    out, weights = ours.attend(scores, value, mask)
    assert out[:, 1].abs().max() == weights[:, 1].abs().max() == 0
    gradients = torch.autograd.grad(out.square().sum(), (scores, value))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[0][:, 1].abs().max() == 0


def test_scores_of_masked_keys_have_no_effect() -> None:
    scores, value = noise(1, 2, 5), noise(1, 5, 4, seed=1)
    mask = torch.tensor([True, True, False, True, True])
    changed = scores.clone()
    changed[..., 2] = 1e30
    assert torch.equal(ours.attend(scores, value, mask)[0], ours.attend(changed, value, mask)[0])


# local windows


def places(grid: Sequence[int]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(size) for size in grid)))


every_grid = pytest.mark.parametrize("grid", [(9,), (4, 5)], ids=["a sequence", "a grid"])


@every_grid
@pytest.mark.parametrize("first", [0, 7])
def test_a_monotonic_window_equals_loops(grid: tuple[int, ...], first: int) -> None:
    cells = places(grid)
    scores, value = noise(2, 4, len(cells)), noise(2, len(cells), 3, seed=1)
    out, weights = ours.LocalMonotonic(2)(scores, value, grid, first=first)
    for b, t in itertools.product(range(2), range(4)):
        center = cells[min(first + t, len(cells) - 1)]
        near = [all(abs(a - c) <= 2 for a, c in zip(cell, center, strict=True)) for cell in cells]
        exps = [math.exp(one) * inside for one, inside in zip(scores[b, t].tolist(), near, strict=True)]
        assert weights[b, t].tolist() == pytest.approx([one / sum(exps) for one in exps], abs=1e-12)
    close(out, torch.einsum("btn,bnd->btd", weights, value))


@every_grid
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("cut", [True, False])
def test_a_predicted_window_equals_loops(grid: tuple[int, ...], renormalize: bool, cut: bool) -> None:
    cells, radius = places(grid), 2
    local = lively(ours.LocalPredictive(6, radius, axes=len(grid), attention_dim=4, renormalize=renormalize, truncate=cut))
    query, scores, value = noise(2, 3, 6), noise(2, 3, len(cells), seed=1), noise(2, len(cells), 3, seed=2)
    centers = local.centers(query, grid)
    out, weights = local(query, scores, value, grid)
    for b, t in itertools.product(range(2), range(3)):
        hidden = torch.tensor([math.tanh(one) for one in product(local.hidden.weight, query[b, t])], dtype=torch.float64)
        shares = [1 / (1 + math.exp(-one)) for one in product(local.vector.weight, hidden)]
        center = [(size - 1) * share for size, share in zip(grid, shares, strict=True)]
        assert centers[b, t].tolist() == pytest.approx(center, abs=1e-12)
        exps, gauss = [], []
        for n, cell in enumerate(cells):
            away = [a - c for a, c in zip(cell, centers[b, t].tolist(), strict=True)]
            inside = not cut or all(abs(one) <= radius for one in away)
            exps.append(math.exp(float(scores[b, t, n])) * inside)
            gauss.append(math.exp(-sum(one**2 for one in away) / (2 * (radius / 2) ** 2)))
        expected = [one * factor for one, factor in zip(exps, gauss, strict=True)]
        total = sum(expected) if renormalize else sum(exps)
        assert weights[b, t].tolist() == pytest.approx([one / total for one in expected], abs=1e-12)
    close(out, torch.einsum("btn,bnd->btd", weights, value))


@every_grid
def test_a_window_larger_than_the_map_is_global(grid: tuple[int, ...]) -> None:
    count = len(places(grid))
    scores, value = noise(2, 3, count), noise(2, count, 4, seed=1)
    close(ours.LocalMonotonic(max(grid))(scores, value, grid)[0], ours.attend(scores, value)[0])
    wide = ours.LocalPredictive(6, 10**6, axes=len(grid)).double()
    close(wide(noise(2, 3, 6), scores, value, grid)[0], ours.attend(scores, value)[0], 1e-10)


def test_weights_of_a_window_sum_to_less_than_one_unless_renormalized() -> None:
    query, scores, value = noise(2, 3, 6), noise(2, 3, 49), noise(2, 49, 4)
    for renormalize in (False, True):
        sums = lively(ours.LocalPredictive(6, 2, renormalize=renormalize))(query, scores, value, (7, 7))[1].sum(-1)
        assert ((sums - 1).abs().max() < 1e-12) == renormalize
        assert renormalize or sums.max() < 0.9


@pytest.mark.parametrize("cut", [True, False])
def test_the_center_gets_a_gradient(cut: bool) -> None:
    local = lively(ours.LocalPredictive(6, 2, truncate=cut))
    out, _ = local(noise(2, 3, 6), noise(2, 3, 49, seed=1), noise(2, 49, 4, seed=2), (7, 7))
    gradients = torch.autograd.grad(out.square().sum(), list(local.parameters()))
    assert all(gradient.isfinite().all() and gradient.abs().max() > 1e-6 for gradient in gradients)


def test_a_fully_masked_window_gets_zero_output() -> None:
    mask = torch.ones(49, dtype=torch.bool)
    mask[:21] = False  # the first three rows contain the windows of the first queries
    out, weights = ours.LocalMonotonic(1)(noise(1, 49, 49), noise(1, 49, 4), (7, 7), mask)
    assert weights.isfinite().all()
    assert out[0, :14].abs().max() == 0
    assert weights.sum(-1)[0, 14:] == pytest.approx(torch.ones(35).tolist())


def test_centers_are_float32_in_half_precision() -> None:
    local = ours.LocalPredictive(6, 2).bfloat16()
    centers = local.centers(noise(1, 3, 6).bfloat16(), (200, 300))
    assert centers.dtype == torch.float32


# soft and hard attention


def alphas_of(module: Any, features: Tensor, state: Tensor) -> list[list[float]]:
    """Compute the attention weights of each image from the formula."""
    rows = []
    for a, h in zip(features, state, strict=True):
        exps = []
        for place in a:
            hidden = zip(
                product(module.feature.weight, place), product(module.state.weight, h), module.feature.bias.tolist(), strict=True
            )
            score = sum(u * math.tanh(sum(parts)) for u, parts in zip(module.score.weight[0].tolist(), hidden, strict=True))
            exps.append(math.exp(score + module.score.bias.item()))
        rows.append([one / sum(exps) for one in exps])
    return rows


def test_soft_attention_equals_loops() -> None:
    module, features, state = lively(ours.SoftAttention(5, 4, attention_dim=6)), noise(2, 7, 5), noise(2, 4, seed=1)
    context, alpha = module(features, state)
    for b, row in enumerate(alphas_of(module, features, state)):
        assert alpha[b].tolist() == pytest.approx(row, abs=1e-12)
        expected = [sum(row[i] * float(features[b, i, c]) for i in range(7)) for c in range(5)]
        assert context[b].tolist() == pytest.approx(expected, abs=1e-12)
    close(module(features, state, module.keys(features))[0], context, 0)


def test_expected_context_of_hard_attention_equals_soft_attention() -> None:
    soft, hard = lively(ours.SoftAttention(5, 4)), lively(ours.HardAttention(5, 4)).eval()
    for found, expected in zip(hard(noise(2, 7, 5), noise(2, 4)), soft(noise(2, 7, 5), noise(2, 4)), strict=False):
        close(found, expected, 0)


def test_hard_attention_chooses_one_location() -> None:
    hard, features = lively(ours.HardAttention(5, 4, eval_mode="argmax")), noise(64, 7, 5)
    torch.manual_seed(0)
    for how in ("sample", "argmax"):
        glimpse = hard.train(how == "sample")(features, noise(64, 4))
        place = glimpse.taken.argmax(-1)
        assert torch.equal(glimpse.taken, F.one_hot(place, 7).double())
        assert torch.equal(glimpse.context, features[torch.arange(64), place])
        close(glimpse.log_probability.exp(), glimpse.alpha[torch.arange(64), place])
        assert torch.equal(place, glimpse.alpha.argmax(-1)) == (how == "argmax")
        close(glimpse.entropy, -(glimpse.alpha * glimpse.alpha.log()).sum(-1))


def test_locations_are_sampled_with_the_probabilities_alpha() -> None:
    hard, draws = lively(ours.HardAttention(5, 4)).train(), 20_000
    torch.manual_seed(0)
    glimpse = hard(noise(1, 6, 5).expand(draws, -1, -1), noise(1, 4).expand(draws, -1))
    often, alpha = glimpse.taken.mean(0), glimpse.alpha[0]
    assert alpha.max() > 2 * alpha.min()
    assert ((often - alpha).abs() <= 5 * (alpha * (1 - alpha) / draws).sqrt()).all()


def test_the_surrogate_gradient_is_unbiased_and_a_baseline_makes_it_less_noisy(figures: Figures) -> None:
    hard, draws = lively(ours.HardAttention(5, 4)).train(), 50_000
    costs = torch.tensor([2.0, 2.3, 1.6, 2.8, 1.9, 2.2], dtype=torch.float64)
    features, start = noise(1, 6, 5), noise(1, 4)
    state = start.clone().requires_grad_()
    (exact,) = torch.autograd.grad((hard(features, state).alpha * costs).sum(), state)
    mean = float((hard(features, start).alpha[0] * costs).sum().detach())
    spread = {}
    for name, baseline in (("none", 0.0), ("mean", mean)):
        torch.manual_seed(0)
        states = start.expand(draws, -1).clone().requires_grad_()  # the gradient of each sample
        glimpse = hard(features.expand(draws, -1, -1), states)
        cost = glimpse.taken @ costs
        loss = ours.reinforce(cost, glimpse.log_probability[:, None], glimpse.entropy[:, None], baseline=baseline)
        (each,) = torch.autograd.grad(loss * draws, states)
        error = each.std(0) / draws**0.5
        bias = float(((each.mean(0) - exact[0]).abs() / error).max())
        figures(f"reinforce, baseline {name}: largest bias in standard errors", bias, "<= 4")
        assert bias <= 4
        assert exact.abs().max() > 10 * error.max()
        spread[name] = float(each.var(0).sum())
    figures("reinforce: variance with the mean as baseline over that without", spread["mean"] / spread["none"], "<= 0.2")
    assert spread["mean"] <= 0.2 * spread["none"]


def test_the_expected_context_gives_no_gradient_to_the_log_probability() -> None:
    hard, state = lively(ours.HardAttention(5, 4)).train(), noise(2, 4).requires_grad_()
    glimpse = hard(noise(2, 7, 5), state, sampling="expected")
    (gradient,) = torch.autograd.grad(glimpse.log_probability.sum(), state)
    close(gradient, torch.zeros_like(gradient), 1e-14)
    assert torch.equal(glimpse.taken, glimpse.alpha)


def test_entropy_and_log_probabilities_are_finite_where_alpha_is_zero() -> None:
    hard, state = lively(ours.HardAttention(5, 4)).float().train(), noise(3, 4).float().requires_grad_()
    with torch.no_grad():
        hard.score.weight.mul_(1e3)
    torch.manual_seed(0)
    glimpse = hard(noise(3, 7, 5).float(), state)
    assert glimpse.alpha.min() == 0
    loss = ours.reinforce(
        torch.ones(3), glimpse.log_probability[:, None], glimpse.entropy[:, None], strength=0.1, entropy_strength=0.002
    )
    (gradient,) = torch.autograd.grad(loss, state)
    assert loss.isfinite()
    assert gradient.isfinite().all()


def test_reinforce_equals_loops() -> None:
    cost, logs, entropy, steps = noise(3), noise(3, 4, seed=1), noise(3, 4, seed=2), noise(3, 4, seed=3) > -0.5
    found = ours.reinforce(cost, logs, entropy, baseline=0.3, steps=steps, strength=0.1, entropy_strength=0.002)
    total = 0.0
    for b, t in itertools.product(range(3), range(4)):
        if steps[b, t]:
            total += 0.1 * (float(cost[b]) - 0.3) * float(logs[b, t]) - 0.002 * float(entropy[b, t])
    assert not steps.all()
    assert float(found) == pytest.approx(total / 3, abs=1e-12)


def test_reinforce_sends_no_gradient_into_the_cost() -> None:
    cost, logs = noise(3).requires_grad_(), noise(3, 4, seed=1).requires_grad_()
    ours.reinforce(cost, logs, logs).backward()  # type: ignore[no-untyped-call]
    assert cost.grad is None
    assert logs.grad is not None


@pytest.mark.parametrize("masked", [False, True])
def test_the_doubly_stochastic_term_equals_loops(masked: bool) -> None:
    alphas, steps = noise(3, 4, 5).softmax(-1), torch.tensor([[True] * 4, [True] * 2 + [False] * 2, [True] * 3 + [False]])
    missing = [
        [(1 - sum(float(alphas[b, t, i]) for t in range(4) if steps[b, t] or not masked)) ** 2 for i in range(5)]
        for b in range(3)
    ]
    total = sum(sum(row) for row in missing)
    for reduction, expected in (("paper", total / 3), ("arctic", total / 5), ("mean", total / 15)):
        found = ours.doubly_stochastic(alphas, steps if masked else None, reduction=reduction)  # type: ignore[arg-type]
        assert float(found) == pytest.approx(expected, abs=1e-12)


def test_the_doubly_stochastic_term_of_uniform_total_attention_is_zero() -> None:
    assert float(ours.doubly_stochastic(torch.full((2, 6, 6), 1 / 6))) == pytest.approx(0, abs=1e-10)


# errors

BOOL, FLOAT = torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 3)
BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "widths of a dot score": (
        lambda: ours.DotScore()(torch.zeros(1, 2, 4), torch.zeros(1, 3, 5)),
        ShapeError,
        r"queries and keys of the same width, got \(1, 2, 4\) and \(1, 3, 5\)\. Use GeneralScore for two widths",
    ),
    "batches": (
        lambda: ours.ScaledDotScore()(torch.zeros(1, 2, 4), torch.zeros(2, 3, 4)),
        ShapeError,
        "queries and keys of the same batch",
    ),
    "one query": (lambda: ours.CosineScore()(torch.zeros(1, 4), torch.zeros(1, 3, 4)), ShapeError, r"must be given \(B, N, 4\)"),
    "width of a query": (
        lambda: ours.AdditiveScore(6, 4)(torch.zeros(1, 2, 4), torch.zeros(1, 3, 4)),
        ShapeError,
        r"AdditiveScore must be given \(B, N, 6\)",
    ),
    "width of a layer": (
        lambda: ours.AdditiveScore(6, 4, attention_dim=0),
        OptionError,
        "attention_dim must be a whole number of at least 1",
    ),
    "beta": (lambda: ours.CosineScore(0.0), OptionError, "beta must be above 0, got 0.0"),
    "another number of locations": (
        lambda: ours.LocationScore(4, 9)(torch.zeros(1, 2, 4), torch.zeros(1, 8, 4)),
        ShapeError,
        "must be given 9 keys, got 8",
    ),
    "values": (lambda: ours.attend(torch.zeros(1, 2, 4), torch.zeros(1, 3, 4)), ShapeError, r"values \(B, N, dv\)"),
    "mask": (lambda: ours.attend(torch.zeros(2, 3, 4), torch.zeros(2, 4, 5), FLOAT), OptionError, "mask must be boolean"),
    "mask of another shape": (
        lambda: ours.attend(torch.zeros(2, 3, 4), torch.zeros(2, 4, 5), BOOL),
        ShapeError,
        r"mask must broadcast to \(2, 3, 4\), got \(2, 3\)",
    ),
    "radius": (lambda: ours.LocalMonotonic(0), OptionError, "radius must be a whole number of at least 1"),
    "axes": (lambda: ours.LocalPredictive(4, 2, axes=3), OptionError, "axes must be 1 or 2, got 3"),
    "axes of the grid": (
        lambda: ours.LocalPredictive(4, 2).centers(torch.zeros(1, 2, 4), (9,)),
        ShapeError,
        r"the grid must have 2 axes, got \(9,\)",
    ),
    "grid": (
        lambda: ours.LocalMonotonic(2)(torch.zeros(1, 2, 9), torch.zeros(1, 9, 4), (2, 4)),
        ShapeError,
        r"must have the 9 positions of the scores, got \(2, 4\)",
    ),
    "state": (
        lambda: ours.SoftAttention(4, 3)(torch.zeros(2, 9, 4), torch.zeros(2, 1, 3)),
        ShapeError,
        r"the hidden state for SoftAttention must be \(2, 3\), got \(2, 1, 3\)",
    ),
    "features": (
        lambda: ours.HardAttention(4, 3)(torch.zeros(2, 4, 3, 3), torch.zeros(2, 3)),
        ShapeError,
        r"HardAttention must be given \(B, N, 4\)",
    ),
    "evaluation": (
        lambda: ours.HardAttention(4, 3, eval_mode="arg max"),  # type: ignore[arg-type]
        OptionError,
        "did you mean 'argmax'",
    ),
    "how": (
        lambda: ours.HardAttention(4, 3)(torch.zeros(2, 9, 4), torch.zeros(2, 3), sampling="samples"),
        OptionError,
        "did you mean 'sample'",
    ),
    "costs": (lambda: ours.reinforce(torch.zeros(2, 3), FLOAT, FLOAT), ShapeError, r"costs must be \(B,\)"),
    "steps of numbers": (lambda: ours.reinforce(torch.zeros(2), FLOAT, FLOAT, steps=FLOAT), OptionError, "steps must be boolean"),
    "another number of steps": (
        lambda: ours.doubly_stochastic(torch.zeros(2, 4, 5), BOOL),
        ShapeError,
        r"steps must be \(B, T\) = \(2, 4\), got \(2, 3\)",
    ),
    "alphas": (lambda: ours.doubly_stochastic(torch.zeros(2, 4)), ShapeError, r"alphas must be \(B, T, L\), got \(2, 4\)"),
    "reduction": (
        lambda: ours.doubly_stochastic(torch.zeros(2, 4, 5), reduction="sum"),  # type: ignore[arg-type]
        OptionError,
        "Known: paper, arctic, mean",
    ),
}


@pytest.mark.parametrize("name", list(BAD))
def test_invalid_arguments_are_refused_with_the_reason(name: str) -> None:
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()
