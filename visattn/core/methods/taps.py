"""Features of one layer and their gradient, from which class activation maps are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from visattn.core.maps import AttentionMap
from visattn.core.methods.method import Method, needs
from visattn.core.methods.result import to_map
from visattn.core.methods.selection import one_forward
from visattn.core.records import FeatureRecord, Recording, TokenLayout, split_call
from visattn.errors import OptionError

_ROLES = ("tokens", "activation")


@dataclass(frozen=True, eq=False)
class Tap:
    """Features of one layer and their gradient, without prefix tokens.

    Attributes:
        recording: Recording that holds them.
        layer: Dotted name of the layer, with its call if there are several.
        layout: Layout of the layer's tokens, including prefix tokens.
        features: `(B, C, positions)` features.
        gradient: `(B, C, positions)` gradient.
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
        """Build a map with the axis `batch` from `(B, positions)` values."""
        return to_map(self.recording, method, meaning, values, self.layout, {"layer": self.layer, **parameters}, signed=signed)


def tap(recording: Recording, layer: int | str, dtype: torch.dtype) -> Tap:
    """Return the features of one layer with their gradient.

    Raises:
        OptionError: If they were not recorded, have no gradient, or their positions on the image are not known.
    """
    feature = feature_of(recording, layer)
    if feature.gradient is None:
        raise OptionError(
            "a score's gradient is needed. Use capture(model, gradients=True), then recording.gradients(logits[:, index])."
        )
    layout = placed(feature)
    features, gradient = (over_positions(x, layout).to(dtype) for x in (feature.value, feature.gradient))
    return Tap(recording, feature.name, layout, features, gradient)


def feature_of(recording: Recording, layer: int | str = -1) -> FeatureRecord:
    """Return the tokens or feature maps of one layer, by dotted name or by index among the recorded layers.

    Of a layer with several calls, those of the last one whose positions on the image are known.

    Raises:
        OptionError: If they were not recorded.
    """
    every = [feature for feature in one_forward(recording).features if feature.role in _ROLES]
    at = layer if isinstance(layer, int) and -len(every) <= layer < len(every) else None
    found = named(every, layer) if isinstance(layer, str) else [] if at is None else [every[at]]
    if not found:
        known = ", ".join(feature.name for feature in every) or "none"
        raise OptionError(f"no features of layer {layer} were recorded (recorded: {known}). Use capture(model, features=[name]).")
    return next((feature for feature in reversed(found) if feature.layout is not None and feature.layout.grid), found[-1])


def named(features: Sequence[FeatureRecord], layer: str) -> list[FeatureRecord]:
    """Return the features of a layer, such as `relu`, or of one of its calls, such as `relu #0`."""
    name, call = split_call(layer)
    return [feature for feature in features if feature.layer == name and call in (None, feature.call)]


def placed(feature: FeatureRecord) -> TokenLayout:
    """Return the layout of features after checking that they form a map.

    Raises:
        OptionError: If their positions on the image are not known, or there is only one position.
    """
    layout, shape = feature.layout, tuple(feature.value.shape)
    if layout is None or not layout.grid:
        raise OptionError(
            f"{feature.name}: the positions of its values {shape} on the image are not known. Choose another layer."
        )
    if layout.cells < 2:
        raise OptionError(f"{feature.name}: its features have only one position, which gives no map. Choose an earlier layer.")
    return layout


def over_positions(values: Tensor, layout: TokenLayout) -> Tensor:
    """Convert tokens `(B, N, C)` or feature maps `(B, C, H, W)` to `(B, C, positions)`, without prefix tokens."""
    return values[:, len(layout.prefix) :].mT if values.ndim == 3 else values.flatten(2)


def refusal(recording: Recording) -> str | None:
    """Return why no class activation map can be computed from a recording, or None if one can."""
    return None if any(feature.role in _ROLES for feature in recording.features) else "no features of a layer were recorded."


def cam_method(
    function: Callable[..., AttentionMap], *aliases: str, weights: Literal["gradients", "score"] = "gradients"
) -> Method:
    """Describe a class activation map, which weights the features of one layer by their gradient or by measured scores."""
    return Method(
        function=function, needs=needs("features", "cam layer", weights), accepts=refusal, targeted=True, aliases=aliases
    )
