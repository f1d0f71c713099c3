"""Hard attention: gradients against the sum over all paths, the authors' rule, semi-sampling, Gumbel sampling, running mean."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.conftest import Figures
from tests.models.captions_by_loops import ZERO, cost, log_probability, told_by_loops
from tests.models.test_show_attend_tell import captioner, close, gradients, padded, pictures, tell
from visattn.errors import OptionError
from visattn.models.show_attend_tell import DecoderOutput, Objective, ShowAttendTell, costs, loss
from visattn.nn import HardAttention

ROOT = Path(__file__).parents[2]
UNBIASED: dict[str, Any] = {"regularizer": 0.0, "semi_sampling": 0.0, "reward": 1.0, "entropy": 0.0, "cost": "sum"}
LENGTHS = torch.tensor([2, 4, 3])
NEAR, BATCHES, SIZE = 6.6, 100, 500  # baseline near the mean cost; number of batches and samples per batch
BASELINES = [("none", 0.0, 1.0), ("a constant", NEAR, 1.0), ("running mean", 0.0, 0.9)]  # name, start value, decay


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("estimator")


@cache
def counted() -> tuple[Tensor, float, float]:
    """Loop over all 64 paths: return the gradient of the expected cost, that cost, and the sum of the probabilities."""
    toy = importlib.import_module("estimator")
    model = toy.toy()
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    expected = total = ZERO
    for path in toy.paths().tolist():
        words = told_by_loops(weights, toy.examples(1)[0][0], toy.CAPTION, "hard", path)
        probability = torch.exp(log_probability(words))
        expected, total = expected + probability * cost(words), total + probability
    found = torch.autograd.grad(expected, list(weights.values()), allow_unused=True, materialize_grads=True)
    return torch.cat([part.flatten() for part in found]), expected.item(), total.item()


@cache
def each_path(baseline: float) -> tuple[Tensor, Tensor]:
    """Return the probability of each path, `(64,)`, and its gradient of the loss, `(64, parameters)`."""
    toy = importlib.import_module("estimator")
    model, objective = toy.toy(), Objective(**UNBIASED, decay=1.0)
    model.baseline.fill_(baseline)
    probabilities, rows = [], []
    images, captions, lengths = toy.examples(1)
    for path in toy.paths():
        told = model(images, captions, lengths, locations=path[None])
        probabilities.append(told.log_probability.detach().sum().exp())
        rows.append(toy.gradient(model, loss(model, told, captions, objective)))
    return torch.stack(probabilities), torch.stack(rows)


@cache
def drawn(start: float, decay: float) -> Tensor:
    """Return the mean gradient of each batch of samples."""
    toy = importlib.import_module("estimator")
    model = toy.toy()
    model.baseline.fill_(start)
    means: Tensor = toy.sampled(model, Objective(**UNBIASED, decay=decay), BATCHES, SIZE)
    return means


def variance(baseline: float) -> float:
    """Return the variance of the gradient of one sample, summed over parameters."""
    probabilities, rows = each_path(baseline)
    return float((probabilities[:, None] * (rows - probabilities @ rows).square()).sum())


# the gradient of the expected cost


def test_the_exact_gradient_of_the_script_equals_loops_over_all_paths(script: ModuleType) -> None:
    exact, expected, total = counted()
    model = script.toy()
    assert len({tuple(path) for path in script.paths().tolist()}) == 64
    assert total == pytest.approx(1, abs=1e-12)
    assert script.expected(model).item() == pytest.approx(expected, abs=1e-10)
    found = script.gradient(model, script.expected(model))
    assert found.tolist() == pytest.approx(exact.tolist(), abs=1e-10)
    assert float(exact.abs().max()) > 0.1


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize("baseline", [0.0, NEAR])
def test_the_expected_sample_gradient_is_exact_for_any_baseline(baseline: float) -> None:
    probabilities, rows = each_path(baseline)
    assert (probabilities @ rows).tolist() == pytest.approx(counted()[0].tolist(), abs=1e-10)
    assert float((rows - counted()[0]).abs().max()) > 0.1  # a single sample does not


@pytest.mark.full
@pytest.mark.parametrize(("name", "start", "decay"), BASELINES, ids=[name for name, _, _ in BASELINES])
def test_the_mean_gradient_of_50_000_samples_is_exact(
    script: ModuleType, figures: Figures, name: str, start: float, decay: float
) -> None:
    means, exact = drawn(start, decay), counted()[0]
    errors = means.std(0) / len(means) ** 0.5
    apart = float(((means.mean(0) - exact).abs() / errors.clamp(min=1e-12)).max())
    figures(f"captioner, hard, baseline {name}: farthest gradient in standard errors", apart, "<= 4")
    assert apart <= 4
    assert apart == pytest.approx(script.farthest(means, exact))
    assert float(exact.abs().max()) > 10 * float(errors.max())


@pytest.mark.usefixtures("script")
def test_a_baseline_near_the_mean_cost_makes_the_gradient_less_noisy(figures: Figures) -> None:
    ratio = variance(NEAR) / variance(0.0)
    figures("captioner, hard: variance with a baseline near the mean cost over that without", ratio, "<= 0.5")
    assert ratio <= 0.5


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(("name", "start", "decay"), BASELINES, ids=[name for name, _, _ in BASELINES])
def test_variance_of_samples_equals_the_exact_variance(name: str, start: float, decay: float) -> None:
    """Check the noise: the running mean starts at 0, and after 40 batches it is as good as a baseline near the mean."""
    means = drawn(start, decay)[40:]
    assert float(SIZE * means.var(0).sum()) == pytest.approx(variance(0.0 if name == "none" else NEAR), rel=0.25)


def test_without_reinforce_the_gradient_is_biased(script: ModuleType) -> None:
    means = script.sampled(script.toy(), Objective(**{**UNBIASED, "reward": 0.0}), 20, 200)
    assert script.farthest(means, counted()[0]) > 20


# the authors' rule


@pytest.mark.parametrize("places", ["drawn", "expected"])
def test_the_gradient_on_alpha_equals_the_authors_code(places: str) -> None:
    """Compare with the gradient on alpha in the authors' code, which sums over the batch while ours averages."""
    model, captions = captioner("hard"), padded()
    model.baseline.fill_(1.3)
    told = tell(model) if places == "drawn" else model(pictures(), captions, LENGTHS, sampling="expected")
    each = costs(told, captions).detach() / 4  # divided by the longest caption
    alpha, taken = told.alpha.detach(), told.taken
    put = (1.3 - each[:, None, None]) / 10 * (-taken / alpha) + 0.002 * (alpha.log() + 1)
    put = put.masked_fill(~told.steps[..., None], 0) / 3
    expected = gradients(model, (put * told.alpha).sum())
    objective = Objective(regularizer=0.0, reward=0.1, entropy=0.002)
    found = gradients(model, loss(model, told, captions, objective) - costs(told, captions).mean())
    close(found, expected, 1e-9)
    assert bool(found["look.state.weight"].any())


# semi-sampling


def test_the_gradient_with_the_expected_context_equals_soft_attention() -> None:
    hard, soft, captions = captioner("hard"), captioner("soft"), padded()
    soft.load_state_dict(hard.state_dict())
    told = hard(pictures(), captions, LENGTHS, sampling="expected")
    found = [gradients(hard, loss(hard, told, captions, Objective(reward=reward, entropy=0.0))) for reward in (1.0, 0.0)]
    close(found[0], found[1], 1e-8)
    expected = gradients(soft, loss(soft, tell(soft), captions, Objective()))
    close(found[0], expected, 1e-8)


@pytest.mark.parametrize("estimator", ["reinforce", "gumbel"])
@pytest.mark.parametrize("probability", [0.0, 0.2, 0.5, 1.0])
def test_batches_use_the_expected_context_with_the_given_probability(probability: float, estimator: str) -> None:
    objective, draws = Objective(semi_sampling=probability, estimator=estimator), 4000  # type: ignore[arg-type]
    taken = [objective.sampling() for _ in range(draws)]
    assert set(taken) <= {"expected", "gumbel" if estimator == "gumbel" else "sample"}
    error = (probability * (1 - probability) / draws) ** 0.5
    assert abs(taken.count("expected") / draws - probability) <= 4 * error


def test_all_images_of_a_batch_use_the_same_sampling() -> None:
    model, seen = captioner("hard"), set()
    for _ in range(12):
        told = model(pictures(), padded(), LENGTHS, sampling=Objective().sampling())
        one = (told.taken[told.steps] == 1).any(1)
        assert bool(one.all()) or torch.equal(told.taken, told.alpha.detach())
        seen.add(bool(one.all()))
    assert seen == {True, False}


def test_training_samples_and_evaluation_takes_the_argmax() -> None:
    model = captioner("hard")
    drawn = [model(pictures(), padded(), LENGTHS).taken for _ in range(5)]
    assert any(not torch.equal(drawn[0], other) for other in drawn[1:])
    told: DecoderOutput = model.eval()(pictures(), padded(), LENGTHS)
    assert torch.equal(told.taken.argmax(-1), told.alpha.argmax(-1))
    assert torch.equal(told.taken.sum(-1), told.steps.double())
    with pytest.raises(OptionError, match="unknown sampling 'samples'; did you mean 'sample'"):
        model(pictures(), padded(), LENGTHS, sampling="samples")


# Gumbel sampling


def looking(temperature: float, draws: int) -> tuple[HardAttention, Tensor, Tensor, Tensor]:
    """Build hard attention with one hidden unit, so that scores depend on keys with a known derivative; also features, states and keys."""
    random = torch.Generator().manual_seed(3)
    module = HardAttention(2, 1, attention_dim=1, temperature=temperature).double()
    with torch.no_grad():
        module.score.weight.fill_(2.0)
        module.state.weight.fill_(0.0)
    features = torch.randn(1, 4, 2, generator=random, dtype=torch.float64).expand(draws, -1, -1)
    keys = torch.tensor([0.8, -0.1, 0.3, -0.9], dtype=torch.float64)[None, :, None].repeat(draws, 1, 1)
    return module, features, torch.zeros(draws, 1, dtype=torch.float64), keys.requires_grad_()


@pytest.mark.parametrize("how", ["gumbel", "sample"])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_samples_have_the_probabilities_alpha(temperature: float, how: Any) -> None:
    module, features, states, keys = looking(temperature, 20_000)
    glimpse = module(features, states, keys, sampling=how)
    alpha = glimpse.alpha[0].detach()
    assert float(alpha.max()) > 3 * float(alpha.min())
    assert alpha.tolist() == pytest.approx((2 * keys[0, :, 0].detach().tanh()).softmax(0).tolist(), abs=1e-12)
    wanted = 20_000 * alpha
    assert float(((glimpse.taken.sum(0) - wanted).square() / wanted).sum()) <= 21.1  # chi-square of 3 degrees: 1 in 10,000


def test_a_gumbel_sample_selects_exactly_one_location() -> None:
    module, features, states, keys = looking(0.7, 1000)
    glimpse = module(features, states, keys, sampling="gumbel")
    assert torch.equal(glimpse.taken, torch.nn.functional.one_hot(glimpse.taken.argmax(-1), 4).double())
    assert torch.equal(glimpse.context, features[torch.arange(1000), glimpse.taken.argmax(-1)])
    assert len(glimpse.taken.unique(dim=0)) == 4
    assert not glimpse.taken.requires_grad


def slopes(how: Any, temperature: float, draws: int) -> tuple[Tensor, Tensor]:
    """Return the gradient of the first context feature with respect to the scores, and that feature of each location."""
    module, features, states, keys = looking(temperature, draws)
    context = module(features, states, keys, sampling=how).context
    if not context.requires_grad:
        return torch.zeros(draws, 4), features[0, :, 0]
    (found,) = torch.autograd.grad(context[:, 0].sum(), keys)
    return found[..., 0] / (2 * (1 - keys.detach()[..., 0].tanh().square())), features[0, :, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_gradients_of_gumbel_samples_are_those_of_their_softmax(temperature: float) -> None:
    """Compare averages over samples, with samples drawn by numpy."""
    draws = 20_000
    found, values = slopes("gumbel", temperature, draws)
    scores = 2 * np.tanh([0.8, -0.1, 0.3, -0.9]) + np.random.RandomState(0).gumbel(size=(draws, 4))
    powers = np.exp((scores - scores.max(1, keepdims=True)) / temperature)
    soft = powers / powers.sum(1, keepdims=True)
    seen = values.numpy()
    expected = soft * (seen - (soft @ seen)[:, None]) / temperature
    error = ((found.numpy().var(0) + expected.var(0)) / draws) ** 0.5
    assert (np.abs(found.numpy().mean(0) - expected.mean(0)) <= 4 * error).all()
    assert (np.abs(expected.mean(0)) > 10 * error).any()


def test_gumbel_samples_at_high_temperature_have_the_gradient_of_the_mean() -> None:
    found, values = slopes("gumbel", 1e6, 3)
    assert (1e6 * found).tolist() == [pytest.approx(((values - values.mean()) / 4).tolist(), abs=1e-4)] * 3


def test_a_plain_sample_has_no_gradient() -> None:
    assert not slopes("sample", 1.0, 3)[0].any()


def test_gumbel_samples_give_a_gradient_to_the_attention_parameters() -> None:
    model, captions, found = captioner("hard"), padded(), {}
    objective = Objective(regularizer=0.0, entropy=0.0, estimator="gumbel")
    for how in ("gumbel", "sample"):
        told = model(pictures(), captions, LENGTHS, sampling=how)
        found[how] = gradients(model, loss(model, told, captions, objective))
    names = ("look.feature.weight", "look.feature.bias", "look.state.weight", "look.score.weight")
    assert all(bool(found["gumbel"][name].any()) and not bool(found["sample"][name].any()) for name in names)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_above_0_is_refused(temperature: float) -> None:
    with pytest.raises(OptionError, match="temperature of HardAttention must be above 0"):
        looking(temperature, 1)


# the running mean


def reinforced(model: ShowAttendTell, told: DecoderOutput, baseline: float) -> float:
    """Compute the REINFORCE term of the loss with loops."""
    each = costs(told, padded()).tolist()
    logs = told.log_probability.tolist()
    total: float = sum((one - baseline) * sum(log) for one, log in zip(each, logs, strict=True))
    return total / 3


@pytest.mark.parametrize("decay", [0.9, 0.0])
def test_the_baseline_is_the_running_mean_of_previous_batches(decay: float) -> None:
    model, objective, before = captioner("hard"), Objective(**UNBIASED, decay=decay), 0.0
    for _ in range(4):
        assert model.baseline.item() == pytest.approx(before, abs=1e-12)
        told = model(pictures(), padded(), LENGTHS, sampling="sample")
        mean = costs(told, padded()).mean().item()
        found = loss(model, told, padded(), objective).item()
        assert found == pytest.approx(mean + reinforced(model, told, before), abs=1e-10)
        assert abs(reinforced(model, told, before) - reinforced(model, told, mean)) > 1e-3
        before = decay * before + (1 - decay) * mean


def test_the_baseline_is_updated_only_in_training_of_hard_attention() -> None:
    for model in (captioner("hard").eval(), captioner("soft"), captioner("uniform")):
        loss(model, tell(model), padded(), Objective())
        assert float(model.baseline) == 0


@pytest.mark.parametrize("each", ["mean", "sum"])
def test_the_baseline_averages_the_rewarded_costs_and_is_saved(each: str) -> None:
    model = captioner("hard")
    told = tell(model)
    loss(model, told, padded(), Objective(cost=each))  # type: ignore[arg-type]
    mean = costs(told, padded()).mean().item() / (4 if each == "mean" else 1)
    assert float(model.baseline) == pytest.approx(0.1 * mean, abs=1e-12)
    other = captioner("hard")
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.baseline, model.baseline)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_baseline_has_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    model = captioner("hard").to(dtype)
    value = loss(model, tell(model, pictures().to(dtype)), padded(), Objective())
    assert model.baseline.dtype == dtype
    assert float(model.baseline) > 0
    assert bool(value.isfinite())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_costs_have_the_dtype_of_the_model_but_at_least_float32(dtype: torch.dtype) -> None:
    model = captioner("hard").to(dtype)
    found = costs(tell(model, pictures().to(dtype)), padded())
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


# the script


def test_the_script_prints_a_row_for_each_estimator(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["estimator.py", "--batches", "4", "--size", "5"])
    assert script.main() in (0, 1)  # too few samples to prove anything
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [row[0] for row in rows] == list(script.ESTIMATORS)
    assert all(np.isfinite(float(cell)) for row in rows for cell in row[1:] if cell)
    assert [bool(row[-1]) for row in rows] == [True, True, False, True, True]
    assert float(rows[1][-1]) < float(rows[0][-1])


def test_the_script_distinguishes_bias_from_noise(script: ModuleType) -> None:
    exact = counted()[0]
    noise = torch.randn(100, len(exact), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = script.compared(exact + noise, script.toy(), 1, shared=False)
    assert found["bias"] < 0.5 * float(noise.mean(0).norm() / exact.norm())
    assert found["largest deviation"] < 4
    found = script.compared(1.5 * exact + noise / 100, script.toy(), 1, shared=False)
    assert found["bias"] == pytest.approx(0.5, abs=4 * found["standard error of the bias"])
    assert found["bias of the attention parameters"] == pytest.approx(0.5, abs=0.1)
    assert found["largest deviation"] > 20
