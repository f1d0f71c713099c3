"""Numbers of every head in its joint space: how well closeness stands for attention there, and where attention goes that says nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visattn._support.modes import in_own_modes
from visattn._support.tables import Row
from visattn._support.typed import typed
from visattn._support.types import Criterion
from visattn.embedding.correlations import distances, ranks, row_correlation, row_pearson, row_spearman, weighted_correlation
from visattn.embedding.space import LayerStates, Space
from visattn.errors import OptionError
from visattn.evaluation import mean_interval

IMAGES = 20
_POOLED = 2_000  # queries and keys of all images that are compared


@typed()
@in_own_modes
def head_numbers(
    space: Space, criterion: Criterion = "norms", *, heads: Sequence[int] | None = None, images: int = IMAGES, seed: int = 0
) -> list[Row]:
    """Compute the numbers of every head, see the columns of the table in the documentation of `visattn embed`.

    Args:
        space: Queries and keys.
        criterion: Choice of the scale, see `factor_of`.
        heads: Numbers of the heads; None: all.
        images: Most images whose rows are correlated, drawn evenly from the photos.
        seed: Seed of the draw of pooled tokens.

    Returns:
        A row for each head: `layer`, `head`, `factor` (scale of the queries), `norm_ratio` (median norm of keys by that of queries, over
        patches), `row_pearson` with the bounds `low` and `high` of its 95 % bootstrap interval over photos (None for one photo),
        `row_spearman`, `pooled_pearson` (queries against keys of all images, as AttentionViz reports it), `weighted` (see
        `weighted_correlation`), `attention_spearman` (ranks of distances against ranks of the attention itself, so with biases and within
        windows), and `null_attention`: mean attention of patches on class tokens, registers and sinks. NaN where nothing varies.

    Raises:
        OptionError: If `images` is below 1.
    """
    if images < 1:
        raise OptionError(f"images must be 1 or more, got {images}.")
    chosen = _spread(space.groups, images)
    return [
        row
        for states in space.layers
        for head in (range(len(states.queries)) if heads is None else heads)
        for row in [_of_head(space, states, head, criterion, chosen, seed)]
    ]


def _of_head(
    space: Space, states: LayerStates, head: int, criterion: Criterion, chosen: Sequence[int], seed: int
) -> dict[str, Any]:
    both = space.joint(states.layer, head, criterion)
    plain = states.tokens.plain
    norms = [float(each[plain].double().norm(dim=1).median()) for each in states.head(head)]
    pearson, spearman = {}, {}
    for image in chosen:
        some = plain & (states.tokens.image == image)
        if int(some.sum()) > 1:
            pair = both.queries[some], both.keys[some]
            pearson[image], spearman[image] = row_pearson(*pair), row_spearman(*pair)
    low, high = _interval(pearson, space.groups)
    generator = torch.Generator().manual_seed(seed)
    pooled = [each[plain][torch.randperm(int(plain.sum()), generator=generator)[:_POOLED]] for each in both[:2]]
    return {
        "layer": states.layer,
        "head": head,
        "factor": both.factor,
        "norm_ratio": norms[1] / norms[0] if norms[0] else math.nan,
        "row_pearson": _mean(_by_photo(pearson, space.groups)),
        "low": low,
        "high": high,
        "row_spearman": _mean(_by_photo(spearman, space.groups)),
        "pooled_pearson": row_pearson(pooled[0], pooled[1]),
        "weighted": weighted_correlation(both.queries[plain], both.keys[plain], seed=seed),
        "attention_spearman": _with_attention(states, head, both.queries, both.keys),
        "null_attention": _on_nothing(states, head),
    }


def _with_attention(states: LayerStates, head: int, queries: Tensor, keys: Tensor) -> float:
    """Correlate ranks of distances and of attention over the patches that a query attends to, and average over queries."""
    tokens, plain = states.tokens, states.tokens.plain
    of_patches = plain[states.some]
    some, rows = states.some[of_patches], states.rows[head][of_patches].double()
    found = []
    for image in torch.unique(tokens.image[some]).tolist():
        of_image = tokens.image[some] == image
        own = slice(image * tokens.per_image, (image + 1) * tokens.per_image)
        attention, apart = rows[of_image], distances(queries[some[of_image]], keys[own])
        seen = plain[own] & (attention > 0)
        attention, apart = (ranks(each.masked_fill(~seen, math.inf)) for each in (attention, apart))  # the others come last
        found.append(row_correlation(attention, apart, seen / seen.sum(1, keepdim=True).double()))
    return float(torch.cat(found).nanmean()) if found else math.nan


def _on_nothing(states: LayerStates, head: int) -> float:
    tokens = states.tokens
    some = states.some[tokens.plain[states.some]]  # the queries of patches
    rows = states.rows[head][tokens.plain[states.some]].double()
    plain = tokens.plain.view(-1, tokens.per_image)[tokens.image[some]]  # (queries, keys)
    return float((rows * ~plain).sum(1).mean())


def _spread(groups: Sequence[int], most: int) -> list[int]:
    """Choose images from as many photos as there are: first one of each photo, then the next; of a round that is too many, evenly."""
    rounds: list[list[int]] = []
    seen = dict.fromkeys(groups, 0)
    for image, group in enumerate(groups):
        if seen[group] == len(rounds):
            rounds.append([])
        rounds[seen[group]].append(image)
        seen[group] += 1
    chosen: list[int] = []
    for some in rounds:
        left = min(most - len(chosen), len(some))
        chosen += [some[round(at)] for at in np.linspace(0, len(some) - 1, left)]
    return sorted(chosen)


def _mean(values: Iterable[float]) -> float:
    """Return the mean of those that are numbers; NaN if none is."""
    known = [value for value in values if math.isfinite(value)]
    return float(np.mean(known)) if known else math.nan


def _by_photo(values: dict[int, float], groups: Sequence[int]) -> list[float]:
    """Return the mean of each photo's images, of photos that have one."""
    photos: dict[int, list[float]] = {}
    for image, value in values.items():
        photos.setdefault(groups[image], []).append(value)
    return [mean for each in photos.values() if math.isfinite(mean := _mean(each))]


def _interval(values: dict[int, float], groups: Sequence[int]) -> tuple[float | None, float | None]:
    """Return the interval of a mean over photos."""
    means = _by_photo(values, groups)
    if len(means) < 2:
        return None, None
    low, high = mean_interval(np.array(means))
    return float(low), float(high)
