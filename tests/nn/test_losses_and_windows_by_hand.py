"""Hard attention, its losses, glimpses, filters and local windows, with values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from visattn import capture, nn as ours
from visattn.errors import OptionError, ShapeError, WeightsError
from visattn.nn.decoder.draw import _filters
from visattn.nn.decoder.soft_hard import _one_hot

COST = torch.tensor([3.0, 1.0])
LOGS = torch.tensor([[-1.0, -2.0, -4.0], [-0.5, -1.5, -3.0]])
ENTROPY = torch.tensor([[0.5, 0.25, 1.0], [0.75, 0.125, 2.0]])


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_loss_of_hard_attention_sums_steps_and_averages_sequences() -> None:
    assert ours.reinforce(COST, LOGS, ENTROPY).item() == pytest.approx((3 * -7 + 1 * -5) / 2)
    assert ours.reinforce(COST, LOGS, ENTROPY, baseline=2.0).item() == pytest.approx((1 * -7 + -1 * -5) / 2)
    each = torch.tensor([1.0, 2.0])
    assert ours.reinforce(COST, LOGS, ENTROPY, baseline=each).item() == pytest.approx((2 * -7 + -1 * -5) / 2)
    steps = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, -1.0]])
    whole = (2 * -1 + 1 * -2 + 0 * -4 + 1 * -0.5 + 0 * -1.5 + 2 * -3) / 2
    assert ours.reinforce(COST, LOGS, ENTROPY, baseline=steps).item() == pytest.approx(whole)
    assert ours.reinforce(COST, LOGS, ENTROPY, baseline=torch.tensor(2.0)).item() == pytest.approx((-7 + 5) / 2)
    weighted = ours.reinforce(COST, LOGS, ENTROPY, strength=0.5, entropy_strength=2.0)
    assert weighted.item() == pytest.approx((0.5 * (3 * -7 + -5) - 2 * (1.75 + 2.875)) / 2)
    counted = torch.tensor([[True, True, False], [True, False, False]])
    masked = ours.reinforce(COST, LOGS, ENTROPY, steps=counted, entropy_strength=1.0)
    assert masked.item() == pytest.approx((3 * -3 - 0.75 + -0.5 - 0.75) / 2)


@pytest.mark.parametrize(
    ("cost", "logs", "entropy"),
    [
        (COST[:1], LOGS, ENTROPY),
        (COST, LOGS, ENTROPY[:, :2]),
        (COST, LOGS[0], ENTROPY[0]),
        (torch.ones(3), LOGS, ENTROPY),
        (COST[:, None], LOGS, ENTROPY),
    ],
)
def test_costs_and_steps_must_fit(cost: Tensor, logs: Tensor, entropy: Tensor) -> None:
    with pytest.raises(ShapeError, match=r"costs must be \(B,\)"):
        ours.reinforce(cost, logs, entropy)


@pytest.mark.parametrize("shape", [(3,), (2, 1), (2, 2), (1,), (2, 3, 1)])
def test_a_baseline_is_one_number_or_one_of_each_sequence_or_step(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"= \(2, 3\), got"):
        ours.reinforce(COST, LOGS, ENTROPY, baseline=torch.zeros(shape))


def test_flags_of_steps_must_be_boolean_and_of_each_step() -> None:
    with pytest.raises(OptionError, match="steps must be boolean"):
        ours.reinforce(COST, LOGS, ENTROPY, steps=torch.ones(2, 3))
    for shape in ((3, 2), (2,), (2, 4)):
        with pytest.raises(ShapeError, match=r"steps must be \(B, T\) = \(2, 3\)"):
            ours.reinforce(COST, LOGS, ENTROPY, steps=torch.ones(shape, dtype=torch.bool))


def test_the_doubly_stochastic_penalty_by_each_reduction() -> None:
    alphas = torch.tensor([[[0.5, 0.0, 0.5, 0.0], [0.5, 0.5, 0.0, 0.0]], [[1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]])
    first, second = 0 + 0.25 + 0.25 + 1, 1 + 1 + 1 + 1
    assert ours.doubly_stochastic(alphas).item() == (first + second) / 2
    assert ours.doubly_stochastic(alphas, reduction="arctic").item() == (first + second) / 4
    assert ours.doubly_stochastic(alphas, reduction="mean").item() == (first + second) / 8
    steps = torch.tensor([[True, False], [False, True]])
    assert ours.doubly_stochastic(alphas, steps).item() == (0.25 + 1 + 0.25 + 1 + 0 + 3) / 2
    for wrong in (alphas[0], alphas[None]):
        with pytest.raises(ShapeError, match=r"alphas must be \(B, T, L\)"):
            ours.doubly_stochastic(wrong)
    with pytest.raises(ShapeError, match=r"= \(2, 2\)"):
        ours.doubly_stochastic(alphas, steps[:, :1])


def test_one_location_of_each_image_is_marked() -> None:
    assert _one_hot(torch.tensor([2, 0]), torch.zeros(2, 3)).tolist() == [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]


@pytest.mark.parametrize("mode", ["expected", "argmax", "locations"])
def test_hard_attention_returns_the_features_of_its_location(mode: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = ours.HardAttention(4, 6, attention_dim=5, eval_mode="argmax" if mode == "argmax" else "expected").eval()
    features, state = noise(2, 7, 4), noise(2, 6, seed=1)
    scores = module.score((module.feature(features) + module.state(state)[:, None]).tanh())[..., 0]
    alpha = scores.softmax(-1)
    places = torch.tensor([6, 1])
    found = module(features, state, locations=places if mode == "locations" else None)
    taken = {"expected": alpha, "argmax": _one_hot(alpha.argmax(-1), alpha), "locations": _one_hot(places, alpha)}[mode]
    torch.testing.assert_close(found.alpha, alpha)
    torch.testing.assert_close(found.taken, taken)
    torch.testing.assert_close(found.context, (taken[:, :, None] * features).sum(1))
    torch.testing.assert_close(found.log_probability, (taken * alpha.log()).sum(1))
    torch.testing.assert_close(found.entropy, -(alpha * alpha.log()).sum(1))


def test_a_temperature_lies_above_zero() -> None:
    assert ours.HardAttention(4, 6, temperature=0.5).temperature == 0.5
    for wrong in (0.0, -1.0):
        with pytest.raises(OptionError, match="temperature of HardAttention must be above 0"):
            ours.HardAttention(4, 6, temperature=wrong)


@pytest.mark.parametrize("shape", [(2, 5), (3, 6), (2, 1, 6), (6,)])
def test_a_hidden_state_is_one_vector_for_each_image(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"must be \(2, 6\)"):
        ours.SoftAttention(4, 6)(noise(2, 7, 4), noise(*shape))


# glimpses


def test_patches_of_a_retina_lie_around_the_location() -> None:
    boxes = ours.Retina(4, 3).boxes(torch.tensor([[0.0, 0.0], [1.0, -0.5]]), (10, 20))
    assert boxes.shape == (2, 3, 4)
    assert boxes[0].tolist() == [[3.0, 8.0, 7.0, 12.0], [1.0, 6.0, 9.0, 14.0], [-3.0, 2.0, 13.0, 18.0]]
    assert boxes[1, 0].tolist() == [0.5, 18.0, 4.5, 22.0]
    assert ours.Retina(4, 2, 3).boxes(torch.zeros(1, 2), (10, 20))[0, 1].tolist() == [-1.0, 4.0, 11.0, 16.0]


def test_a_retina_cuts_pixels_out_and_averages_coarse_ones() -> None:
    images = noise(2, 3, 10, 20)
    found = ours.Retina(4, 2)(images, torch.zeros(2, 2))
    assert found.shape == (2, 6, 4, 4)
    torch.testing.assert_close(found[:, :3], images[:, :, 3:7, 8:12], atol=1e-5, rtol=0)
    coarse = images[:, :, 1:9, 6:14].reshape(2, 3, 4, 2, 4, 2).mean((3, 5))
    torch.testing.assert_close(found[:, 3:], coarse, atol=1e-5, rtol=0)
    for shape in ((3, 2), (2, 3), (2, 2, 1), (2,)):
        with pytest.raises(ShapeError, match=r"locations must be \(2, 2\)"):
            ours.Retina(4, 2)(images, torch.zeros(shape))


@pytest.mark.parametrize("count", [1, 3])
def test_filters_of_draw_are_gaussians_on_an_even_grid(count: int) -> None:
    numbers = torch.tensor([[0.25, -0.5, 0.4, -0.3, 0.7], [-0.2, 0.1, -0.6, 0.2, -0.1]])
    window = torch.nn.Linear(5, 5, bias=False)
    torch.nn.init.eye_(window.weight)
    rows, columns, log_gamma = _filters(window, numbers, 6, 9, count)
    for image, (x, y, log_variance, log_spacing, gamma) in enumerate(numbers.tolist()):
        spacing = (9 - 1) / max(count - 1, 1) * math.exp(log_spacing)
        for side, center, found in ((6, y, rows), (9, x, columns)):
            for i in range(1, count + 1):
                at = (side + 1) / 2 * (center + 1) + (i - count / 2 - 0.5) * spacing
                each = [math.exp(-((pixel - at) ** 2) / (2 * math.exp(log_variance))) for pixel in range(1, side + 1)]
                expected = torch.tensor(each) / max(sum(each), 1e-8)
                torch.testing.assert_close(found[image, i - 1].detach(), expected, atol=1e-5, rtol=0)
        assert log_gamma[image].item() == pytest.approx(gamma)


# local windows and scores


@pytest.mark.parametrize("first", [0, 4, 40])
def test_a_window_reaches_as_far_as_its_radius_along_both_axes(first: int) -> None:
    _, weights = ours.LocalMonotonic(1)(torch.zeros(2, 3, 35), noise(2, 35, 4), (5, 7), first=first)
    for query in range(3):
        row, column = divmod(min(first + query, 34), 7)
        near = [7 * r + c for r in range(5) for c in range(7) if abs(r - row) <= 1 and abs(c - column) <= 1]
        expected = torch.zeros(35)
        expected[near] = 1 / len(near)
        torch.testing.assert_close(weights[1, query], expected)


def test_scores_need_a_third_axis_and_as_many_keys_as_values() -> None:
    for scores, value in (
        (noise(2, 3, 5), noise(2, 6, 4)),
        (noise(2, 3, 5), noise(3, 5, 4)),
        (noise(2, 5), noise(2, 5, 4)),
        (noise(2, 3, 5), noise(2, 5)),
    ):
        with pytest.raises(ShapeError, match=r"scores must be \(B, T, N\)"):
            ours.attend(scores, value)
    out, weights = ours.attend(torch.zeros(2, 3, 5), noise(2, 5, 4))
    torch.testing.assert_close(out, noise(2, 5, 4).mean(1, keepdim=True).expand(-1, 3, -1))
    assert weights.shape == (2, 3, 5)


def test_a_cosine_is_scaled_by_a_finite_factor_above_zero() -> None:
    assert ours.CosineScore().beta == 1.0
    assert torch.as_tensor(ours.CosineScore(2.5, learned=True).beta).item() == pytest.approx(2.5)
    query, keys = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[4.0, 3.0], [-3.0, -4.0]]])
    torch.testing.assert_close(ours.CosineScore(2.0)(query, keys), torch.tensor([[[1.92, -2.0]]]))
    for wrong in (0.0, -1.0, math.inf):
        with pytest.raises(OptionError, match="beta must be above 0"):
            ours.CosineScore(wrong)


# published gates and checkpoints


def test_the_gate_of_scse_is_the_larger_for_values_above_zero_and_the_smaller_for_others() -> None:
    module = ours.SCSE(4).eval()
    x = noise(2, 4, 5, 7)
    x[0, 0, 0, 0] = 0
    with capture(module) as recording:
        module(x)
    channel, spatial, gate = (
        next(one.value for one in recording.features if one.role == role) for role in ("channel_gate", "spatial_gate", "gate")
    )
    channel = channel.reshape(2, 4, 1, 1).expand_as(x)
    spatial = spatial.expand_as(x)
    larger = x > 0
    assert torch.equal(gate[larger], torch.maximum(channel, spatial)[larger])
    assert torch.equal(gate[~larger], torch.minimum(channel, spatial)[~larger])


def test_one_tensor_of_another_shape_is_told_alone() -> None:
    state = ours.SqueezeExcite(8, 2).state_dict()
    state["fc2.bias"] = torch.zeros(9)
    with pytest.raises(WeightsError, match=r"given fc2\.bias of 8, got 9\. Build"):
        ours.load_checkpoint(ours.SqueezeExcite(8, 2), state)
    state["fc1.bias"] = torch.zeros(5)
    with pytest.raises(WeightsError, match=r"given fc1\.bias of 4, got 5 \(and 1 more\)\. Build"):
        ours.load_checkpoint(ours.SqueezeExcite(8, 2), state)
