"""Methods that multiply attention by its gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import torch

from visattn._support.checks import between, one_of
from visattn._support.modes import in_own_modes
from visattn._support.types import DiscardOver
from visattn.core.maps import AttentionMap
from visattn.core.methods.from_attention import recursion
from visattn.core.methods.from_attention.attention import chosen_records
from visattn.core.methods.method import gradient_method
from visattn.core.methods.queries import Query, weights_of
from visattn.core.methods.result import to_map
from visattn.core.methods.selection import chain, chain_refusal_of_any_rows, graded, spatial_refusal
from visattn.core.records import Recording
from visattn.errors import OptionError


@in_own_modes
def attention_gradient(
    recording: Recording,
    *,
    layer: int | str | Literal["all"] = "all",
    head: int | Literal["all"] = "all",
    signed: bool = False,
    query: Query = "auto",
    dtype: torch.dtype = torch.float32,
) -> AttentionMap:
    """Compute attention times its gradient: the first-order contribution of each weight of the query to the score.

    Args:
        recording: Attention with the gradient of a score: `recording.gradients(score)`.
        layer: `all` for the mean over the layers of self-attention, or the index or dotted name of one layer, also of a pooling head.
        head: `all` for the mean over heads, or the index of one head.
        signed: Keep the sign, so that negative values are evidence against the target. The map is then the mean of `A * dA`. By
            default, heads and layers are averaged over the positive part, `(A * dA)^+`.
        query: Query token; see `attention`.
        dtype: Compute type; float64 for double precision.

    Returns:
        Map with the axis `batch`, in units of the score.

    Raises:
        OptionError: If there is no gradient, or a layer, head or query does not exist.

    Reference:
        Barkan et al., "Grad-SAM: Explaining Transformers via Gradient Self-Attention Maps", CIKM 2021, arXiv:2204.11073 (all
        layers, unsigned).
    """
    records = chosen_records(graded(_of_tokens(recording)), layer, query, 0)
    heads = records[0].operator.shape[1]
    if head != "all" and not -heads <= head < heads:
        raise OptionError(f"head must lie in [{-heads}, {heads - 1}], got {head}.")
    layout = records[0].keys
    total = torch.zeros(records[0].operator.shape[0], 1, len(layout), dtype=dtype, device=records[0].operator.device)
    for record in records:
        weights, chosen = weights_of(query, record.queries, recording.reading, record.operator.device)
        weights = weights[:, 0].to(dtype)
        for tile in record.operator.to(dtype).tiles(scratch=True):
            mine = weights[..., tile.queries]
            if tile.grad is not None and mine.any():
                product = tile.weights * tile.grad
                product = product if signed else product.clamp_(min=0)
                total.index_add_(2, tile.keys, mine @ (product.mean(1) if head == "all" else product[:, head]))
    return to_map(
        recording,
        "attention_gradient",
        "signed attention x gradient" if signed else "attention x gradient",
        (total / len(records))[:, 0],
        layout,
        {"layer": layer, "head": head, "query": chosen, "signed": signed},
        signed=signed,
        queries=record.queries,
    )


@in_own_modes
def gradient_rollout(
    recording: Recording,
    *,
    discard: float = 0.9,
    discard_over: DiscardOver = "layer",
    start_layer: int = 0,
    query: Query = "auto",
    dtype: torch.dtype = torch.float32,
) -> AttentionMap:
    """Compute rollout of attention times its gradient.

    In each layer, `F = (mean_h A * dA)^+`. Its smallest weights are discarded, and the rows of `F + I` are divided by their sums. The
    results are multiplied over the layers.

    Args:
        recording: Self-attention of every layer with the gradient of a score: `recording.gradients(score)`.
        discard: Share of the smallest patch entries of `F` that are set to 0, in [0, 1).
        discard_over: Scope of discarding: the smallest of each `row` or of the whole `layer`.
        start_layer: First layer to include.
        query: Query token to explain; `auto` is what the model reads. For models with a pooling head, `auto` is the
            attention of that head, averaged over its heads.
        dtype: Compute type; float64 for double precision.

    Returns:
        Map with the axis `batch`; non-negative. The sum over the patches is 1 minus the share of prefix tokens.

    Raises:
        OptionError: If there is no gradient, an option is out of range, or the layers do not share one token set.

    Reference:
        Gildenblat, "Exploring Explainability for Vision Transformers", 2020. Differs: the published code pairs the
        attention of layer `l` with the gradient of layer `L - 1 - l` and divides columns by row sums. Here prefix tokens are never
        discarded.
    """
    one_of(discard_over, get_args(DiscardOver), "discard_over")
    if between(discard, 0, 1, "discard") == 1:
        raise OptionError("discard must be less than 1, got 1, which would leave nothing. Use for example 0.9.")
    records = chain(recording, probability=False)
    graded(recording)
    recursion.check_start(start_layer, len(records))
    layout = records[0].keys
    row, chosen = recursion.beginning(recording, records, query, recursion.fused("mean"), dtype)
    for record in reversed(records[start_layer:]):
        operator = record.operator.to(dtype)
        rows: recursion.Rows = recursion.net_evidence
        if discard:
            rows = recursion.discarding(rows, operator, layout, discard, discard_over)
        row = recursion.step(operator, row, rows, recursion.added_and_normalized)
    return to_map(
        recording,
        "gradient_rollout",
        "gradient rollout",
        row[:, 0],
        layout,
        {"discard": discard, "discard_over": discard_over, "start_layer": start_layer, "query": chosen},
    )


def _of_tokens(recording: Recording) -> Recording:
    """Return a recording without weights of sampled points, which have no gradient."""
    return replace(recording, records=[record for record in recording if record.kind != "sampled"])


METHODS = {
    "gradient_rollout": gradient_method(gradient_rollout, chain_refusal_of_any_rows),
    "attention_gradient": gradient_method(
        attention_gradient, lambda recording: spatial_refusal(_of_tokens(recording)), aliases=("gradsam",)
    ),
}
