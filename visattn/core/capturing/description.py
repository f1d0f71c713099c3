"""Facts about a model that `capture` cannot find out by itself. Model families provide them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from visattn._support.types import Kind
from visattn.core.provenance import Provenance
from visattn.core.records import TokenLayout

Placement = tuple[Kind, TokenLayout, TokenLayout]  # kind, queries, keys
Place = Callable[
    [nn.Module, int, int, tuple[int, int]], Placement
]  # takes the owner, the numbers of queries and keys, and the input size


@dataclass(frozen=True)
class ModelDescription:
    """Facts about a model.

    Attributes:
        tokens: Modules whose outputs are tokens, by dotted name, in the order of the forward pass.
        readout: Query that represents the whole image: `cls`, `cls+distillation`, `mean` or `pool`; empty if unknown. A readout found
            by tracing a forward pass takes precedence unless `stated` is set.
        provenance: Name of the model and its weights.
        output_weight: Function from an attention module to the `(D, heads * d)` weight of the projection that directly follows its
            heads, multiplied by the layer scale behind it; None if there is none.
        adds_to: Function from an attention module to the name of the module whose input its result is added to (the residual
            connection), or None.
        answers_at_keys: Function that returns True for an attention module whose output row `i` belongs to token `i` of the window,
            whatever the query was computed from.
        ends: Names of the last of these modules in each branch of the model; empty if it has one branch.
        stated: Whether the user has set the readout.
        place: Function `(owner, q, k, input size) -> (kind, queries, keys)` for models whose tokens are not traced. It raises
            `LayoutError` if it cannot locate the tokens.
    """

    tokens: Mapping[str, nn.Module]
    readout: str
    provenance: Provenance = field(default_factory=Provenance)
    output_weight: Callable[[nn.Module], Tensor | None] = lambda _: None
    adds_to: Callable[[nn.Module], str | None] = lambda _: None
    answers_at_keys: Callable[[nn.Module], bool] = lambda _: False
    ends: tuple[str, ...] = ()
    stated: bool = False
    place: Place | None = None
