"""Metrics that captum computes: infidelity, and the largest change of a map under small noise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from visattn._support.checks import at_least, between
from visattn._support.extras import need
from visattn.evaluation.choices import By
from visattn.evaluation.given import MapLike, as_map
from visattn.evaluation.scores import Baseline, Score, background, checked, one_input
from visattn.evaluation.units import units_of


def infidelity(
    score: Score,
    pixels: Tensor,
    shown: MapLike,
    *,
    samples: int = 200,
    scaled: bool = True,
    baseline: Baseline = 0.0,
    by: By = "cells",
    batch_size: int = 32,
    seed: int = 0,
) -> float:
    """Compute how far sums of values are from losses of the score: the mean squared difference over random sets of units.

    Each set holds each unit with a probability of one half, and replaces it. A map whose values add up to every loss has infidelity 0.
    The number has the square of the score's unit, so it compares maps of one input.

    Args:
        score: See `deletion`.
        pixels: See `deletion`.
        shown: See `deletion`. Values are summed with their sign; the value of a cell counts once.
        samples: Number of sets.
        scaled: Whether the map is first multiplied by the number that fits best, since few maps are in the score's unit.
        baseline: What replaces a unit, see `deletion`.
        by: See `deletion`.
        batch_size: See `deletion`.
        seed: Seed of the sets.

    Returns:
        A number of at least 0.

    Raises:
        MissingExtra: If captum is not installed.
        OptionError: If a number is out of range, or a word unknown.
        ShapeError: See `deletion`.
        MapError: See `deletion`.

    Reference:
        Yeh et al., "On the (In)fidelity and Sensitivity of Explanations", NeurIPS 2019, arXiv:1901.09392, definition 2.1, with
        perturbations that replace parts (section 3.2); computed by captum.
    """
    need("captum", "attribution", "infidelity")
    from captum.metrics import infidelity as of_captum

    at_least("samples", samples)
    at_least("seed", seed, 0)
    pixels = one_input(pixels)
    units = units_of(shown, (pixels.shape[-2], pixels.shape[-1]), by)
    other, random = background(pixels, baseline), np.random.default_rng(seed)
    sizes = np.bincount(units.index[units.index >= 0], minlength=len(units))
    shares = (
        np.append(units.values / sizes, 0)[units.index] / pixels.shape[1]
    )  # of each number in a pixel; sums are those of units
    attributions = torch.from_numpy(shares).to(pixels).expand_as(pixels)

    def replaced(inputs: Tensor) -> tuple[Tensor, Tensor]:
        is_replaced = units.among(random.random((len(inputs), len(units))) < 0.5, inputs.device)
        return is_replaced.to(inputs).expand_as(inputs), torch.where(is_replaced, other, inputs)

    with torch.no_grad():
        found = of_captum(
            checked(score),
            replaced,
            pixels,
            attributions,
            n_perturb_samples=samples,
            max_examples_per_batch=min(at_least("batch_size", batch_size), samples),
            normalize=scaled,
        )
    return float(found)


def max_sensitivity(
    explain: Callable[[Tensor], MapLike], pixels: Tensor, *, radius: float = 0.02, samples: int = 10, seed: int = 0
) -> float:
    """Compute the largest change of a map under small noise on the input, relative to the map.

    It is the largest of `samples` values of `|map(x + e) - map(x)| / |map(x)|` with Euclidean norms, where the noise `e` is uniform in
    `[-radius, radius]`. A small number does not mean that a map is right: a map that ignores the input has 0.

    Args:
        explain: Function from one input `(1, C, H, W)` to its map.
        pixels: See `deletion`.
        radius: Largest noise on each number, in the units of `pixels`.
        samples: Number of noisy inputs.
        seed: Seed of the noise. The global random state is not changed.

    Returns:
        A number of at least 0.

    Raises:
        MissingExtra: If captum is not installed.
        OptionError: If a number is out of range.
        ShapeError: See `deletion`.

    Reference:
        Yeh et al., "On the (In)fidelity and Sensitivity of Explanations", NeurIPS 2019, arXiv:1901.09392, definition 3.1; computed by
        captum.
    """
    need("captum", "attribution", "max_sensitivity")
    from captum.metrics import sensitivity_max

    at_least("samples", samples)
    at_least("seed", seed, 0)
    between(radius, 0, float("inf"), "radius")
    pixels = one_input(pixels)
    generator = torch.Generator().manual_seed(seed)

    def explained(inputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor]:  # captum takes the norm of each row of a bare tensor
        with torch.enable_grad():  # which captum switches off
            return (torch.stack([as_map(explain(one[None])).values.detach().double().cpu() for one in _only(inputs)]),)

    def noisy(inputs: Tensor | tuple[Tensor, ...], reach: float) -> Tensor:
        noise = torch.rand(_only(inputs).shape, generator=generator, dtype=torch.float64) * 2 - 1
        return _only(inputs) + (reach * noise).to(pixels)

    found = sensitivity_max(
        explained, pixels, perturb_func=noisy, perturb_radius=radius, n_perturb_samples=samples, max_examples_per_batch=1
    )
    return float(found)


def _only(inputs: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Return the tensor that captum gives, now in a tuple and now not."""
    return inputs if isinstance(inputs, Tensor) else inputs[0]
