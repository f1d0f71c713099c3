"""Attributions by captum, compared with closed forms, loops over all subsets, captum itself, and a photo of known content."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import captum.attr
import numpy as np
import pytest
import torch
from captum._utils.models.linear_model import SkLearnLasso
from PIL import Image
from torch import Tensor, nn

import visattn
from tests import tiny
from tests.conftest import Figures
from tests.samples import sampled
from visattn import data
from visattn.core import methods
from visattn.core.maps import AttentionMap, value_range
from visattn.core.methods import METHODS, ScoredImages, segments
from visattn.core.pipeline.again import scoring
from visattn.core.pipeline.explanation import Explanation
from visattn.core.pipeline.targets import Target
from visattn.core.provenance import Provenance
from visattn.core.records import Recording
from visattn.errors import MissingExtra, ModelError, OptionError, ShapeError

SIZE, CELLS = (12, 18), (2, 3)
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
NAMES = "saliency", "input_x_gradient", "integrated_gradients", "smoothgrad", "occlusion", "kernel_shap", "lime"
METHOD = {name: getattr(methods, name) for name in NAMES}
ONE_GRADIENT = "saliency", "input_x_gradient"
SAMPLED = ("smoothgrad", "kernel_shap", "lime")
GRAY: dict[str, Any] = {"baseline": "mean"}
QUICK: dict[str, dict[str, Any]] = {
    "saliency": {},
    "input_x_gradient": {},
    "integrated_gradients": GRAY | {"steps": 5},
    "smoothgrad": {"samples": 5},
    "occlusion": GRAY | {"grid_size": CELLS},
    "kernel_shap": GRAY | {"grid_size": CELLS, "samples": 20},
    "lime": GRAY | {"grid_size": CELLS, "samples": 20},
}


def images(count: int = 1) -> Tensor:
    return torch.randn(count, 3, *SIZE, generator=torch.Generator().manual_seed(count))


def network() -> nn.Module:
    """Build a small random classifier that is strongly nonlinear."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        layers = nn.Conv2d(3, 8, 3, 2), nn.Tanh(), nn.Conv2d(8, 8, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 2 * 3, 4)
        return nn.Sequential(*layers).eval()


def asked(score: Callable[[Tensor], Tensor], count: int = 1) -> ScoredImages:
    return ScoredImages(images(count), score, MEAN, STD)


def run(method: str, scored: ScoredImages, **options: Any) -> AttentionMap:
    made: AttentionMap = METHOD[method](Recording(), scored=scored, **QUICK[method] | options)
    return made


def cell_sums(pixels: Tensor) -> Tensor:
    """Sum over the 6 x 6 pixels of each cell and over channels, by slices."""
    return torch.stack(
        [torch.stack([pixels[0, :, 6 * r : 6 * r + 6, 6 * c : 6 * c + 6].sum() for c in range(3)]) for r in range(2)]
    )


def only(image: Tensor, ground: Tensor, kept: tuple[int, ...]) -> Tensor:
    """Combine the image in these cells (raster order) with the baseline in the others."""
    out = ground.clone()
    for cell in kept:
        rows, columns = slice(6 * (cell // 3), 6 * (cell // 3) + 6), slice(6 * (cell % 3), 6 * (cell % 3) + 6)
        out[..., rows, columns] = image[..., rows, columns]
    return out


def shapley(value: Callable[[tuple[int, ...]], float], parts: int) -> list[float]:
    """Compute Shapley values from their definition: a part's mean gain over all subsets of the others."""
    values = []
    for part in range(parts):
        others = [other for other in range(parts) if other != part]
        total = 0.0
        for size in range(parts):
            share = math.factorial(size) * math.factorial(parts - size - 1) / math.factorial(parts)
            for subset in combinations(others, size):
                total += share * (value(tuple(sorted((*subset, part)))) - value(subset))
        values.append(total)
    return values


@pytest.fixture(scope="module")
def weights() -> Tensor:
    return torch.randn(3, *SIZE, generator=torch.Generator().manual_seed(9)) / 10


@pytest.fixture(scope="module")
def efficientnet() -> nn.Module:
    """Load an ImageNet classifier without attention, with pretrained weights."""
    return visattn.load_model("tf_efficientnet_lite0", weights=data.offline_weights("tf_efficientnet_lite0"))


@pytest.mark.parametrize("baseline", ["mean", "black", "blur"])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("integrated_gradients", {"segments": "grid", "grid_size": CELLS}),
        ("occlusion", {}),
        ("kernel_shap", {"samples": 60}),
        ("lime", {"samples": 60, "l1": 0}),
    ],
    ids=["integrated_gradients", "occlusion", "kernel_shap", "lime"],
)
def test_values_of_a_linear_score_are_the_weighted_pixels_of_each_segment(
    method: str, options: dict[str, Any], baseline: Any, weights: Tensor, figures: Figures
) -> None:
    scored = asked(lambda pixels: (pixels * weights).sum((1, 2, 3)))
    expected = cell_sums(weights * (scored.pixels - scored.baseline(baseline)))
    found = run(method, scored, baseline=baseline, **options).values[0]
    worst = float((found - expected).abs().max() / expected.abs().max())
    figures(f"captum.{method} of a linear score, baseline {baseline}: relative error", worst, "<= 1e-4")
    assert worst <= 1e-4


def test_pixels_of_integrated_gradients_of_a_linear_score(weights: Tensor) -> None:
    scored = asked(lambda pixels: (pixels * weights).sum((1, 2, 3)))
    made = run("integrated_gradients", scored)
    assert torch.allclose(made.values[0], (weights * scored.pixels[0]).sum(0), atol=1e-5)
    assert made.layout.grid == SIZE


def test_smoothgrad_of_a_linear_score_is_its_weights(weights: Tensor) -> None:
    made = run("smoothgrad", asked(lambda pixels: (pixels * weights).sum((1, 2, 3))))
    assert torch.allclose(made.values[0], weights.sum(0), atol=1e-5)


class Curved(nn.Module):
    """A small network in double precision, whose gradient is computed by hand below."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first = torch.randn(6, 3 * SIZE[0] * SIZE[1], generator=generator, dtype=torch.float64) / 20
        self.second = torch.randn(6, generator=generator, dtype=torch.float64)

    def forward(self, pixels: Tensor) -> Tensor:
        return (pixels.flatten(1) @ self.first.T).tanh() @ self.second

    def slope(self, pixels: Tensor) -> list[float]:
        """Compute the gradient at one image by loops: `sum_j v_j (1 - tanh^2(u_j x)) u_ji`."""
        flat = pixels.flatten().tolist()
        first, second = self.first.tolist(), self.second.tolist()
        hidden = [math.tanh(sum(weight * value for weight, value in zip(row, flat, strict=True))) for row in first]
        steep = [factor * (1 - value * value) for factor, value in zip(second, hidden, strict=True)]
        return [sum(factor * row[i] for factor, row in zip(steep, first, strict=True)) for i in range(len(flat))]


def curved() -> tuple[ScoredImages, list[list[list[float]]], list[list[list[float]]]]:
    """Return the input, the gradient and the pixels by channel, row and column."""
    net, count = Curved(), SIZE[0] * SIZE[1]
    scored = ScoredImages(images().double(), net, MEAN, STD)
    planes = []
    for flat in (net.slope(scored.pixels), scored.pixels.flatten().tolist()):
        planes.append([[flat[c * count + y * SIZE[1] :][: SIZE[1]] for y in range(SIZE[0])] for c in range(3)])
    return scored, planes[0], planes[1]


@pytest.mark.parametrize("signed", [False, True])
def test_saliency_is_the_largest_absolute_gradient_of_a_pixel_or_their_sum(signed: bool, figures: Figures) -> None:
    scored, slope, _ = curved()
    made = run("saliency", scored, signed=signed)
    expected = torch.zeros(SIZE)
    for y in range(SIZE[0]):
        for x in range(SIZE[1]):
            each = [slope[c][y][x] for c in range(3)]
            expected[y, x] = sum(each) if signed else max(abs(value) for value in each)
    worst = float((made.values[0] - expected).abs().max() / expected.abs().max())
    figures(f"captum.saliency, signed {signed}, against a gradient by hand: relative error", worst, "<= 1e-6")
    assert worst <= 1e-6
    assert made.signed == signed
    assert made.provenance.parameters == {"segments": "pixels", "signed": signed}


@pytest.mark.parametrize("options", [{}, {"segments": "grid", "grid_size": CELLS}], ids=["pixels", "grid"])
def test_input_x_gradient_is_each_pixel_times_its_gradient(options: dict[str, Any], figures: Figures) -> None:
    scored, slope, pixels = curved()
    made = run("input_x_gradient", scored, **options)
    rows, columns = made.layout.grid
    expected = torch.zeros(rows, columns)
    for y in range(SIZE[0]):
        for x in range(SIZE[1]):
            value = sum(slope[c][y][x] * pixels[c][y][x] for c in range(3))
            expected[y * rows // SIZE[0], x * columns // SIZE[1]] += value
    worst = float((made.values[0] - expected).abs().max() / expected.abs().max())
    figures(f"captum.input_x_gradient on {rows} x {columns} parts, against a gradient by hand: relative error", worst, "<= 1e-6")
    assert worst <= 1e-6
    assert made.signed


def test_signed_saliency_equals_smoothgrad_without_noise() -> None:
    scored, _, _ = curved()
    plain = run("saliency", scored, signed=True).values
    near = run("smoothgrad", scored, noise=1e-6, samples=3).values
    assert torch.allclose(near, plain, atol=1e-5 * float(plain.abs().max()))
    with pytest.raises(OptionError, match=r"noise must be .* Use captum\.saliency for no noise\."):
        run("smoothgrad", scored, noise=0)


def test_values_of_input_x_gradient_sum_to_the_rise_of_a_linear_score_only(weights: Tensor) -> None:
    def sums(score: Callable[[Tensor], Tensor]) -> tuple[float, float, tuple[str, ...]]:
        made = run("input_x_gradient", asked(score))
        found = re.search(r"values sum to (\S+), the score rises by (\S+) from the baseline", "\n".join(made.provenance.notes))
        assert found is not None
        return float(found[1]), float(found[2]), made.provenance.warnings

    total, rise, warnings = sums(lambda pixels: (pixels * weights).sum((1, 2, 3)) + 3)
    assert total == pytest.approx(rise, rel=1e-3)
    assert warnings == ()
    total, rise, warnings = sums(lambda pixels: (pixels * weights).sum((1, 2, 3)).square())
    assert total == pytest.approx(2 * rise, rel=1e-3)  # the gradient of a square
    assert warnings == ()  # the method does not promise a sum


def test_a_pixel_of_the_mean_color_has_no_share_in_input_x_gradient() -> None:
    score, pixels = Curved(), images().double()
    pixels[..., 3:5, 4:9] = 0
    made = run("input_x_gradient", ScoredImages(pixels, score, MEAN, STD))
    inside = made.values[0, 3:5, 4:9]
    assert not inside.any()
    assert bool(run("saliency", ScoredImages(pixels, score, MEAN, STD)).values[0, 3:5, 4:9].all())


@pytest.mark.full
def test_kernel_shap_comes_near_exact_shapley_values_of_a_network(figures: Figures) -> None:
    net = network()
    scored = asked(lambda pixels: net(pixels)[:, 1])

    @torch.no_grad()
    def value(kept: tuple[int, ...]) -> float:
        return float(scored.score(only(scored.pixels, scored.baseline("mean"), kept)))

    exact = torch.tensor(shapley(value, 6)).view(CELLS)
    errors = {}
    for evaluations in (100, 5000):
        found = run("kernel_shap", scored, samples=evaluations, batch_size=64).values[0]
        errors[evaluations] = float((found - exact).abs().max() / exact.abs().max())
        figures(
            f"captum.kernel_shap, {evaluations} evaluations of 6 parts: error over the largest value", errors[evaluations], ""
        )
    assert errors[5000] <= 0.02
    assert errors[5000] < errors[100]


@pytest.mark.parametrize("segments", ["grid", "slic"])
def test_occlusion_equals_a_loop_over_segments(segments: Any) -> None:
    net = network()
    smooth = nn.functional.interpolate(images()[..., :4, :6], SIZE, mode="bilinear")
    scored = ScoredImages(smooth, lambda pixels: net(pixels)[:, 2], MEAN, STD)
    options: dict[str, Any] = {"grid_size": CELLS} if segments == "grid" else {"grid_size": None, "num_segments": 6}
    made = run("occlusion", scored, segments=segments, baseline="black", batch_size=4, **options)
    (parts,) = scored.parts(segments, **options)
    expected = torch.zeros(len(parts))
    with torch.no_grad():
        for part in range(len(parts)):
            edited = torch.where(parts.labels == part, scored.baseline("black"), scored.pixels)
            expected[part] = scored.score(scored.pixels) - scored.score(edited)
    assert len(parts) > 2
    assert torch.allclose(made.values[0], expected.view(CELLS) if segments == "grid" else expected[parts.labels], atol=1e-5)


def test_lime_shrinks_weights_by_four_penalties_and_zeroes_small_ones() -> None:
    effects = torch.tensor([3.0, -2.0, 1.0, 0.1, 0.0, -0.1])
    scored = ScoredImages(torch.ones(1, 3, *SIZE), lambda pixels: (pixels[:, 0, 3::6, 3::6].flatten(1) * effects).sum(1))
    found = run("lime", scored, samples=4000, l1=0.05, batch_size=500).values.flatten()  # the rise is 2
    assert torch.allclose(found[:3], torch.tensor([2.6, -1.6, 0.6]), atol=0.06)
    assert not found[3:].any()


def test_edited_copies_are_scored_for_the_class_of_the_original_photo() -> None:
    class Flips(nn.Module):
        """Classifier whose prediction changes when the center becomes gray."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, pixels: Tensor) -> Tensor:
            bright = pixels[:, :, 96:128, 96:128].mean((1, 2, 3)) * self.scale
            return torch.stack([bright, 1 - bright], 1)

    photo = Image.new("RGB", (224, 224), "white")
    made = visattn.explain(Flips(), photo, method="captum.occlusion", baseline="mean", grid_size=(7, 7)).map.values
    white = float(((1 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])).mean())
    assert float(made[3, 3]) == pytest.approx(white, rel=1e-4)  # the score of the other class would rise
    assert made.count_nonzero() == 1


def test_lime_scales_with_the_score() -> None:
    net = network()
    large = run("lime", asked(lambda pixels: net(pixels)[:, 0]), samples=60).values
    small = run("lime", asked(lambda pixels: net(pixels)[:, 0] / 512), samples=60).values
    assert bool(small.any())
    assert torch.allclose(small * 512, large, rtol=1e-3, atol=1e-3 * float(large.abs().max()))


DIRECT: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "saliency": lambda score, x, mask: captum.attr.Saliency(score).attribute(x.clone().requires_grad_()).amax(1),
    "input_x_gradient": lambda score, x, mask: captum.attr.InputXGradient(score).attribute(x.clone().requires_grad_()).sum(1),
    "integrated_gradients": lambda score, x, mask: (
        captum.attr.IntegratedGradients(score).attribute(x, n_steps=5, internal_batch_size=16).sum(1)
    ),
    "smoothgrad": lambda score, x, mask: (
        captum.attr.NoiseTunnel(captum.attr.Saliency(score))
        .attribute(x, nt_samples=5, stdevs=0.15 * float(x.max() - x.min()), abs=False)
        .sum(1)
    ),
    "occlusion": lambda score, x, mask: captum.attr.Occlusion(score).attribute(x, (3, 6, 6), strides=(3, 6, 6))[:, 0, ::6, ::6],
    "kernel_shap": lambda score, x, mask: captum.attr.KernelShap(score).attribute(
        x, feature_mask=mask, n_samples=20, perturbations_per_eval=16
    )[:, 0, ::6, ::6],
    "lime": lambda score, x, mask: captum.attr.Lime(
        score, SkLearnLasso(alpha=0.001 * (score(x) - score(0 * x)).abs().item())
    ).attribute(x, feature_mask=mask, n_samples=20, perturbations_per_eval=16)[:, 0, ::6, ::6],
}


@pytest.mark.parametrize("method", METHOD)
def test_values_equal_captum_called_directly(method: str) -> None:
    net = network()
    scored = asked(lambda pixels: net(pixels)[:, 0])
    mask = (torch.arange(12)[:, None] // 6 * 3 + torch.arange(18) // 6)[None, None]
    torch.manual_seed(7)
    expected = DIRECT[method](scored.score, scored.pixels, mask)
    found = run(method, scored, **({"seed": 7} if method in SAMPLED else {})).values
    assert found.shape == expected.shape
    assert torch.allclose(found, expected.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", SAMPLED)
def test_the_seed_determines_the_result_and_global_random_states_are_unchanged(method: str) -> None:
    net = network()
    scored = asked(lambda pixels: net(pixels)[:, 0])
    before, numbers = torch.get_rng_state(), repr(np.random.get_state())  # noqa: NPY002 - the state that libraries would use
    first, again, other = (run(method, scored, seed=seed).values for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)
    assert repr(np.random.get_state()) == numbers  # noqa: NPY002


@pytest.mark.parametrize("method", METHOD)
def test_evaluations_are_counted(method: str) -> None:
    net, seen = network(), []

    def score(pixels: Tensor) -> Tensor:
        seen.append(len(pixels))
        return net(pixels)[:, 0]  # type: ignore[no-any-return]

    made = run(method, asked(score), **({} if method in ONE_GRADIENT else {"batch_size": 4}))
    said = "1 evaluation" if sum(seen) == 1 else f"{sum(seen)} evaluations"
    assert f"{said} of the model" in made.provenance.notes
    assert max(seen) <= 4


@pytest.mark.parametrize("method", METHOD)
def test_several_images_are_explained_one_by_one(method: str) -> None:
    net = network()
    both = asked(lambda pixels: net(pixels)[:, 0], 2)
    made = run(method, both)
    for i in range(2):
        one = ScoredImages(both.pixels[i : i + 1], both.score, MEAN, STD)
        assert torch.allclose(made.values[i], run(method, one).values[0], atol=1e-5)
    assert any(note.startswith("image 1: ") for note in made.provenance.notes)


def test_integrated_gradients_note_the_sum_of_their_values() -> None:
    def kink(pixels: Tensor) -> Tensor:
        return 10 * (pixels[:, 0, 0, 0] - 0.9).relu()

    scored = ScoredImages(torch.ones(1, 3, *SIZE), kink)
    made = run("integrated_gradients", scored, steps=2)
    (note,) = [note for note in made.provenance.notes if note.startswith("values sum to")]
    numbers = [float(number) for number in re.findall(r"-?[\d.]+(?:e-?\d+)?", note)]
    assert numbers == pytest.approx([float(made.values.sum()), 1.0, abs(float(made.values.sum()) - 1)], abs=0.01)
    assert made.provenance.warnings == (f"{note}; increase steps or samples",)
    assert not run("integrated_gradients", scored, steps=200).provenance.warnings


@pytest.mark.parametrize(("method", "options"), [("kernel_shap", {}), ("lime", {"l1": 0})], ids=["kernel_shap", "lime"])
def test_the_standard_error_is_how_values_vary_from_seed_to_seed(method: str, options: dict[str, Any], figures: Figures) -> None:
    net = network()
    scored = asked(lambda pixels: net(pixels)[:, 1])
    made = [run(method, scored, seed=seed, grid_size=(3, 4), samples=80, batch_size=80, **options) for seed in range(40)]
    actual = float(torch.cat([one.values for one in made]).var(0).mean().sqrt())
    stated = float(np.median([uncertainty(one)[1] for one in made]))
    figures(f"captum.{method}: stated standard error over the deviation among 40 seeds", stated / actual, "0.7 to 1.4")
    assert 0.7 <= stated / actual <= 1.4


def uncertainty(made: AttentionMap) -> tuple[float, float]:
    """Return the standard deviation of the values and the standard error of one, from the notes."""
    found = re.search(
        r"values have a standard deviation of (\S+) and a standard error of (\S+)", "\n".join(made.provenance.notes)
    )
    assert found is not None
    return float(found[1]), float(found[2])


@pytest.mark.parametrize("method", ["kernel_shap", "lime"])
def test_warns_about_values_that_are_mostly_chance(method: str) -> None:
    signs = torch.tensor([1.0, -1.0] * 3)
    scored = ScoredImages(torch.ones(1, 3, *SIZE), lambda pixels: (1 - 2 * pixels[:, 0, 3::6, 3::6].flatten(1)).prod(1))
    made = run(method, scored, samples=300, batch_size=50)
    assert any(warning.endswith("increase samples, or use fewer segments") for warning in made.provenance.warnings)
    plain = ScoredImages(scored.pixels, lambda pixels: (pixels[:, 0, 3::6, 3::6].flatten(1) * signs).sum(1))
    made = run(method, plain, samples=300, batch_size=50)
    assert not made.provenance.warnings
    spread, error = uncertainty(made)
    assert spread == pytest.approx(1.1, abs=0.05)  # of three values 1 and three values -1
    assert error < 1e-3 if method == "kernel_shap" else error < 0.05  # the Lasso is biased


def test_baselines_are_colors_of_pixels_before_normalization() -> None:
    scored = asked(lambda pixels: pixels.sum((1, 2, 3)))
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    assert torch.allclose(scored.baseline("black") * std + mean, torch.zeros(1, 3, *SIZE), atol=1e-6)
    assert torch.equal(scored.baseline("mean"), torch.zeros(1, 3, *SIZE))


def test_blur_is_a_gaussian_of_a_sixteenth_of_the_side() -> None:
    size, sigma = (48, 64), 3.0
    dot = torch.zeros(1, 1, *size)
    dot[0, 0, 24, 30] = 1
    found = ScoredImages(dot, lambda pixels: pixels.sum((1, 2, 3)), (0.5,), (0.5,)).baseline("blur")[0, 0]
    for y, x in [(24, 30), (24, 33), (27, 30), (20, 35)]:
        expected = math.exp(-((y - 24) ** 2 + (x - 30) ** 2) / (2 * sigma**2)) / (2 * math.pi * sigma**2)
        assert float(found[y, x]) == pytest.approx(expected, rel=0.01)
    constant = ScoredImages(torch.full((1, 3, *size), 0.3), lambda pixels: pixels.sum((1, 2, 3))).baseline("blur")
    assert torch.allclose(constant, torch.tensor(0.3), atol=1e-6)


@pytest.mark.parametrize(
    ("size", "patch", "count", "cells"),
    [
        ((224, 224), (16, 16), 196, (14, 14)),  # the model's own patches
        ((224, 224), (32, 32), 196, (7, 7)),  # no cells smaller than a patch
        ((224, 224), (1, 1), 25, (5, 5)),  # for models without patches
        ((420, 630), (14, 14), 50, (6, 9)),  # 5 x 5 patches each
        ((518, 518), (14, 14), 50, (7, 7)),  # 37 patches are prime
        ((16, 224), (16, 16), 50, (1, 14)),
    ],
)
def test_cells_are_full_patches_if_possible(
    size: tuple[int, int], patch: tuple[int, int], count: int, cells: tuple[int, int]
) -> None:
    assert segments.about(size, patch, count) == cells


def test_slic_gives_one_value_to_all_pixels_of_a_segment() -> None:
    photo = torch.zeros(1, 3, 40, 60)
    photo[:, 0, :, :20], photo[:, 1, :, 20:45], photo[:, 2, :, 45:] = 1, 1, 1
    scored = ScoredImages(photo, lambda pixels: pixels[:, 1].mean((1, 2)))
    made = run("occlusion", scored, segments="slic", grid_size=None, num_segments=12, baseline="black")
    (parts,) = scored.parts("slic", None, 12)
    assert set(parts.labels.flatten().tolist()) == set(range(len(parts)))
    assert made.values.shape == (1, 40, 60)
    for part in range(len(parts)):
        inside = parts.labels == part
        assert len(set(made.values[0][inside].tolist())) == 1
        assert len(set(map(tuple, photo[0][:, inside].T.tolist()))) == 1  # all of one color
    assert not made.values[0][:, :20].any()
    assert bool((made.values[0][:, 20:45] > 0).all())


def test_a_model_of_one_channel_has_segments_too() -> None:
    pixels = torch.cat([torch.zeros(1, 1, 40, 30), torch.ones(1, 1, 40, 30)], 3)
    made = run(
        "occlusion",
        ScoredImages(pixels, lambda x: x.sum((1, 2, 3)), (0.0,), (1.0,)),
        segments="slic",
        grid_size=None,
        num_segments=8,
    )
    assert float(made.values[0, :, 30:].min()) > 0 == float(made.values[0, :, :30].abs().max())


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("occlusion", {"segments": "pixels", "grid_size": None}, "too many pixels to remove"),
        ("occlusion", {"segments": "patches"}, "unknown segments 'patches'"),
        ("occlusion", {"segments": "slic"}, "grid_size applies only to segments='grid'"),
        ("occlusion", {"grid_size": (1, 1)}, "grid_size must give at least two cells"),
        ("occlusion", {"grid_size": (13, 3)}, "at most 12 x 18 (one per pixel), got 13 x 3"),
        ("occlusion", {"grid_size": None, "num_segments": 1}, "num_segments must be at least 2, got 1"),
        ("occlusion", {"baseline": "white"}, "unknown baseline 'white'"),
        ("occlusion", {"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ("integrated_gradients", {"steps": 0}, "steps must be at least 1, got 0"),
        ("kernel_shap", {"samples": 7}, "samples must be at least 8, two more than the number of segments, got 7"),
        ("lime", {"l1": -1}, "l1 must be 0 or more"),
        ("smoothgrad", {"noise": 0}, "noise must be a positive share"),
    ],
)
def test_invalid_options_are_refused(method: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        run(method, asked(lambda pixels: pixels.sum((1, 2, 3))), **options)


def test_slic_that_finds_one_segment_is_refused() -> None:
    with pytest.raises(OptionError, match=r"SLIC found only one segment in this image instead of 6\. Use segments='grid'"):
        asked(lambda pixels: pixels.sum((1, 2, 3))).parts("slic", None, 6)


@pytest.mark.parametrize("method", METHOD)
def test_a_score_that_is_not_one_finite_number_per_image_is_refused(method: str) -> None:
    with pytest.raises(ShapeError, match=r"the score must be one number for each of \d+ images, got \(\)"):
        run(method, asked(lambda pixels: pixels.sum()))
    with pytest.raises(ModelError, match="the score is NaN or infinite"):
        run(method, asked(lambda pixels: pixels.sum((1, 2, 3)) * math.nan))


@pytest.mark.parametrize(
    ("method", "options", "module"),
    [(method, {}, "captum") for method in METHOD]
    + [("kernel_shap", {}, "sklearn"), ("lime", {}, "sklearn"), ("lime", {"segments": "slic", "grid_size": None}, "skimage")],
)
def test_a_missing_package_is_reported_with_the_install_command(
    method: str, options: dict[str, Any], module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("visattn._support.extras.find_spec", lambda name: None if name == module else object())
    with pytest.raises(
        MissingExtra,
        match=rf'needs {module}, which is not installed\. In the source folder of visattn, run: pip install -e "\.\[attribution\]"$',
    ):
        run(method, asked(lambda pixels: pixels.sum((1, 2, 3))), **options)


@pytest.mark.parametrize("name", [name for name in METHODS if name.startswith("captum.")])
def test_each_method_is_in_the_table(name: str) -> None:
    model = tiny.vit(num_classes=4)
    prepared = visattn.prepare(Image.new("RGB", (48, 32), "white"), model)
    with scoring(model, prepared, Target()) as (recording, scored):
        counted = "steps" if name.endswith("integrated_gradients") else "samples"
        options: dict[str, Any] = {} if name.split(".")[1] in ("occlusion", *ONE_GRADIENT) else {counted: 20}
        made = METHODS[name].function(recording, scored=scored, **options)
    assert made.axes == ("batch",)
    assert made.provenance.method == name
    heat = visattn.explain(model, prepared.photo, method=METHODS[name].aliases[0], **options).heatmap()
    assert heat.signed == (name != "captum.saliency")


def test_a_vit_is_divided_into_its_own_patches() -> None:
    model = tiny.vit()
    found = visattn.explain(model, Image.effect_noise((48, 32), 80).convert("RGB"), method="captum.occlusion")
    assert found.map.layout.grid == tiny.GRID
    assert found.provenance.parameters["segments"] == "grid 2 x 3"
    assert found.provenance.target[0].startswith("output ")


def test_a_model_without_classes_needs_a_function(dinov2: nn.Module) -> None:
    photo = Image.effect_noise((84, 56), 80).convert("RGB")
    with pytest.raises(OptionError, match="has no classification head"):
        visattn.explain(dinov2, photo, method="captum.occlusion", img_size=56)

    def first(features: Tensor) -> Tensor:
        return features[:, 0]

    found = visattn.explain(dinov2, photo, method="captum.occlusion", target=first, img_size=56)
    assert found.provenance.target == ("first of the output",)
    assert bool(found.map.values.any())


def test_several_photos_are_refused_by_the_pipeline() -> None:
    model = tiny.vit()
    prepared = visattn.prepare_batch([Image.new("RGB", (48, 32))] * 2, model)
    with pytest.raises(ShapeError, match="a batch of one photo, got 2"), scoring(model, prepared, Target()):
        pass


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_unchanged(fails: bool) -> None:
    model = tiny.vit()
    model.train()
    model.get_submodule("blocks.0").eval()
    model.get_parameter("blocks.1.attn.qkv.weight").requires_grad_(False)
    before = [module.training for module in model.modules()], [parameter.requires_grad for parameter in model.parameters()]
    photo = Image.new("RGB", (48, 32), "white")
    if fails:
        with pytest.raises(OptionError):
            visattn.explain(model, photo, method="captum.occlusion", grid_size=(1, 1))
    else:
        visattn.explain(model, photo, method="captum.integrated_gradients", steps=3)
    after = [module.training for module in model.modules()], [parameter.requires_grad for parameter in model.parameters()]
    assert after == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_map_is_aligned_with_the_cropped_photo() -> None:
    class Bright(nn.Module):
        """Classifier with two classes, bright and dark."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, pixels: Tensor) -> Tensor:
            light = pixels.mean((1, 2, 3)) * self.scale
            return torch.stack([light, -light], 1)

    photo = Image.new("RGB", (640, 320), "black")
    photo.paste("white", (360, 40, 440, 120))
    found = visattn.explain(Bright(), photo, method="captum.occlusion", target=0, baseline="black", grid_size=(8, 8))
    heat = found.heatmap("nearest")
    assert tuple(heat.seen) == (0, 160, 320, 480)  # the middle square
    ys, xs = np.nonzero(heat.values > 0.01)  # apart from resampling ringing
    assert (ys.min(), ys.max() + 1, xs.min(), xs.max() + 1) == (40, 120, 360, 440)


def test_single_pixels_are_colored_up_to_the_99th_percentile_on_either_side_of_zero() -> None:
    model = tiny.vit()
    photo = Image.effect_noise((48, 32), 80).convert("RGB")
    unsigned = visattn.explain(model, photo, method="saliency")
    _, provenance = unsigned.draw()
    assert provenance.normalization == "percentile"
    assert provenance.value_range == pytest.approx(np.percentile(unsigned.map.values.numpy(), (1, 99)))
    for parts, how in ("pixels", "percentile"), ("grid", "symmetric"):
        found = visattn.explain(model, photo, method="ig", steps=3, segments=parts)
        _, provenance = found.draw()
        assert provenance.normalization == how
        bound = np.percentile(np.abs(found.map.values.numpy()), 99 if how == "percentile" else 100)
        assert provenance.value_range == pytest.approx((-bound, bound))
    spike = np.zeros((20, 20), np.float32)
    spike[3, 4] = -2
    assert value_range(spike, "percentile", signed=True) == (-2, 2)  # a spike on a flat background is not a constant map


def on_cup(found: Explanation) -> float:
    """Compute the share of the positive values on the cup, over the cup's share of what the model received."""
    heat = found.heatmap("nearest")
    with Image.open(Path(__file__).parents[2] / "assets" / "objects" / "masks" / "coffee.png") as picture:
        mask = np.asarray(picture.convert("L")) > 127
    top, left, bottom, right = (int(side) for side in heat.seen)
    inside, values = mask[top:bottom, left:right], heat.values[top:bottom, left:right].clip(min=0)
    return float(values[inside].sum() / values.sum() / inside.mean())


@pytest.mark.full
@pytest.mark.real
@pytest.mark.parametrize(
    ("method", "options", "bound"),
    [
        ("integrated_gradients", {"baseline": "mean"}, 1.0),
        ("saliency", {}, 1.0),
        ("saliency", {"signed": True}, 1.0),
        ("input_x_gradient", {}, 1.0),
        *sampled(
            [
                ("occlusion", {}, 1.2),
                ("integrated_gradients", {}, 1.2),
                ("smoothgrad", {"samples": 30}, 1.0),
                ("kernel_shap", {"samples": 300}, 1.2),
                ("lime", {"samples": 300, "segments": "slic"}, 1.2),
            ],
            5,
        ),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_the_espresso_is_in_the_cup(
    method: str, options: dict[str, Any], bound: float, efficientnet: nn.Module, figures: Figures
) -> None:
    found = visattn.explain(efficientnet, data.photo_path("coffee"), method=f"captum.{method}", **options)
    assert found.provenance.target[0].startswith("logit of espresso (class 967)")
    title = f"captum.{method} {options}"
    ratio = on_cup(found)
    figures(f"{title}: positive values on the cup over its area", ratio, f"> {bound}")
    for note in found.provenance.notes:
        if residual := re.search(r"rises by ([\d.]+).*residual ([\d.e-]+)", note):
            figures(f"{title}: residual over the rise", float(residual[2]) / float(residual[1]), "")
        if count := re.fullmatch(r"(\d+) evaluations? of the model", note):
            figures(f"{title}: evaluations", int(count[1]), "<= 302")
            assert int(count[1]) <= 302
    if method in ("kernel_shap", "lime"):
        spread, error = uncertainty(found.map)
        figures(f"{title}: standard error over the values' spread", error / spread, "")
    if method == "kernel_shap":
        rise, total = re.search(
            r"values sum to ([\d.]+), the score rises by ([\d.]+)", "\n".join(found.provenance.notes)
        ).groups()  # type: ignore[union-attr]
        assert float(total) == pytest.approx(float(rise), rel=0.01)
    assert ratio > bound


@pytest.mark.full
@pytest.mark.real
def test_a_blurred_baseline_gives_less_chance_than_a_gray_one(efficientnet: nn.Module, figures: Figures) -> None:
    errors = {}
    for baseline in ("blur", "mean"):
        options: dict[str, Any] = {"method": "captum.kernel_shap", "samples": 150, "baseline": baseline}
        spread, errors[baseline] = uncertainty(visattn.explain(efficientnet, data.photo_path("coffee"), **options).map)
        figures(
            f"captum.kernel_shap, 150 evaluations, baseline {baseline}: standard error over the spread",
            errors[baseline] / spread,
            "",
        )
        figures(f"captum.kernel_shap, 150 evaluations, baseline {baseline}: standard error", errors[baseline], "")
    assert errors["blur"] < errors["mean"] / 1.5


def test_a_recording_without_provenance_facts_is_enough() -> None:
    made = run("occlusion", asked(lambda pixels: pixels.sum((1, 2, 3))))
    assert made.provenance.model == Provenance().model
    assert made.provenance.versions["captum"] == captum.__version__
    assert made.provenance.parameters == {"segments": "grid 2 x 3", "baseline": "mean"}
    assert "baseline: the mean color of the training images, 0, 0, 0 after normalization" in made.provenance.notes


def test_slic_sees_the_colors_of_each_photo(monkeypatch: pytest.MonkeyPatch) -> None:
    photos = torch.rand(2, 3, *SIZE, generator=torch.Generator().manual_seed(7))
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    seen: list[Tensor] = []

    def kept(photo: Tensor, _count: int) -> segments.Segments:
        seen.append(photo)
        return segments.grid(SIZE, *CELLS)

    monkeypatch.setattr(segments, "slic", kept)
    ScoredImages((photos - mean) / std, lambda pixels: pixels.sum((1, 2, 3)), MEAN, STD).parts("slic", None, 6)
    for photo, shown in zip(photos, seen, strict=True):
        torch.testing.assert_close(shown, photo)


@pytest.mark.parametrize(
    ("rows", "columns", "text"), [(12, 18, "pixels"), (12, 9, "grid 12 x 9"), (1, 2, "grid 1 x 2"), (12, 1, "grid 12 x 1")]
)
def test_cells_of_a_grid_are_counted_by_row_and_column(rows: int, columns: int, text: str) -> None:
    made = segments.grid(SIZE, rows, columns)
    assert (made.grid, made.text, len(made)) == ((rows, columns), text, rows * columns)
    for y, x in ((0, 0), (5, 7), (11, 17)):
        assert int(made.labels[y, x]) == (y * rows // SIZE[0]) * columns + x * columns // SIZE[1]


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (0, 2), (2, 0), (13, 1), (1, 19)])
def test_grids_of_one_cell_or_of_less_than_a_pixel_are_refused(rows: int, columns: int) -> None:
    with pytest.raises(OptionError, match=f"got {rows} x {columns}"):
        segments.grid(SIZE, rows, columns)
