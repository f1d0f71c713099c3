"""Slow and literal versions of the methods, for one image, in float64, from the papers.

Nothing here knows the library: nested loops over numpy arrays. Layers come first to last. Attention `a` and its gradient `g` are
`(heads, queries, keys)`; most functions give the whole matrix `(N, N)`, a row for each query.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tests.oracles.maps import Array

# matrices


def product(a: Array, b: Array) -> Array:
    """`a b`."""
    columns = b.T.tolist()
    return np.array([[math.fsum(x * y for x, y in zip(row, column, strict=True)) for column in columns] for row in a.tolist()])


def fused(a: Array, fusion: str = "mean") -> Array:
    """One matrix of all heads."""
    heads, queries, keys = a.shape
    out = np.zeros((queries, keys))
    for i, j in np.ndindex(queries, keys):
        entries = [a[h, i, j] for h in range(heads)]
        out[i, j] = {"mean": math.fsum(entries) / heads, "max": max(entries), "min": min(entries)}[fusion]
    return out


def clamped(a: Array) -> Array:
    """`a^+`."""
    return np.where(a > 0, a, 0.0)


def length(vector: Array) -> float:
    """Euclidean norm."""
    return math.sqrt(math.fsum(x * x for x in vector))


def row_normalized(a: Array) -> Array:
    """Rows divided by their sums; a row that nothing is left of becomes the token itself."""
    out = np.eye(len(a))
    for i, row in enumerate(a):
        total = math.fsum(row)
        if total > 0:
            out[i] = [entry / total for entry in row]
    return out


def without_smallest(a: Array, ratio: float, over: str, prefix: int) -> Array:
    """Zero in the place of the smallest share of the entries in patch columns, of each row or of all rows together."""
    out = a.copy()
    everything = [(i, j) for i in range(len(a)) for j in range(prefix, a.shape[1])]
    groups = [everything] if over == "layer" else [[(i, j) for i, j in everything if i == row] for row in range(len(a))]
    for group in groups:
        for i, j in sorted(group, key=lambda place: float(a[place]))[: int(ratio * len(group))]:
            out[i, j] = 0
    return out


# Kobayashi et al. 2020 and 2021: what a token lets through


class Carried(NamedTuple):
    """What attention carries in one layer.

    Attributes:
        value: `(heads, N, d)`.
        weight: `(D, heads * d)` of the projection behind the heads.
        residual: `(N, D)` what the result is added to.
    """

    value: Array
    weight: Array
    residual: Array


def let_through(value: Array, weight: Array) -> Array:
    """`f_h(x_j) = v_j^h W_O^h`, `(heads, N, D)`."""
    heads, tokens, dim = value.shape
    out = np.zeros((heads, tokens, len(weight)))
    for h, j, c in np.ndindex(*out.shape):
        out[h, j, c] = math.fsum(weight[c, h * dim + k] * value[h, j, k] for k in range(dim))
    return out


def given(a: Array, f: Array, i: int, j: int) -> Array:
    """`sum_h A_ij^h f_h(x_j)`: what token j gives to token i."""
    total = np.zeros(f.shape[2])
    for h in range(len(a)):
        total += a[h, i, j] * f[h, j]
    return total


def norm_attention(a: Array, carried: Carried, *, residual: bool = False) -> Array:
    """`||sum_h A_ij^h f_h(x_j)||`, with the residual path added to each token's own vector."""
    f = let_through(carried.value, carried.weight)
    out = np.zeros(a.shape[1:])
    for i, j in np.ndindex(*out.shape):
        out[i, j] = length(given(a, f, i, j) + (carried.residual[i] if residual and i == j else 0.0))
    return out


def norm_attention_of_heads(a: Array, carried: Carried) -> Array:
    """`||A_ij^h f_h(x_j)||`, `(heads, N, N)`."""
    f = let_through(carried.value, carried.weight)
    out = np.zeros(a.shape)
    for h, i, j in np.ndindex(*out.shape):
        out[h, i, j] = length(a[h, i, j] * f[h, j])
    return out


def mixing_ratios(a: Array, carried: Carried) -> list[float]:
    """Of each token: the size of what others give it over that plus the size of what it keeps."""
    f = let_through(carried.value, carried.weight)
    tokens, ratios = a.shape[1], []
    for i in range(tokens):
        mixed = np.zeros(f.shape[2])
        for j in range(tokens):
            if j != i:
                mixed += given(a, f, i, j)
        kept = given(a, f, i, i) + carried.residual[i]
        ratios.append(length(mixed) / (length(mixed) + length(kept)))
    return ratios


# Abnar & Zuidema 2020


def rollout(
    layers: Sequence[Array],
    carried: Sequence[Carried],
    *,
    prefix: int,
    fusion: str = "mean",
    weights_by: str = "attention",
    residual: float | str = 0.5,
    discard: float = 0.0,
    discard_over: str = "row",
    start_layer: int = 0,
) -> Array:
    """`M_L ... M_start`."""
    rolled = np.eye(layers[0].shape[1])
    for layer in range(start_layer, len(layers)):
        a = layers[layer]
        mixed = norm_attention(a, carried[layer]) if weights_by == "norm" else fused(a, fusion)
        mixed = without_smallest(mixed, discard, discard_over, prefix)
        tokens = len(mixed)
        if residual == "measured":  # what a token does not keep is shared by the others
            shares = [1 - ratio for ratio in mixing_ratios(a, carried[layer])]
            for i in range(tokens):
                mixed[i, i] = 0
        else:
            shares = [float(residual)] * tokens
        mixed = row_normalized(mixed)
        step = np.zeros((tokens, tokens))
        for i, j in np.ndindex(tokens, tokens):
            step[i, j] = shares[i] * (i == j) + (1 - shares[i]) * mixed[i, j]
        rolled = product(step, rolled)
    return rolled


def attention_flow(layers: Sequence[Array], query: Array, *, residual: float = 0.5, start_layer: int = 0) -> Array:
    """Maximum flow between the query and each token of the input, over the sum of all."""
    capacity: dict[tuple[int, int], dict[tuple[int, int], float]] = {}
    source, used = (-1, 0), layers[start_layer:]
    capacity[source] = {(len(used), i): float(query[i]) for i in range(len(query))}
    for level, a in enumerate(used):
        mean = fused(a)
        for i in range(len(mean)):
            capacity[level + 1, i] = {
                (level, j): (1 - residual) * float(mean[i, j]) + residual * (i == j) for j in range(len(mean))
            }
    flows = [max_flow(capacity, source, (0, j)) for j in range(len(query))]
    return np.array(flows) / math.fsum(flows)


def max_flow(
    capacity: dict[tuple[int, int], dict[tuple[int, int], float]], source: tuple[int, int], sink: tuple[int, int]
) -> float:
    """Edmonds & Karp: along a shortest path that is still open, until there is none."""
    left: dict[tuple[int, int], dict[tuple[int, int], float]] = {}
    for node, edges in capacity.items():
        for other, width in edges.items():
            left.setdefault(node, {})[other] = width
            left.setdefault(other, {})[node] = 0.0
    total = 0.0
    while True:
        before, waiting = {source: source}, deque([source])
        while waiting and sink not in before:
            node = waiting.popleft()
            for other, width in left[node].items():
                if width > 1e-14 and other not in before:
                    before[other] = node
                    waiting.append(other)
        if sink not in before:
            return total
        path = [sink]
        while path[-1] != source:
            path.append(before[path[-1]])
        narrowest = min(left[tail][head] for head, tail in pairwise(path))
        for head, tail in pairwise(path):
            left[tail][head] -= narrowest
            left[head][tail] += narrowest
        total += narrowest


# Chefer, Gur & Wolf 2021


def positive(a: Array, g: Array) -> Array:
    """Equation 5: `mean_h (dA * A)^+`."""
    return fused(clamped(g * a))


def relevance(layers: Sequence[Array], gradients: Sequence[Array], *, start_layer: int = 0) -> Array:
    """Equation 6 over self-attention only, less the identity that it starts from."""
    tokens = layers[0].shape[1]
    r = np.eye(tokens)
    for a, g in list(zip(layers, gradients, strict=True))[start_layer:]:
        r = r + product(positive(a, g), r)
    return r - np.eye(tokens)


class Attended(NamedTuple):
    """Attention of the tokens `queries` to the tokens `keys`, with its gradient."""

    queries: str
    keys: str
    attention: Array
    gradient: Array


def relevances(steps: Sequence[Sequence[Attended]], sizes: dict[str, int]) -> dict[tuple[str, str], Array]:
    """Equations 5 to 11: a relevance matrix for each pair of token sets.

    Args:
        steps: Attention in the order of the forward; two of one step (co-attention) both read what was there before.
        sizes: Number of tokens of each set.
    """
    r = {(s, q): np.eye(sizes[s]) if s == q else np.zeros((sizes[s], sizes[q])) for s in sizes for q in sizes}
    for step in steps:
        old = dict(r)
        for s, q, a, g in step:
            mean = positive(a, g)
            if s == q:  # 6 and 7
                for other in sizes:
                    r[s, other] = r[s, other] + product(mean, old[s, other])
            else:  # 10 and 11
                r[s, q] = r[s, q] + product(product(self_normalized(old[s, s]).T, mean), self_normalized(old[q, q]))
                r[s, s] = r[s, s] + product(mean, old[q, s])
    return r


def self_normalized(r: Array) -> Array:
    """Equations 8 and 9: rows of `R - I` divided by their sums, and `I` again; a row of zeros stays."""
    tokens = len(r)
    rest = r - np.eye(tokens)
    for i in range(tokens):
        total = math.fsum(rest[i])
        if total != 0:
            rest[i] = [entry / total for entry in rest[i]]
    return rest + np.eye(tokens)


# other methods with gradients


def gradient_rollout(
    layers: Sequence[Array],
    gradients: Sequence[Array],
    *,
    prefix: int,
    discard: float = 0.9,
    discard_over: str = "layer",
    start_layer: int = 0,
) -> Array:
    """Gildenblat 2020, each layer with its own gradient: rows of `(mean_h A * dA)^+ + I`, over their sums, multiplied."""
    tokens = layers[0].shape[1]
    rolled = np.eye(tokens)
    for a, g in list(zip(layers, gradients, strict=True))[start_layer:]:
        weights = without_smallest(clamped(fused(a * g)), discard, discard_over, prefix)
        rolled = product(row_normalized(weights + np.eye(tokens)), rolled)
    return rolled


def attention_gradient(layers: Sequence[Array], gradients: Sequence[Array], *, signed: bool = False) -> Array:
    """Barkan et al. 2021: the mean over heads and layers of `A * dA^+`, or of `A * dA`."""
    total = np.zeros(layers[0].shape[1:])
    for a, g in zip(layers, gradients, strict=True):
        total += fused(a * (g if signed else clamped(g)))
    return total / len(layers)


def legrad(gradients: Sequence[Array], last: int | None = None) -> Array:
    """Bousselham et al. 2025: of each token the mean over heads and queries of `dA^+`, then over the last layers."""
    used = gradients if last is None else gradients[-last:]
    total = np.zeros(used[0].shape[2])
    for g in used:
        heads, queries, keys = g.shape
        for j in range(keys):
            total[j] += math.fsum(max(g[h, i, j], 0.0) for h in range(heads) for i in range(queries)) / (heads * queries)
    return total / len(used)


def transition_attention(layers: Sequence[Array], gradients: Sequence[Array], query: Array, *, start_layer: int = 0) -> Array:
    """Yuan et al. 2021: how much reaches the query, times the positive part of the mean of the last layer's gradients."""
    r = query[None]
    state = product(r, fused(layers[-1]))
    for i in range(len(layers) - 2, start_layer - 1, -1):
        state = product(state, fused(layers[i])) + state
    mean = sum(gradients[1:], gradients[0]) / len(gradients)
    out: Array = (state * product(r, fused(clamped(mean))))[0]
    return out


def gradcam(x: Array, g: Array, prefix: int) -> Array:
    """Selvaraju et al. 2017 on tokens `(N, D)`: the value of each patch."""
    tokens, channels = x.shape
    patches = range(prefix, tokens)
    weights = [math.fsum(g[j, c] for j in patches) / len(patches) for c in range(channels)]
    return np.array([max(0.0, math.fsum(weights[c] * x[j, c] for c in range(channels))) for j in patches])
