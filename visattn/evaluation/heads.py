"""Head statistics: the spread and distance of each head's attention, and the kinds of tokens it attends to."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from visattn._support.modes import in_own_modes
from visattn._support.reprs import brief
from visattn.core.methods.selection import one_forward
from visattn.core.operators import Operator, SoftmaxOperator
from visattn.core.records import AttentionRecord, Recording, TokenLayout
from visattn.errors import OptionError

PADDING, SELF, PATCHES = "padding", "self", "patches"  # kinds of keys besides the named prefix tokens
COLLAPSED, UNIFORM = 0.99, 0.98  # largest weight of a collapsed row; entropy of a near-uniform row over `ln K`
MASKED = 1e-30  # keys below this in all heads count as masked: Swin adds -100 to their scores, which leaves 1e-44


@dataclass(frozen=True, eq=False)
class HeadStatistics:
    """Statistics of the heads of one attention call.

    Every tensor is `(B, heads)`, a mean over queries. `keys`, `uniform_distance` and `nearest_distance` are numbers.

    Attributes:
        layer: Dotted name of the module that made the call.
        call: Index of the call among this module's calls.
        entropy: Entropy of a query's attention, `-sum_j A_ij ln A_ij`, in nats.
        effective_keys: `exp(entropy)` of each query, the number of keys that would share its attention evenly.
        max_weight: Largest weight of each query, in [0, 1].
        collapsed: Share of queries that give more than 0.99 to a single key.
        uniform: Share of near-uniform queries, whose entropy exceeds `0.98 ln K` for K visible keys.
        keys: Number of keys that a query can attend to: all keys, or those of its window, without padding and masked keys. It is the
            upper bound of `effective_keys`. With a bias or explicit weights, a key counts as masked if no head gives it more than
            1e-30.
        mass: Share of attention by kind of key: prefix tokens by name, `self` (the query's own token), `patches` (all other grid
            tokens) and `padding`. The shares sum to 1.
        distance: Mean attention distance between patches in pixels of the model's input, `sum_j A_ij |p_i - p_j|`. Each row is
            divided by its attention to patches. None if queries or keys are not on a grid.
        uniform_distance: Distance of a head with equal weights on all visible patches, which depends only on the shape of the grid or
            window. Compare `distance` with it.
        nearest_distance: Distance of a head that attends only to the nearest other patch. None also if a patch can attend to no
            other patch.
    """

    layer: str
    call: int
    entropy: Tensor
    effective_keys: Tensor
    max_weight: Tensor
    collapsed: Tensor
    uniform: Tensor
    keys: float
    mass: dict[str, Tensor]
    distance: Tensor | None
    uniform_distance: float | None
    nearest_distance: float | None

    __repr__ = brief

    @property
    def name(self) -> str:
        """Name of the layer, with the index of the call unless it is the first."""
        return self.layer + (f" #{self.call}" if self.call else "")

    def numbers(self) -> dict[str, Tensor]:
        """Return every `(B, heads)` tensor by its name in tables. Register tokens are summed; `distance_px` may be missing."""
        registers = [value for name, value in self.mass.items() if name.startswith("register")]
        return {
            "entropy": self.entropy,
            "effective_keys": self.effective_keys,
            "max_weight": self.max_weight,
            "collapsed": self.collapsed,
            "uniform": self.uniform,
            **({} if self.distance is None else {"distance_px": self.distance}),
            **{name: value for name, value in self.mass.items() if not name.startswith("register")},
            **({"registers": torch.stack(registers).sum(0)} if registers else {}),
        }


@in_own_modes
def statistics(recording: Recording, *, dtype: torch.dtype = torch.float32) -> list[HeadStatistics]:
    """Compute statistics of every head in a recording, tile by tile, without building attention matrices.

    Args:
        recording: Attention of one forward pass.
        dtype: Compute type; float64 for double precision.

    Returns:
        One entry per record, in call order.

    Raises:
        OptionError: If there are several forward passes, or the rows of a layer are not distributions, as with talking heads.

    Reference:
        Distance: Dosovitskiy et al., "An Image is Worth 16x16 Words", arXiv:2010.11929, figure 7, here without prefix tokens.
        Entropy and entropy collapse: Zhai et al., "Stabilizing Transformer Training by Preventing Attention Entropy Collapse",
        arXiv:2303.06296; the two thresholds are ours.
    """
    return [_of(record, dtype) for record in one_forward(recording)]


@in_own_modes
def head_divergence(recording: Recording, *, layer: int | str = -1, call: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Compute the Jensen-Shannon divergence between the heads of one call, averaged over queries.

    `JS(p, q) = H((p + q) / 2) - (H(p) + H(q)) / 2` with the entropy `H` in nats. Attention to padding counts as one more key.

    Args:
        recording: Attention of one forward pass.
        layer: Index of the layer (negative counts from the end) or dotted name.
        call: Index of the call, for layers that call their attention several times.
        dtype: Compute type; float64 for double precision.

    Returns:
        `(B, heads, heads)`, symmetric, in nats. It is 0 for heads with the same attention, as on the diagonal, and `ln 2` for heads
        that share no key.

    Raises:
        OptionError: If there are several forward passes, the layer or call does not exist, or its rows are not distributions.

    Reference:
        Clark et al., "What Does BERT Look At?", arXiv:1906.04341, section 6. Differs: the mean over tokens, not their sum.
    """
    calls = {record.call: record for record in one_forward(recording).select(layer=layer)}
    if call not in calls:
        raise OptionError(f"call must be one of {', '.join(map(str, calls))} for layer {layer}, got {call}.")
    operator = _distributions(calls[call], dtype)
    batch, heads, queries, _ = operator.shape
    leaked = operator.leaked()
    sums = leaked.new_zeros(batch, heads, heads)
    for tile in operator.tiles(scratch=True):
        rows = torch.cat([tile.weights, leaked[:, :, tile.queries, None]], -1)
        own = _entropy(rows)  # (B, heads, q)
        for head in range(1, heads):
            shared = _entropy((rows[:, :head] + rows[:, head, None]) / 2)
            sums[:, head, :head] += (shared - (own[:, :head] + own[:, head, None]) / 2).sum(-1)
    return ((sums + sums.mT) / queries).clamp_min(0)


def _distributions(record: AttentionRecord, dtype: torch.dtype) -> Operator:
    if not record.probability:
        raise OptionError(
            f"{record.layer}: attention rows do not sum to 1 in this layer, so they have no entropy. "
            "Leave it out: recording.select(layer=[...])."
        )
    if 0 in record.operator.shape:
        raise OptionError(
            f"{record.layer}: attention among no tokens has no statistics. Leave it out: recording.select(layer=[...])."
        )
    return record.operator.to(dtype)


def _entropy(weights: Tensor) -> Tensor:
    """Compute the entropy of each row in nats, several times as fast as with `torch.xlogy`."""
    return -weights.clamp_min(torch.finfo(weights.dtype).tiny).log_().mul_(weights).sum(-1)


def _of(record: AttentionRecord, dtype: torch.dtype) -> HeadStatistics:
    operator = _distributions(record, dtype)
    queries = operator.shape[2]
    first_query, first_key = len(record.queries.prefix), len(record.keys.prefix)
    places = [_centers(layout).to(operator.device, dtype) for layout in (record.queries, record.keys)]
    placed = all(len(layout.grid) == 2 for layout in (record.queries, record.keys))
    leaked = operator.leaked().mean(-1)
    names = ("entropy", "effective", "max_weight", "collapsed", "uniform", "distance")
    sums = {name: torch.zeros_like(leaked) for name in names}
    mass = {name: torch.zeros_like(leaked) for name in (*record.keys.prefix, SELF, PATCHES)}
    maskable = not isinstance(operator, SoftmaxOperator) or operator.bias is not None
    count, uniform, nearest, asked = 0, 0.0, 0.0, 0
    for tile in operator.tiles(scratch=True):
        entropy, largest = _entropy(tile.weights), tile.weights.amax(-1)
        own = tile.queries[:, None] == tile.keys if record.kind == "self" else tile.queries[:, None] < 0
        seen = tile.weights.amax((0, 1)) > MASKED if maskable else torch.ones_like(tile.weights[0, 0], dtype=torch.bool)
        keys = seen.sum(-1).to(dtype)
        count += int(keys.sum())
        sums["entropy"] += entropy.sum(-1)
        sums["effective"] += entropy.exp().sum(-1)
        sums["max_weight"] += largest.sum(-1)
        sums["collapsed"] += (largest > COLLAPSED).sum(-1)
        sums["uniform"] += (entropy > UNIFORM * keys.clamp_min(1).log()).sum(-1)
        mass[SELF] += (tile.weights * own).sum((-1, -2))
        received = tile.weights.masked_fill(own, 0).sum(-2)  # (B, heads, K)
        for number, name in enumerate(record.keys.prefix):
            mass[name] += received[..., tile.keys == number].sum(-1)
        patches = tile.keys >= first_key
        mass[PATCHES] += received[..., patches].sum(-1)
        rows = tile.queries >= first_query
        if placed and bool(rows.any()) and bool(patches.any()):
            seen &= patches
            apart = torch.cdist(places[0][tile.queries], places[1][tile.keys]).masked_fill_(own | ~seen, 0)
            total = (tile.weights @ patches.to(dtype)).clamp_min(torch.finfo(dtype).tiny)
            sums["distance"] += ((tile.weights * apart).sum(-1) / total)[..., rows].sum(-1)
            uniform += float((apart.sum(-1) / seen.sum(-1).clamp_min(1))[rows].sum())
            nearest += float(apart.masked_fill_(own | ~seen, math.inf).amin(-1)[rows].sum())
            asked += int(rows.sum())
    mass = {name: value / queries for name, value in mass.items()} | {PADDING: leaked}
    return HeadStatistics(
        record.layer,
        record.call,
        sums["entropy"] / queries,
        sums["effective"] / queries,
        sums["max_weight"] / queries,
        sums["collapsed"] / queries,
        sums["uniform"] / queries,
        count / queries,
        mass,
        sums["distance"] / asked if asked else None,
        uniform / asked if asked else None,
        nearest / asked if asked and math.isfinite(nearest) else None,
    )


def _centers(layout: TokenLayout) -> Tensor:
    """Return `(tokens, 2)` centers of the grid cells in pixels of the model's input; 0 for tokens that are not on a grid."""
    y, x = torch.zeros(2, len(layout), dtype=torch.float64)
    if len(layout.grid) == 2:
        (rows, columns), box, first = layout.grid, layout.box, len(layout.prefix)
        down, across = (torch.arange(count, dtype=torch.float64) + 0.5 for count in (rows, columns))
        present = list(layout.present)
        y[first:] = (box.top + down * box.height / rows).repeat_interleave(columns)[present]
        x[first:] = (box.left + across * box.width / columns).repeat(rows)[present]
    return torch.stack([y, x], dim=-1)
