"""Attributions: how a score changes with the pixels. They read no attention, so any model will do. The algorithms are captum's.

In: a recording, for its provenance, and a `Scored`. Out: maps with the axis `batch`, on a grid of parts or on the input's own
pixels, signed. `OptionError` tells an option out of range, `MissingExtra` a package that is not installed, `ShapeError` and
`ModelError` a score that is not one finite number for each image.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from visattn._support.extras import need
from visattn.errors import OptionError
from visattn.maps import AttentionMap
from visattn.methods.method import attribution_method
from visattn.methods.scored import Asked, Baseline, Found, Scored, attributed
from visattn.methods.segments import Parts, Segments
from visattn.records import Recording

_BOUND = 1e-3  # of a sample's leverage to 1


def integrated_gradients(
    recording: Recording,
    *,
    scored: Scored,
    baseline: Baseline = "blur",
    segments: Parts = "pixels",
    cells: tuple[int, int] | None = None,
    count: int = 196,
    evaluations: int = 50,
    batch_size: int = 16,
) -> AttentionMap:
    """Integrated gradients: each pixel's share of the score's rise from the baseline to the image.

    `(x - baseline)` times the mean gradient on the straight line between the two, summed over channels. All values sum to the rise, up
    to the error of the integral, which is noted.

    Args:
        recording: For its provenance.
        scored: Pixels and their score.
        baseline: The image without content: `mean`, `black` or `blur`. `blur`, the photo blurred by a sixteenth of its shorter side,
            is the default: a photo with blurred parts is nearly a photo still, one with gray cells is like nothing the model knows.
            It keeps what is smooth, so the score there is noted. `mean`: the mean color of the training images, 0 after
            normalization. `black`: nothing dark has a share of the way from there. None is neutral: compare two.
        segments: The parts of the image: `pixels`, or `grid` or `slic`, each with the sum over its pixels.
        cells: Rows and columns of `grid`.
        count: About how many parts, where `cells` does not say; cells are whole patches where they can be, and never smaller ones.
        evaluations: How often the model is run. They are steps of the integral (Gauss-Legendre).
        batch_size: How many images run at once.

    Returns:
        Map in units of the score.

    Reference:
        Sundararajan et al., "Axiomatic Attribution for Deep Networks", ICML 2017, arXiv:1703.01365.
    """
    attr = captum_of("integrated_gradients", evaluations, batch_size)

    def kernel(asked: Asked) -> Found:
        options = {"n_steps": evaluations, "internal_batch_size": batch_size}
        found = attr.IntegratedGradients(asked.score).attribute(asked.image, baselines=asked.ground, **options)
        return Found(asked.parts.summed(found[0].sum(0)))

    return attributed(
        "captum.integrated_gradients",
        "integrated gradients",
        recording,
        scored,
        kernel,
        scored.parts(segments, cells, count),
        baseline=baseline,
        additive=True,
        evaluations=evaluations,
    )


def smoothgrad(
    recording: Recording, *, scored: Scored, noise: float = 0.15, evaluations: int = 50, batch_size: int = 16, seed: int = 0
) -> AttentionMap:
    """SmoothGrad: the mean gradient of the score over noisy copies of the image, summed over channels.

    Args:
        recording: For its provenance.
        scored: Pixels and their score.
        noise: Standard deviation of the noise, as a share of the range of the image's values.
        evaluations: How often the model is run, each time on a noisy copy.
        batch_size: How many run at once; which noise they get depends on it.
        seed: Of the noise; the process's own random state is left alone.

    Returns:
        Map of the input's pixels: score per unit of the normalized pixels.

    Raises:
        OptionError: If an option is out of range.

    Reference:
        Smilkov et al., "SmoothGrad: removing noise by adding noise", 2017, arXiv:1706.03825. Differs: the sign is kept.
    """
    attr = captum_of("smoothgrad", evaluations, batch_size)
    if noise <= 0:
        raise OptionError(
            f"noise must be a positive share of the range of the image's values, got {noise:g}. Without noise it is captum.saliency."
        )

    def kernel(asked: Asked) -> Found:
        deviation = noise * float(asked.image.max() - asked.image.min())
        options = {"nt_samples": evaluations, "nt_samples_batch_size": batch_size, "stdevs": deviation}
        tunnel = attr.NoiseTunnel(attr.Saliency(asked.score))
        with _seeded(seed, asked.image.device):
            found = tunnel.attribute(asked.image, nt_type="smoothgrad", abs=False, **options)
        return Found(found[0].sum(0).flatten())

    return attributed(
        "captum.smoothgrad",
        "SmoothGrad",
        recording,
        scored,
        kernel,
        scored.parts("pixels"),
        baseline=None,
        noise=noise,
        evaluations=evaluations,
        batch_size=batch_size,
        seed=seed,
    )


def occlusion(
    recording: Recording,
    *,
    scored: Scored,
    baseline: Baseline = "blur",
    segments: Parts = "grid",
    cells: tuple[int, int] | None = None,
    count: int = 196,
    batch_size: int = 16,
) -> AttentionMap:
    """Occlusion: how far the score falls when one part of the image is replaced by the baseline.

    Args:
        recording: For its provenance.
        scored: Pixels and their score.
        baseline: See `integrated_gradients`.
        segments: The parts of the image: `grid`, or `slic`, regions of like color. Each costs one evaluation.
        cells: Rows and columns of `grid`.
        count: About how many parts, where `cells` does not say.
        batch_size: How many images run at once.

    Returns:
        Map in units of the score, on the grid; for `slic` on the input's pixels, each with the value of its whole part.

    Reference:
        Zeiler & Fergus, "Visualizing and Understanding Convolutional Networks", ECCV 2014, arXiv:1311.2901. Differs: parts do not
        overlap.
    """
    attr = captum_of("occlusion", 1, batch_size)

    def kernel(asked: Asked) -> Found:
        options = {"feature_mask": asked.parts.labels[None, None], "perturbations_per_eval": batch_size}
        found = attr.FeatureAblation(asked.score).attribute(asked.image, baselines=asked.ground, **options)
        return Found(asked.parts.picked(found[0, 0]))

    parts = _few(scored, segments, cells, count)
    return attributed("captum.occlusion", "occlusion", recording, scored, kernel, parts, baseline=baseline)


def kernel_shap(
    recording: Recording,
    *,
    scored: Scored,
    baseline: Baseline = "blur",
    segments: Parts = "grid",
    cells: tuple[int, int] | None = None,
    count: int = 25,
    evaluations: int = 500,
    batch_size: int = 16,
    seed: int = 0,
) -> AttentionMap:
    """Kernel SHAP: Shapley values of the parts of the image, estimated by a linear model of random subsets.

    A Shapley value is what a part adds to the score, averaged over all orders in which parts could be put on the baseline. That the
    values sum to the score's rise is built into the fit, so a small residual proves nothing: the standard error tells.

    Args:
        recording: For its provenance.
        scored: Pixels and their score.
        baseline: See `integrated_gradients`.
        segments: The parts of the image: `grid`, or `slic`, regions of like color.
        cells: Rows and columns of `grid`.
        count: About how many parts, where `cells` does not say. Each is an unknown of the fit, and most subsets are nearly all or
            nearly nothing, so half as many parts as for LIME.
        evaluations: How often the model is run, each time on a subset; twenty for each part.
        batch_size: How many images run at once.
        seed: Of the subsets; the process's own random state is left alone.

    Returns:
        Map in units of the score, on the grid; for `slic` on the input's pixels, each with the value of its whole part.

    Reference:
        Lundberg & Lee, "A Unified Approach to Interpreting Model Predictions", NIPS 2017, arXiv:1705.07874. As captum has it: the
        sizes of subsets are drawn by the Shapley kernel, and all count alike.
    """
    attr = captum_of("kernel_shap", evaluations, batch_size, "sklearn")

    def kernel(asked: Asked) -> Found:
        return _regressed(attr.KernelShap(asked.score), asked, evaluations, batch_size, seed)

    return attributed(
        "captum.kernel_shap",
        "Shapley value",
        recording,
        scored,
        kernel,
        _few(scored, segments, cells, count, evaluations),
        baseline=baseline,
        additive=True,
        evaluations=evaluations,
        seed=seed,
    )


def lime(
    recording: Recording,
    *,
    scored: Scored,
    baseline: Baseline = "blur",
    segments: Parts = "grid",
    cells: tuple[int, int] | None = None,
    count: int = 50,
    lasso: float = 0.001,
    evaluations: int = 500,
    batch_size: int = 16,
    seed: int = 0,
) -> AttentionMap:
    """LIME: the weights of a sparse linear model of the score, fitted to copies of the image with half of their parts taken away.

    Args:
        recording: For its provenance.
        scored: Pixels and their score.
        baseline: See `integrated_gradients`.
        segments: The parts of the image: `grid`, or `slic`, regions of like color.
        cells: Rows and columns of `grid`.
        count: About how many parts, where `cells` does not say; each is an unknown of the fit.
        lasso: Penalty of the absolute weights, as a share of the score's rise from the baseline. Each weight shrinks by about four
            times as much, and smaller ones vanish; 0 is least squares.
        evaluations: How often the model is run, each time on a subset; ten for each part.
        batch_size: How many images run at once.
        seed: Of the subsets; the process's own random state is left alone.

    Returns:
        Map in units of the score, on the grid; for `slic` on the input's pixels, each with the weight of its whole part.

    Raises:
        OptionError: If an option is out of range.

    Reference:
        Ribeiro et al., "Why Should I Trust You?", KDD 2016, arXiv:1602.04938. As captum has it: a Lasso (there of 0.01,
        whatever the score), and copies count by `exp(-d * d / 2)`, where d is the cosine distance of their pixels from the photo's.
    """
    attr = captum_of("lime", evaluations, batch_size, "sklearn")
    if lasso < 0:
        raise OptionError(f"lasso must be 0 or more, as a share of the score's rise, got {lasso:g}.")
    from captum._utils.models.linear_model import SkLearnLasso, SkLearnLinearRegression

    def kernel(asked: Asked) -> Found:
        # a Lasso without a random state of its own draws from numpy's global one, for nothing
        alpha = lasso * abs(asked.rise)
        linear = SkLearnLasso(alpha=alpha, random_state=0) if alpha else SkLearnLinearRegression()
        return _regressed(attr.Lime(asked.score, interpretable_model=linear), asked, evaluations, batch_size, seed)

    return attributed(
        "captum.lime",
        "LIME weight",
        recording,
        scored,
        kernel,
        _few(scored, segments, cells, count, evaluations),
        baseline=baseline,
        lasso=lasso,
        evaluations=evaluations,
        seed=seed,
    )


def captum_of(method: str, evaluations: int, batch_size: int, *also: str) -> Any:  # noqa: ANN401 - the module
    """`captum.attr`, once it is known to be installed and the numbers to make sense.

    Raises:
        OptionError: If a package is missing, or a number is below 1.
    """
    for module in ("captum", *also):
        need(module, "attribution", f"captum.{method}")
    if evaluations < 1 or batch_size < 1:
        raise OptionError(f"evaluations and batch_size must be at least 1, got {evaluations} and {batch_size}.")
    import captum.attr

    return captum.attr


def _few(
    scored: Scored, segments: Parts, cells: tuple[int, int] | None, count: int, evaluations: int | None = None
) -> list[Segments]:
    """Parts that can be taken away one by one, fewer than the evaluations that are to tell their values."""
    if segments == "pixels":
        raise OptionError(
            "segments must be 'grid' or 'slic', pixels are too many to take each away. Or use integrated_gradients."
        )
    parts = scored.parts(segments, cells, count)
    if evaluations is not None and evaluations < (least := max(map(len, parts)) + 2):
        raise OptionError(
            f"evaluations must be at least {least}, two more than there are segments, got {evaluations}. Or take fewer segments."
        )
    return parts


def _regressed(estimator: Any, asked: Asked, evaluations: int, batch_size: int, seed: int) -> Found:  # noqa: ANN401 - captum's Lime
    estimator.interpretable_model = kept = _Kept(estimator.interpretable_model)
    options = {"n_samples": evaluations, "perturbations_per_eval": batch_size, "return_input_shape": False}
    parts = asked.parts.labels[None, None]
    with _seeded(seed, asked.image.device):
        weights = estimator.attribute(asked.image, baselines=asked.ground, feature_mask=parts, **options)
    return Found(weights.flatten().to(asked.image), kept.uncertainty())


class _Kept:
    """A linear model of captum that remembers what it was fitted to."""

    def __init__(self, model: Any) -> None:  # noqa: ANN401
        self._model = model

    def fit(self, data: Any) -> Any:  # noqa: ANN401 - a DataLoader of subsets (N, parts), scores (N,) and their weights (N,)
        self._fitted = data.dataset.tensors
        return self._model.fit(data)

    def representation(self) -> Any:  # noqa: ANN401
        return self._model.representation()

    def uncertainty(self) -> float:
        """The standard error of a weight, the root of the mean square over the parts.

        HC3 of MacKinnon & White, 1985: near what a fit to each sample's others would miss it by, since subsets differ in how surely
        they tell. Of a Lasso it is that of least squares.
        """
        subsets, scores, weights = (tensor.cpu().double() for tensor in self._fitted)
        missed = scores - self._model(subsets.float()).detach()[:, 0]
        design = torch.nn.functional.pad(subsets, (1, 0), value=1.0)  # the intercept first
        inverse, singular = torch.linalg.inv_ex(design.T @ (design * weights[:, None]))
        others = 1 - weights * ((design @ inverse) * design).sum(1)  # 0: the fit is bound to go through
        missed = torch.where(others > _BOUND, missed / others.clamp(min=_BOUND), 0)
        pulls = inverse @ (design * (weights * missed)[:, None]).T
        return math.inf if bool(singular) else float(pulls[1:].square().sum(1).mean().sqrt())


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers from a seed; the process's own state is put back, that of other devices never touched."""
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
