"""Grad-CAM and its kin: each channel has one weight, made of its gradient; the map is the positive part of the weighted sum."""

from __future__ import annotations

import torch

from visattn._support.checks import between
from visattn.maps import AttentionMap
from visattn.methods.taps import cam_method, tap
from visattn.records import Recording

_XGRAD = 1e-7  # the authors' own; it keeps an empty channel from dividing by 0


def gradcam(recording: Recording, *, layer: int | str = -1, dtype: torch.dtype = torch.float32) -> AttentionMap:
    """Grad-CAM: channels weighted by the mean of their gradient over the positions, then the positive part of their sum.

    `(sum_k mean_ij(g_k) A_k)^+`, where `A` are the features and `g` is their gradient.

    Args:
        recording: Features of a layer, maps or tokens, with the gradient of a score: `recording.gradients(score)`.
        layer: Dotted name, or position among the recorded features. Of a CNN the usual one is the last before pooling; of a ViT what
            the last attention reads (`blocks.11.norm1`) is right for every readout: behind it the patches of a model that reads out
            its class token have no gradient.
        dtype: float64 computes in double precision.

    Returns:
        Map with the axis `batch`; non-negative, not normalized.

    Raises:
        OptionError: If the features or their gradient do not exist.

    Reference:
        Selvaraju et al., "Grad-CAM", ICCV 2017, arXiv:1610.02391. Differs on tokens: prefix tokens are left out.
    """
    tapped = tap(recording, layer, dtype)
    weights = tapped.gradient.mean(-1, keepdim=True)
    return tapped.map((weights * tapped.features).sum(1).clamp_(min=0), "Grad-CAM", "gradcam")


def gradcam_plus_plus(
    recording: Recording, *, layer: int | str = -1, epsilon: float = 1e-6, dtype: torch.dtype = torch.float32
) -> AttentionMap:
    """Grad-CAM++: positive gradients are summed with weights that make small and repeated objects count as much as large ones.

    `w_k = sum_ij alpha g^+` with `alpha = g^2 / (2 g^2 + g^3 sum_ij A_k + epsilon)`, 0 where `g` is; map `(sum_k w_k A_k)^+`. This is
    the paper's closed form for the exponential of the score, so only its first derivative is needed. It is meant for features behind a
    ReLU, where the denominator has no zero.

    Args:
        recording: See `gradcam`.
        layer: See `gradcam`.
        epsilon: What the usual implementation adds to the denominator. Gradients before a pooling are so small that it moves the map;
            0 is the paper's formula, which does not change with the scale of the features.
        dtype: float64 computes in double precision.

    Returns:
        Map with the axis `batch`; non-negative, not normalized.

    Raises:
        OptionError: If the features or their gradient do not exist, or `epsilon` is out of range.

    Reference:
        Chattopadhay et al., "Grad-CAM++", WACV 2018, arXiv:1710.11063.
    """
    between(epsilon, 0, 1, "epsilon")
    tapped = tap(recording, layer, dtype)
    rising = tapped.gradient > 0  # others have weight 0
    g = torch.where(rising, tapped.gradient, 1)
    below = 2 + g * tapped.features.sum(-1, keepdim=True) + (epsilon / g.square() if epsilon else 0)
    alpha = 1 / torch.where(below == 0, 1, below)  # as in the authors' code
    weights = torch.where(rising, alpha * g, 0).sum(-1, keepdim=True)
    values = (weights * tapped.features).sum(1).clamp_(min=0)
    return tapped.map(values, "Grad-CAM++", "gradcam_plus_plus", epsilon=epsilon)


def xgradcam(recording: Recording, *, layer: int | str = -1, dtype: torch.dtype = torch.float32) -> AttentionMap:
    """XGrad-CAM: channels weighted by their gradient where they are active, so that weights of a linear head sum to the score.

    `w_k = sum_ij g_k A_k / sum_ij A_k`; map `(sum_k w_k A_k)^+`. It is meant for features behind a ReLU: where they have both signs a
    sum near 0 lets one channel rule the map.

    Args:
        recording: See `gradcam`.
        layer: See `gradcam`.
        dtype: float64 computes in double precision.

    Returns:
        Map with the axis `batch`; non-negative, not normalized.

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
