"""Class activation maps that use the gradient at each position, without averaging it."""

from __future__ import annotations

import torch

from visattn._support.modes import in_own_modes
from visattn.core.maps import AttentionMap
from visattn.core.methods.taps import cam_method, tap
from visattn.core.records import Recording


@in_own_modes
def hirescam(recording: Recording, *, layer: int | str = -1, dtype: torch.dtype = torch.float32) -> AttentionMap:
    """Compute HiResCAM: the positive part of features times their own gradient, summed over channels.

    The map is `(sum_k g_k A_k)^+`. If only a linear layer follows, with or without average pooling, the sum of the map before the
    positive part is the score without its bias. Before global average pooling, the method equals Grad-CAM.

    Args:
        recording: See `gradcam`.
        layer: See `gradcam`.
        dtype: Compute type; float64 for double precision.

    Returns:
        Map with the axis `batch`; non-negative and not normalized.

    Raises:
        OptionError: If the features or their gradient do not exist.

    Reference:
        Draelos & Carin, "Use HiResCAM instead of Grad-CAM for faithful explanations of convolutional neural networks", 2020,
        arXiv:2011.08891.
    """
    tapped = tap(recording, layer, dtype)
    return tapped.map((tapped.gradient * tapped.features).sum(1).clamp_(min=0), "HiResCAM", "hirescam")


@in_own_modes
def layercam(recording: Recording, *, layer: int | str = -1, dtype: torch.dtype = torch.float32) -> AttentionMap:
    """Compute Layer-CAM: the positive part of features times their own positive gradient, summed over channels.

    The map is `(sum_k g_k^+ A_k)^+`. It is also meaningful in early layers, whose maps are finer.

    Args:
        recording: See `gradcam`.
        layer: See `gradcam`.
        dtype: Compute type; float64 for double precision.

    Returns:
        Map with the axis `batch`; non-negative and not normalized.

    Raises:
        OptionError: If the features or their gradient do not exist.

    Reference:
        Jiang et al., "LayerCAM: Exploring Hierarchical Class Activation Maps for Localization", TIP 2021. Differs: maps of several
        layers are not combined.
    """
    tapped = tap(recording, layer, dtype)
    return tapped.map((tapped.gradient.clamp(min=0) * tapped.features).sum(1).clamp_(min=0), "Layer-CAM", "layercam")


METHODS = {
    "hirescam": cam_method(hirescam, "hires-cam"),
    "layercam": cam_method(layercam, "layer-cam"),
}
