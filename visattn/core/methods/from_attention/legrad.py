"""LeGrad: gradients of attention maps, with a separate score for each layer."""

from __future__ import annotations

import torch

from visattn._support.modes import in_own_modes
from visattn.core.maps import AttentionMap
from visattn.core.methods.method import Method, needs
from visattn.core.methods.result import to_map
from visattn.core.methods.selection import chain, chain_refusal_of_any_rows, graded
from visattn.core.records import Recording
from visattn.errors import OptionError


@in_own_modes
def legrad(recording: Recording, *, last_layers: int | None = None, dtype: torch.dtype = torch.float32) -> AttentionMap:
    """Compute LeGrad: where more attention, from any query, would increase the score.

    The positive part of each layer's `dA` is averaged over heads and queries, and then over layers. The attention weights themselves
    are not used, so no softmax is computed.

    Args:
        recording: Self-attention of every layer, each with the gradient of *its own* score: the logit obtained by applying the model's
            head to that layer's output tokens. `explain` does this; by hand, use `recording.gradients({layer: score, ...})`.
        last_layers: Number of last layers to average; all by default, as in the paper. The authors' code uses 2.
        dtype: Compute type; float64 for double precision.

    Returns:
        Map with the axis `batch`; non-negative and not normalized. All zero if no attention would increase the score.

    Raises:
        OptionError: If there is no gradient, there are too few layers, or they do not share one token set.

    Reference:
        Bousselham et al., "LeGrad: An Explainability Method for Vision Transformers via Feature Formation Sensitivity", ICCV 2025,
        arXiv:2404.03214. Differs: layers are averaged instead of summed, and values are not scaled to [0, 1].
    """
    records = chain(recording, probability=False)
    graded(recording)
    count = len(records) if last_layers is None else last_layers
    if not 1 <= count <= len(records):
        raise OptionError(f"last_layers must lie in [1, {len(records)}], got {last_layers}.")
    layout = records[0].keys
    batch, heads, tokens, _ = records[0].operator.shape
    total = torch.zeros(batch, len(layout), dtype=dtype, device=records[0].operator.device)
    for record in records[-count:]:
        for _, keys, grad in record.operator.to(dtype).gradient_pieces():
            total.index_add_(1, keys, grad.clamp(min=0).sum((1, 2)))
    return to_map(recording, "legrad", "LeGrad", total / (count * heads * tokens), layout, {"last_layers": count})


METHODS = {
    "legrad": Method(
        function=legrad, needs=needs("attention", "layer gradients"), accepts=chain_refusal_of_any_rows, targeted=True
    ),
}
