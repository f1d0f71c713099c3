"""Glimpses of recurrent attention models."""

from __future__ import annotations

import torch
from torch import Tensor

from visattn._support.modes import in_own_modes
from visattn.core.geometry import Box
from visattn.core.maps import AttentionMap, MapFacts
from visattn.core.methods.gate_maps import layer_of
from visattn.core.methods.method import Method, needs
from visattn.core.methods.result import to_map
from visattn.core.methods.selection import one_forward
from visattn.core.records import FeatureRecord, Recording, TokenLayout
from visattn.errors import OptionError

NO_GLIMPSES = (
    "the network takes no glimpses: no visattn.nn.Retina or DrawRead was called. Use method 'gradcam', or 'attention' of a "
    "transformer."
)


@in_own_modes
def glimpses(recording: Recording, *, layer: int | str = -1) -> AttentionMap:
    """Compute where a recurrent attention model looked: the share of its glimpses whose finest patch covers each pixel.

    A patch covers a pixel if the pixel's center lies in `[top, bottom) x [left, right)`. Of `DrawRead`, it is the box of its filters.

    Args:
        recording: Forward pass of a network with a `visattn.nn.Retina` or `visattn.nn.DrawRead`. Their calls are always recorded.
        layer: Index or dotted name among the modules with glimpses.

    Returns:
        Map with the axis `batch`, on the grid of the input's pixels; values in `[0, 1]`. `facts.glimpses` holds the patches of each
        glimpse, in order, for each image.

    Raises:
        OptionError: If there is no glimpse, or its position on the image is not known.

    Reference:
        Mnih et al., "Recurrent Models of Visual Attention", NeurIPS 2014, arXiv:1406.6247. Every glimpse counts equally, although the
        prediction may depend on only one of them.
    """
    looks = [feature for feature in one_forward(recording).features if feature.role == "glimpse"]
    if not looks:
        raise OptionError(NO_GLIMPSES)
    name = layer_of(layer, [look.layer for look in looks], what="glimpses")
    boxes = torch.stack([_on_input(look) for look in looks if look.layer == name], 1)  # (B, T, scales, 4)
    height, width = recording.input_size
    finest = boxes[:, :, 0]
    covered = _within(finest[..., 0::2], height)[..., :, None] & _within(finest[..., 1::2], width)[..., None, :]  # (B, T, H, W)
    layout = TokenLayout("pixels", (), (height, width), Box(0, 0, height, width))
    seen = tuple(tuple(tuple(Box(*box) for box in scales) for scales in image) for image in boxes.tolist())
    return to_map(
        recording, "glimpses", "glimpses", covered.float().mean(1), layout, {"layer": name}, facts=MapFacts(glimpses=seen)
    )


def refusal(recording: Recording) -> str | None:
    """Return why no glimpses can be drawn on the image, or None if they can."""
    return None if any(feature.role == "glimpse" for feature in recording.features) else NO_GLIMPSES


def _on_input(look: FeatureRecord) -> Tensor:
    """Return the patches of one call in pixels of the model's input, `(B, scales, 4)`."""
    layout = look.layout
    if layout is None:
        raise OptionError(
            f"{look.layer}: the position of its glimpses on the image could not be traced. Pass it the image or feature maps."
        )
    return layout.on_input(look.value)


def _within(ends: Tensor, side: int) -> Tensor:
    """Return `(..., side)`: true for pixels of a row whose center lies between two ends `(..., 2)`."""
    centers = torch.arange(side, dtype=ends.dtype) + 0.5
    return (centers >= ends[..., :1]) & (centers < ends[..., 1:])


METHODS = {
    "glimpses": Method(function=glimpses, needs=needs("glimpses"), accepts=refusal, lacking=NO_GLIMPSES),
}
