"""Recurrent attention model: the steps of the paper written out, and which loss term trains which parameters."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conftest import Figures
from visattn.errors import OptionError, ShapeError
from visattn.models import RAM
from visattn.models.ram import RAMOutput, loss
from visattn.nn import reinforce

POLICY = {"location.weight", "location.bias"}
BASELINE = {"baseline.weight", "baseline.bias"}


def tiny(scales: int = 1, **options: int) -> RAM:
    return RAM(4, scales, num_glimpses=3, hidden_dim=16, num_classes=3, **options)


def digits(batch: int = 5, channels: int = 1) -> Tensor:
    return torch.randn(batch, channels, 14, 11)


def reached(model: RAM, value: Tensor) -> set[str]:
    """Return the names of the parameters that get a gradient from `value`."""
    model.zero_grad()
    value.backward()  # type: ignore[no-untyped-call]
    return {name for name, parameter in model.named_parameters() if parameter.grad is not None and bool(parameter.grad.any())}


def test_parameter_count_equals_that_of_the_papers_layers() -> None:
    sums = 8 * 8 * 128 + 128, 2 * 128 + 128, 2 * (128 * 256 + 256), 2 * (256 * 256 + 256), 256 * 10 + 10, 256 * 2 + 2, 256 + 1
    assert sum(sums) == 209_677
    assert sum(parameter.numel() for parameter in RAM(8, 1, num_classes=10).parameters()) == 209_677


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("scales", [1, 3])
def test_shapes_and_ranges(scales: int, channels: int, training: bool) -> None:
    looked = tiny(scales, in_channels=channels).train(training)(digits(5, channels))
    assert looked.logits.shape == (5, 3)
    assert looked.locations.shape == (5, 3, 2)
    assert looked.log_probabilities.shape == looked.baselines.shape == (5, 3)
    assert bool((looked.locations.abs() <= 1).all())
    assert all(bool(part.isfinite().all()) for part in looked)


def test_locations_are_clipped_to_the_image() -> None:
    model = RAM(4, num_glimpses=2, hidden_dim=16, std=3.0)
    locations = model(digits(50)).locations
    assert float(locations.abs().max()) == 1
    assert 0.2 < float((locations.abs() == 1).float().mean()) < 1  # many samples lie outside


def test_evaluation_is_deterministic_and_training_is_not() -> None:
    model, images = tiny(), digits()
    assert not torch.equal(model(images).locations, model(images).locations)
    model.eval()
    first, second = model(images), model(images)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    alone = torch.cat([model(image[None]).logits for image in images])
    torch.testing.assert_close(alone, first.logits)


def test_a_forward_equals_the_papers_steps_written_out(figures: Figures) -> None:
    model = tiny(2, in_channels=3).double()
    images = digits(4, 3).double()
    with torch.no_grad():
        looked = model(images)
    weights = {name: value.detach() for name, value in model.named_parameters()}

    def linear(name: str, x: Tensor) -> Tensor:
        return torch.stack(
            [
                sum((weights[f"{name}.weight"][i, j] * x[j] for j in range(len(x))), weights[f"{name}.bias"][i])
                for i in range(len(weights[f"{name}.bias"]))
            ]
        )

    worst = 0.0
    for b in range(len(images)):
        state = torch.zeros(16, dtype=torch.float64)
        for t in range(3):
            mean = linear("location", state).tanh()
            where = looked.locations[b, t]
            density = sum(
                -((float(where[axis]) - float(mean[axis])) ** 2) / (2 * 0.1**2) - math.log(0.1 * math.sqrt(2 * math.pi))
                for axis in (0, 1)
            )
            if float(where.abs().max()) < 1:  # not clamped after sampling
                worst = max(worst, abs(float(looked.log_probabilities[b, t]) - density))
            worst = max(worst, abs(float(looked.baselines[b, t]) - float(linear("baseline", state)[0])))
            seen = model.glimpse.retina(images[b : b + 1], where[None]).flatten()
            what, there = linear("glimpse.what", seen).relu(), linear("glimpse.where", where).relu()
            glimpse = (linear("glimpse.from_what", what) + linear("glimpse.from_where", there)).relu()
            state = (linear("core.from_state", state) + linear("core.from_glimpse", glimpse)).relu()
        worst = max(worst, float((looked.logits[b] - linear("action", state)).abs().max()))
    figures("RAM against the paper's steps in loops", worst, "<= 1e-12")
    assert worst <= 1e-12


def test_evaluation_uses_the_mean_location() -> None:
    model = tiny().eval()
    with torch.no_grad():
        model.location.weight.zero_()
        model.location.bias.copy_(torch.tensor([0.3, -5.0]))
    expected = torch.tensor([math.tanh(0.3), math.tanh(-5.0)]).expand(5, 3, 2)
    torch.testing.assert_close(model(digits()).locations, expected)


def test_x_is_the_first_coordinate_of_a_location() -> None:
    model = RAM(2, num_glimpses=1, hidden_dim=16).eval()
    images = torch.zeros(2, 1, 8, 8)
    images[1, :, 3:5, 7] = 1  # glimpse at (1, 0): the right edge, halfway down
    with torch.no_grad():
        model.location.bias.copy_(torch.tensor([9.0, 0.0]))
    right = model(images).logits
    assert not torch.allclose(right[0], right[1])
    with torch.no_grad():
        model.location.bias.copy_(torch.tensor([0.0, 9.0]))
    below = model(images).logits
    torch.testing.assert_close(below[0], below[1])


def test_log_probabilities_are_those_of_samples_before_clipping() -> None:
    model = RAM(2, num_glimpses=1, hidden_dim=16, std=0.8)
    looked = model(torch.zeros(4000, 1, 2, 2))
    assert float((looked.locations.abs() == 1).float().mean()) > 0.1
    expected = -(1 + math.log(2 * math.pi * 0.8**2))  # mean log-density of a 2-d normal distribution
    assert float(looked.log_probabilities.detach().mean()) == pytest.approx(
        expected, abs=0.06
    )  # its standard error is 1 / sqrt(4000)


@pytest.mark.parametrize("options", [{"num_glimpses": 0}, {"std": 0}])
def test_a_model_without_glimpses_or_noise_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(OptionError, match="must have num_glimpses of at least 1 and std above 0"):
        RAM(**options)


# which loss term trains which parameters


def test_classification_loss_has_no_gradient_in_policy_or_baseline() -> None:
    model = tiny()
    found = reached(model, F.cross_entropy(model(digits()).logits, torch.tensor([0, 1, 2, 0, 1])))
    assert not found & (POLICY | BASELINE)
    assert {name.split(".")[0] for name in found} == {"glimpse", "core", "action"}


def test_log_probabilities_have_gradients_in_the_location_network_only() -> None:
    model = tiny()
    assert reached(model, model(digits()).log_probabilities.sum()) == POLICY


def test_baselines_have_gradients_in_the_baseline_network_only() -> None:
    model = tiny()
    assert reached(model, model(digits()).baselines.square().sum()) == BASELINE


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_no_gradient_goes_through_a_location(training: bool) -> None:
    assert not tiny().train(training)(digits()).locations.requires_grad


def test_the_loss_is_the_papers_sum() -> None:
    model, labels = tiny(), torch.tensor([0, 1, 2, 0, 1])
    looked = RAMOutput(*(part.detach() for part in model(digits())))
    entropy = policy = error = 0.0
    for b in range(5):
        scores = [float(score) for score in looked.logits[b]]
        entropy += math.log(sum(math.exp(score) for score in scores)) - scores[int(labels[b])]
        reward = float(scores.index(max(scores)) == int(labels[b]))
        for t in range(3):
            advantage = reward - float(looked.baselines[b, t])
            policy -= float(looked.log_probabilities[b, t]) * advantage
            error += advantage**2
    for weight in (1.0, 0.01):
        expected = entropy / 5 + weight * policy / 5 + error / 15
        assert float(loss(looked, labels, reinforce=weight)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("term", "names"),
    [(lambda all_, none: all_ - none, POLICY), (lambda _all, none: none, None)],
    ids=["reinforce", "the others"],
)
def test_reinforce_has_gradients_in_the_location_network_only(
    term: Callable[[Tensor, Tensor], Tensor], names: set[str] | None
) -> None:
    model = tiny()
    looked = model(digits())
    labels = torch.tensor([0, 1, 2, 0, 1])
    found = reached(model, term(loss(looked, labels), loss(looked, labels, reinforce=0)))
    everything = {name for name, _ in model.named_parameters()}
    assert found == (names if names is not None else everything - POLICY)


def test_rewarded_locations_become_more_likely() -> None:
    logits = torch.tensor([[9.0, 0, 0], [0, 9.0, 0]])
    wished = torch.zeros(2, 3, requires_grad=True)
    loss(RAMOutput(logits, wished, torch.zeros(2, 3, 2), torch.full((2, 3), 0.25)), torch.tensor([0, 0])).backward()  # type: ignore[no-untyped-call]
    assert wished.grad is not None
    torch.testing.assert_close(
        wished.grad, torch.tensor([[-0.75] * 3, [0.25] * 3]) / 2
    )  # gradient descent moves toward the first


def test_gradients_of_the_loss_equal_those_of_its_explicit_terms() -> None:
    logits, logs, baselines = torch.randn(4, 3).double(), torch.randn(4, 6).double(), torch.rand(4, 6).double()
    labels = torch.tensor([2, 0, 1, int(logits[3].argmax())])
    looked = RAMOutput(logits.requires_grad_(), logs.requires_grad_(), torch.zeros(4, 6, 2), baselines.requires_grad_())
    found = torch.autograd.grad(loss(looked, labels, reinforce=0.3), [logits, logs, baselines])
    rewards = []
    for b, row in enumerate(logits.tolist()):
        shares = [math.exp(score) for score in row]
        rewards.append(float(row.index(max(row)) == int(labels[b])))
        for k in range(3):
            expected = (shares[k] / sum(shares) - (k == int(labels[b]))) / 4
            assert float(found[0][b, k]) == pytest.approx(expected, abs=1e-12)
        for t in range(6):
            advantage = rewards[b] - baselines[b, t].item()
            assert float(found[1][b, t]) == pytest.approx(-0.3 * advantage / 4, abs=1e-12)
            assert float(found[2][b, t]) == pytest.approx(-2 * advantage / 24, abs=1e-12)
    assert set(rewards) == {0, 1}


@pytest.mark.parametrize("shape", [(), (3,), (3, 4)], ids=["a number", "of sequences", "of steps"])
def test_reinforce_accepts_a_baseline_per_batch_image_or_step(shape: tuple[int, ...]) -> None:
    cost, baseline, steps = torch.randn(3), torch.randn(shape), torch.rand(3, 4) > 0.3
    logs = torch.randn(3, 4, requires_grad=True)
    reinforce(cost, logs, torch.zeros(3, 4), baseline=baseline, steps=steps, strength=0.5).backward()  # type: ignore[no-untyped-call]
    assert logs.grad is not None
    for b in range(3):
        for t in range(4):
            expected = float(cost[b]) - float(baseline[(b, t)[: len(shape)]])
            assert float(logs.grad[b, t]) == pytest.approx(0.5 * expected / 3 if steps[b, t] else 0, abs=1e-6)


@pytest.mark.parametrize("shape", [(4,), (1, 4), (3, 1), (4, 3)])
def test_reinforce_refuses_a_baseline_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"the baseline must be a number, \(B,\) or \(B, T\) = \(3, 4\), got"):
        reinforce(torch.zeros(3), torch.zeros(3, 4), torch.zeros(3, 4), baseline=torch.zeros(shape))


# learning


def test_a_few_steps_reduce_the_loss(figures: Figures) -> None:
    model = RAM(6, num_glimpses=2, hidden_dim=32, num_classes=2)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    labels = torch.arange(64) % 2
    images = torch.rand(64, 1, 12, 12) * 0.2 + labels[:, None, None, None]  # bright or dark
    losses = []
    for _ in range(40):
        value = loss(looked := model(images), labels, reinforce=0.01)
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(F.cross_entropy(looked.logits, labels).item())
    figures("RAM on a trivial task: cross-entropy after 40 steps, of its start", losses[-1] / losses[0], "< 0.1")
    assert losses[-1] < 0.1 * losses[0]


def test_reinforce_learns_the_location_where_the_class_is_visible(figures: Figures) -> None:
    """Train on a class that is visible only at the left edge, with a glimpse too small to see it from the center."""
    model = RAM(4, num_glimpses=1, hidden_dim=32, num_classes=2, std=0.3)
    fast = torch.optim.Adam(
        [
            {"params": [parameter for name, parameter in model.named_parameters() if name in POLICY], "lr": 0.05},
            {"params": [parameter for name, parameter in model.named_parameters() if name not in POLICY], "lr": 3e-3},
        ]
    )
    labels = torch.arange(128) % 2
    images = torch.zeros(128, 1, 16, 16)
    images[labels == 1, :, :, :5] = 1
    for _ in range(150):
        value = loss(model(images), labels)
        fast.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        fast.step()
    model.eval()
    looked = model(images)
    right = float((looked.logits.argmax(1) == labels).float().mean())
    figures("RAM finds the class at the left edge: x of the glimpse", float(looked.locations[0, 0, 0]), "< -0.25")
    assert right == 1
    assert float(looked.locations[0, 0, 0]) < -0.25
