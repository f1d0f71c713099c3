"""Cosine similarity between one token and all patches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch.nn.functional as F
from torch import Tensor

from visattn._support.checks import one_of
from visattn._support.language import option
from visattn._support.modes import in_own_modes
from visattn.core.maps import AttentionMap, MapFacts
from visattn.core.methods.method import Method, Need, needs
from visattn.core.methods.queries import named, token_of
from visattn.core.methods.result import to_map
from visattn.core.methods.selection import features_refusal, one_forward, tokens_of
from visattn.core.operators import SoftmaxOperator
from visattn.core.records import Recording, TokenLayout
from visattn.errors import OptionError

Of = Literal["tokens", "keys", "queries", "values"]


@in_own_modes
def similarity(recording: Recording, *, query: str, of: Of = "tokens", layer: int | str = -1, image: int = 0) -> AttentionMap:
    """Compute the cosine similarity between one token and every patch, in its own image and in the others of the batch.

    Args:
        recording: Recording with token features (`of="tokens"`), attention, or values (`capture(model, values=True)`).
        query: Token to compare: `patch:ROW,COL`, `cls` or `register:N`; for photos also `pixel:X,Y`.
        of: Vectors to compare: token features, or the keys, queries or values of an attention layer with concatenated heads.
        layer: Index or dotted name among the layers with such vectors.
        image: Index of the query token's image in the batch.

    Returns:
        Map with the axis `batch`; values in [-1, 1], with 1 at the query patch itself.

    Raises:
        OptionError: If the token, the vectors or the image do not exist.
    """
    one_of(of, get_args(Of), "kind of vector")
    vectors, layout, name = _vectors(one_forward(recording), of, layer)
    if not 0 <= image < len(vectors):
        raise OptionError(f"image must lie in [0, {len(vectors) - 1}], got {image}.")
    unit = F.normalize(vectors.double(), dim=-1)
    chosen = "cls" if query == "auto" and "cls" in layout.prefix else named(query, layout)
    cosine = unit @ unit[image, token_of(chosen, layout)]  # (B, N)
    values = cosine.clamp(-1, 1).float()
    return to_map(
        recording,
        "similarity",
        "cosine similarity",
        values,
        layout,
        {"query": chosen, "of": of, "layer": name, "image": image},
        facts=MapFacts(interval=True),
    )


def _vectors(recording: Recording, of: Of, layer: int | str) -> tuple[Tensor, TokenLayout, str]:
    """Return `(B, N, D)` vectors, their layout and the name of their layer."""
    if of == "tokens":
        feature = tokens_of(recording, layer)
        assert feature.layout is not None  # noqa: S101 - tokens always have one
        return feature.value, feature.layout, feature.name
    record = recording.select(kind="self", layer=layer)[0]
    operator = record.operator
    if of == "values":
        if record.value is None:
            raise OptionError("values were not recorded. Use capture(model, values=True).")
        vectors, layout = record.value, record.keys
    elif isinstance(operator, SoftmaxOperator) and operator.query_index is None:
        vectors = (operator.key if of == "keys" else operator.query)[:, :, 0]
        layout = record.keys if of == "keys" else record.queries
    else:
        raise OptionError(f"{record.layer} has no {of} in token order. Use {option('of', 'tokens')}.")
    return vectors.transpose(1, 2).flatten(2), layout, record.layer


def _values(parameters: Mapping[str, Any]) -> frozenset[Need]:
    return needs("values") if parameters.get("of") == "values" else needs()


METHODS = {
    "similarity": Method(function=similarity, needs=needs("features"), accepts=features_refusal, more=_values),
}
