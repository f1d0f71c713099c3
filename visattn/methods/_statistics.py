"""What each head does, in numbers: how wide it looks, how far, and at which kind of token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from visattn.errors import OptionError
from visattn.methods._select import one_forward
from visattn.records import AttentionRecord, Recording, TokenLayout

PADDING, SELF, PATCHES = "padding", "self", "patches"  # kinds of keys beside the prefix tokens by name


@dataclass(frozen=True, eq=False)
class HeadStatistics:
    """Of one attention call; every tensor is `(B, heads)`, a mean over queries.

    Attributes:
        layer: Dotted name of the module that made the call.
        call: Which call of that module.
        entropy: `-sum_j A_ij ln A_ij` in nats.
        effective_keys: `exp(entropy)` of each query: as many keys as would share its attention evenly.
        saturation: The largest weight of each query, in [0, 1].
        mass: Share of attention by where it goes: prefix tokens by name, `self` (the query's own token), `patches` (all other
            grid tokens) and `padding`. They sum to 1.
        distance: How far patches look, in pixels of the model's input: `sum_j A_ij |p_i - p_j|` over patches, rows divided by what
            goes to patches; None where queries or keys are on no grid.
        uniform_distance: The same for a head that gives every patch that it can see the same weight: nothing, but the shape of the
            grid or window. A distance means something only beside it.
    """

    layer: str
    call: int
    entropy: Tensor
    effective_keys: Tensor
    saturation: Tensor
    mass: dict[str, Tensor]
    distance: Tensor | None
    uniform_distance: float | None


def statistics(recording: Recording, *, dtype: torch.dtype = torch.float32) -> list[HeadStatistics]:
    """Statistics of every head of a recording, by tiles: no matrix is built.

    Args:
        recording: Attention of one forward pass.
        dtype: float64 computes in double precision.

    Returns:
        An entry for each record, in the order of the calls.

    Raises:
        OptionError: If there are several forwards, or the rows of a layer are no distributions, as behind talking heads.

    Reference:
        Distance: Dosovitskiy et al., "An Image is Worth 16x16 Words", arXiv:2010.11929, figure 7, here without prefix tokens.
        Entropy and saturation: Zhai et al., "Stabilizing Transformer Training by Preventing Attention Entropy Collapse",
        arXiv:2303.06296.
    """
    return [_of(record, dtype) for record in one_forward(recording)]


def _of(record: AttentionRecord, dtype: torch.dtype) -> HeadStatistics:
    if not record.probability:
        raise OptionError(
            f"{record.layer}: attention rows do not sum to 1 in this layer, so they have no entropy. "
            "Leave it out: recording.select(layer=[...])."
        )
    operator = record.operator.to(dtype)
    batch, heads, queries, _ = operator.shape
    first_query, first_key = len(record.queries.prefix), len(record.keys.prefix)
    centres = [_centres(layout).to(operator.device, dtype) for layout in (record.queries, record.keys)]
    placed = all(len(points) for points in centres)
    sums = {name: operator.leaked().new_zeros(batch, heads) for name in ("entropy", "effective", "largest", "distance")}
    mass = {name: sums["entropy"].clone() for name in (*record.keys.prefix, SELF, PATCHES)}
    uniform, asked = 0.0, 0
    for tile in operator.tiles():
        entropy = -torch.xlogy(tile.weights, tile.weights).sum(-1)
        sums["entropy"] += entropy.sum(-1)
        sums["effective"] += entropy.exp().sum(-1)
        sums["largest"] += tile.weights.amax(-1).sum(-1)
        own = tile.queries[:, None] == tile.keys if record.kind == "self" else tile.queries[:, None] < 0
        mass[SELF] += (tile.weights * own).sum((-1, -2))
        received = tile.weights.masked_fill(own, 0).sum(-2)  # (B, heads, K)
        for number, name in enumerate(record.keys.prefix):
            mass[name] += received[..., tile.keys == number].sum(-1)
        mass[PATCHES] += received[..., tile.keys >= first_key].sum(-1)
        rows, columns = tile.queries >= first_query, tile.keys >= first_key
        if placed and bool(rows.any()) and bool(columns.any()):
            apart = torch.cdist(centres[0][tile.queries[rows] - first_query], centres[1][tile.keys[columns] - first_key])
            shares = tile.weights[:, :, rows][..., columns]
            total = shares.sum(-1).clamp_min(torch.finfo(dtype).tiny)
            sums["distance"] += ((shares * apart).sum(-1) / total).sum(-1)
            uniform += float(apart.mean(-1).sum())
            asked += len(apart)
    mass = {name: value / queries for name, value in mass.items()} | {PADDING: operator.leaked().mean(-1)}
    return HeadStatistics(
        record.layer,
        record.call,
        sums["entropy"] / queries,
        sums["effective"] / queries,
        sums["largest"] / queries,
        mass,
        sums["distance"] / asked if asked else None,
        uniform / asked if asked else None,
    )


def _centres(layout: TokenLayout) -> Tensor:
    """`(cells, 2)` centres of the grid's cells in pixels of the model's input; none for tokens on no grid."""
    if len(layout.grid) != 2:
        return torch.zeros(0, 2)
    (rows, columns), box = layout.grid, layout.box
    y = box.top + (torch.arange(rows, dtype=torch.float64) + 0.5) * box.height / rows
    x = box.left + (torch.arange(columns, dtype=torch.float64) + 0.5) * box.width / columns
    return torch.cartesian_prod(y, x)
