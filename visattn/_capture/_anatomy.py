"""What `capture` must be told about a model; a family writes it, capture only reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from visattn._types import Kind
from visattn.provenance import Provenance
from visattn.records import TokenLayout

Placement = tuple[Kind, TokenLayout, TokenLayout]  # kind, queries, keys


@dataclass(frozen=True)
class Anatomy:
    """Facts about one model.

    Attributes:
        stem: The module that receives the pixels `(B, C, H, W)`.
        tokens: Modules whose output is the tokens `(B, N, D)`, by dotted name, in order.
        place: `(owner, q, k, input size) -> (kind, queries, keys)`: where the tokens of a call lie; raises `LayoutError` where
            that is not known.
        layout: `input size -> layout` of the tokens that `tokens` give.
        output_weight: `owner -> (D, heads * d)` weight of the projection that follows the heads at once, or None.
        readout: The query that stands for the whole image: `cls`, `cls+distillation`, `mean` or `pool`.
        provenance: The model's name and its weights.
    """

    stem: nn.Module
    tokens: Mapping[str, nn.Module]
    place: Callable[[nn.Module, int, int, tuple[int, int]], Placement]
    layout: Callable[[tuple[int, int]], TokenLayout]
    output_weight: Callable[[nn.Module], Tensor | None]
    readout: str
    provenance: Provenance = field(default_factory=Provenance)
