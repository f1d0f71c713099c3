"""Readout of a model: how much its output depends on each token behind the last attention, and the name of the query that this is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from visattn._support.reprs import brief
from visattn.core.operators.images import of_image
from visattn.core.records.entries import Source
from visattn.core.records.layouts import TokenLayout

OUTSIDE = 0.01  # largest share, in all, of tokens that a name leaves out
EQUAL = 0.01  # largest relative difference between the shares of tokens that one name joins, and their mean
PROBES = 16  # gradients that stand for those of all numbers of a larger output
RATIO = 3.0  # largest ratio between the weights that a name gives its parts, and their shares


@dataclass(frozen=True, eq=False)
class Readout:
    """Tokens from which a model computes its output, or a score.

    The share of a token is the norm of the gradient at this token, divided by the sum of all these norms. It is taken where the tokens are
    last held apart: behind the last attention, and behind layers that change each token alone.

    Attributes:
        query: Name of the query, if the shares are those that the name means: tokens without a name have less than 1 % in all, patches
            have equal shares (1 %), and the parts of `cls+mean` equal ones within a factor of 3. `read` if the shares have no such name;
            empty if they are unknown.
        layout: Layout of the tokens; None if it is unknown where the model reads them.
        shares: `(B, N)` shares, or `(1, N)` if they are the same for all images; None if they are unknown.
        reason: Why the query is unknown.
        pools: Whether the tokens are the results of the learned queries of an attention pooling.
        source: The tokens in the autograd graph, if captured with `capture(model, gradients=True)`.
    """

    query: str = ""
    layout: TokenLayout | None = None
    shares: Tensor | None = None
    reason: str = ""
    pools: bool = False
    source: Source | None = None

    __repr__ = brief

    def image(self, number: int, batch: int) -> Readout:
        """Return the readout of one image of a batch, without its source."""
        shares = self.shares
        shares = shares if shares is None or len(shares) != batch else of_image(shares, number, batch)
        return replace(self, shares=shares, source=None).named()

    def named(self) -> Readout:
        """Return this readout with the name of its shares."""
        if self.shares is None or self.layout is None:
            return self
        if not bool((self.shares.sum(-1) > 0).all()):
            return replace(self, query="", shares=None, reason="it depends on no token behind the last attention")
        return replace(self, query=name_of(self.shares, self.layout, pools=self.pools))

    @property
    def measurable(self) -> bool:
        """True if the query is unknown because it depends on the values of the tokens, so that only a gradient can tell it."""
        return not self.query and self.shares is None and self.layout is not None

    def measured(self, *gradients: Tensor) -> Readout:
        """Return the readout of scores with these gradients at the tokens, each `(B, N, D)`."""
        if self.shares is not None and self.layout is not None and self.query in self.layout.prefix:
            return self  # all outputs depend on this token alone, so every score does
        norms = torch.stack([torch.linalg.vector_norm(gradient.double(), dim=-1) for gradient in gradients])
        norm = torch.linalg.vector_norm(norms, dim=0).cpu()  # the only values that are read
        if self.query and not bool(norm.any()):
            return self  # a head of zeros, as before training
        return replace(self, shares=shares_of(norm)).named()


def probes_of(images: int, size: int) -> list[Tensor]:
    """Return gradients `(images, size)` of an output that stand for all of its numbers: each alone if they are few, else random."""
    if size <= PROBES:
        return [row.expand(images, -1) for row in torch.eye(size)]
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, size, generator=generator).expand(images, -1) for _ in range(PROBES)]


def shares_of(norms: Tensor) -> Tensor:
    """Return the shares `(B, N)` of the norms of gradients; zeros for an image without any."""
    total = norms.sum(-1, keepdim=True)
    return torch.where(total > 0, norms / torch.where(total > 0, total, 1), 0)


def name_of(shares: Tensor, layout: TokenLayout, *, pools: bool = False) -> str:
    """Name the query whose weights are these shares `(B, N)`, the same for all images; `read` if there is no such name."""
    prefix, patches = shares[:, : len(layout.prefix)], shares[:, len(layout.prefix) :]
    if patches.shape[1] and _fits(shares, [shares]):
        return "all" if layout.prefix else "mean"
    read = [number for number in range(prefix.shape[1]) if bool((prefix[:, number] > OUTSIDE / prefix.shape[1]).any())]
    parts, names = [prefix[:, [number]] for number in read], [layout.prefix[number] for number in read]
    if bool((patches.sum(-1) > OUTSIDE).any()):
        parts, names = [*parts, patches], [*names, "mean"]
    if not _fits(shares, parts):
        return "read"
    return "pool" if pools and len(read) == prefix.shape[1] else "+".join(names)


def _fits(shares: Tensor, parts: Sequence[Tensor]) -> bool:
    """Check whether the shares are those of a sum of parts, each the mean of its tokens."""
    sums = torch.stack([part.sum(-1) for part in parts], -1)  # (B, parts)
    if bool((shares.sum(-1) - sums.sum(-1) > OUTSIDE).any()) or bool((sums.amax(-1) > RATIO * sums.amin(-1)).any()):
        return False
    means = [part.mean(-1, keepdim=True) for part in parts]
    return not any(bool(((part - mean).abs() > EQUAL * mean).any()) for part, mean in zip(parts, means, strict=True))
