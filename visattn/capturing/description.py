"""What `capture` must be told about a model; a family writes it, capture only reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from visattn._support.types import Kind
from visattn.provenance import Provenance
from visattn.records import TokenLayout

Placement = tuple[Kind, TokenLayout, TokenLayout]  # kind, queries, keys


@dataclass(frozen=True)
class Anatomy:
    """Facts about one model.

    Attributes:
        tokens: Modules whose output is the tokens, by dotted name, in order.
        readout: The query that stands for the whole image: `cls`, `cls+distillation`, `mean` or `pool`; empty where nothing is known.
            What a forward shows goes before it, unless it was `stated`.
        provenance: The model's name and its weights.
        output_weight: `owner -> (D, heads * d)` weight of the projection that follows the heads at once, with the scale of the layer
            behind it, or None.
        adds_to: `owner -> name` of the module to whose input the owner's result is added, or None.
        answers_at_keys: Whether query `i` of a window of this owner is answered at its token `i`, wherever the query came from.
        stated: Whether the user has said what the readout is.
        place: `(owner, q, k, input size) -> (kind, queries, keys)`, for a model whose tokens are not to be followed; raises
            `LayoutError` where the place is not known.
    """

    tokens: Mapping[str, nn.Module]
    readout: str
    provenance: Provenance = field(default_factory=Provenance)
    output_weight: Callable[[nn.Module], Tensor | None] = lambda _: None
    adds_to: Callable[[nn.Module], str | None] = lambda _: None
    answers_at_keys: Callable[[nn.Module], bool] = lambda _: False
    stated: bool = False
    place: Callable[[nn.Module, int, int, tuple[int, int]], Placement] | None = None
