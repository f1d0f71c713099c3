"""Class activation maps."""

from __future__ import annotations

import torch

from visattn._support.modes import in_own_modes
from visattn.core.maps import AttentionMap
from visattn.core.methods.taps import cam_method, tap
from visattn.core.records import Recording
from visattn.errors import OptionError

_EVEN = 1e-4  # largest difference of a gradient between positions, as a share of the largest gradient


@in_own_modes
def cam(recording: Recording, *, layer: int | str = -1, dtype: torch.dtype = torch.float32) -> AttentionMap:
    """Compute CAM: the contribution of each position to the score, for networks with global average pooling and a linear head.

    The map is `sum_k w_k A_k`, where `w` are the weights of the class. They are read from the gradient, which is `w / (H W)` at every
    position, so the map is also correct for `versus` and other targets. It equals Grad-CAM times `H W` before the positive part is
    taken, and its mean plus the bias of the class is the logit. For heads with more layers, `w` is the gradient of the score with
    respect to the averaged features.

    Args:
        recording: See `gradcam`.
        layer: See `gradcam`. It must be the layer whose features are averaged.
        dtype: Compute type; float64 for double precision.

    Returns:
        Map with the axis `batch`; signed, in units of the score and not normalized.

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
            f"{tapped.layer}: CAM needs features that are averaged over all positions before the head, but this layer's gradient "
            "differs between positions. Use method 'hirescam'."
        )
    values = (weights * tapped.features).sum(1) * tapped.layout.cells
    return tapped.map(values, "class activation", "cam", signed=True)


METHODS = {
    "cam": cam_method(cam),
}
