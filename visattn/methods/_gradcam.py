from __future__ import annotations

import torch

from visattn.errors import OptionError
from visattn.maps import AttentionMap
from visattn.methods._select import described, tokens_of
from visattn.records import Recording


def gradcam(recording: Recording, *, layer: int | str = -1, dtype: torch.dtype = torch.float32) -> AttentionMap:
    """Grad-CAM on tokens: channels weighted by the mean gradient over the patches, then the positive part of their sum.

    Args:
        recording: Token features with the gradient of a score: `recording.gradients(score)`.
        layer: Position or dotted name among the layers with token features. What the last attention reads is right for every
            readout (`blocks.11.norm1`); behind it the patches of a model that reads out its class token have no gradient.
        dtype: float64 computes in double precision.

    Returns:
        Map with the axis `batch`; non-negative, not normalised.

    Raises:
        OptionError: If the features or their gradient do not exist.

    Reference:
        Selvaraju et al., "Grad-CAM", ICCV 2017, arXiv:1610.02391. Differs: tokens in the place of a feature map; prefix tokens are
        left out.
    """
    feature = tokens_of(recording, layer)
    layout = feature.layout
    assert layout is not None  # noqa: S101 - tokens always have one
    if feature.gradient is None:
        raise OptionError(
            "a score's gradient is needed. Use capture(model, gradients=True), then recording.gradients(logits[:, index])."
        )
    tokens, gradient = (x[:, len(layout.prefix) :].to(dtype) for x in (feature.value, feature.gradient))
    patches = (tokens * gradient.mean(1, keepdim=True)).sum(-1).clamp_(min=0).reshape(-1, *layout.grid)
    return AttentionMap(patches, ("batch",), layout, {}, "Grad-CAM", described(recording, "gradcam", layer=feature.layer))
