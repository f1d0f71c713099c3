"""Attention sinks: the few tokens that receive many times their share of attention and can make maps misleading."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from visattn._support.modes import in_own_modes
from visattn.core.methods.selection import chain
from visattn.core.operators.softmax import stacked
from visattn.core.provenance import Sink
from visattn.core.records import AttentionRecord, Recording

__all__ = ["attention_received", "find_sinks", "sink_mass", "sinks_of_scores"]

THRESHOLD = 20.0  # times the uniform share; DINOv2's sinks score 23 to 225, its patches on objects below 19
_SAMPLE = 32  # queries of each layer from which candidates are found
_LIKELY = 4.0  # a candidate scores at least a fourth of the threshold on the sample


@in_own_modes
def attention_received(recording: Recording) -> Tensor:
    """Compute the attention that each token receives, relative to the uniform share: `K * mean_i A[i, j]`, averaged over heads.

    Args:
        recording: Self-attention over one token set.

    Returns:
        `(B, layers, K)` scores, which are 1 under uniform attention.

    Raises:
        OptionError: If there is no self-attention over one token set.
    """
    return torch.stack([_score(record) for record in chain(recording)], dim=1)


@in_own_modes
def find_sinks(recording: Recording, threshold: float = THRESHOLD, layer: str = "") -> tuple[tuple[Sink, ...], ...]:
    """Find patches whose `attention_received` exceeds `threshold` in some layer, or in one, highest first, for each image.

    Prefix tokens are not counted, since class and register tokens are meant to receive attention. Candidates are found on a fixed
    random sample of 32 queries per layer, then scored on all: each score is exact, but a patch that few queries attend to may be
    missed. `attention_received` computes all scores, at about the cost of the attention itself.

    Args:
        recording: Self-attention over one token set.
        threshold: Score above which a patch is a sink, as a multiple of the uniform share.
        layer: Name of the only layer that counts; empty: any layer.

    Returns:
        Sinks of each image of the batch.

    Raises:
        OptionError: If there is no self-attention over one token set.

    Reference:
        Gu et al., "When Attention Sink Emerges in Language Models", arXiv:2410.10781, scores keys by their column mean.
        Differs: the threshold is relative to the uniform share. Token norms (Darcet et al., arXiv:2309.16588) do not reveal these
        tokens in small models.
    """
    everywhere = chain(recording)
    records = [record for record in everywhere if layer in ("", record.layer, record.name)]
    if records:
        sampled = _sampled_scores(records)
        sampled[..., : len(records[0].keys.prefix)] = 0  # not counted
        likely = (sampled > threshold / _LIKELY).any(0).cpu()  # (layers, K)
        if bool(likely.any()):
            return sinks_of_scores(_scores_of(records, likely), records, threshold)
    return ((),) * everywhere[0].operator.shape[0]


def sinks_of_scores(
    scores: Tensor, records: Sequence[AttentionRecord], threshold: float = THRESHOLD
) -> tuple[tuple[Sink, ...], ...]:
    """Find sinks from `(B, layers, K)` scores of these records, as `attention_received` computes them; see `find_sinks`."""
    layout = records[0].keys
    best, where = scores.cpu().max(dim=1)  # (B, K)
    found = []
    for image, layers in zip(best, where, strict=True):
        tokens = [int(token) for token in (image > threshold).nonzero().flatten() if token >= len(layout.prefix)]
        tokens.sort(key=lambda token: -float(image[token]))
        cells = [(layout.cell(token), token) for token in tokens]
        found.append(
            tuple(Sink(*cell, round(float(image[token]), 2), records[int(layers[token])].layer) for cell, token in cells if cell)
        )
    return tuple(found)


@in_own_modes
def sink_mass(recording: Recording, found: Sequence[Sequence[Sink]], scores: Tensor | None = None) -> Tensor:
    """Compute the share of each layer's attention that other tokens give to sinks, averaged over heads and queries.

    Args:
        recording: Self-attention over one token set.
        found: Sinks of each image, as returned by `find_sinks`.
        scores: `attention_received(recording)`, if already computed.

    Returns:
        `(B, layers)` in [0, 1]; 0 for an image without sinks.

    Raises:
        OptionError: If there is no self-attention over one token set.
    """
    records = chain(recording)
    scores = attention_received(recording) if scores is None else scores
    layout, mass = records[0].keys, scores.new_zeros(scores.shape[:2])
    for image, sinks_ in enumerate(found):
        tokens = torch.tensor([layout.patch(sink.row, sink.column) for sink in sinks_], device=scores.device)
        each = torch.arange(len(tokens), device=scores.device)
        for number, record in enumerate(records if sinks_ else ()):
            own = record.operator.rows(tokens)[image][:, each, tokens].mean(0)
            mass[image, number] = (scores[image, number, tokens] - own).sum() / len(layout)
    return mass


def _score(record: AttentionRecord) -> Tensor:
    queries, keys = record.operator.shape[2:]
    uniform = torch.full((1, 1, 1, queries), 1 / queries, device=record.operator.device)
    return (uniform @ record.operator).mean(1)[:, 0] * keys


def _scores_of(records: Sequence[AttentionRecord], likely: Tensor) -> Tensor:
    """Return the scores `(B, layers, K)` of some tokens in each layer, and 0 for all others."""
    operator = records[0].operator
    scores = torch.zeros(operator.shape[0], *likely.shape, device=operator.device)
    for number, record in enumerate(records):
        tokens = likely[number].nonzero().flatten()
        if len(tokens):
            scores[:, number, tokens] = record.operator.columns(tokens).mean((1, 2)).to(scores.dtype) * record.operator.shape[3]
    return scores


def _sampled_scores(records: Sequence[AttentionRecord]) -> Tensor:
    """Return the scores `(B, layers, K)` of each token, from a sample of the queries if they are many."""
    queries, keys = records[0].operator.shape[2:]
    rows = _sample(queries)
    together = stacked([record.operator for record in records], rows)
    if together is not None:
        return together.dense().mean((1, 2)).reshape(len(records), -1, keys).transpose(0, 1) * keys
    return torch.stack([record.operator.rows(rows).mean((1, 2)) for record in records], dim=1) * keys


@cache
def _sample(queries: int) -> Tensor:
    return torch.randperm(queries, generator=torch.Generator().manual_seed(0))[:_SAMPLE]
