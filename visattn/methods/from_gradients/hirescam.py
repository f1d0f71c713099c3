"""Maps that keep each position's own gradient."""

from __future__ import annotations

import torch

from visattn.maps import AttentionMap
from visattn.methods.taps import cam_method, tap
from visattn.records import Recording


def hirescam(recording: Recording, *, layer: int | str = -1, dtype: torch.dtype = torch.float32) -> AttentionMap:
    """HiResCAM: features times their own gradient, summed over channels; the positive part.

    `(sum_k g_k A_k)^+`. If one linear layer follows, with or without an average before it, the sum over all positions before the
    positive part is the score without its bias: the map shows what was added up. Behind an average it equals Grad-CAM.

    Args:
        recording: See `gradcam`.
        layer: See `gradcam`.
        dtype: float64 computes in double precision.

    Returns:
        Map with the axis `batch`; non-negative, not normalized.

    Raises:
        OptionError: If the features or their gradient do not exist.

    Reference:
        Draelos & Carin, "Use HiResCAM instead of Grad-CAM for faithful explanations of convolutional neural networks", 2020,
        arXiv:2011.08891.
    """
    tapped = tap(recording, layer, dtype)
    return tapped.map((tapped.gradient * tapped.features).sum(1).clamp_(min=0), "HiResCAM", "hirescam")


def layercam(recording: Recording, *, layer: int | str = -1, dtype: torch.dtype = torch.float32) -> AttentionMap:
    """Layer-CAM: features times the positive part of their own gradient, summed over channels; the positive part.

    `(sum_k g_k^+ A_k)^+`. It stays meaningful in early layers, whose maps are finer.

    Args:
        recording: See `gradcam`.
        layer: See `gradcam`.
        dtype: float64 computes in double precision.

    Returns:
        Map with the axis `batch`; non-negative, not normalized.

    Raises:
        OptionError: If the features or their gradient do not exist.

    Reference:
        Jiang et al., "LayerCAM: Exploring Hierarchical Class Activation Maps for Localization", TIP 2021. The maps of several layers
        that the paper joins are not joined here.
    """
    tapped = tap(recording, layer, dtype)
    return tapped.map((tapped.gradient.clamp(min=0) * tapped.features).sum(1).clamp_(min=0), "Layer-CAM", "layercam")


METHODS = {
    "hirescam": cam_method(hirescam, "hires-cam"),
    "layercam": cam_method(layercam, "layer-cam"),
}
