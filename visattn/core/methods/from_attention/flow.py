"""Attention flow: maximum flow between a query and each patch through all layers."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from visattn._support.checks import between
from visattn._support.extras import need
from visattn._support.language import option
from visattn._support.modes import in_own_modes
from visattn.core.maps import AttentionMap
from visattn.core.methods.from_attention import recursion
from visattn.core.methods.method import attention_method
from visattn.core.methods.queries import Query
from visattn.core.methods.result import to_map
from visattn.core.methods.selection import chain, chain_refusal
from visattn.core.records import Recording
from visattn.errors import OptionError

LIMIT = 800  # tokens; edges grow with their square, and every patch needs one flow
UNIT = 1e-6  # capacities are rounded to multiples of it


@in_own_modes
def attention_flow(recording: Recording, *, residual: float = 0.5, start_layer: int = 0, query: Query = "auto") -> AttentionMap:
    """Compute attention flow: the maximum flow between each patch and the query, with attention weights as edge capacities.

    The tokens of each layer are nodes. Edges between two layers have the capacity `residual * I + (1 - residual) * A`, with heads
    averaged. The value of a patch is the maximum flow between it and the query, where the flow through each query token is limited by
    its weight. Values are divided by their sum over all tokens.

    Args:
        recording: Self-attention of every layer over one token set of at most 800 tokens.
        residual: Weight of the residual connection in [0, 1].
        start_layer: First layer to include.
        query: Query token to explain; `auto` is what the model reads.

    Returns:
        Map with the axis `batch`; non-negative. The sum over the patches is 1 minus the share of prefix tokens. Capacities are rounded
        to 1e-6.

    Raises:
        OptionError: If there are too many tokens, an option is out of range, or the layers do not share one token set.
        MissingExtra: If SciPy is not installed.

    Reference:
        Abnar & Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020, arXiv:2005.00928.
    """
    need("scipy", "flow", "attention_flow")
    between(residual, 0, 1, "residual")
    records = chain(recording)
    recursion.check_start(start_layer, len(records))
    if reason := refusal(recording):
        raise OptionError(reason)
    layout = records[0].keys
    begin, chosen = recursion.beginning(recording, records, query, recursion.fused("mean"), torch.float64)
    layers = [
        residual * torch.eye(len(layout)) + (1 - residual) * record.operator.to(torch.float64).dense().mean(1).cpu()
        for record in reversed(records[start_layer:])
    ]
    flows = np.stack(
        [_flows(begin[image, 0].cpu().numpy(), [layer[image].numpy() for layer in layers]) for image in range(len(layers[0]))]
    )
    values = torch.from_numpy(flows).float()
    return to_map(
        recording,
        "attention_flow",
        "attention flow",
        values,
        layout,
        {"residual": residual, "start_layer": start_layer, "query": chosen},
    )


def refusal(recording: Recording) -> str | None:
    """Return why attention flow does not apply to a recording, or None if it does."""
    if reason := chain_refusal(recording):
        return reason
    tokens = next(len(record.keys) for record in recording if record.kind == "self")
    if tokens > LIMIT:
        return f"attention flow supports at most {LIMIT} tokens, got {tokens}. Use method 'rollout', or a smaller {option('img_size')}."
    return None


def _flows(query: NDArray[np.float64], layers: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Compute the maximum flow from the query to each token of the first layer, over their sum; `layers` start with the last."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import maximum_flow

    tokens = len(query)
    source, nodes = tokens * (len(layers) + 1), tokens * (len(layers) + 1) + 1
    rows, columns, widths = [np.full(tokens, source)], [np.arange(tokens)], [query / query.sum()]
    for number, layer in enumerate(layers):
        i, j = np.nonzero(layer)
        rows.append(i + number * tokens)
        columns.append(j + (number + 1) * tokens)
        widths.append(layer[i, j])
    capacity = np.rint(np.concatenate(widths) / UNIT).astype(np.int32)
    places = np.concatenate(rows).astype(np.int32), np.concatenate(columns).astype(np.int32)  # SciPy 1.13 takes no others
    graph = coo_array((capacity, places), shape=(nodes, nodes)).tocsr()
    ends = range(tokens * len(layers), tokens * (len(layers) + 1))
    flows: NDArray[np.float64] = np.array([maximum_flow(graph, source, end).flow_value for end in ends], np.float64)
    return flows / float(flows.sum())


METHODS = {
    "attention_flow": attention_method(attention_flow, refusal, sinks=True),
}
