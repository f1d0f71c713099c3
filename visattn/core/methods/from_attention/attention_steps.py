"""How the attention of one query comes about: dot products, scores, weights, and what each key adds to the output."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from visattn._support.language import option, worded
from visattn._support.modes import in_own_modes
from visattn._support.reprs import brief
from visattn.core.maps import AttentionMap, MapFacts
from visattn.core.methods.from_attention.attention import chosen_records
from visattn.core.methods.queries import Query, tokens_of, weights_of
from visattn.core.methods.result import to_map
from visattn.core.methods.selection import one_forward
from visattn.core.operators import SoftmaxOperator
from visattn.core.operators.softmax import unblocked
from visattn.core.records import AttentionRecord, Recording
from visattn.errors import OptionError

__all__ = ["STEPS", "AttentionSteps", "attention_steps"]

STEPS = ("dot product", "score", "weight", "output")


@dataclass(frozen=True, eq=False)
class AttentionSteps:
    """Steps of the attention of one query in one head of one image.

    Attributes:
        map: Values on the grid, with the axis `step`: `q . k`; the score `scale q . k + bias`; the weight, its softmax; and
            `weight (v . o) / |o|`, what each key adds to the length of the output `o`. Keys that the query cannot see, behind a mask or in
            another window, have the lowest dot product and score of the others.
        weights: Weights of all keys, those before the grid first, `(K,)`.
        hidden: Number of keys that the query cannot see.
        padding: Weight of the query on padding, which is no key of the image.
        variances: Variance of the dot products, and of the same times the scale, over all pairs of the head that see each other.
        entropies: Entropy of the weights in nats, the mean over the queries of the head that see a key: without the scale, and with it.
            Padding counts as one more key.
        width: Number of entries of a query, d.
        scale: Factor on the dot products.
    """

    map: AttentionMap
    weights: Tensor
    hidden: int
    padding: float
    variances: tuple[float, float]
    entropies: tuple[float, float]
    width: int
    scale: float

    __repr__ = brief

    @property
    def facts(self) -> tuple[str, ...]:
        """What the scale does in this head, and what the query does not see, as lines of text."""
        before, after = self.variances
        without, with_it = self.entropies
        lines = [
            f"variance over all pairs: {before:.3g} of the dot products, {after:.3g} of the scaled ones (scale {self.scale:.3g}, width "
            f"{self.width})",
            f"entropy of the weights, mean over all queries: {without:.3g} nats without the scale, {with_it:.3g} with it",
        ]
        if self.scale == 1:
            lines = [
                f"variance over all pairs: {before:.3g} of the dot products (width {self.width}); a scale would be part of the queries",
                f"entropy of the weights, mean over all queries: {with_it:.3g} nats",
            ]
        if self.hidden:
            lines.append(
                f"{self.hidden} keys that the query cannot see are drawn with the lowest dot product and score of the others"
            )
        if self.padding > 0:
            lines.append(f"{self.padding:.3g} of the query's weight lies on padding")
        return tuple(lines)


@in_own_modes
def attention_steps(
    recording: Recording, *, layer: int | str = -1, head: int = 0, query: Query = "auto", call: int = 0
) -> AttentionSteps:
    """Compute the steps of the attention of one query, in float64.

    Args:
        recording: Recording of one image, made with `capture(model, values=True)`.
        layer: Index of the layer, or its dotted name.
        head: Index of the head.
        query: One query token: `cls`, `patch:ROW,COL` or `register:N`; `auto` if the model reads a single token.
        call: Index of the call, for layers that call their attention several times.

    Returns:
        The steps.

    Raises:
        OptionError: If a layer, head, query or call does not exist, the query stands for several tokens, the recording has several images
            or no values, or the scale is not known because the model writes its attention out.

    Reference:
        Vaswani et al., "Attention Is All You Need", NeurIPS 2017, arXiv:1706.03762, section 3.2.1 and footnote 4: if the entries of queries
        and keys are independent with variance 1, the variance of `q . k` is their number.
    """
    (record,) = chosen_records(one_forward(recording), layer, query, call)
    operator = record.operator
    heads = operator.shape[1]
    if operator.shape[0] != 1:
        raise OptionError(f"steps are those of one image, got {operator.shape[0]}. Choose one: recording.image(0).")
    if not -heads <= head < heads:
        raise OptionError(f"head must lie in [{-heads}, {heads - 1}], got {head}.")
    if not isinstance(operator, SoftmaxOperator):
        raise OptionError(
            f"{record.layer} writes its attention out, so the scale is part of its queries or scores. Choose a layer with fused attention."
        )
    if record.value is None:
        fix = worded("Use capture(model, values=True).", "Pass the photo and --model; studies hold no values.")
        raise OptionError(f"values were not kept. {fix}")
    number, chosen = _token(record, query, recording)
    products, scores = _pairs(operator, head)
    exact = operator.to(torch.float64)
    weights = exact.rows(torch.tensor([number]))[0, head, 0].cpu()
    index = operator.key_index
    value = (record.value if index is None else unblocked(record.value, index, len(record.keys)))[0, head].double().cpu()
    output = weights @ value
    added = weights * (value @ output) / torch.linalg.vector_norm(output).clamp_min(torch.finfo(output.dtype).tiny)  # 0 if o is 0
    is_seen = scores[number].isfinite()
    shown = [row.where(is_seen, row[is_seen].amin() if bool(is_seen.any()) else 0) for row in (products[number], scores[number])]
    values = torch.stack([*shown, weights, added]).float()[None]
    found = to_map(
        recording,
        "attention",
        "attention step by step",
        values[..., len(record.keys.prefix) :],
        record.keys,
        {"layer": record.layer, "head": head % heads, "query": chosen, "steps": True},
        axes=("step",),
        labels={"step": STEPS},
        facts=MapFacts(interval=True),
        queries=record.queries,
    )
    variance = float(products[scores.isfinite()].var(correction=0))
    unscaled = copy.copy(exact)
    unscaled.scale = 1.0
    return AttentionSteps(
        found.at(batch=0),
        weights.float(),
        int((~is_seen).sum()),
        float(exact.leaked()[0, head, number]),
        (variance, variance * operator.scale**2),
        (_mean_entropy(unscaled, head), _mean_entropy(exact, head)),
        operator.query.shape[-1],
        operator.scale,
    )


def _token(record: AttentionRecord, query: Query, recording: Recording) -> tuple[int, str]:
    """Return the index of the one token that a query names, and the query as text."""
    _, chosen = weights_of(query, record.queries, recording.reading, record.operator.device)
    tokens = [] if chosen in ("read", "weights") else [token for one in tokens_of(chosen, record.queries) for token in one]
    if len(tokens) != 1:
        example = record.queries.prefix[0] if record.queries.prefix else "patch:0,0"
        raise OptionError(
            f"steps are those of one query token, and '{chosen}' stands for {len(tokens) or 'several'}. "
            f"Choose one, such as {option('query', example)}."
        )
    return tokens[0], chosen


def _pairs(operator: SoftmaxOperator, head: int) -> tuple[Tensor, Tensor]:
    """Return the dot products and the scores of all pairs of one head, `(Q, K)` each, in float64; hidden pairs have the score -inf.

    In windows, pairs of different windows are hidden.
    """
    queries, keys = (tensor[0, head].double().cpu() for tensor in (operator.queries(), operator.keys()))
    products = queries @ keys.mT
    if operator.query_index is None or operator.key_index is None:
        bias = torch.zeros(()) if operator.bias is None else operator.bias[0, head % operator.bias.shape[1], 0].double().cpu()
        return products, products * operator.scale + bias
    scores = torch.full_like(products, -torch.inf)
    for block, (rows, columns) in enumerate(zip(operator.query_index.cpu(), operator.key_index.cpu(), strict=True)):
        inside = products[rows[:, None], columns] * operator.scale
        if operator.bias is not None:
            of_block = operator.bias[0, head % operator.bias.shape[1], block % operator.bias.shape[2]].double().cpu()
            inside = inside + of_block
        kept_rows, kept_columns = rows >= 0, columns >= 0
        scores[rows[kept_rows][:, None], columns[kept_columns]] = inside[kept_rows][:, kept_columns]
    return products, scores


def _mean_entropy(operator: SoftmaxOperator, head: int) -> float:
    """Return the entropy of the weights in nats, the mean over the queries of a head that see a key; padding counts as one more key."""
    leaked = operator.leaked()[0, head]
    total, count = 0.0, 0
    for tile in operator.tiles(scratch=True):
        weights = torch.cat([tile.weights[0, head], leaked[tile.queries, None]], 1)
        total += float(torch.special.entr(weights).sum())
        count += int((weights.sum(1) > 0).sum())
    return total / max(count, 1)
