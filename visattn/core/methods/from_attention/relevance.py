"""Relevance propagation for transformers (Chefer et al.)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from visattn._support.faces import Later
from visattn._support.modes import in_own_modes
from visattn.core.maps import AttentionMap
from visattn.core.methods.from_attention import recursion
from visattn.core.methods.method import gradient_method
from visattn.core.methods.queries import Query
from visattn.core.methods.result import to_map
from visattn.core.methods.selection import chain, chain_refusal_of_any_rows, graded, of_the_image, one_forward
from visattn.core.records import Recording

if TYPE_CHECKING:
    from visattn.core.methods.from_attention import relevance_of_sets as of_sets
else:
    of_sets = Later("visattn.core.methods.from_attention.relevance_of_sets")


@in_own_modes
def relevance(
    recording: Recording, *, start_layer: int = 0, query: Query = "auto", dtype: torch.dtype = torch.float32
) -> AttentionMap:
    r"""Compute relevance (Chefer et al.): positive evidence for the target, propagated through all layers.

    Each layer has `A' = mean_h (dA * A)^+`. For vision transformers the map is `query^T (I + A'_L) ... (I + A'_start)` minus the query
    itself. It is computed as a row vector from the last layer down, without building a matrix. Models with several token sets (object
    queries of a decoder, or text and image) have one relevance matrix for each pair of sets. Every attention updates these matrices in
    the order of the forward pass. They are built in full, with the heads of each layer fused.

    Args:
        recording: All attention of one forward pass, with the gradient of the target's score: `recording.gradients(score)`.
        start_layer: First layer to include.
        query: Query token whose output is explained; `auto` is what the model reads. For models with several token
            sets, choose a token of the last set that attends to the image, as `query:N` or as a vector of weights.
        dtype: Compute type; float64 for double precision.

    Returns:
        Map with the axis `batch`; non-negative and not normalized. All zero if there is no evidence for the target.

    Raises:
        OptionError: If there is no gradient, the layers do not compose, or the query does not exist.

    Reference:
        Chefer, Gur & Wolf, "Generic Attention-model Explainability for Interpreting Bi-Modal and Encoder-Decoder Transformers", ICCV
        2021, arXiv:2103.15679, equations 5 to 11. Differs: all-zero rows of `R - I` remain zero when normalized, where the
        authors' code divides 0 by 0. For models with a pooling head, the recursion starts from the `A'` of that head.
    """
    recording = of_the_image(one_forward(recording))
    if _has_sets(recording):
        row, layout, chosen = of_sets.between_sets(recording, start_layer, query, dtype)
    else:
        records = chain(recording, probability=False)
        graded(recording)
        recursion.check_start(start_layer, len(records))
        layout = records[0].keys
        row, chosen = recursion.beginning(recording, records, query, recursion.evidence, dtype)
        own = 0 if chosen.startswith("pool") else row
        for record in reversed(records[start_layer:]):
            row = recursion.step_of_evidence(record.operator.to(dtype), row)
        row = row - own
    return to_map(recording, "relevance", "relevance", row[:, 0], layout, {"start_layer": start_layer, "query": chosen})


def refusal(recording: Recording) -> str | None:
    """Return why the layers of a recording do not compose, or None if they do."""
    recording = of_the_image(recording)
    return of_sets.sets_refusal(recording) if _has_sets(recording) else chain_refusal_of_any_rows(recording)


def _has_sets(recording: Recording) -> bool:
    """Check whether several token sets attend to each other, or tokens that lie nowhere in the image among themselves."""
    return any(record.kind == "cross" or (record.kind == "self" and not record.keys.grid) for record in recording)


METHODS = {
    "relevance": gradient_method(relevance, refusal, aliases=("chefer",)),
}
