"""Attributions from a single gradient of the score with respect to the pixels, computed by captum.

Each method takes one forward and one backward pass and involves no randomness. See `visattn.methods.by_perturbation.captum` for inputs
and outputs.
"""

from __future__ import annotations

from torch import Tensor

from visattn._support.modes import in_own_modes
from visattn.core.maps import AttentionMap
from visattn.core.methods.by_perturbation.captum import captum_of
from visattn.core.methods.method import attribution_method
from visattn.core.methods.scored import KernelInput, KernelOutput, ScoredImages, attributed
from visattn.core.methods.segments import Parts
from visattn.core.records import Recording


@in_own_modes
def saliency(recording: Recording, *, scored: ScoredImages, signed: bool = False) -> AttentionMap:
    """Compute saliency: the gradient of the score with respect to the pixels, as the largest magnitude over channels.

    The gradient is taken with respect to the normalized pixels that the model receives, as in SmoothGrad. With respect to the photo's
    own pixels, each channel would also be divided by its standard deviation. Saliency shows where a small change would affect the
    score, not which pixels the score is made of.

    Args:
        recording: Recording that gives the provenance.
        scored: Images and their score function.
        signed: Sum the gradient over channels and keep its sign. SmoothGrad is the mean of this map over noisy copies.

    Returns:
        Map on the input's pixels, in score per unit of the normalized pixels.

    Reference:
        Simonyan et al., "Deep Inside Convolutional Networks: Visualizing Image Classification Models and Saliency Maps", 2013,
        arXiv:1312.6034.
    """
    attr = captum_of("saliency")

    def kernel(asked: KernelInput) -> KernelOutput:
        slope = attr.Saliency(asked.score).attribute(_leaf(asked.image), abs=not signed)[0]
        return KernelOutput((slope.sum(0) if signed else slope.amax(0)).flatten())

    return attributed(
        "captum.saliency",
        "gradient" if signed else "size of the gradient",
        recording,
        scored,
        kernel,
        scored.parts("pixels"),
        baseline=None,
        diverging=signed,
        signed=signed,
    )


@in_own_modes
def input_x_gradient(
    recording: Recording,
    *,
    scored: ScoredImages,
    segments: Parts = "pixels",
    grid_size: tuple[int, int] | None = None,
    num_segments: int = 196,
) -> AttentionMap:
    """Compute input x gradient: the normalized pixels times the gradient of the score, summed over channels.

    If the score is linear between the mean color of the training images and the image, the values sum to the score's rise from the
    one to the other. The notes compare the sum with this rise. A pixel of the mean color has value 0, whatever its gradient.

    Args:
        recording: Recording that gives the provenance.
        scored: Images and their score function.
        segments: See `integrated_gradients`.
        grid_size: Numbers of rows and columns, for `segments='grid'`.
        num_segments: Approximate number of parts; ignored if `grid_size` is given.

    Returns:
        Map in units of the score.

    Reference:
        Shrikumar et al., "Not Just a Black Box: Learning Important Features Through Propagating Activation Differences", 2016,
        arXiv:1605.01713; Ancona et al., "Toward better understanding of gradient-based attribution methods for Deep Neural
        Networks", ICLR 2018, arXiv:1711.06104.
    """
    attr = captum_of("input_x_gradient")

    def kernel(asked: KernelInput) -> KernelOutput:
        found = attr.InputXGradient(asked.score).attribute(_leaf(asked.image))
        return KernelOutput(asked.parts.summed(found[0].detach().sum(0)))

    return attributed(
        "captum.input_x_gradient",
        "input x gradient",
        recording,
        scored,
        kernel,
        scored.parts(segments, grid_size, num_segments),
        baseline="mean",
    )


def _leaf(image: Tensor) -> Tensor:
    """Return a copy that requires a gradient, so that captum need not change the caller's tensor."""
    return image.detach().clone().requires_grad_()


METHODS = {
    "captum.saliency": attribution_method(saliency, "saliency"),
    "captum.input_x_gradient": attribution_method(input_x_gradient, "input_x_gradient"),
}
