"""Slow and literal float64 versions of attention, rollout, sinks and masks, from the papers.

They use no code of the library: nested loops over numpy arrays if that is fast enough, else whole float64 matrices, one head at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]


def array(x: Tensor) -> Array:
    """Convert a tensor of any type to a float64 array."""
    result: Array = x.detach().to(torch.float64).cpu().numpy()
    return result


# attention


def softmax(scores: Sequence[float]) -> list[float]:
    """Compute the softmax of one row; a row of -inf has zero weights."""
    top = max(scores)
    if top == -math.inf:
        return [0.0] * len(scores)
    powers = [math.exp(score - top) for score in scores]
    total = math.fsum(powers)
    return [power / total for power in powers]


def block_weights(query: Array, key: Array, bias: Array | None, scale: float) -> Array:
    """Compute `softmax(scale * q.k + bias)`, entry by entry.

    Args:
        query: `(B, heads, blocks, q, d)`.
        key: `(B, heads, blocks, k, d)`.
        bias: `(B, heads, blocks, q, k)` or None.
        scale: Scale of the scores.
    """
    batch, heads, blocks, queries, dim = query.shape
    keys = key.shape[3]
    weights = np.zeros((batch, heads, blocks, queries, keys))
    for b, h, n, i in np.ndindex(batch, heads, blocks, queries):
        row = []
        for j in range(keys):
            score = scale * math.fsum(query[b, h, n, i, c] * key[b, h, n, j, c] for c in range(dim))
            row.append(score + (0.0 if bias is None else bias[b, h, n, i, j]))
        weights[b, h, n, i] = softmax(row)
    return weights


def placed(weights: Array, query_index: NDArray[Any], key_index: NDArray[Any], queries: int, keys: int) -> Array:
    """Place blocks of weights into one matrix in token order; padding (-1) is left out."""
    batch, heads, blocks = weights.shape[:3]
    dense = np.zeros((batch, heads, queries, keys))
    for b, h, n in np.ndindex(batch, heads, blocks):
        for i, row in enumerate(query_index[n]):
            for j, column in enumerate(key_index[n]):
                if row >= 0 and column >= 0:
                    dense[b, h, row, column] = weights[b, h, n, i, j]
    return dense


def to_padding(weights: Array, query_index: NDArray[Any], key_index: NDArray[Any], queries: int) -> Array:
    """Sum the attention of each query to padded keys."""
    batch, heads, blocks = weights.shape[:3]
    lost = np.zeros((batch, heads, queries))
    for b, h, n in np.ndindex(batch, heads, blocks):
        for i, row in enumerate(query_index[n]):
            for j, column in enumerate(key_index[n]):
                if row >= 0 and column < 0:
                    lost[b, h, row] += weights[b, h, n, i, j]
    return lost


def gathered(dense: Array, x: Array) -> Array:
    """Compute `A @ x`: `(B, heads, Q, K)` by `(B or 1, heads or 1, K, C)`."""
    batch, heads, queries, keys = dense.shape
    out = np.zeros((batch, heads, queries, x.shape[-1]))
    for b, h, i, c in np.ndindex(*out.shape):
        out[b, h, i, c] = math.fsum(dense[b, h, i, j] * x[b % x.shape[0], h % x.shape[1], j, c] for j in range(keys))
    return out


def drawn(dense: Array, r: Array) -> Array:
    """Compute `r @ A`: `(B or 1, heads or 1, C, Q)` by `(B, heads, Q, K)`."""
    batch, heads, queries, keys = dense.shape
    out = np.zeros((batch, heads, r.shape[2], keys))
    for b, h, c, j in np.ndindex(*out.shape):
        out[b, h, c, j] = math.fsum(r[b % r.shape[0], h % r.shape[1], c, i] * dense[b, h, i, j] for i in range(queries))
    return out


def head_matrix(query: Tensor, key: Tensor, scale: float | None = None) -> Tensor:
    """Compute the float64 matrix `(q, k)` of one head of one image, from `(q, d)` and `(k, d)`."""
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query.double() @ key.double().T
    scores *= factor
    scores -= scores.max(dim=1, keepdim=True).values
    powers = scores.exp_()
    powers /= powers.sum(dim=1, keepdim=True)
    return powers


# rollout and sinks


def fuse(heads: Sequence[Tensor], fusion: str) -> Tensor:
    """Fuse the matrices of all heads into one."""
    fused = heads[0].clone()
    for matrix in heads[1:]:
        if fusion == "mean":
            fused += matrix
        elif fusion == "max":
            fused = torch.maximum(fused, matrix)
        else:
            fused = torch.minimum(fused, matrix)
    return fused / len(heads) if fusion == "mean" else fused


def without_sinks(matrix: Tensor, sunk: Sequence[int], treatment: str, prefix: int) -> Tensor:
    """Remove the attention to the given sinks from a fused matrix."""
    matrix = matrix.clone()
    tokens = matrix.shape[1]
    others = [j for j in range(prefix, tokens) if j not in sunk]
    for i in range(matrix.shape[0]):
        lost = math.fsum(float(matrix[i, j]) for j in sunk)
        for j in sunk:
            matrix[i, j] = 0
        if treatment == "redistribute":
            for j in others:
                matrix[i, j] += lost / len(others)
    return matrix


def rollout(
    layers: Iterable[Sequence[Tensor]],
    *,
    fusion: str = "mean",
    residual: float = 0.5,
    start: int = 0,
    sunk: Sequence[int] = (),
    treatment: str = "keep",
    prefix: int = 0,
) -> Tensor:
    """Compute the whole rollout matrix `(N, N)` of one image: the product of all mixed layers, with the first rightmost.

    Args:
        layers: Float64 matrices `(N, N)` of the heads of each layer, first layer first.
        fusion: `mean`, `max` or `min`.
        residual: Weight of the identity.
        start: First layer.
        sunk: Tokens that are sinks.
        treatment: `keep`, `drop` or `redistribute`.
        prefix: Number of tokens before the patches.
    """
    product = torch.empty(0)
    for number, heads in enumerate(layers):
        identity = torch.eye(heads[0].shape[0], dtype=torch.float64)
        if number == 0:
            product = identity
        if number < start:
            continue
        fused = fuse(heads, fusion)
        if treatment != "keep":
            fused = without_sinks(fused, sunk, treatment, prefix)
        fused = fused / fused.sum(dim=1, keepdim=True)
        product = ((1 - residual) * fused + residual * identity) @ product
    return product


def attention_received(heads: Sequence[Tensor]) -> list[float]:
    """Compute the attention that each token receives, averaged over heads, relative to the uniform share."""
    queries, keys = heads[0].shape
    total = torch.zeros(keys, dtype=torch.float64)
    for matrix in heads:
        for row in matrix:
            total += row
    scores: list[float] = (total / (len(heads) * queries) * keys).tolist()
    return scores


def sinks(layers: Iterable[Sequence[Tensor]], prefix: int, threshold: float) -> dict[int, float]:
    """Find patch tokens whose score exceeds the threshold in some layer, with their highest score."""
    best: dict[int, float] = {}
    for heads in layers:
        for token, score in enumerate(attention_received(heads)):
            if token >= prefix and score > threshold:
                best[token] = max(score, best.get(token, 0.0))
    return best


# features


def cosine(a: Array, b: Array) -> float:
    """Compute the cosine of two vectors."""
    dot = math.fsum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(math.fsum(x * x for x in a) * math.fsum(y * y for y in b))


def principal_scores(rows: Array, components: int) -> tuple[Array, Array]:
    """Compute scores `(rows, components)` from singular values, with arbitrary signs, and the explained variance of each component."""
    centered = rows - rows.mean(axis=0)
    left, values, _ = np.linalg.svd(centered, full_matrices=False)
    shares = values**2 / (values**2).sum()
    return left[:, :components] * values[:components], shares[:components]


# localization

Rectangle = tuple[float, float, float, float]  # left, top, right, bottom


def mass_mask(grid: Array, share: float) -> NDArray[np.bool_]:
    """Return the smallest set of cells that holds `share` of the sum, taken from the largest down."""
    mask = np.zeros(grid.shape, dtype=bool)
    held = 0.0
    for index in np.argsort(-grid, axis=None, kind="stable"):
        if held >= share * grid.sum() - 1e-12:
            break
        mask[np.unravel_index(index, grid.shape)] = True
        held += grid.flat[index]
    return mask


def overlap(a: Rectangle, b: Rectangle) -> float:
    """Compute the common area of two rectangles."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    return max(0.0, width) * max(0.0, height)


def lift(mask: NDArray[np.bool_], box: Rectangle, width: float, height: float) -> float:
    """Compute the share of the mask's area inside the box, over the box's share of the photo; cells divide the photo evenly."""
    rows, columns = mask.shape
    inside = area = 0.0
    for row, column in zip(*np.nonzero(mask), strict=True):
        cell = (column * width / columns, row * height / rows, (column + 1) * width / columns, (row + 1) * height / rows)
        inside += overlap(cell, box)
        area += overlap(cell, cell)
    share = overlap(box, box) / (width * height)
    return inside / area / share
