"""Why a capture recorded no attention."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from visattn._support.checks import printable
from visattn.core.records import UnseenAttention


def why(model: nn.Module, layers: str, passed_by: Collection[str], unseen: Sequence[UnseenAttention]) -> str:
    """Say why a capture recorded no attention; `passed_by` are the attention layers whose names do not match the glob `layers`."""
    if passed_by:
        return f"no attention captured: no layer name matches {printable(layers)!r}. The model's attention layers: {', '.join(passed_by)}."
    if unseen:
        return f"no attention captured: {unseen[0].layer or type(model).__name__} {unseen[0].reason}, which cannot be recorded."
    return (
        f"no attention captured: no layer of {type(model).__name__} multiplied a softmax with values, both computed from the image. "
        "Use method 'gradcam', or 'eigencam' where there is no class; without feature maps, 'captum.saliency'."
    )
