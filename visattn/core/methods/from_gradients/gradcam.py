"""Grad-CAM and variants: channels are weighted by their gradient; the map is the positive part of the weighted sum."""

from __future__ import annotations

import torch

from visattn._support.checks import between
from visattn._support.modes import in_own_modes
from visattn.core.maps import AttentionMap
from visattn.core.methods.taps import cam_method, tap
from visattn.core.records import Recording

_ROUNDING = 1e-5  # share of the mean absolute gradient
_XGRAD = 1e-7  # as in the authors' code; avoids division by 0 for empty channels


@in_own_modes
def gradcam(recording: Recording, *, layer: int | str = -1, dtype: torch.dtype = torch.float32) -> AttentionMap:
    """Compute Grad-CAM: the positive part of the sum of channels, each weighted by its gradient averaged over positions.

    The map is `(sum_k mean_ij(g_k) A_k)^+`, where `A` are the features and `g` is their gradient. If all means are 0 up to rounding, as
    before a normalization over positions, the map is 0.

    Args:
        recording: Recording with the features of a layer (feature maps or tokens) and the gradient of a score, as returned by
            `recording.gradients(score)`.
        layer: Dotted name of the layer, or its index among the recorded features. For CNNs, use the last layer before pooling. For
            ViTs, use the input of the last attention (`blocks.11.norm1`). In later layers, the patches have no gradient if the model
            reads out its class token.
        dtype: Compute type; float64 for double precision.

    Returns:
        Map with the axis `batch`; non-negative and not normalized.

    Raises:
        OptionError: If the features or their gradient do not exist.

    Reference:
        Selvaraju et al., "Grad-CAM", ICCV 2017, arXiv:1610.02391. Differs on tokens: prefix tokens are left out.
    """
    tapped = tap(recording, layer, dtype)
    weights = tapped.gradient.mean(-1, keepdim=True)
    least = _ROUNDING * tapped.gradient.abs().mean(-1, keepdim=True).amax(1, keepdim=True)
    weights = weights * (weights.abs().amax(1, keepdim=True) >= least)
    return tapped.map((weights * tapped.features).sum(1).clamp_(min=0), "Grad-CAM", "gradcam")


@in_own_modes
def gradcam_plus_plus(
    recording: Recording, *, layer: int | str = -1, epsilon: float = 1e-6, dtype: torch.dtype = torch.float32
) -> AttentionMap:
    """Compute Grad-CAM++: positive gradients are weighted so that small and repeated objects count as much as large ones.

    The map is `(sum_k w_k A_k)^+` with `w_k = sum_ij alpha g^+` and `alpha = g^2 / (2 g^2 + g^3 sum_ij A_k + epsilon)`, which is 0
    where `g` is 0. This is the paper's closed form for the exponential of the score, so only the first derivative is needed. It is
    meant for features after a ReLU, where the denominator is never 0.

    Args:
        recording: See `gradcam`.
        layer: See `gradcam`.
        epsilon: Constant added to the denominator. The default is that of common implementations. Gradients before pooling are so
            small that it changes the map. With 0, as in the paper, the map does not depend on the scale of the features.
        dtype: Compute type; float64 for double precision.

    Returns:
        Map with the axis `batch`; non-negative and not normalized.

    Raises:
        OptionError: If the features or their gradient do not exist, or `epsilon` is out of range.

    Reference:
        Chattopadhay et al., "Grad-CAM++", WACV 2018, arXiv:1710.11063.
    """
    between(epsilon, 0, 1, "epsilon")
    tapped = tap(recording, layer, dtype)
    rising = tapped.gradient > 0  # the others have weight 0
    g = torch.where(rising, tapped.gradient, 1)
    below = 2 + g * tapped.features.sum(-1, keepdim=True) + (epsilon / g.square() if epsilon else 0)
    alpha = 1 / torch.where(below == 0, 1, below)  # as in the authors' code
    weights = torch.where(rising, alpha * g, 0).sum(-1, keepdim=True)
    values = (weights * tapped.features).sum(1).clamp_(min=0)
    return tapped.map(values, "Grad-CAM++", "gradcam_plus_plus", epsilon=epsilon)


@in_own_modes
def xgradcam(recording: Recording, *, layer: int | str = -1, dtype: torch.dtype = torch.float32) -> AttentionMap:
    """Compute XGrad-CAM: channels weighted by their gradient, averaged over positions in proportion to the activation.

    The map is `(sum_k w_k A_k)^+` with `w_k = sum_ij g_k A_k / sum_ij A_k`. For a linear head, the sum of the map before the positive
    part is the score without its bias. The method is meant for features after a ReLU. If features have both signs, a sum near 0 lets
    one channel dominate the map.

    Args:
        recording: See `gradcam`.
        layer: See `gradcam`.
        dtype: Compute type; float64 for double precision.

    Returns:
        Map with the axis `batch`; non-negative and not normalized.

    Raises:
        OptionError: If the features or their gradient do not exist.

    Reference:
        Fu et al., "Axiom-based Grad-CAM", BMVC 2020, arXiv:2008.02312; 1e-7 is added to the sum, as in the authors' code.
    """
    tapped = tap(recording, layer, dtype)
    active = (tapped.gradient * tapped.features).sum(-1, keepdim=True)
    weights = active / (tapped.features.sum(-1, keepdim=True) + _XGRAD)
    return tapped.map((weights * tapped.features).sum(1).clamp_(min=0), "XGrad-CAM", "xgradcam")


METHODS = {
    "gradcam": cam_method(gradcam, "grad-cam"),
    "gradcam_plus_plus": cam_method(gradcam_plus_plus, "gradcam++", "grad-cam++"),
    "xgradcam": cam_method(xgradcam, "xgrad-cam"),
}
