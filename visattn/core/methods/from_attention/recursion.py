"""Recursion shared by rollout, gradient rollout and relevance: a row vector is propagated from the last layer down.

In each layer, `r <- sum_i r_i (keep_i e_i + scale_i rows_i)`, where `rows_i` is row `i` of the fused heads. Rows are computed tile by
tile, so no matrix is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from visattn._support.types import Fusion, Sinks
from visattn.core.methods.queries import Query, weights_of
from visattn.core.operators import Operator, Tile
from visattn.core.provenance import Sink
from visattn.core.records import AttentionRecord, Recording, TokenLayout
from visattn.errors import OptionError

Rows = Callable[[Tile], Tensor]  # tile -> fused rows (B, q, K), which may be changed in place
Balance = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # row sums (B, q) and their queries -> keep, scale, both (B, q)


def step(operator: Operator, r: Tensor, rows: Rows, balance: Balance) -> Tensor:
    """Propagate `r`, `(B, 1, Q)`, through one layer, in which every query is also a key."""
    out = torch.zeros_like(r)
    for tile in operator.tiles(scratch=True):
        fused = rows(tile)
        keep, scale = balance(fused.sum(-1), tile.queries)
        mine = r[..., tile.queries]
        out.index_add_(2, tile.keys, (mine * scale[:, None]) @ fused)
        out[..., tile.queries] += mine * keep[:, None]
    return out


def step_of_evidence(operator: Operator, r: Tensor) -> Tensor:
    """Compute `r (I + mean_h (dA * A)^+)`, which needs no whole rows; heads are averaged last."""
    out = r.clone()
    for tile in operator.pieces():
        pulled = r[:, None, :, tile.queries] @ _product(tile).clamp_(min=0)  # (B, heads, 1, keys)
        out.index_add_(2, tile.keys, pulled.mean(1))
    return out


def own_entries(tile: Tile) -> tuple[Tensor, Tensor]:
    """Return the rows and columns of a tile's diagonal entries, where a token attends to itself."""
    where = torch.full((int(torch.max(tile.queries.max(), tile.keys.max())) + 1,), -1, device=tile.keys.device)
    where[tile.keys] = torch.arange(len(tile.keys), device=tile.keys.device)
    there = where[tile.queries]
    here = (there >= 0).nonzero().flatten()
    return here, there[here]


def fused(fusion: Fusion) -> Rows:
    """Return a function that fuses the heads of a tile."""

    def rows(tile: Tile) -> Tensor:
        if fusion == "mean":
            return tile.weights.mean(1)
        return tile.weights.amax(1) if fusion == "max" else tile.weights.amin(1)

    return rows


def evidence(tile: Tile) -> Tensor:
    """Compute `mean_h (dA * A)^+`, attention that is evidence for the target."""
    return _product(tile).clamp_(min=0).mean(1)


def net_evidence(tile: Tile) -> Tensor:
    """Compute `(mean_h dA * A)^+`, in which heads of opposite sign cancel."""
    return _product(tile).mean(1).clamp_(min=0)


def _product(tile: Tile) -> Tensor:
    assert tile.grad is not None  # noqa: S101 - the recording was checked
    return tile.weights * tile.grad


def discarding(rows: Rows, operator: Operator, layout: TokenLayout, ratio: float, over: str) -> Rows:
    """Set the smallest patch weights of each row or of the whole layer to 0; prefix tokens are kept.

    `int(ratio * count)` weights are discarded, except those equal to the smallest weight that is kept.
    """
    first = len(layout.prefix)
    if over == "layer":
        limit = _whole_limit(rows, operator, first, ratio)

    def kept(tile: Tile) -> Tensor:
        found = rows(tile)
        patches = tile.keys >= first
        count = int(patches.sum())
        if over == "row" and int(ratio * count):
            within = found if count == len(tile.keys) else found[..., patches]
            least = within.kthvalue(int(ratio * count) + 1, dim=-1, keepdim=True).values
        elif over == "row":
            return found
        else:
            least = limit[:, None, None]
        return found.masked_fill_((found < least) & patches, 0)

    return kept


def _whole_limit(rows: Rows, operator: Operator, first: int, ratio: float) -> Tensor:
    """Compute the smallest patch weight that is kept in a whole layer, `(B,)`, by a radix search over its bits.

    Non-negative floats have the same order as their bit patterns. Each pass over the tiles determines 16 bits, from the highest.
    """
    as_bits, width = (torch.int32, 32) if operator.dtype == torch.float32 else (torch.int64, 64)
    batch, total, known = operator.shape[0], 0, 0
    found = torch.zeros(batch, 1, dtype=as_bits, device=operator.device)
    rank = torch.zeros(batch, dtype=torch.int64, device=operator.device)
    for shift in range(width - 16, -1, -16):
        counts = torch.zeros(batch, 1 << 16, dtype=torch.int64, device=operator.device)
        for tile in operator.tiles(scratch=True):
            bits = rows(tile)[..., tile.keys >= first].flatten(1).abs().view(as_bits)  # no -0
            total += bits.shape[1] if not known else 0
            digits = (bits >> shift) & 0xFFFF
            for image in range(batch):
                same = digits[image][bits[image] >> (shift + 16) == found[image]] if known else digits[image]
                counts[image] += torch.bincount(same, minlength=1 << 16)
        rank = rank if known else torch.full_like(rank, int(ratio * total))
        below = counts.cumsum(1)
        digit = (below <= rank[:, None]).sum(1, keepdim=True)
        rank = rank - (below - counts).gather(1, digit)[:, 0]
        found, known = (found << 16) | digit.to(as_bits), known + 16
    return found.view(operator.dtype)[:, 0]


def without_sinks(rows: Rows, found: Sequence[Sequence[Sink]], layout: TokenLayout, treatment: Sinks, like: Operator) -> Rows:
    """Remove attention to sinks from rows; `redistribute` spreads it evenly over the other patches."""
    sunk = torch.zeros(like.shape[0], len(layout), dtype=torch.bool, device=like.device)
    for image, entries in enumerate(found):
        for sink in entries:
            sunk[image, layout.patch(sink.row, sink.column)] = True
    others = ~sunk
    others[:, : len(layout.prefix)] = False

    def open_rows(tile: Tile) -> Tensor:
        rest = rows(tile)
        here = sunk[:, None, tile.keys]
        lost = (rest * here).sum(-1, keepdim=True)
        rest = rest.masked_fill_(here, 0)
        if treatment == "redistribute":
            rest += lost * others[:, None, tile.keys] / others.sum(-1)[:, None, None]
        return rest

    return open_rows


def others(rows: Rows) -> Rows:
    """Set the attention of each token to itself to 0."""

    def without_own(tile: Tile) -> Tensor:
        found = rows(tile)
        here, there = own_entries(tile)
        found[:, here, there] = 0
        return found

    return without_own


def mixed(keep: float | Tensor) -> Balance:
    """Keep the share `keep` (a number or `(B, N)`) of each token and mix the rest by normalized rows; an empty row keeps all."""

    def balance(sums: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
        stays = keep[:, queries] if isinstance(keep, Tensor) else torch.full_like(sums, keep)
        empty = sums <= 0
        return stays.masked_fill(empty, 1), ((1 - stays) / sums.clamp_min(torch.finfo(sums.dtype).tiny)).masked_fill(empty, 0)

    return balance


def added_and_normalized(sums: Tensor, _queries: Tensor) -> tuple[Tensor, Tensor]:
    """Normalize the rows of `I + rows` to sum 1."""
    scale = 1 / (1 + sums)
    return scale, scale


def beginning(
    recording: Recording, records: Sequence[AttentionRecord], query: Query, pooled: Rows, dtype: torch.dtype
) -> tuple[Tensor, str]:
    """Return the row `(B, 1, N)` from which the recursion starts, and the query as text.

    For models with an attention pooling head, the recursion starts from the attention of that head, fused by `pooled`.
    """
    layout, operator, reading = records[0].keys, records[0].operator, recording.reading
    pool = [
        record
        for record in recording
        if record.kind == "pool" and (record.keys.grid, record.keys.holes) == (layout.grid, layout.holes)
    ]
    if query not in ("auto", "read") or not (reading.pools or reading.query == "pool") or not pool:
        weights, chosen = weights_of(query, layout, reading, operator.device)
        return weights.to(dtype)[:, 0].expand(operator.shape[0], 1, -1), chosen
    weights, chosen = weights_of(query, pool[-1].queries, reading, operator.device)
    keys, out = pool[-1].keys, torch.zeros(operator.shape[0], 1, len(layout), dtype=dtype, device=operator.device)
    names = [layout.prefix.index(name) for name in keys.prefix]
    tokens = torch.tensor([*names, *range(len(layout.prefix), len(layout))], device=operator.device)
    for tile in pool[-1].operator.to(dtype).tiles():
        out.index_add_(2, tokens[tile.keys], weights[:, 0, :, tile.queries].to(dtype) @ pooled(tile))
    return out, f"pool ({pool[-1].layer})" if reading.query == "pool" else chosen


def check_start(start_layer: int, layers: int) -> None:
    """Check that the first layer exists.

    Raises:
        OptionError: If it does not exist.
    """
    if not 0 <= start_layer < layers:
        raise OptionError(f"start_layer must lie in [0, {layers - 1}], got {start_layer}.")
