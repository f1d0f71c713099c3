"""Class activation maps."""

from __future__ import annotations

import torch

from visattn.errors import OptionError
from visattn.maps import AttentionMap
from visattn.methods.taps import cam_method, tap
from visattn.records import Recording

_EVEN = 1e-4  # how far a gradient may differ between positions, as a share of the largest


def cam(recording: Recording, *, layer: int | str = -1, dtype: torch.dtype = torch.float32) -> AttentionMap:
    """CAM: what each position adds to the score of a network that averages its features and has one linear layer behind.

    `sum_k w_k A_k`, where `w` are the weights of the class. They are read from the gradient, which is `w / (H W)` at every position;
    so the map is Grad-CAM times `H W` without the positive part, its mean plus the class's bias is the logit, and of `versus` and
    other targets it is right too. Behind a head with more layers `w` is the slope of the score in the averaged features.

    Args:
        recording: See `gradcam`.
        layer: See `gradcam`; the features that are averaged.
        dtype: float64 computes in double precision.

    Returns:
        Map with the axis `batch`; signed, in units of the score, not normalized.

    Raises:
        OptionError: If the features or their gradient do not exist, or are not averaged over all positions.

    Reference:
        Zhou et al., "Learning Deep Features for Discriminative Localization", CVPR 2016, arXiv:1512.04150.
    """
    tapped = tap(recording, layer, dtype)
    weights = tapped.gradient.mean(-1, keepdim=True)
    uneven, largest = ((x.abs().flatten(1).amax(1)) for x in (tapped.gradient - weights, tapped.gradient))
    if bool((uneven > _EVEN * largest).any()):
        raise OptionError(
            f"{tapped.layer}: CAM needs features that are averaged over all positions before the head, but their gradient differs "
            "between positions. Use method 'hirescam'."
        )
    values = (weights * tapped.features).sum(1) * tapped.layout.cells
    return tapped.map(values, "class activation", "cam", signed=True)


METHODS = {
    "cam": cam_method(cam),
}
