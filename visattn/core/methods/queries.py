"""Queries of maps: weights of the query tokens, given as text or as a vector."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from visattn._support.checks import whole_number
from visattn._support.faces import Later
from visattn.core.records import Readout, TokenLayout
from visattn.errors import OptionError, ShapeError

if TYPE_CHECKING:
    from visattn._support import other_words
else:
    other_words = Later("visattn._support.other_words")

Query = str | Tensor

UNKNOWN = "the tokens that this model's output is computed from could not be traced"
QUERY_SPELLINGS = (
    "auto, read, cls, mean, all, patch:ROW,COL, input:Y,X, register:N, distillation, query:N (also object:N, latent:N) or word:N, "
    "or several joined by +"
)
_SETS = {"query": ("query", "word"), "object": ("query",), "latent": ("query",), "word": ("word",)}  # names of their tokens


def weights_of(query: Query, layout: TokenLayout, reading: Readout, device: torch.device) -> tuple[Tensor, str]:
    """Compute the weight of each query token.

    Args:
        query: `auto` (what the model reads), `cls`, `mean` (mean of the patches), `all` (mean of all tokens),
            `patch:ROW,COL`, `input:Y,X` (a pixel of the model's input), `register:N`, `distillation`, `query:N` (a learned query; also
            spelled `object:N` or `latent:N`) or `word:N` (the N-th word of the input). Several may be joined by `+`, with equal
            weights. `read` gives each token the share that the output, or the score, depends on. A tensor gives the weights directly.
        layout: Layout of the query tokens.
        reading: What the model reads, for `auto` and `read`.
        device: Device of the result.

    Returns:
        `(1, 1, 1, Q)` float64 weights (`(B, 1, 1, Q)` for one vector per image), and the query as text.

    Raises:
        OptionError: If the query is unknown, the model has no such token, or the query is `auto` or `read` and it is not known what the
            model reads.
        ShapeError: If a vector has the wrong length.
    """
    if isinstance(query, Tensor):
        if query.shape[-1] != len(layout) or query.ndim > 2:
            raise ShapeError(f"query weights must be (Q,) or (B, Q) with Q = {len(layout)} tokens, got {tuple(query.shape)}.")
        return query.to(device, torch.float64).reshape(-1, 1, 1, len(layout)), "weights"
    chosen = _automatic(layout, reading) if query == "auto" else named(query, layout)
    if chosen == "read":
        return _shares(layout, reading, device), chosen
    weights = torch.zeros(1, 1, 1, len(layout), dtype=torch.float64, device=device)
    for tokens in tokens_of(chosen, layout):
        weights[..., tokens] += 1 / len(tokens)
    return weights / weights.sum(), chosen


def tokens_of(chosen: str, layout: TokenLayout) -> list[range]:
    """Return the indices of the tokens of each query that is joined in one, as `weights_of` returns it; not for `read`.

    Raises:
        OptionError: If a query is unknown or the model has no such token.
    """
    every, tokens = range(len(layout)), list[range]()
    for name in chosen.split("+"):
        if name in ("mean", "all"):
            tokens.append(every[len(layout.prefix) :] if layout.cells and name == "mean" else every)
        else:
            number = token_of(name, layout)
            tokens.append(range(number, number + 1))
    return tokens


def named(query: str, layout: TokenLayout) -> str:
    """Replace `input:Y,X` by the patch that covers this pixel; return other queries unchanged.

    Raises:
        OptionError: If no patch covers the pixel, or its coordinates are not numbers.
    """
    if not query.startswith("input:"):
        return query
    try:
        y, x = (float(part) for part in query.removeprefix("input:").split(","))
    except ValueError as error:
        raise OptionError(f"an input query must be input:Y,X with numbers, got '{query}'.") from error
    cell = layout.cell(layout.token_at(y, x))
    assert cell is not None  # noqa: S101 - token_at returns patches
    return f"patch:{cell[0]},{cell[1]}"


def token_of(query: str, layout: TokenLayout) -> int:
    """Return the index of the token that a query names.

    Raises:
        OptionError: If the query is unknown or the model has no such token.
    """
    name, _, argument = query.partition(":")
    numbers = [whole_number(part) for part in argument.split(",")]
    if name == "patch" and len(numbers) == 2 and None not in numbers:
        return layout.patch(*(number for number in numbers if number is not None))
    if name == "pixel":
        raise OptionError(
            "a pixel query needs the photo's geometry: use explain or the command line, or geometry.patch_at(y, x)."
        )
    tokens = [f"{base}{argument}" for base in _SETS[name]] if name in _SETS else [f"register{argument}", query]
    named_token = next((token for token in tokens if token in layout.prefix), None)
    if named_token is not None and (name in (*_SETS, "register") or named_token == query):
        return layout.prefix.index(named_token)
    prefix_names = ", ".join(layout.prefix) or "none"
    if query in ("cls", "distillation") or name == "register":
        raise OptionError(f"the model has no token '{query}'; its prefix tokens: {prefix_names}. Use mean or patch:ROW,COL.")
    meant = other_words.value_meant("query", query, ("auto", "read", "cls", "mean", "all", "distillation"))
    hint = "" if meant is None else f"did you mean '{meant}'? "
    raise OptionError(f"unknown query '{query}'; {hint}known: {QUERY_SPELLINGS}.")


def members_asked(query: Query, layout: TokenLayout) -> bool | None:
    """Check whether all members of sets that a query names are among the tokens of a layout; None if it names none."""
    names = [name.partition(":") for name in query.split("+")] if isinstance(query, str) else []
    candidates = [[f"{base}{argument}" for base in _SETS[name]] for name, _, argument in names if name in _SETS]
    return all(set(tokens) & set(layout.prefix) for tokens in candidates) if candidates else None


def _automatic(layout: TokenLayout, reading: Readout) -> str:
    """Return the query that the model reads; for tokens that it does not read itself, the mean of the patches or all learned queries."""
    here = reading.layout == layout
    if not reading.query:
        choices = ", ".join([*layout.prefix[:3], *(["mean", "patch:ROW,COL"] if layout.grid else [])])
        raise OptionError(f"the query is not known: {reading.reason or UNKNOWN}. Choose the query: {choices}.")
    if not layout.grid:
        return reading.query if here and reading.query != "pool" else "+".join(layout.prefix)
    if here or {*reading.query.split("+")} <= {*layout.prefix, "mean", "all"}:
        return reading.query
    return "mean"


def _shares(layout: TokenLayout, reading: Readout, device: torch.device) -> Tensor:
    """Return the weights `(B, 1, 1, Q)` of the query `read`."""
    if reading.shares is None:
        raise OptionError(
            f"query 'read' needs the gradient of a score: {reading.reason or UNKNOWN}. "
            "Use capture(model, gradients=True) and recording.gradients(score)."
        )
    if reading.layout != layout:
        raise OptionError(
            "query 'read' is known for the tokens behind the last attention only. Choose the last layer, or another query."
        )
    return reading.shares.to(device, torch.float64)[:, None, None]
