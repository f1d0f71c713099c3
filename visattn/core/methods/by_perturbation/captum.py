"""Attributions of a score to pixels, computed by captum. They use no attention, so they apply to any model.

The inputs are a recording, which gives the provenance, and a `ScoredImages`. The outputs are signed maps with the axis `batch`, on a
grid of parts or on the input's own pixels. `OptionError` is raised for options out of range and `MissingExtra` for missing packages.
`ShapeError` and `ModelError` are raised for scores that are not one finite number per image.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from visattn._support.extras import need
from visattn._support.modes import in_own_modes
from visattn.core.maps import AttentionMap
from visattn.core.methods.method import attribution_method
from visattn.core.methods.scored import Baseline, KernelInput, KernelOutput, ScoredImages, attributed
from visattn.core.methods.segments import Parts, Segments
from visattn.core.records import Recording
from visattn.errors import OptionError

_BOUND = 1e-3  # least distance of a sample's leverage from 1
_MOST_NOISE = 100  # times the range of the values, far beyond any image


@in_own_modes
def integrated_gradients(
    recording: Recording,
    *,
    scored: ScoredImages,
    baseline: Baseline = "blur",
    segments: Parts = "pixels",
    grid_size: tuple[int, int] | None = None,
    num_segments: int = 196,
    steps: int = 50,
    batch_size: int = 16,
) -> AttentionMap:
    """Compute integrated gradients: each pixel's share of the score's rise from the baseline to the image.

    The value is `(x - baseline)` times the mean gradient on the straight line between the two, summed over channels. All values sum to
    the rise, up to the integration error, which the notes state.

    Args:
        recording: Recording that gives the provenance.
        scored: Images and their score function.
        baseline: Baseline image without content: `blur`, `mean` or `black`. `blur` (default) blurs the image by a sixteenth of its
            shorter side. Images with blurred parts remain close to natural images, while gray cells are unlike any training image.
            Blurring keeps smooth content, so the notes state the score of the baseline. `mean` is the mean color of the training
            images, 0 after normalization. With `black`, dark pixels cannot receive any attribution. No baseline is neutral: compare
            two.
        segments: Parts of the image: `pixels`, `grid` or `slic` (regions of similar color). The values of a part's pixels are summed.
        grid_size: Numbers of rows and columns, for `segments='grid'`.
        num_segments: Approximate number of parts; ignored if `grid_size` is given. Cells consist of whole patches if possible, and are
            never smaller than a patch.
        steps: Number of integration steps (Gauss-Legendre), each one forward and backward pass.
        batch_size: Number of images per forward pass.

    Returns:
        Map in units of the score.

    Reference:
        Sundararajan et al., "Axiomatic Attribution for Deep Networks", ICML 2017, arXiv:1703.01365.
    """
    attr = captum_of("integrated_gradients", steps=steps, batch_size=batch_size)

    def kernel(asked: KernelInput) -> KernelOutput:
        options = {"n_steps": steps, "internal_batch_size": batch_size}
        found = attr.IntegratedGradients(asked.score).attribute(asked.image, baselines=asked.ground, **options)
        return KernelOutput(asked.parts.summed(found[0].sum(0)))

    return attributed(
        "captum.integrated_gradients",
        "integrated gradients",
        recording,
        scored,
        kernel,
        scored.parts(segments, grid_size, num_segments),
        baseline=baseline,
        additive=True,
        steps=steps,
    )


@in_own_modes
def smoothgrad(
    recording: Recording, *, scored: ScoredImages, noise: float = 0.15, samples: int = 50, batch_size: int = 16, seed: int = 0
) -> AttentionMap:
    """Compute SmoothGrad: the gradient of the score, averaged over noisy copies of the image and summed over channels.

    Args:
        recording: Recording that gives the provenance.
        scored: Images and their score function.
        noise: Standard deviation of the noise, as a share of the range of the image's values.
        samples: Number of samples. Each is one forward and backward pass on a noisy copy.
        batch_size: Number of images per forward pass. It affects which noise each sample receives.
        seed: Seed of the noise. The global random state is not changed.

    Returns:
        Map on the input's pixels, in score per unit of the normalized pixels.

    Raises:
        OptionError: If an option is out of range.

    Reference:
        Smilkov et al., "SmoothGrad: removing noise by adding noise", 2017, arXiv:1706.03825. Differs: the sign is kept.
    """
    attr = captum_of("smoothgrad", samples=samples, batch_size=batch_size)
    if not 0 < noise <= _MOST_NOISE:
        raise OptionError(
            f"noise must be a positive share of the range of the image's values, up to {_MOST_NOISE}, got {noise:g}. "
            "Use captum.saliency for no noise."
        )

    def kernel(asked: KernelInput) -> KernelOutput:
        deviation = noise * float(asked.image.max() - asked.image.min())
        options = {"nt_samples": samples, "nt_samples_batch_size": batch_size, "stdevs": deviation}
        tunnel = attr.NoiseTunnel(attr.Saliency(asked.score))
        with _seeded(seed, asked.image.device):
            found = tunnel.attribute(asked.image, nt_type="smoothgrad", abs=False, **options)
        return KernelOutput(found[0].sum(0).flatten())

    return attributed(
        "captum.smoothgrad",
        "SmoothGrad",
        recording,
        scored,
        kernel,
        scored.parts("pixels"),
        baseline=None,
        noise=noise,
        samples=samples,
        batch_size=batch_size,
        seed=seed,
    )


@in_own_modes
def occlusion(
    recording: Recording,
    *,
    scored: ScoredImages,
    baseline: Baseline = "blur",
    segments: Parts = "grid",
    grid_size: tuple[int, int] | None = None,
    num_segments: int = 196,
    batch_size: int = 16,
) -> AttentionMap:
    """Compute occlusion: the drop in score when one part of the image is replaced by the baseline.

    Args:
        recording: Recording that gives the provenance.
        scored: Images and their score function.
        baseline: See `integrated_gradients`.
        segments: Parts of the image: `grid`, or `slic` (regions of similar color). Each takes one forward pass.
        grid_size: Numbers of rows and columns, for `segments='grid'`.
        num_segments: Approximate number of parts; ignored if `grid_size` is given.
        batch_size: Number of images per forward pass.

    Returns:
        Map in units of the score, on the grid. For `slic`, it is on the input's pixels, each with the value of its whole part.

    Reference:
        Zeiler & Fergus, "Visualizing and Understanding Convolutional Networks", ECCV 2014, arXiv:1311.2901. Differs: parts do not
        overlap.
    """
    attr = captum_of("occlusion", batch_size=batch_size)

    def kernel(asked: KernelInput) -> KernelOutput:
        options = {"feature_mask": asked.parts.labels[None, None], "perturbations_per_eval": batch_size}
        found = attr.FeatureAblation(asked.score).attribute(asked.image, baselines=asked.ground, **options)
        return KernelOutput(asked.parts.picked(found[0, 0]))

    parts = _few(scored, segments, grid_size, num_segments)
    return attributed("captum.occlusion", "occlusion", recording, scored, kernel, parts, baseline=baseline)


@in_own_modes
def kernel_shap(
    recording: Recording,
    *,
    scored: ScoredImages,
    baseline: Baseline = "blur",
    segments: Parts = "grid",
    grid_size: tuple[int, int] | None = None,
    num_segments: int = 25,
    samples: int = 500,
    batch_size: int = 16,
    seed: int = 0,
) -> AttentionMap:
    """Compute Kernel SHAP: Shapley values of the parts of the image, estimated by a linear model of random subsets.

    A Shapley value is what a part adds to the score, averaged over all orders in which parts could be added to the baseline. The fit
    forces the values to sum to the score's rise, so a small residual is no evidence of accuracy. Read the standard error instead.

    Args:
        recording: Recording that gives the provenance.
        scored: Images and their score function.
        baseline: See `integrated_gradients`.
        segments: Parts of the image: `grid`, or `slic` (regions of similar color).
        grid_size: Numbers of rows and columns, for `segments='grid'`.
        num_segments: Approximate number of parts; ignored if `grid_size` is given. Each is an unknown of the fit. Most subsets contain
            nearly all parts or nearly none, so the default is half that of LIME.
        samples: Number of samples. Each is one forward pass on a random subset of the parts; use about 20 per part.
        batch_size: Number of images per forward pass.
        seed: Seed of the random subsets. The global random state is not changed.

    Returns:
        Map in units of the score, on the grid. For `slic`, it is on the input's pixels, each with the value of its whole part.

    Reference:
        Lundberg & Lee, "A Unified Approach to Interpreting Model Predictions", NIPS 2017, arXiv:1705.07874. As in captum, the sizes
        of subsets are drawn from the Shapley kernel, and all subsets have equal weight.
    """
    attr = captum_of("kernel_shap", "sklearn", samples=samples, batch_size=batch_size)

    def kernel(asked: KernelInput) -> KernelOutput:
        return _regressed(attr.KernelShap(asked.score), asked, samples, batch_size, seed)

    return attributed(
        "captum.kernel_shap",
        "Shapley value",
        recording,
        scored,
        kernel,
        _few(scored, segments, grid_size, num_segments, samples),
        baseline=baseline,
        additive=True,
        samples=samples,
        seed=seed,
    )


@in_own_modes
def lime(
    recording: Recording,
    *,
    scored: ScoredImages,
    baseline: Baseline = "blur",
    segments: Parts = "grid",
    grid_size: tuple[int, int] | None = None,
    num_segments: int = 50,
    l1: float = 0.001,
    samples: int = 500,
    batch_size: int = 16,
    seed: int = 0,
) -> AttentionMap:
    """Compute LIME: weights of a sparse linear model of the score, fitted to copies of the image in which half of the parts are removed.

    Args:
        recording: Recording that gives the provenance.
        scored: Images and their score function.
        baseline: See `integrated_gradients`.
        segments: Parts of the image: `grid`, or `slic` (regions of similar color).
        grid_size: Numbers of rows and columns, for `segments='grid'`.
        num_segments: Approximate number of parts; ignored if `grid_size` is given. Each is an unknown of the fit.
        l1: L1 penalty of the linear model, as a share of the score's rise from the baseline. Each weight shrinks by about four times as
            much, and smaller ones become 0. With 0, the fit is least squares.
        samples: Number of samples. Each is one forward pass on a random subset of the parts; use about 10 per part.
        batch_size: Number of images per forward pass.
        seed: Seed of the random subsets. The global random state is not changed.

    Returns:
        Map in units of the score, on the grid. For `slic`, it is on the input's pixels, each with the weight of its whole part.

    Raises:
        OptionError: If an option is out of range.

    Reference:
        Ribeiro et al., "Why Should I Trust You?", KDD 2016, arXiv:1602.04938. As in captum, the model is a Lasso (there
        with penalty 0.01, independent of the score), and copies are weighted by `exp(-d * d / 2)`, where d is the cosine distance
        between their pixels and the image's.
    """
    attr = captum_of("lime", "sklearn", samples=samples, batch_size=batch_size)
    if not 0 <= l1 < math.inf:
        raise OptionError(f"l1 must be 0 or more, as a share of the score's rise, got {l1:g}.")
    from captum._utils.models.linear_model import SkLearnLasso, SkLearnLinearRegression

    def kernel(asked: KernelInput) -> KernelOutput:
        # without its own random state, Lasso would draw from numpy's global one to no effect
        alpha = l1 * abs(asked.rise)
        linear = SkLearnLasso(alpha=alpha, random_state=0) if alpha else SkLearnLinearRegression()
        return _regressed(attr.Lime(asked.score, interpretable_model=linear), asked, samples, batch_size, seed)

    return attributed(
        "captum.lime",
        "LIME weight",
        recording,
        scored,
        kernel,
        _few(scored, segments, grid_size, num_segments, samples),
        baseline=baseline,
        l1=l1,
        samples=samples,
        seed=seed,
    )


def captum_of(method: str, *also: str, **counts: int) -> Any:  # noqa: ANN401 - the module
    """Return `captum.attr`, after checking that the packages are installed and counts are positive.

    Raises:
        MissingExtra: If a package is not installed.
        OptionError: If a count is less than 1.
    """
    for module in ("captum", *also):
        need(module, "attribution", f"captum.{method}")
    for name, count in counts.items():
        if count < 1:
            raise OptionError(f"{name} must be at least 1, got {count}.")
    import captum.attr

    return captum.attr


def _few(
    scored: ScoredImages, segments: Parts, grid_size: tuple[int, int] | None, num_segments: int, samples: int | None = None
) -> list[Segments]:
    """Divide images into parts that can be removed one by one, after checking that there are enough samples."""
    if segments == "pixels":
        raise OptionError(
            "segments must be 'grid' or 'slic', as there are too many pixels to remove each one. Or use integrated_gradients."
        )
    parts = scored.parts(segments, grid_size, num_segments)
    if samples is not None and samples < (least := max(map(len, parts)) + 2):
        raise OptionError(
            f"samples must be at least {least}, two more than the number of segments, got {samples}. Or use fewer segments."
        )
    return parts


def _regressed(estimator: Any, asked: KernelInput, samples: int, batch_size: int, seed: int) -> KernelOutput:  # noqa: ANN401 - captum's Lime
    estimator.interpretable_model = kept = _Kept(estimator.interpretable_model)
    options = {"n_samples": samples, "perturbations_per_eval": batch_size, "return_input_shape": False}
    parts = asked.parts.labels[None, None]
    with _seeded(seed, asked.image.device):
        weights = estimator.attribute(asked.image, baselines=asked.ground, feature_mask=parts, **options)
    return KernelOutput(weights.flatten().to(asked.image), kept.uncertainty())


class _Kept:
    """Wrapper of a captum linear model that stores its training data."""

    def __init__(self, model: Any) -> None:  # noqa: ANN401
        self._model = model

    def fit(self, data: Any) -> Any:  # noqa: ANN401 - a DataLoader of subsets (N, parts), scores (N,) and their weights (N,)
        self._fitted = data.dataset.tensors
        return self._model.fit(data)

    def representation(self) -> Any:  # noqa: ANN401
        return self._model.representation()

    def uncertainty(self) -> float:
        """Compute the standard error of a weight, as root mean square over the parts.

        This is HC3 of MacKinnon & White, 1985, which is robust to unequal variances of the subsets and approximates leave-one-out
        errors. For Lasso, the formula of least squares is used.
        """
        subsets, scores, weights = (tensor.cpu().double() for tensor in self._fitted)
        missed = scores - self._model(subsets.float()).detach()[:, 0]
        design = torch.nn.functional.pad(subsets, (1, 0), value=1.0)  # the intercept first
        inverse, singular = torch.linalg.inv_ex(design.T @ (design * weights[:, None]))
        others = 1 - weights * ((design @ inverse) * design).sum(1)  # at 0 the fit passes through the sample
        missed = torch.where(others > _BOUND, missed / others.clamp(min=_BOUND), 0)
        pulls = inverse @ (design * (weights * missed)[:, None]).T
        return math.inf if bool(singular) else float(pulls[1:].square().sum(1).mean().sqrt())


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the random generators of the CPU and this device, and restore their states afterwards."""
    cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []):
        torch.default_generator.manual_seed(seed)
        if cuda:
            torch.cuda.default_generators[device.index].manual_seed(seed)
        yield


METHODS = {
    "captum.integrated_gradients": attribution_method(integrated_gradients, "ig"),
    "captum.smoothgrad": attribution_method(smoothgrad, "smoothgrad"),
    "captum.occlusion": attribution_method(occlusion, "occlusion"),
    "captum.kernel_shap": attribution_method(kernel_shap, "shap"),
    "captum.lime": attribution_method(lime, "lime"),
}
