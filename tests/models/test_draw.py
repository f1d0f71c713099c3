"""DRAW against loops over images, steps, filters and pixels; the bound; generation."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

import visattn
from tests.models.captions_by_loops import affine, lstm
from visattn.errors import OptionError, ShapeError
from visattn.models.draw import Draw, DrawOutput, bound

SIZE, STEPS = (6, 5), 3
Weights = Mapping[str, Tensor]


def network() -> Draw:
    """Build a network in float64 whose parameters are far from their initial values."""
    torch.manual_seed(0)
    model = Draw(img_size=SIZE, steps=STEPS, read_size=3, write_size=2, hidden_dim=4, latent_dim=2).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn_like(parameter))
    return model.eval()


def images(count: int = 2) -> Tensor:
    return torch.rand(count, 1, *SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64).round()


def filters(numbers: Tensor, count: int) -> tuple[list[list[float]], list[list[float]], float]:
    """Return the filters on rows and on columns, and gamma, from the five numbers of a state (equations 22 to 26 of the paper)."""
    g_x, g_y, log_variance, log_spacing, log_gamma = numbers.tolist()
    rows, columns = SIZE
    center_x, center_y = (columns + 1) / 2 * (g_x + 1), (rows + 1) / 2 * (g_y + 1)
    spacing = (max(rows, columns) - 1) / (count - 1) * math.exp(log_spacing)
    found = []
    for center, side in ((center_y, rows), (center_x, columns)):
        bank = []
        for i in range(1, count + 1):
            mean = center + (i - count / 2 - 0.5) * spacing
            weights = [math.exp(-((a - mean) ** 2) / (2 * math.exp(log_variance))) for a in range(1, side + 1)]
            total = sum(weights)
            bank.append([weight / total if total > 1e-8 else weight / 1e-8 for weight in weights])
        found.append(bank)
    return found[0], found[1], math.exp(log_gamma)


def painted(weights: Weights, picture: Tensor) -> tuple[list[Tensor], list[float]]:
    """Paint one image `(rows, columns)` by loops, with the mean of each posterior; return the canvases and the divergences."""
    rows, columns = SIZE
    h = c = torch.zeros(4, dtype=torch.float64)
    seen_h = seen_c = torch.zeros(4, dtype=torch.float64)
    canvas, canvases, divergences = torch.zeros(rows, columns, dtype=torch.float64), [], []
    for _ in range(STEPS):
        error = picture - 1 / (1 + torch.exp(-canvas))
        down, right, gamma = filters(affine(weights, "read.window", h), 3)
        patch = []
        for image in (picture, error):
            for j in range(3):
                for i in range(3):
                    total = sum(down[j][b] * float(image[b, a]) * right[i][a] for b in range(rows) for a in range(columns))
                    patch.append(gamma * total)
        encoder = {name.removeprefix("encoder."): value for name, value in weights.items() if name.startswith("encoder.")}
        seen_h, seen_c = lstm(
            {f"lstm.{k}": v for k, v in encoder.items()}, torch.cat((torch.tensor(patch, dtype=torch.float64), h)), seen_h, seen_c
        )
        mean, log_deviation = affine(weights, "mean", seen_h), affine(weights, "log_deviation", seen_h)
        divergences.append(
            sum(0.5 * (m**2 + math.exp(2 * s) - 2 * s) - 0.5 for m, s in zip(mean.tolist(), log_deviation.tolist(), strict=True))
        )
        decoder = {name.removeprefix("decoder."): value for name, value in weights.items() if name.startswith("decoder.")}
        h, c = lstm({f"lstm.{k}": v for k, v in decoder.items()}, mean, h, c)
        down, right, gamma = filters(affine(weights, "write.window", h), 2)
        stroke = affine(weights, "write.patch", h).view(2, 2)
        canvas = canvas.clone()
        for b in range(rows):
            for a in range(columns):
                added = sum(down[j][b] * float(stroke[j, i]) * right[i][a] for j in range(2) for i in range(2))
                canvas[b, a] += added / gamma
        canvases.append(canvas)
    return canvases, divergences


@torch.no_grad()
def test_every_step_equals_loops() -> None:
    model, pictures = network(), images()
    told = model(pictures)
    for b, picture in enumerate(pictures[:, 0]):
        canvases, divergences = painted(dict(model.named_parameters()), picture)
        torch.testing.assert_close(told.canvases[b, :, 0], torch.stack(canvases), rtol=0, atol=1e-10)
        assert told.divergences[b].tolist() == pytest.approx(divergences, abs=1e-10)


@torch.no_grad()
def test_the_bound_is_the_cross_entropy_of_the_last_canvas_and_all_divergences() -> None:
    model, pictures = network(), images()
    told = model(pictures)
    for b, picture in enumerate(pictures[:, 0]):
        total = float(told.divergences[b].sum())
        for pixel, logit in zip(picture.flatten().tolist(), told.canvases[b, -1].flatten().tolist(), strict=True):
            chance = 1 / (1 + math.exp(-logit))
            total -= math.log(chance if pixel == 1 else 1 - chance)
        assert float(bound(told, pictures)[b]) == pytest.approx(total, abs=1e-9)


def test_the_divergence_is_that_of_gaussians() -> None:
    model, pictures = network(), images(1)
    with torch.no_grad():
        model.mean.weight.zero_()
        model.log_deviation.weight.zero_()
        model.mean.bias.copy_(torch.tensor([0.5, -2.0]))
        model.log_deviation.bias.copy_(torch.tensor([0.3, -1.0]))
        told = model(pictures)
    posterior = torch.distributions.Normal(torch.tensor([0.5, -2.0]), torch.tensor([0.3, -1.0]).exp())
    expected = torch.distributions.kl_divergence(posterior, torch.distributions.Normal(0.0, 1.0)).sum()
    assert told.divergences[0].tolist() == pytest.approx([float(expected)] * STEPS, abs=1e-6)


def test_training_samples_and_every_parameter_gets_a_gradient() -> None:
    model, pictures = network().train(), images()
    torch.manual_seed(3)
    one, other = model(pictures), model(pictures)
    assert not torch.equal(one.canvases, other.canvases)
    bound(one, pictures).mean().backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
        assert parameter.grad.isfinite().all(), name


def test_gradients_equal_finite_differences() -> None:
    model, pictures = network(), images(1)
    given = [model.read.window.bias, model.write.window.bias, model.mean.bias]

    def value(*biases: Tensor) -> Tensor:
        named = dict(zip(("read.window.bias", "write.window.bias", "mean.bias"), biases, strict=True))
        return bound(torch.func.functional_call(model, named, (pictures,)), pictures)

    assert torch.autograd.gradcheck(value, tuple(one.detach().clone().requires_grad_() for one in given), atol=1e-6)


def test_new_images_are_painted_from_the_prior() -> None:
    model = network()
    pixels, boxes = model.generate(3, torch.Generator().manual_seed(5))
    again, _ = model.generate(3, torch.Generator().manual_seed(5))
    assert pixels.shape == (3, STEPS, 1, *SIZE)
    assert boxes.shape == (3, STEPS, 4)
    assert torch.equal(pixels, again)
    assert ((pixels > 0) & (pixels < 1)).all()
    noise = torch.randn(STEPS, 3, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    state = torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, 4, dtype=torch.float64)
    canvas = torch.zeros(3, 1, *SIZE, dtype=torch.float64)
    with torch.no_grad():
        for step in range(STEPS):
            state = model.decoder(noise[step], state)
            canvas = model.write(canvas, state[0])
            torch.testing.assert_close(pixels[:, step], canvas.sigmoid())


def test_reading_filters_are_glimpses_of_the_image_and_writing_ones_windows_of_the_canvas() -> None:
    model, pictures = network().float(), images().float()
    with torch.no_grad(), visattn.capture(model) as recording:
        told: DrawOutput = model(pictures)
    read = [feature for feature in recording.features if feature.role == "glimpse"]
    written = [feature for feature in recording.features if feature.role == "window"]
    assert len(read) == len(written) == STEPS
    torch.testing.assert_close(torch.stack([feature.value[:, 0] for feature in read], 1), told.read)
    torch.testing.assert_close(torch.stack([feature.value[:, 0, :4] for feature in written], 1), told.written)


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"Draw must be given \(B, 1, 6, 5\), got \(2, 1, 5, 6\)"):
        network()(images().mT)
    with pytest.raises(OptionError, match="steps must be a whole number of at least 1"):
        Draw(steps=0)
