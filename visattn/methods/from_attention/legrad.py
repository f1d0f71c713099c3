"""LeGrad: gradients of attention maps, each layer with its own score."""

from __future__ import annotations

import torch

from visattn.errors import OptionError
from visattn.maps import AttentionMap
from visattn.methods.method import Method, needs
from visattn.methods.result import to_map
from visattn.methods.selection import chain, chain_refusal_of_any_rows, graded
from visattn.records import Recording


def legrad(recording: Recording, *, layers: int | None = None, dtype: torch.dtype = torch.float32) -> AttentionMap:
    """LeGrad: where a score would rise if more attention went there, whoever asks.

    Of each layer the positive part of `dA` is averaged over heads and queries; layers are averaged. Attention itself does not enter,
    so no softmax is computed.

    Args:
        recording: Self-attention of every layer, each with the gradient of *its own* score: what the model's head makes of the
            tokens behind that layer. `explain` does that; by hand it is `recording.gradients({layer: score, ...})`.
        layers: How many of the last layers count; None: all, as in the paper. The authors' code counts 2.
        dtype: float64 computes in double precision.

    Returns:
        Map with the axis `batch`; non-negative, not normalized. All zero where nothing would raise the score.

    Raises:
        OptionError: If there is no gradient, there are not so many layers, or they do not share one token set.

    Reference:
        Bousselham et al., "LeGrad: An Explainability Method for Vision Transformers via Feature Formation Sensitivity", ICCV 2025,
        arXiv:2404.03214. Differs: layers are averaged, not added, and nothing is scaled to [0, 1].
    """
    records = chain(recording, probability=False)
    graded(recording)
    count = len(records) if layers is None else layers
    if not 1 <= count <= len(records):
        raise OptionError(f"layers must lie in [1, {len(records)}], got {layers}.")
    layout = records[0].keys
    batch, heads, tokens, _ = records[0].operator.shape
    total = torch.zeros(batch, len(layout), dtype=dtype, device=records[0].operator.device)
    for record in records[-count:]:
        for _, keys, grad in record.operator.to(dtype).gradient_pieces():
            total.index_add_(1, keys, grad.clamp(min=0).sum((1, 2)))
    return to_map(recording, "legrad", "LeGrad", total / (count * heads * tokens), layout, {"layers": count})


METHODS = {
    "legrad": Method(
        function=legrad, needs=needs("attention", "layer gradients"), accepts=chain_refusal_of_any_rows, targeted=True
    ),
}
