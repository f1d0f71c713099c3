"""Queries and keys of every head for many images, and their projection to a few dimensions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from visattn._support.reprs import brief
from visattn._support.types import Criterion
from visattn.core.provenance import Provenance
from visattn.embedding.components import Moments, joint_axes
from visattn.embedding.joint import Joint, NoFactor, factor_of, joined
from visattn.errors import OptionError
from visattn.evaluation import HeadScores


@dataclass(frozen=True, eq=False)
class Tokens:
    """Tokens of all images, in the order of the states.

    Attributes:
        image: `(N,)` index of the image.
        row: `(N,)` row of the patch, -1 for tokens without a place.
        column: `(N,)` column of the patch, -1 for tokens without a place.
        sink: `(N,)` whether the patch is an attention sink of its image.
        color: `(N, 3)` mean color of the patch, from 0 to 1; NaN for tokens without a place.
        object: `(N,)` share of the patch that an object covers; NaN without a place, or without a mask.
        names: Names of the tokens without a place in one image, such as `cls`; they come first.
        grid: Rows and columns of the patches of one image.
        boxes: `(images, 4)` rectangle of each photo that the grid covers: top, left, bottom, right, in pixels.
        words: For a layer over words: the words of each image's text. The grid is then one row of words, and padding has no place.
    """

    image: Tensor
    row: Tensor
    column: Tensor
    sink: Tensor
    color: Tensor
    object: Tensor
    names: tuple[str, ...]
    grid: tuple[int, int]
    boxes: Tensor
    words: tuple[tuple[str, ...], ...] = ()

    __repr__ = brief

    @property
    def per_image(self) -> int:
        """Number of tokens of one image."""
        return len(self.image) // len(self.boxes)

    @property
    def plain(self) -> Tensor:
        """Mask `(N,)` of the patches that are no sinks."""
        return (self.row >= 0) & ~self.sink


@dataclass(frozen=True, eq=False)
class LayerStates:
    """Queries and keys of one attention layer.

    Attributes:
        layer: Dotted name of the layer.
        number: Number of the layer among those of the model that have attention.
        queries: `(heads, N, D)`.
        keys: `(heads, N, D)`.
        tokens: The tokens, which are queries and keys.
        some: `(S,)` tokens that are drawn, and whose attention as queries is kept.
        rows: `(heads, S, keys of one image)` their attention.
        notes: What the dot product of a query and a key leaves out of the attention.
    """

    layer: str
    number: int
    queries: Tensor
    keys: Tensor
    tokens: Tokens
    some: Tensor
    rows: Tensor
    notes: tuple[str, ...] = ()
    _factors: dict[tuple[int, Criterion], float] = field(default_factory=dict, init=False)

    __repr__ = brief

    def factor(self, head: int, criterion: Criterion = "norms") -> float:
        """Return the scale of a head's queries, see `factor_of`; 1 for a head that has none, such as one whose keys are zero."""
        if (head, criterion) not in self._factors:
            queries, keys = self.head(head)
            try:
                found = factor_of(queries[self.tokens.plain], keys[self.tokens.plain], criterion)
            except NoFactor:
                found = 1.0
            self._factors[head, criterion] = found
        return self._factors[head, criterion]

    def head(self, head: int) -> tuple[Tensor, Tensor]:
        """Return queries and keys of one head, each `(N, D)`.

        Raises:
            OptionError: If there is no such head.
        """
        if not 0 <= head < len(self.queries):
            raise OptionError(f"{self.layer} has heads 0 to {len(self.queries) - 1}, got {head}.")
        return self.queries[head], self.keys[head]


class Projection(NamedTuple):
    """Points of one layer's heads.

    Attributes:
        layer: Dotted name of the layer.
        heads: Numbers of the heads.
        queries: `(heads, N, dimensions)` points.
        keys: `(heads, N, dimensions)` points.
        shares: `(heads, dimensions)` share of the variance along each axis.
        factors: `(heads,)` scale of the queries in the joint space.
    """

    layer: str
    heads: tuple[int, ...]
    queries: Tensor
    keys: Tensor
    shares: Tensor
    factors: Tensor


@dataclass(frozen=True, eq=False)
class Space:
    """Queries and keys of every head of a model for many images; made by `gather`.

    Attributes:
        layers: States of each attention layer.
        images: Names of the images.
        digests: SHA-256 of the file or the pixels of each image.
        pictures: What the model received of each image, as a small JPEG.
        windows: `(images, 4)` rectangle of each photo that the model received: top, left, bottom, right, in pixels.
        codes: `(images, D)` class token of each image after the last layer, or the mean of its patches; `(images, 0)` if not known.
        labels: Class of each image, or nothing.
        groups: Photo of each image; crops of one photo share a number.
        scores: What heads attend to, by property; see `visattn.evaluation.find_heads`.
        provenance: Model and preprocessing.
    """

    layers: tuple[LayerStates, ...]
    images: tuple[str, ...]
    digests: tuple[str, ...]
    pictures: tuple[bytes, ...]
    windows: Tensor
    codes: Tensor
    labels: tuple[str, ...]
    groups: tuple[int, ...]
    scores: tuple[HeadScores, ...]
    provenance: Provenance

    __repr__ = brief

    def layer(self, layer: int | str) -> LayerStates:
        """Return a layer by its index or its name.

        Raises:
            OptionError: If there is no such layer.
        """
        names = [one.layer for one in self.layers]
        if isinstance(layer, str) and layer in names:
            return self.layers[names.index(layer)]
        if isinstance(layer, int) and -len(names) <= layer < len(names):
            return self.layers[layer]
        raise OptionError(f"there is no layer {layer!r} in the space. Its layers: {', '.join(names)}.")

    def joint(self, layer: int | str, head: int, criterion: Criterion = "norms") -> Joint:
        """Return all queries and keys of a head in their joint space, which is fitted to the patches that are no sinks.

        The factor of a head that has none, because its queries or keys are zero, is 1.
        """
        states = self.layer(layer)
        queries, keys = states.head(head)
        plain = states.tokens.plain
        fitted = joined(queries[plain], keys[plain], states.factor(head, criterion))
        return Joint(queries.double() * fitted.factor, keys.double() / fitted.factor + fitted.shift, fitted.factor, fitted.shift)

    def project(self, dimensions: int = 2, criterion: Criterion = "norms") -> list[Projection]:
        """Project queries and keys of each head to their joint principal components.

        Axes, scales and translations are fitted to the patches that are no sinks. Class tokens, registers and sinks, which often lie far
        away, are then projected in the same way.

        Args:
            dimensions: Number of components.
            criterion: Choice of the scale, see `factor_of`.

        Returns:
            The points of each layer.
        """
        return [_projected(states, dimensions, criterion) for states in self.layers]


def _projected(states: LayerStates, dimensions: int, criterion: Criterion) -> Projection:
    heads, _, width = states.queries.shape
    moments = Moments.empty(heads, width), Moments.empty(heads, width)
    for gathered, every in zip(moments, (states.queries, states.keys), strict=True):
        gathered.add(every[:, states.tokens.plain])
    factors = torch.tensor([states.factor(head, criterion) for head in range(heads)], dtype=torch.float64)
    axes, shares = joint_axes(*moments, factors, dimensions)
    by = factors[:, None, None]
    own = [each.mean[:, None] for each in moments]  # each cloud is centered at its own mean: the translation of the keys
    points = [
        ((each.double() - mean) * scale @ axes.mT).float()
        for each, mean, scale in zip((states.queries, states.keys), own, (by, 1 / by), strict=True)
    ]
    return Projection(states.layer, tuple(range(heads)), points[0], points[1], shares, factors)
