"""Numbers of every head in its joint space: how well closeness stands for attention there, and where attention goes that says nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from visattn._support.types import Criterion
from visattn.embedding.correlations import distances, ranks, row_correlation, row_pearson, row_spearman, weighted_correlation
from visattn.embedding.space import LayerStates, Space
from visattn.errors import OptionError
from visattn.evaluation.intervals import mean_interval

if TYPE_CHECKING:
    from visattn._support.tables import Row

IMAGES = 20
_POOLED = 2_000  # queries and keys of all images that are compared


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
        windows), and `null_attention`: mean attention of patches on class tokens, registers and sinks.

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
    plain = states.of_queries.plain, states.of_keys.plain
    norms = [float(each.double()[some].norm(dim=1).median()) for each, some in zip(states.head(head), plain, strict=True)]
    pearson, spearman = {}, {}
    for image in chosen:
        some, seen = (at & (tokens.image == image) for at, tokens in zip(plain, (states.of_queries, states.of_keys), strict=True))
        pair = both.queries[some], both.keys[seen]
        pearson[image], spearman[image] = row_pearson(*pair), row_spearman(*pair)
    low, high = _interval(pearson, space.groups)
    generator = torch.Generator().manual_seed(seed)
    pooled = [
        each[at][torch.randperm(int(at.sum()), generator=generator)[:_POOLED]] for each, at in zip(both[:2], plain, strict=True)
    ]
    return {
        "layer": states.layer,
        "head": head,
        "factor": both.factor,
        "norm_ratio": norms[1] / norms[0] if norms[0] else float("nan"),
        "row_pearson": float(np.nanmean(list(pearson.values()))),
        "low": low,
        "high": high,
        "row_spearman": float(np.nanmean(list(spearman.values()))),
        "pooled_pearson": row_pearson(pooled[0], pooled[1]),
        "weighted": weighted_correlation(both.queries[plain[0]], both.keys[plain[1]], seed=seed),
        "attention_spearman": _with_attention(states, head, both.queries, both.keys),
        "null_attention": _on_nothing(states, head),
    }


def _with_attention(states: LayerStates, head: int, queries: Tensor, keys: Tensor) -> float:
    """Correlate ranks of distances and of attention over the patches that a query attends to, and average over queries."""
    found = []
    each = states.of_keys.per_image
    for row, at in zip(states.rows[head].double(), states.some.tolist(), strict=True):
        image = int(states.of_queries.image[at])
        some = slice(image * each, (image + 1) * each)
        seen = states.of_keys.plain[some] & (row > 0)
        if not bool(states.of_queries.plain[at]) or int(seen.sum()) < 2:
            continue
        apart = distances(queries[at][None], keys[some][seen])
        found.append(row_correlation(ranks(row[seen][None]), ranks(apart)))
    return float(torch.cat(found).nanmean()) if found else float("nan")


def _on_nothing(states: LayerStates, head: int) -> float:
    each = states.of_keys.per_image
    of = states.of_queries.image[states.some]
    plain = states.of_keys.plain.view(-1, each)[of]  # (S, keys)
    rows = states.rows[head].double()[states.of_queries.plain[states.some]]
    return float((rows * ~plain[states.of_queries.plain[states.some]]).sum(1).mean())


def _spread(groups: Sequence[int], most: int) -> list[int]:
    """Choose images from as many photos as there are: first one of each photo, then the next."""
    order, seen = [], dict.fromkeys(groups, 0)
    for image, group in enumerate(groups):
        order.append((seen[group], image))
        seen[group] += 1
    return sorted(image for _, image in sorted(order)[:most])


def _interval(values: dict[int, float], groups: Sequence[int]) -> tuple[float | None, float | None]:
    """Return the interval of a mean over photos."""
    photos: dict[int, list[float]] = {}
    for image, value in values.items():
        photos.setdefault(groups[image], []).append(value)
    means = np.array([np.nanmean(each) for each in photos.values()])
    if len(means) < 2:
        return None, None
    low, high = mean_interval(means)
    return float(low), float(high)
