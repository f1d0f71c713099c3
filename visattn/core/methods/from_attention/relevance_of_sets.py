"""Relevance between several token sets that attend to each other, such as object queries of a decoder, or text and image."""

from __future__ import annotations

import torch
from torch import Tensor

from visattn._support.language import option, worded
from visattn.core.methods.from_attention import recursion
from visattn.core.methods.queries import Query, weights_of
from visattn.core.methods.selection import advice, graded, named, set_refusal
from visattn.core.records import AttentionRecord, Recording, TokenLayout
from visattn.errors import OptionError


def sets_refusal(recording: Recording) -> str | None:
    """Return why attention between token sets does not compose, or None: there must be exactly one grid of the image."""
    if reason := set_refusal(recording):
        return reason
    odd = next((record for record in recording if record.kind in ("unplaced", "channel")), None)
    if odd is not None:
        return (
            f"{named(odd.layer)}: {odd.reason or 'channels attend to channels'}, so layers cannot be combined.{advice(recording)}"
        )
    images = {record.keys for record in recording if record.keys.grid} | {
        record.queries for record in recording if record.queries.grid
    }
    if len(images) != 1:
        sizes = ", ".join(sorted({" x ".join(map(str, layout.grid)) for layout in images})) or "none"
        return f"attention is over several grids of the image ({sizes}), so layers cannot be combined.{advice(recording)}"
    return None


def between_sets(recording: Recording, start_layer: int, query: Query, dtype: torch.dtype) -> tuple[Tensor, TokenLayout, str]:
    """Compute the row of the relevance matrix from the last set of queries to the image."""
    if reason := sets_refusal(recording):
        raise OptionError(reason)
    records = list(graded(recording))
    recursion.check_start(start_layer, len(records))
    image = next(layout for record in records for layout in (record.queries, record.keys) if layout.grid)
    asking = next((record.queries for record in reversed(records) if not record.queries.grid), image)
    if query == "auto" and asking is not image and len(asking) > 1:
        raise OptionError(
            f"the model has outputs for {len(asking)} queries. Choose one: {option('query', 'query:0')}"
            + worded(", or pass a vector of weights.", ".")
        )
    weights, chosen = weights_of(query, asking, recording.reading, records[0].operator.device)
    relevances = _Relevances(records, dtype)
    waiting = records[start_layer:]
    while waiting:
        first, *waiting = waiting
        partner = waiting[0] if waiting and _exchange(first, waiting[0]) else None
        relevances.update([first] if partner is None else [first, partner])
        waiting = waiting if partner is None else waiting[1:]
    found = relevances.of(asking, image)
    if asking is image:
        found = found - torch.eye(len(image), dtype=dtype, device=found.device)
    return weights[:, 0].to(dtype) @ found, image, chosen


def _exchange(one: AttentionRecord, other: AttentionRecord) -> bool:
    """Check whether two sets attend to each other in parallel, so that neither uses the other's updated tokens."""
    crossed = one.kind == other.kind == "cross" and one.queries == other.keys and one.keys == other.queries
    return crossed and other.follows != (one.layer, one.call)


class _Relevances:
    """Relevance matrices `R`, `(B, queries, keys)`, of all pairs of token sets; initially the identity within a set, else 0."""

    def __init__(self, records: list[AttentionRecord], dtype: torch.dtype) -> None:
        self._batch, self._device, self._dtype = records[0].operator.shape[0], records[0].operator.device, dtype
        self._sets = list(dict.fromkeys(layout for record in records for layout in (record.queries, record.keys)))
        self._found = {(one, one): torch.eye(len(one), dtype=dtype, device=self._device)[None] for one in self._sets}

    def of(self, queries: TokenLayout, keys: TokenLayout) -> Tensor:
        zero = torch.zeros(1, len(queries), len(keys), dtype=self._dtype, device=self._device)
        return self._found.get((queries, keys), zero).expand(self._batch, -1, -1)

    def update(self, records: list[AttentionRecord]) -> None:
        """Add the update of one attention call, or of two parallel ones, which both start from the previous matrices."""
        added = [item for record in records for item in (self._self(record) if record.kind == "self" else self._cross(record))]
        for pair, value in added:
            self._found[pair] = self.of(*pair) + value

    def _self(self, record: AttentionRecord) -> list[tuple[tuple[TokenLayout, TokenLayout], Tensor]]:
        own, evidence = record.queries, _whole(record, self._dtype)
        return [((own, other), evidence @ self.of(own, other)) for other in self._sets if (own, other) in self._found]

    def _cross(self, record: AttentionRecord) -> list[tuple[tuple[TokenLayout, TokenLayout], Tensor]]:
        asking, asked, evidence = record.queries, record.keys, _whole(record, self._dtype)
        between = _normalized(self.of(asking, asking)).mT @ evidence @ _normalized(self.of(asked, asked))
        back = [((asking, asking), evidence @ self.of(asked, asking))] if (asked, asking) in self._found else []
        return [((asking, asked), between), *back]


def _normalized(relevance: Tensor) -> Tensor:
    """Normalize the rows of `R - I` to sum 1 and add `I` (equations 8 and 9)."""
    identity = torch.eye(relevance.shape[-1], dtype=relevance.dtype, device=relevance.device)
    rest = relevance - identity
    sums = rest.sum(-1, keepdim=True)
    return torch.where(sums == 0, 0, rest / torch.where(sums == 0, 1, sums)) + identity


def _whole(record: AttentionRecord, dtype: torch.dtype) -> Tensor:
    """Build `A'`, `(B, Q, K)`."""
    batch, _, queries, keys = record.operator.shape
    out = torch.zeros(batch, queries, keys, dtype=dtype, device=record.operator.device)
    for tile in record.operator.to(dtype).pieces():
        out[:, tile.queries[:, None], tile.keys] = recursion.evidence(tile)
    return out
