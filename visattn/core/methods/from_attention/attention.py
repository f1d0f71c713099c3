"""Raw attention weights of a query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from visattn._support.checks import one_of, shown
from visattn._support.language import option, worded
from visattn._support.modes import in_own_modes
from visattn._support.reprs import in_runs
from visattn._support.types import Fusion, Sinks
from visattn.core.geometry import Box
from visattn.core.maps import AttentionMap, MapFacts
from visattn.core.methods.method import attention_method
from visattn.core.methods.queries import Query, members_asked, tokens_of, weights_of
from visattn.core.methods.result import to_map
from visattn.core.methods.selection import one_forward, spatial_refusal
from visattn.core.methods.sinks import find_sinks
from visattn.core.provenance import Sink
from visattn.core.records import AttentionRecord, Readout, Recording, TokenLayout
from visattn.errors import OptionError


@in_own_modes
def attention(
    recording: Recording,
    *,
    layer: int | str | Literal["all"] = -1,
    head: int | Literal["all"] = "all",
    fusion: Fusion | None = None,
    sinks: Sinks = "keep",
    query: Query = "auto",
    call: int = 0,
    dtype: torch.dtype = torch.float32,
) -> AttentionMap:
    """Return the raw attention weights from a query to the patches: `sum_i query_i A[i, patch]`.

    Args:
        recording: Any recording with attention over tokens on a grid.
        layer: Index of the layer, its dotted name, or `all`.
        head: Index of one head, or `all`.
        fusion: Fusion of heads: `mean`, `max` or `min`. None keeps the heads separate.
        sinks: Treatment of attention to sinks: `keep`, `drop` or `redistribute`. `drop` removes it and renormalizes the rest;
            `redistribute` spreads it evenly over all other patches. Sinks are found in all layers, so all must be captured.
        query: Query token: `auto` (what the model reads), `read` (its measured shares), `cls`, `mean`, `patch:ROW,COL` or
            `register:N`; for photos also `pixel:X,Y`. `visattn.methods.QUERY_SPELLINGS` lists all spellings.
        call: Index of the call, for layers that call their attention several times.
        dtype: Compute type of the softmax; float64 for double precision.

    Returns:
        Map with axes `batch`, `layer` (if `all`) and `head` (unless fused or selected). Values are in [0, 1]. Their sum over the
        patches is 1 minus the attention to prefix tokens, which the notes state.

    Raises:
        OptionError: If a layer, head, fusion, query or call does not exist, or the layers attend over different tokens.

    Reference:
        Caron et al., "Emerging Properties in Self-Supervised Vision Transformers", ICCV 2021, arXiv:2104.14294 (last layer, class
        token, each head).
    """
    if fusion is not None:
        one_of(fusion, get_args(Fusion), "fusion")
    one_of(sinks, get_args(Sinks), "sinks")
    records = chosen_records(one_forward(recording), layer, query, call)
    rows, chosen = zip(*(_row(record, query, recording.reading, dtype) for record in records), strict=True)
    stacked = torch.stack(rows, dim=1).cpu()  # (B, layers, heads, K)
    found = () if sinks == "keep" else find_sinks(recording)
    if sinks != "keep":
        stacked = _without(stacked, found, sinks, records[0].keys)
    labels = {"layer": tuple(record.layer for record in records)}
    axes = ["layer", "head"]
    heads = stacked.shape[2]
    if head != "all":
        if not isinstance(head, int):
            raise OptionError(
                f"head must be a whole number or 'all', got {shown(head)}. The mean over heads is {option('fusion', 'mean')}."
            )
        if not -heads <= head < heads:
            raise OptionError(f"head must lie in [{-heads}, {heads - 1}], got {head}.")
        stacked = stacked[:, :, [head]]
    labels["head"] = tuple(str(i) for i in (range(heads) if head == "all" else [head % heads]))
    if fusion is not None:
        stacked = {"mean": stacked.mean(2), "max": stacked.amax(2), "min": stacked.amin(2)}[fusion]
    elif head != "all":
        stacked = stacked[:, :, 0]
    if fusion is not None or head != "all":
        axes.remove("head")
        del labels["head"]
    if layer != "all":
        stacked = stacked[:, 0]
        axes.remove("layer")
        del labels["layer"]
    layout = records[0].keys
    patches = stacked[..., len(layout.prefix) :]
    notes: tuple[str, ...] = ()
    if layout.prefix:
        share = 1 - float(patches.sum() / stacked.sum())
        notes = (f"{share:.0%} of the attention goes to the prefix tokens ({in_runs(layout.prefix)}) and is not drawn",)
    if any(record.operator.key_index is not None and bool((record.operator.key_index < 0).any()) for record in records):
        share = 1 - float(stacked.sum() / stacked[..., 0].numel())
        notes += (f"{share:.0%} of the attention goes to padding and is not drawn",)
    sampled = any(record.kind == "sampled" for record in records)
    if sampled:
        notes += ("weights of the points that each query samples, on the finest grid that is sampled",)
    calls = sum(record.layer == records[0].layer and record.forward == records[0].forward for record in recording)
    if calls > 1:
        notes += (f"{records[0].layer} calls its attention {calls} times; this is call {call}",)
    return to_map(
        recording,
        "attention",
        "attention",
        patches,
        layout,
        {
            "layer": "all" if layer == "all" else records[0].layer,
            "head": head,
            "fusion": fusion or "none",
            "sinks": sinks,
            "query": chosen[0],
        },
        axes=axes,
        labels=labels,
        facts=MapFacts(
            sinks=found,
            sinks_kept=sinks == "keep",
            windows=() if layer == "all" else _windows(recording, records[0], chosen[0]),
            pixelwise=sampled,
        ),
        queries=records[0].queries,
        notes=notes,
    )


def _without(rows: Tensor, found: Sequence[Sequence[Sink]], sinks: Sinks, layout: TokenLayout) -> Tensor:
    """Remove the attention to sinks from rows `(B, ..., K)`."""
    rows = rows.clone()
    for image, entries in zip(rows, found, strict=True):
        tokens = [layout.patch(sink.row, sink.column) for sink in entries]
        others = [token for token in range(len(layout.prefix), len(layout)) if token not in tokens]
        lost = image[..., tokens].sum(-1, keepdim=True)
        image[..., tokens] = 0
        if sinks == "drop":
            image /= image.sum(-1, keepdim=True).clamp_min(torch.finfo(image.dtype).tiny)
        else:
            image[..., others] += lost / len(others)
    return rows


def _windows(recording: Recording, record: AttentionRecord, chosen: str) -> tuple[tuple[Box, ...], ...]:
    """Return for each image the windows that a layer of local attention has published for the patches asked, in input pixels."""
    features = [feature for feature in recording.features if feature.role == "window" and feature.layer == record.layer]
    feature = next((feature for feature in features if feature.call == record.call), None)
    if feature is None or chosen in ("read", "weights"):
        return ()
    tokens = tokens_of(chosen, record.queries)
    layout, of_all_queries = feature.layout, feature.value.shape[1] == len(record.queries)
    is_named = all(len(numbers) == 1 for numbers in tokens)
    if layout != record.keys or not of_all_queries or record.operator.query_index is not None or not is_named:
        return ()
    boxes = record.keys.on_input(feature.value[:, [numbers[0] for numbers in tokens], :4])
    return tuple(tuple(Box(*box) for box in image) for image in boxes.tolist())


def chosen_records(recording: Recording, layer: int | str, query: Query, call: int) -> list[AttentionRecord]:
    """Return the records of one layer, or of all, whose keys lie on the image.

    Raises:
        OptionError: If there is no such record, or the layers attend over different tokens.
    """
    if reason := spatial_refusal(recording):
        raise OptionError(f"{reason} Use {worded('visattn.capture', 'visattn inspect')} to see what the model has.")
    spatial = replace(recording, records=[record for record in recording if record.keys.grid])
    members = [record for record in spatial if members_asked(query, record.queries)]
    if members:  # object queries, words
        spatial = replace(spatial, records=members)
    pooling = [record for record in spatial if record.kind == "pool"]
    if pooling and layer == -1 and query in ("auto", "read") and (recording.reading.pools or recording.reads == "pool"):
        return pooling[-1:]
    if not isinstance(layer, str) or layer == "all":
        rows = [record for record in spatial if record.kind != "pool"]
        spatial = replace(spatial, records=rows or spatial.records)
    chosen = list(spatial if layer == "all" else spatial.select(layer=layer))
    found = [record for record in chosen if record.call == call]
    if not found:
        count = len(chosen)
        raise OptionError(f"call must lie in [0, {count - 1}], got {call}: {chosen[0].layer} calls its attention {count} times.")
    odd = next((record for record in found if record.keys != found[0].keys or record.queries != found[0].queries), None)
    if odd is not None:
        raise OptionError(
            f"{found[0].layer} and {odd.layer} attend over different tokens, so they cannot share one map. Choose one layer."
        )
    return found


def _row(record: AttentionRecord, query: Query, reading: Readout, dtype: torch.dtype) -> tuple[Tensor, str]:
    """Return `(B, heads, K)` attention of the weighted queries, and the query as text."""
    operator = record.operator.to(dtype)
    weights, chosen = weights_of(query, record.queries, reading, operator.device)
    if chosen in ("read", "weights"):
        used = weights.flatten(0, 2).any(0).nonzero().flatten()
    else:
        used = torch.tensor(sorted({token for tokens in tokens_of(chosen, record.queries) for token in tokens}))
    if len(used) > 8:  # many queries: a product over all rows
        return (weights.to(dtype) @ operator)[:, :, 0], chosen
    rows = operator.rows(used)  # (B, heads, used, K)
    return (weights[..., used].to(dtype) @ rows)[:, :, 0], chosen


METHODS = {
    "attention": attention_method(attention, spatial_refusal, sinks=True, aliases=("raw",)),
}
