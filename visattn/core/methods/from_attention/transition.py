"""Transition attention maps: rollout from the last layer down, weighted by integrated gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import mul

import torch
from torch import Tensor

from visattn._support.modes import in_own_modes
from visattn.core.maps import AttentionMap
from visattn.core.methods.from_attention import recursion
from visattn.core.methods.method import Method, needs
from visattn.core.methods.queries import Query, weights_of
from visattn.core.methods.result import to_map
from visattn.core.methods.selection import chain, chain_refusal
from visattn.core.records import AttentionRecord, Recording
from visattn.errors import OptionError

Replay = Callable[[Callable[[Tensor], Tensor]], Recording]


@in_own_modes
def transition_attention(
    recording: Recording,
    *,
    replay: Replay,
    steps: int = 20,
    start_layer: int = 4,
    query: Query = "auto",
    dtype: torch.dtype = torch.float32,
) -> AttentionMap:
    """Compute the transition attention map: attention of the query propagated down the layers, times integrated gradients.

    The query's attention in the last layer is the first state. In each layer below, it becomes `state A + state`. The result is
    multiplied, patch by patch, by the query's rows of `mean_h (mean_alpha dA)^+` in the last layer. The gradient is averaged over `steps`
    inputs from 0 (the mean color, as pixels are normalized) to the image. Memory for `dA` grows with the number of query tokens.

    Args:
        recording: Self-attention of every layer over one token set.
        replay: Function that runs the model on edited pixels and returns a recording with the gradient of the target's score.
        steps: Number of integration steps. The inputs are `alpha * pixels`, with alpha evenly spaced from 0 to 1, both included.
        start_layer: First layer to include.
        query: Query token to explain; `auto` is what the model reads, or the mean of the patches for models with a
            pooling head.
        dtype: Compute type; float64 for double precision.

    Returns:
        Map with the axis `batch`; non-negative and in units of the score.

    Raises:
        OptionError: If an option is out of range, or the layers do not share one token set.

    Reference:
        Yuan et al., "Explaining Information Flow Inside Vision Transformers Using Markov Chain", XAI4Debugging at NeurIPS 2021.
    """
    records = chain(recording)
    recursion.check_start(start_layer, len(records))
    if steps < 2:
        raise OptionError(f"steps must be at least 2, got {steps}.")
    layout = records[0].keys
    weights, chosen = weights_of(query, layout, recording.reading, records[0].operator.device)
    weights = weights[:, 0].to(dtype).expand(records[0].operator.shape[0], 1, -1)
    state = _through(records[-1], weights, dtype)
    for record in reversed(records[start_layer:-1]):
        state = _through(record, state, dtype) + state
    used = weights.flatten(0, 1).any(0).nonzero().flatten()
    gradient: Tensor = torch.zeros(())
    for step in range(steps):
        scaled = replay(partial(mul, step / (steps - 1)))
        gradient = gradient + _gradient_rows(chain(scaled, probability=False)[-1], used, dtype) / steps
    values = (state * (weights[..., used] @ gradient.clamp(min=0).mean(1)))[:, 0]
    return to_map(
        recording,
        "transition_attention",
        "transition attention",
        values,
        layout,
        {"steps": steps, "start_layer": start_layer, "query": chosen},
    )


def _through(record: AttentionRecord, state: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `state A`, averaged over heads, `(B, 1, N)`."""
    return record.operator.to(dtype).pull(state[:, None]).mean(1)


def _gradient_rows(record: AttentionRecord, queries: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `(B, heads, queries, K)` rows of `dA`."""
    batch, heads, tokens, keys = record.operator.shape
    out = torch.zeros(batch, heads, len(queries), keys, dtype=dtype, device=record.operator.device)
    place = torch.full((tokens,), -1, device=queries.device)
    place[queries] = torch.arange(len(queries), device=queries.device)
    for rows, columns, grad in record.operator.to(dtype).gradient_pieces():
        here = place[rows] >= 0
        out[:, :, place[rows][here][:, None], columns] = grad[:, :, here]
    return out


METHODS = {
    "transition_attention": Method(
        function=transition_attention,
        needs=needs("attention", "gradients", "replay"),
        accepts=chain_refusal,
        targeted=True,
        sinks=True,
        aliases=("tam",),
    ),
}
