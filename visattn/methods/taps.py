"""One layer's features and their gradient: all that class activation maps are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from visattn.errors import OptionError
from visattn.maps import AttentionMap
from visattn.methods.method import Method, needs
from visattn.methods.result import to_map
from visattn.methods.selection import one_forward
from visattn.records import FeatureRecord, Recording, TokenLayout

_ROLES = ("tokens", "activation")


@dataclass(frozen=True, eq=False)
class Tap:
    """What flows past one layer, prefix tokens left out.

    Attributes:
        recording: Where it is from.
        layer: Dotted name.
        layout: Where its positions lie; the prefix still counts.
        features: `(B, C, positions)`.
        gradient: Likewise.
    """

    recording: Recording
    layer: str
    layout: TokenLayout
    features: Tensor
    gradient: Tensor

    def map(
        self,
        values: Tensor,
        meaning: str,
        method: str,
        *,
        signed: bool = False,
        **parameters: Any,  # noqa: ANN401
    ) -> AttentionMap:
        """Values `(B, positions)` as a map with the axis `batch`."""
        return to_map(self.recording, method, meaning, values, self.layout, {"layer": self.layer, **parameters}, signed=signed)


def tap(recording: Recording, layer: int | str, dtype: torch.dtype) -> Tap:
    """The features of one layer with their gradient.

    Raises:
        OptionError: If they were not recorded, have no gradient, or where they lie is not known.
    """
    feature = feature_of(recording, layer)
    if feature.gradient is None:
        raise OptionError(
            "a score's gradient is needed. Use capture(model, gradients=True), then recording.gradients(logits[:, index])."
        )
    layout = placed(feature)
    features, gradient = (over_positions(x, layout).to(dtype) for x in (feature.value, feature.gradient))
    return Tap(recording, feature.layer, layout, features, gradient)


def feature_of(recording: Recording, layer: int | str = -1) -> FeatureRecord:
    """The tokens or feature maps of one layer, by dotted name or by position among those that were recorded.

    Raises:
        OptionError: If they were not recorded.
    """
    every = [feature for feature in one_forward(recording).features if feature.role in _ROLES]
    if isinstance(layer, str):
        found = [feature for feature in every if feature.layer == layer]
    else:
        found = [every[layer]] if -len(every) <= layer < len(every) else []
    if not found:
        known = ", ".join(feature.layer for feature in every) or "none"
        raise OptionError(f"no features of layer {layer} were recorded (recorded: {known}). Use capture(model, features=[name]).")
    return found[-1]


def placed(feature: FeatureRecord) -> TokenLayout:
    """Where features lie.

    Raises:
        OptionError: If that is not known, or is one position only.
    """
    layout, shape = feature.layout, tuple(feature.value.shape)
    if layout is None or not layout.grid:
        raise OptionError(f"{feature.layer}: where its values {shape} lie on the image is not known. Name another layer.")
    if layout.cells < 2:
        raise OptionError(f"{feature.layer}: its features have one position, which is no map. Name an earlier layer.")
    return layout


def over_positions(values: Tensor, layout: TokenLayout) -> Tensor:
    """`(B, C, positions)` of tokens `(B, N, C)` or maps `(B, C, H, W)`."""
    return values[:, len(layout.prefix) :].mT if values.ndim == 3 else values.flatten(2)


def refusal(recording: Recording) -> str | None:
    """Why no class activation map can be made of a recording, or None."""
    return None if any(feature.role in _ROLES for feature in recording.features) else "no features of a layer were recorded."


def cam_method(
    function: Callable[..., AttentionMap], *aliases: str, weights: Literal["gradients", "score"] = "gradients"
) -> Method:
    """A class activation map: features of one layer, weighted by their gradient or by what is measured of the score."""
    return Method(
        function=function, needs=needs("features", "cam layer", weights), accepts=refusal, targeted=True, aliases=aliases
    )
