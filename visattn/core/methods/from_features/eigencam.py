"""Eigen-CAM: the first principal component of a layer's features."""

from __future__ import annotations

import torch

from visattn._support.extras import need
from visattn._support.modes import in_own_modes
from visattn.core.maps import AttentionMap
from visattn.core.methods.method import Method, needs
from visattn.core.methods.result import to_map
from visattn.core.methods.taps import feature_of, over_positions, placed, refusal
from visattn.core.records import Recording


@in_own_modes
def eigencam(recording: Recording, *, layer: int | str = -1) -> AttentionMap:
    """Compute Eigen-CAM: the first principal component of one layer's features. It needs neither a class nor a gradient.

    Features `(positions, C)` are centered and projected onto their first right singular vector. The sign of a component is arbitrary.
    It is chosen so that the value farthest from 0 is positive, and the positive part is the map.

    Args:
        recording: Recording with the features of a layer, feature maps or tokens.
        layer: See `gradcam`.

    Returns:
        Map with the axis `batch`; non-negative and not normalized.

    Raises:
        OptionError: If the features do not exist.
        MissingExtra: If the package grad-cam is not installed.

    Reference:
        Muhammad & Yeasin, "Eigen-CAM", IJCNN 2020, arXiv:2008.00299. Features are centered, as in the package grad-cam. The sign
        is chosen as by Chung & Ying, "Seg-Eigen-CAM", Applied Sciences 2025.
    """
    need("pytorch_grad_cam", "cam", "eigencam")
    from pytorch_grad_cam.utils.svd_on_activations import get_2d_projection

    feature = feature_of(recording, layer)
    layout = placed(feature)
    features = over_positions(feature.value, layout).float().cpu()
    found = torch.from_numpy(get_2d_projection(features.numpy()))
    farthest = found.gather(1, found.abs().argmax(1, keepdim=True))
    values = (found * farthest.sign()).clamp_(min=0)
    return to_map(recording, "eigencam", "Eigen-CAM", values, layout, {"layer": feature.name}, package="grad-cam")


METHODS = {
    "eigencam": Method(function=eigencam, needs=needs("features", "cam layer"), accepts=refusal, aliases=("eigen-cam",)),
}
