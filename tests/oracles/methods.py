"""Slow and literal versions of the methods, for one image, in float64, from the papers.

They use nested loops over numpy arrays and no code of the library. Layers are ordered first to last. Attention `a` and its gradient `g`
are `(heads, queries, keys)`. Most functions return the whole matrix `(N, N)`, with a row for each query.
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
    """Multiply matrices `a` and `b`."""
    columns = b.T.tolist()
    return np.array([[math.fsum(x * y for x, y in zip(row, column, strict=True)) for column in columns] for row in a.tolist()])


def fused(a: Array, fusion: str = "mean") -> Array:
    """Fuse the matrices of all heads."""
    heads, queries, keys = a.shape
    out = np.zeros((queries, keys))
    for i, j in np.ndindex(queries, keys):
        entries = [a[h, i, j] for h in range(heads)]
        out[i, j] = {"mean": math.fsum(entries) / heads, "max": max(entries), "min": min(entries)}[fusion]
    return out


def clamped(a: Array) -> Array:
    """Compute `a^+`."""
    return np.where(a > 0, a, 0.0)


def length(vector: Array) -> float:
    """Compute the Euclidean norm."""
    return math.sqrt(math.fsum(x * x for x in vector))


def row_normalized(a: Array) -> Array:
    """Divide rows by their sums; an empty row becomes that of the identity."""
    out = np.eye(len(a))
    for i, row in enumerate(a):
        total = math.fsum(row)
        if total > 0:
            out[i] = [entry / total for entry in row]
    return out


def without_smallest(a: Array, ratio: float, over: str, prefix: int) -> Array:
    """Set the smallest share of the entries in patch columns to 0, in each row or over all rows together."""
    out = a.copy()
    everything = [(i, j) for i in range(len(a)) for j in range(prefix, a.shape[1])]
    groups = [everything] if over == "layer" else [[(i, j) for i, j in everything if i == row] for row in range(len(a))]
    for group in groups:
        for i, j in sorted(group, key=lambda place: float(a[place]))[: int(ratio * len(group))]:
            out[i, j] = 0
    return out


# Kobayashi et al. 2020 and 2021: weighted value vectors


class Carried(NamedTuple):
    """Values, output projection and residual of one attention layer.

    Attributes:
        value: `(heads, N, d)` value vectors.
        weight: `(D, heads * d)` weight of the output projection.
        residual: `(N, D)` input of the residual connection.
    """

    value: Array
    weight: Array
    residual: Array


def let_through(value: Array, weight: Array) -> Array:
    """Compute `f_h(x_j) = v_j^h W_O^h`, `(heads, N, D)`."""
    heads, tokens, dim = value.shape
    out = np.zeros((heads, tokens, len(weight)))
    for h, j, c in np.ndindex(*out.shape):
        out[h, j, c] = math.fsum(weight[c, h * dim + k] * value[h, j, k] for k in range(dim))
    return out


def given(a: Array, f: Array, i: int, j: int) -> Array:
    """Compute `sum_h A_ij^h f_h(x_j)`, the vector that token i receives from token j."""
    total = np.zeros(f.shape[2])
    for h in range(len(a)):
        total += a[h, i, j] * f[h, j]
    return total


def norm_attention(a: Array, carried: Carried, *, residual: bool = False) -> Array:
    """Compute `||sum_h A_ij^h f_h(x_j)||`, optionally with the residual added to each token's own vector."""
    f = let_through(carried.value, carried.weight)
    out = np.zeros(a.shape[1:])
    for i, j in np.ndindex(*out.shape):
        out[i, j] = length(given(a, f, i, j) + (carried.residual[i] if residual and i == j else 0.0))
    return out


def norm_attention_of_heads(a: Array, carried: Carried) -> Array:
    """Compute `||A_ij^h f_h(x_j)||`, `(heads, N, N)`."""
    f = let_through(carried.value, carried.weight)
    out = np.zeros(a.shape)
    for h, i, j in np.ndindex(*out.shape):
        out[h, i, j] = length(a[h, i, j] * f[h, j])
    return out


def mixing_ratios(a: Array, carried: Carried) -> list[float]:
    """Compute for each token the norm of what it receives from others, over that plus the norm of what it keeps."""
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
    """Compute `M_L ... M_start`."""
    rolled = np.eye(layers[0].shape[1])
    for layer in range(start_layer, len(layers)):
        a = layers[layer]
        mixed = norm_attention(a, carried[layer]) if weights_by == "norm" else fused(a, fusion)
        mixed = without_smallest(mixed, discard, discard_over, prefix)
        tokens = len(mixed)
        if residual == "measured":  # the others share what a token does not keep
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
    """Compute the maximum flow between the query and each token of the input, over the sum of all."""
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
    """Compute the maximum flow by Edmonds & Karp: augment along shortest paths until there is none."""
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
    """Compute equation 5: `mean_h (dA * A)^+`."""
    return fused(clamped(g * a))


def relevance(layers: Sequence[Array], gradients: Sequence[Array], *, start_layer: int = 0) -> Array:
    """Compute equation 6 for self-attention only, minus the initial identity."""
    tokens = layers[0].shape[1]
    r = np.eye(tokens)
    for a, g in list(zip(layers, gradients, strict=True))[start_layer:]:
        r = r + product(positive(a, g), r)
    return r - np.eye(tokens)


class AttentionCall(NamedTuple):
    """Attention from the tokens `queries` to the tokens `keys`, with its gradient."""

    queries: str
    keys: str
    attention: Array
    gradient: Array


def relevances(steps: Sequence[Sequence[AttentionCall]], sizes: dict[str, int]) -> dict[tuple[str, str], Array]:
    """Compute equations 5 to 11: a relevance matrix for each pair of token sets.

    Args:
        steps: Attention calls in the order of the forward pass. Two calls of one step (co-attention) both read the previous matrices.
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
    """Compute equations 8 and 9: rows of `R - I` divided by their sums, plus `I`; a zero row remains zero."""
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
    """Compute Gildenblat 2020, with each layer's own gradient: normalized rows of `(mean_h A * dA)^+ + I`, multiplied."""
    tokens = layers[0].shape[1]
    rolled = np.eye(tokens)
    for a, g in list(zip(layers, gradients, strict=True))[start_layer:]:
        weights = without_smallest(clamped(fused(a * g)), discard, discard_over, prefix)
        rolled = product(row_normalized(weights + np.eye(tokens)), rolled)
    return rolled


def attention_gradient(layers: Sequence[Array], gradients: Sequence[Array], *, signed: bool = False) -> Array:
    """Compute Barkan et al. 2021: the mean over heads and layers of `A * dA^+`, or of `A * dA`."""
    total = np.zeros(layers[0].shape[1:])
    for a, g in zip(layers, gradients, strict=True):
        total += fused(a * (g if signed else clamped(g)))
    return total / len(layers)


def legrad(gradients: Sequence[Array], last: int | None = None) -> Array:
    """Compute Bousselham et al. 2025: for each token the mean over heads and queries of `dA^+`, then over the last layers."""
    used = gradients if last is None else gradients[-last:]
    total = np.zeros(used[0].shape[2])
    for g in used:
        heads, queries, keys = g.shape
        for j in range(keys):
            total[j] += math.fsum(max(g[h, i, j], 0.0) for h in range(heads) for i in range(queries)) / (heads * queries)
    return total / len(used)


def transition_attention(layers: Sequence[Array], gradients: Sequence[Array], query: Array, *, start_layer: int = 0) -> Array:
    """Compute Yuan et al. 2021: propagated attention of the query, times the positive part of the last layer's mean gradients."""
    r = query[None]
    state = product(r, fused(layers[-1]))
    for i in range(len(layers) - 2, start_layer - 1, -1):
        state = product(state, fused(layers[i])) + state
    mean = sum(gradients[1:], gradients[0]) / len(gradients)
    out: Array = (state * product(r, fused(clamped(mean))))[0]
    return out


def gradcam(x: Array, g: Array, prefix: int) -> Array:
    """Compute Selvaraju et al. 2017 on tokens `(N, D)`: the value of each patch."""
    tokens, channels = x.shape
    patches = range(prefix, tokens)
    weights = [math.fsum(g[j, c] for j in patches) / len(patches) for c in range(channels)]
    return np.array([max(0.0, math.fsum(weights[c] * x[j, c] for c in range(channels))) for j in patches])
