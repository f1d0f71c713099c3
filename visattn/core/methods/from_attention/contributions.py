"""Direct contributions of patches to a score: a map that adds up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from visattn._support.language import option
from visattn._support.modes import in_own_modes
from visattn._support.reprs import brief
from visattn.core.maps import AttentionMap, MapFacts
from visattn.core.methods.method import Method, needs
from visattn.core.methods.result import to_map
from visattn.core.methods.selection import NOTHING, named, one_forward
from visattn.core.operators import Operator
from visattn.core.records import AttentionRecord, Recording, TokenLayout
from visattn.core.records.terms import ScoreTerms, Term
from visattn.errors import OptionError

__all__ = ["Contribution", "contributions", "listed", "others", "parts_of", "refusal"]

_EXACT = 1e-5  # largest difference between a sum and what it should be, over the sum of the magnitudes; float32 stays below 2e-6


@dataclass(frozen=True, eq=False)
class Contribution:
    """What one attention call adds directly to a score.

    Attributes:
        layer: Name of the layer, with the index of the call unless it is the first.
        patches: `(heads, cells)` share of each patch through each head.
        tokens: `(heads, prefix)` share of each token before the grid, such as the class token.
        names: Names of these tokens.
        padding: `(heads,)` share of the padding of windows, which lies nowhere in the image.
        bias: Share of the biases of the output projection.
        layout: Layout of the keys.
        difference: Sum of all shares less that of the model's own output of the heads.
    """

    layer: str
    patches: Tensor
    tokens: Tensor
    names: tuple[str, ...]
    padding: Tensor
    bias: float
    layout: TokenLayout
    difference: float

    __repr__ = brief

    @property
    def heads(self) -> Tensor:
        """`(heads,)` what each head adds, through all tokens and padding, without biases."""
        return self.patches.sum(1) + self.tokens.sum(1) + self.padding


@in_own_modes
def contributions(
    recording: Recording, *, layer: int | str = "all", head: int | None = None, dtype: torch.dtype = torch.float64
) -> AttentionMap:
    """Compute direct contributions: how much of a score comes from each patch, through attention heads.

    The output of a transformer is linear in what its layers add to the residual stream, once the statistics of its last normalization are
    taken as numbers. So a score is a sum: embedding, heads, MLPs and biases. The share of a head is again a sum over the patches that it
    reads, `A_ij (v_j . g_i)`, where `g_i` is the gradient of the score at the head's output for query `i`. The map holds this sum over
    queries, layers and heads. All other terms are in the notes, and everything adds up to the score; what remains is rounding.

    *Direct* leaves out what later layers make of a head's output: their shares are their own.

    Args:
        recording: Recording of one image, with the terms of a score; `visattn.explain` makes it.
        layer: Index of a layer, its dotted name, or `all`.
        head: Index of a head; None: all.
        dtype: Compute type.

    Returns:
        Map with the axis `batch`, signed, in the units of the score. Layers on coarser grids are spread evenly over the finest cells.

    Raises:
        OptionError: If the score is not such a sum, attention that it depends on could not be located, or the layer or head does not exist.

    Reference:
        Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021 (direct effects, frozen normalization). Gandelsman, Efros &
        Steinhardt, "Interpreting CLIP's Image Representation via Text-Based Decomposition", ICLR 2024, arXiv:2310.05916, section 3, whose
        shares of heads and tokens these are. Differs: layers are found on the tape of the forward pass, biases are separate terms, and an
        attention pooling is linear with its weights frozen.
    """
    terms, parts = parts_of(recording, dtype=dtype)
    names = [part.layer for part in parts]
    chosen = parts if layer == "all" else [parts[_index(layer, names)]]
    heads = len(chosen[0].patches)
    if head is not None and not all(-len(part.patches) <= head < len(part.patches) for part in chosen):
        raise OptionError(f"head must lie in [{-heads}, {heads - 1}], got {head}.")
    finest = max((part.layout for part in chosen), key=lambda layout: math.prod(layout.grid))
    cells = sum((_on(finest, part, head) for part in chosen), torch.zeros(1))
    shown = float(cells.nan_to_num().sum())
    return to_map(
        recording,
        "contributions",
        "direct contribution",
        cells[None],
        finest,
        {"layer": chosen[0].layer if layer != "all" else layer, "head": "all" if head is None else head},
        signed=True,
        facts=MapFacts(numbers=tuple(listed(terms, parts))),
        notes=tuple(_notes(terms, parts, shown)),
    )


def parts_of(recording: Recording, *, dtype: torch.dtype = torch.float64) -> tuple[ScoreTerms, list[Contribution]]:
    """Return the terms of a score, and what each attention call that it depends on directly adds to it, in call order.

    Raises:
        OptionError: See `contributions`.
    """
    if reason := refusal(one_forward(recording)):
        raise OptionError(reason)
    terms = recording.terms
    assert terms is not None  # noqa: S101 - checked above
    records = {(record.layer, record.call): record for record in recording}
    parts = [
        _shares(records[term.layer, term.call], term, dtype)
        for term in terms.terms
        if term.kind == "attention" and (term.layer, term.call) in records and records[term.layer, term.call].kind != "pool"
    ]
    inexact = next((part for part in parts if abs(part.difference) > _EXACT * terms.absolute), None)
    if inexact is not None:
        raise OptionError(
            f"{named(inexact.layer)}: shares of tokens sum to {inexact.difference:+.2g} more than its heads add to the score, so they are "
            "not drawn. Use method 'relevance'."
        )
    return terms, [part for part in parts if part.layout.grid]


def listed(terms: ScoreTerms, parts: Sequence[Contribution]) -> list[tuple[str, float]]:
    """Return the name and the share of every term: the patches through each layer, its other tokens, MLPs, embedding and biases."""
    of_layer = {part.layer: part for part in parts}
    rows = list[tuple[str, float]]()
    for term in terms.terms:
        part = of_layer.get(_name(term)) if term.kind == "attention" else None
        if part is None:
            rows += _other(term)
            continue
        rows.append((f"{part.layer}: patches", float(part.patches.sum())))
        rows += [(f"{part.layer}: {name}", float(share)) for name, share in zip(part.names, part.tokens.sum(0), strict=True)]
        rows += [*_padding(part), (f"{part.layer}: biases", part.bias)]
    return rows


def others(terms: ScoreTerms, parts: Sequence[Contribution]) -> list[tuple[str, float]]:
    """Return the name and the share of every term that is none of these attention calls, and of what they read of padding."""
    layers = {part.layer for part in parts}
    rows = [row for term in terms.terms if term.kind != "attention" or _name(term) not in layers for row in _other(term)]
    return [*rows, *(row for part in parts for row in _padding(part))]


def _padding(part: Contribution) -> list[tuple[str, float]]:
    return [(f"{part.layer}: padding", float(part.padding.sum()))] if bool(part.padding.any()) else []


def _other(term: Term) -> list[tuple[str, float]]:
    """Return the name and the share of a term, unless it is zero."""
    name = {"bias": "biases", "embedding": "embedding"}.get(term.kind, term.layer or "embedding")
    return [(name, term.total)] if term.total else []


def _shares(record: AttentionRecord, term: Term, dtype: torch.dtype) -> Contribution:
    operator, prefix = record.operator.to(dtype), len(record.keys.prefix)
    if operator.gradient is None:
        raise OptionError(f"{record.name}: the score has no gradient at its weights, so its contributions have no place.")
    shares = torch.zeros(operator.shape[1], operator.shape[3], dtype=dtype, device=operator.device)
    for tile in operator.tiles(scratch=True):
        assert tile.grad is not None  # noqa: S101 - of a score
        shares.index_add_(1, tile.keys, (tile.weights * tile.grad)[0].sum(1))
    padding = _of_padding(operator)
    return Contribution(
        _name(term),
        shares[:, prefix:].cpu(),
        shares[:, :prefix].cpu(),
        record.keys.prefix,
        padding,
        term.constant or 0.0,
        record.keys,
        float(shares.sum()) + float(padding.sum()) - (term.amount or 0.0),
    )


def _of_padding(operator: Operator) -> Tensor:
    """Return the share of each head that goes to padding, `(heads,)`."""
    found = torch.zeros(operator.shape[1], dtype=operator.dtype, device=operator.device)
    assert operator.gradient is not None  # noqa: S101 - of a score
    for block, index in enumerate(() if operator.key_index is None else operator.key_index):
        padded = (index < 0).nonzero().flatten()
        if len(padded):
            grad = operator.gradient.part(block, slice(None), padded, operator.dtype)
            found += (operator.block(block)[..., padded] * grad)[0].sum((1, 2))
    return found.cpu()


def _name(term: Term) -> str:
    return term.layer + (f" #{term.call}" if term.call else "")


def _on(layout: TokenLayout, part: Contribution, head: int | None) -> Tensor:
    """Return the shares of the patches on a grid, whose cells divide those of the layer's own evenly."""
    own = part.layout.on_grid(part.patches.sum(0) if head is None else part.patches[head])
    if part.layout.grid == layout.grid:
        return own
    factors = [many // few for many, few in zip(layout.grid, part.layout.grid, strict=True)]
    if part.layout.box != layout.box or [factor * few for factor, few in zip(factors, part.layout.grid, strict=True)] != list(
        layout.grid
    ):
        raise OptionError(
            f"{named(part.layer)} has another grid ({' x '.join(map(str, part.layout.grid))}) that does not divide "
            f"{' x '.join(map(str, layout.grid))}. Choose one layer: {option('layer', part.layer)}."
        )
    for axis, factor in enumerate(factors):
        own = own.repeat_interleave(factor, axis) / factor
    return own


def _index(layer: int | str, names: Sequence[str]) -> int:
    if isinstance(layer, str):
        found = [number for number, name in enumerate(names) if name == layer or name.startswith(f"{layer}.")]
        if len(found) != 1:
            raise OptionError(f"layer must be one of {', '.join(names)} or all, got {layer}.")
        return found[0]
    if not -len(names) <= layer < len(names):
        raise OptionError(f"layer must lie in [{-len(names)}, {len(names) - 1}], got {layer}.")
    return layer


def _notes(terms: ScoreTerms, parts: Sequence[Contribution], shown: float) -> list[str]:
    """Say what the map leaves out, what was frozen, and how exactly everything adds up."""
    rows = listed(terms, parts)
    patches = sum(float(part.patches.sum()) for part in parts)
    tokens = sum(float(part.tokens.sum()) for part in parts)
    padding = sum(float(part.padding.sum()) for part in parts)
    branches = sum(term.total for term in terms.terms if term.kind == "branch")
    embedding = sum(term.total for term in terms.terms if term.kind == "embedding")
    biases = sum(part.bias for part in parts) + sum(term.total for term in terms.terms if term.kind == "bias")
    other = math.fsum(share for _, share in rows) - (patches + tokens + padding + branches + embedding + biases)
    worst = max((abs(part.difference) for part in parts), default=0.0)
    scale = terms.absolute or 1.0
    lines = [
        f"the map sums to {shown:.4g} of the score {terms.score:.4g}",
        f"all terms: patches through heads {patches:+.4g}, class token and registers through heads {tokens:+.4g}, MLPs {branches:+.4g}, "
        f"embedding {embedding:+.4g}, biases {biases:+.4g}"
        + (f", padding of windows {padding:+.4g}" if padding else "")
        + (f", other attention {other:+.4g}" if abs(other) > 1e-9 * scale else ""),
        f"the terms sum to the score up to {abs(terms.difference):.1e}, {abs(terms.difference) / scale:.1e} of their magnitudes; heads "
        f"equal the model's own up to {worst:.1e}",
    ]
    return [*lines, f"frozen: {', '.join(terms.frozen)}"] if terms.frozen else lines


def _refusal_of(terms: ScoreTerms, recording: Recording) -> str | None:
    """Return why a score is not a sum of direct contributions, or None if it is."""
    scale = terms.absolute
    for term in terms.terms:
        if term.hides and (abs(term.total) > 1e-12 * scale or not scale):
            return (
                f"the score passes through {term.operation} in {named(term.layer)}, which is not known to be linear and has no way around "
                f"it, so {named(term.hides[0])} has no direct contribution. Use method 'relevance'."
            )
    if not scale:
        return "the score is zero and depends on nothing; a new classification head may be all zeros."
    if terms.dtype is not None and terms.dtype.itemsize < torch.float32.itemsize:
        return "in half precision, terms do not add up to the score. Use the model in float32."
    if abs(terms.difference) > _EXACT * scale:
        return (
            f"the score {terms.score:.4g} is not the sum of its terms ({terms.sum:.4g}): it is no linear function of the output, or the "
            f"model cuts its graph. Use a logit or a sum of logits as target ({option('target_space', 'logit')})."
        )
    records = {(record.layer, record.call): record for record in recording}
    reached = [term for term in terms.terms if term.kind == "attention" and term.amount]
    for term in reached:
        record = records.get((term.layer, term.call))
        if record is None or record.kind in ("unplaced", "sampled"):
            why = (
                "was not recorded"
                if record is None
                else record.reason or "weights points that it computes (deformable attention)"
            )
            return f"{named(term.layer)}: {why}, so its contributions have no place. Use method 'relevance'."
    channel = next((term for term in reached if records[term.layer, term.call].kind == "channel"), None)
    if channel is not None:
        return f"{named(channel.layer)}: channels attend to channels, so its contributions have no place. Use method 'gradcam'."
    if not any((record := records.get((term.layer, term.call))) is not None and record.keys.grid for term in reached):
        return "the score does not depend directly on any attention to patches."
    return None


def refusal(recording: Recording) -> str | None:
    """Return why the method does not apply to a recording, or None if it does."""
    if recording.terms is None or recording.terms.score is None:
        return (
            "the terms of a score were not recorded. Use visattn.explain with method 'contributions'."
            if len(recording)
            else NOTHING
        )
    return _refusal_of(recording.terms, recording)


METHODS = {
    "contributions": Method(
        function=contributions, needs=needs("attention", "gradients", "terms"), accepts=refusal, targeted=True
    ),
}
