"""Attributions of one gradient: the oldest pictures of what a score depends on. The algorithms are captum's.

In and out: see `visattn.methods.by_perturbation.captum`. One way forward and one back, and nothing is drawn by chance.
"""

from __future__ import annotations

from torch import Tensor

from visattn.maps import AttentionMap
from visattn.methods.by_perturbation.captum import captum_of
from visattn.methods.method import attribution_method
from visattn.methods.scored import Asked, Found, Scored, attributed
from visattn.methods.segments import Parts
from visattn.records import Recording


def saliency(recording: Recording, *, scored: Scored, signed: bool = False) -> AttentionMap:
    """Saliency: the gradient of the score by the pixels, of each pixel the largest of its channels, without sign.

    It is taken by the pixels as the model takes them, normalized; by those of the photo each channel would be divided by its standard
    deviation, of which it takes no notice, as SmoothGrad does. What the score is made of at the photo it does not tell: only where a
    small change would move it.

    Args:
        recording: For its provenance.
        scored: Pixels and their score.
        signed: Take the sum over channels with its sign. SmoothGrad is the mean of that over noisy copies.

    Returns:
        Map of the input's pixels: score per unit of the normalized pixels.

    Reference:
        Simonyan et al., "Deep Inside Convolutional Networks: Visualizing Image Classification Models and Saliency Maps", 2013,
        arXiv:1312.6034.
    """
    attr = captum_of("saliency", 1, 1)

    def kernel(asked: Asked) -> Found:
        slope = attr.Saliency(asked.score).attribute(_leaf(asked.image), abs=not signed)[0]
        return Found((slope.sum(0) if signed else slope.amax(0)).flatten())

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


def input_x_gradient(
    recording: Recording, *, scored: Scored, segments: Parts = "pixels", cells: tuple[int, int] | None = None, count: int = 196
) -> AttentionMap:
    """Input x gradient: the normalized pixels times the gradient of the score, summed over channels.

    Values sum to the score's rise from the mean color of the training images where the score is linear between the two; what they do
    sum to is noted beside that rise. A pixel of the mean color has the value 0, however steep the score is there.

    Args:
        recording: For its provenance.
        scored: Pixels and their score.
        segments: See `integrated_gradients`.
        cells: Rows and columns of `grid`.
        count: About how many parts, where `cells` does not say.

    Returns:
        Map in units of the score.

    Reference:
        Shrikumar et al., "Not Just a Black Box: Learning Important Features Through Propagating Activation Differences", 2016,
        arXiv:1605.01713; Ancona et al., "Toward better understanding of gradient-based attribution methods for Deep Neural
        Networks", ICLR 2018, arXiv:1711.06104.
    """
    attr = captum_of("input_x_gradient", 1, 1)

    def kernel(asked: Asked) -> Found:
        found = attr.InputXGradient(asked.score).attribute(_leaf(asked.image))
        return Found(asked.parts.summed(found[0].detach().sum(0)))

    return attributed(
        "captum.input_x_gradient",
        "input x gradient",
        recording,
        scored,
        kernel,
        scored.parts(segments, cells, count),
        baseline="mean",
    )


def _leaf(image: Tensor) -> Tensor:
    """A copy that asks for its gradient, so that captum need not change the caller's."""
    return image.detach().clone().requires_grad_()


METHODS = {
    "captum.saliency": attribution_method(saliency, "saliency"),
    "captum.input_x_gradient": attribution_method(input_x_gradient, "input_x_gradient"),
}
