"""Entries of a recording: attention calls, activations, and calls that could not be recorded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from visattn._support.reprs import brief
from visattn._support.types import Kind, Role
from visattn.core.operators import Operator, OuterGradient
from visattn.core.operators.images import of_image
from visattn.core.records.layouts import TokenLayout
from visattn.errors import LayoutError, OptionError, ShapeError


class Source(NamedTuple):
    """A tensor of the autograd graph, and a function that converts its gradient for the record."""

    tensor: Tensor
    gradient: Callable[[Tensor], Any]


@dataclass(frozen=True, eq=False)
class AttentionRecord:
    """One attention call of one forward pass.

    Attributes:
        layer: Dotted name of the module that made the call.
        call: Index of the call among this module's calls in this forward pass.
        forward: Index of the forward pass in the recording.
        kind: `self`; `cross` (keys and queries are different tokens, for example pooled ones or those of another branch); `pool` (a
            few learned queries); `sampled` (deformable attention: weights of points that the queries choose, spread over the cells
            around them on the finest grid that is sampled); `channel` (channels attend to channels); `unplaced` (token positions
            unknown, see `reason`).
        operator: `A`, of shape `(B, heads, Q, K)`.
        queries: Layout of the Q tokens.
        keys: Layout of the K tokens.
        value: `(B, heads, k, d)` value vectors in the order of the operator's columns, with an axis of blocks after the heads if the
            operator has a `key_index`; None if they were not kept. `Recording.values` brings them into the order of `keys`.
        output_weight: `(D, heads * d)` weight of the output projection, including the block's layer scale. None if the projection
            does not follow directly or values were not kept.
        residual: `(B, Q, D)` input of the residual connection around the attention, in the order of `queries`. None if it is not
            known or values were not kept.
        follows: Layer and call of the last attention whose result reached this one; ("", 0) for none, None if not traced.
        reason: Why the attention cannot be mapped onto the image; None if it can.
        source: Tensor from which gradients are computed, if captured with `capture(model, gradients=True)`.
        output: `(B, heads, Q, d)` result of the model's own kernel, with an axis of blocks after the heads if the operator has a
            `query_index`; None if outputs were not kept.
    """

    layer: str
    call: int
    forward: int
    kind: Kind
    operator: Operator
    queries: TokenLayout
    keys: TokenLayout
    value: Tensor | None = None
    output_weight: Tensor | None = None
    residual: Tensor | None = None
    follows: tuple[str, int] | None = None
    reason: str | None = None
    source: Source | None = None
    output: Tensor | None = None

    __repr__ = brief

    @property
    def name(self) -> str:
        """Name of the layer, with the index of the call unless it is the first."""
        return self.layer + (f" #{self.call}" if self.call else "")

    def __post_init__(self) -> None:
        """Check that the layouts and the operator have the same number of tokens.

        Raises:
            LayoutError: If the numbers differ, which would shift the map.
        """
        expected = self.queries.tokens, self.keys.tokens
        if self.operator.shape[2:] != expected:
            raise LayoutError(
                f"{self.layer}: the layout has {expected[0]} queries and {expected[1]} keys, but the model used "
                f"{self.operator.shape[2]} and {self.operator.shape[3]}. Check the grid and the prefix tokens."
            )

    @property
    def probability(self) -> bool:
        """True if rows are distributions: non-negative with sum 1."""
        return self.operator.probability

    def image(self, number: int, batch: int) -> AttentionRecord:
        """Return the record of one image of a batch, on the same memory and without its source.

        A record of something else than the images, such as of parts of each, is returned whole.
        """
        if self.operator.shape[0] != batch:
            return replace(self, source=None)
        value, output, residual = (of_image(tensor, number, batch) for tensor in (self.value, self.output, self.residual))
        return replace(self, operator=self.operator.image(number), value=value, output=output, residual=residual, source=None)

    def error(self) -> float:
        """Return the error of the rebuilt weights: the largest difference between `A V` and the model's own output.

        The difference is divided by the largest output value. If the model computed its weights explicitly, they are stored
        unchanged and the error is 0, also for sampled points.

        Raises:
            OptionError: If the recording was made without `gradients=True`, which stores the model's own output.
        """
        if self.kind == "sampled":
            return 0.0
        if self.source is None:
            raise OptionError("the output of the attention kernel was not kept. Use capture(model, gradients=True).")
        kept = self.source.gradient(self.source.tensor.detach())
        if not isinstance(kept, OuterGradient):
            return 0.0
        worst = 0.0
        for block in range(kept.out.shape[2]):
            weights = self.operator.block(block).to(kept.value.dtype)
            worst = max(worst, float((weights @ kept.value[:, :, block] - kept.out[:, :, block]).abs().max()))
        largest = float(kept.out.abs().max())
        return worst / largest if largest else math.inf if worst else 0.0  # outputs may be zero: the first queries of DETR are


@dataclass(frozen=True, eq=False)
class FeatureRecord:
    """An activation of one forward pass.

    Attributes:
        layer: Dotted name of the module that computed it.
        forward: Index of the forward pass in the recording.
        role: What the tensor is. Features: `tokens`, `(B, N, D)`, or `activation`, `(B, C, H, W)`. Gates that multiply features:
            `channel_gate`, `(B, C)`; `spatial_gate`, `(B, 1, H, W)`; `gate`, `(B, C, H, W)`; `branch_gate`, `(B, branches, C)`, for
            branches that are summed. `transform`, `(B, 2, 3)`: affine map of a spatial transformer, from output to input in
            `[-1, 1]`. `glimpse`, `(B, scales, 4)`: top, left, bottom and right of a retina's patches, in pixels of its image.
            `window`, `(B, Q, 6)`: top, left, bottom and right of the cells that each query may attend to, or that a call writes to, then
            row and column of the center, in cells. `positions`, `(1, N, D)`: what a model adds to its tokens to tell their positions.
            `mix`, `(1, 1)`: learned weight of an attached attention module.
        value: The activation, detached.
        gradient: Gradient of a score with respect to the activation, if it was computed; gates have none.
        layout: Layout of the tokens or of the map's cells; for `transform`, `glimpse` and `window`, of the map that is read. None for
            channel gates and if the positions are not known.
        source: The activation in the autograd graph, if captured with `capture(model, gradients=True)`.
        call: Index of the module's call in the forward pass that computed it.
        calls: Number of the module's calls in the forward pass.
    """

    layer: str
    forward: int
    role: Role
    value: Tensor
    gradient: Tensor | None = None
    layout: TokenLayout | None = None
    source: Source | None = None
    call: int = 0
    calls: int = 1

    __repr__ = brief

    @property
    def name(self) -> str:
        """Name of the layer, with the index of the call if the module was called several times."""
        return self.layer + (f" #{self.call}" if self.calls > 1 else "")

    def image(self, number: int, batch: int) -> FeatureRecord:
        """Return the record of one image of a batch, on the same memory and without its source."""
        value, gradient = (of_image(tensor, number, batch) for tensor in (self.value, self.gradient))
        return replace(self, value=value, gradient=gradient, source=None)

    def __post_init__(self) -> None:
        """Check that the layout fits the shape of the activation.

        Raises:
            ShapeError: If it does not fit.
        """
        if self.layout is None:
            return
        shape = tuple(self.value.shape)
        if self.role in ("tokens", "positions") and shape[1] != len(self.layout):
            raise ShapeError(f"{self.layer}: tokens must be (B, {len(self.layout)}, D) according to the layout, got {shape}.")
        if self.role not in ("tokens", "positions", "transform", "glimpse", "window") and shape[2:] != self.layout.grid:
            raise ShapeError(f"{self.layer}: a map must be (B, C, *{self.layout.grid}) according to the layout, got {shape}.")


def split_call(layer: str) -> tuple[str, int | None]:
    """Split the name of a layer, such as `relu #1`, into that of the module and the index of its call; None if there is none."""
    name, mark, call = layer.rpartition("#")
    return (name.rstrip(), int(call)) if mark and call.isdecimal() else (layer, None)


class UnseenAttention(NamedTuple):
    """An attention call that could not be recorded.

    Attributes:
        layer: Dotted name of the module that made the call.
        forward: Index of the forward pass in the recording.
        reason: What the module does that prevents recording, as a predicate.
    """

    layer: str
    forward: int
    reason: str

    def __repr__(self) -> str:
        """Return the fields in short."""
        return brief(self)
