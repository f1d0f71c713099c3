"""Tokens that several windows read: one token if its vectors are the same in all of them, such as a global token."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from visattn.core.capturing.tokens.arrangement import Arrangement

_FIRST = {"cls": 1, "distillation": 1, "mean": 1}  # of these names, the first has no number


def may_share(lead: Sequence[int], images: int) -> bool:
    """Check whether the axes before the tokens may hold windows beside images and heads."""
    return len(lead) > 0 and (len(lead) > 2 or lead[0] > images)


def merged(arrangement: Arrangement, key: Tensor, value: Tensor) -> Arrangement:
    """Return the arrangement in which tokens without a place that have the same vectors in all windows are one token.

    Tokens that are among the queries too stay apart. A token that has no place in the image is known by its vectors alone: windows of a
    model that runs on tiles have a class token each, windows with global tokens share them. Only of fused calls: one that is written out
    keeps its weights alone, so there each window has tokens of its own.

    Args:
        arrangement: The arrangement, in which each window has tokens of its own.
        key: Keys of the call, `(*lead, k, d)`.
        value: Values of the call, `(*lead, k, d)`.
    """
    index, prefix = arrangement.key_index, arrangement.keys.prefix
    if index is None or len(index) < 2 or arrangement.queries.prefix or not prefix:
        return arrangement
    keys, values = arrangement.take(key), arrangement.take(value)  # (B, heads, windows, k, d)
    one_of = list(range(len(prefix)))
    for column, tokens in enumerate(index.mT.tolist()):
        is_of_each = all(0 <= token < len(prefix) for token in tokens) and len(set(tokens)) == len(tokens)
        if is_of_each and all(_is_shared(vectors[:, :, :, column]) for vectors in (keys, values)):
            for token in tokens:
                one_of[token] = tokens[0]
    kept = sorted(set(one_of))
    if len(kept) == len(prefix):
        return arrangement
    new = torch.tensor([kept.index(token) for token in one_of], device=index.device)
    is_prefix = (index >= 0) & (index < len(prefix))
    moved = torch.where(index >= 0, index - len(prefix) + len(kept), index)
    key_index = torch.where(is_prefix, new[index.clamp(0, len(prefix) - 1)], moved)
    return replace(
        arrangement, keys=replace(arrangement.keys, prefix=_names([prefix[token] for token in kept])), key_index=key_index
    )


def _is_shared(vectors: Tensor) -> bool:
    """Check whether vectors `(B, heads, windows, d)` are the same in all windows."""
    return bool((vectors == vectors[:, :, :1]).all())


def _names(names: Sequence[str]) -> tuple[str, ...]:
    """Number names anew, as `token_names` does."""
    counts: Counter[str] = Counter()
    numbered = []
    for name in names:
        base = re.sub(r"[.\d]+$", "", name)
        number = counts[base] + _FIRST.get(base, 0)
        numbered.append(base if base in _FIRST and number == 1 else f"{base}{number}")
        counts[base] += 1
    return tuple(numbered)
