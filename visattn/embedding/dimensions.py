"""Two or three dimensions for the drawn tokens of each head: principal components, t-SNE or UMAP."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, TypedDict, get_args

import numpy as np
import torch
from torch import Tensor

from visattn._support.checks import one_of
from visattn._support.extras import need
from visattn._support.modes import in_own_modes
from visattn._support.progress import progress
from visattn._support.typed import typed
from visattn._support.types import Criterion, Layout
from visattn.embedding.space import LayerStates, Projection, Space
from visattn.errors import OptionError


class Laid(TypedDict, total=False):
    """Options of `lay_out`."""

    method: Layout
    dimensions: int
    criterion: Criterion
    heads: Sequence[int] | None
    seed: int


_PERPLEXITY, _NEIGHBORS = 30.0, 15  # the usual ones of both
_FEWEST = 5
_LIBRARIES = {"tsne": ("sklearn", "embed", "t-SNE"), "umap": ("umap", "umap", "UMAP")}  # module, extra, name


@typed()
@in_own_modes
def lay_out(
    space: Space,
    method: Layout = "pca",
    *,
    dimensions: int = 2,
    criterion: Criterion = "norms",
    heads: Sequence[int] | None = None,
    seed: int = 0,
) -> list[Projection]:
    """Lay out the drawn tokens of each head, as queries and as keys, in its joint space.

    Args:
        space: Queries and keys.
        method: `pca`: the joint principal components of all patches. `tsne` or `umap`: a layout of the drawn patches that keeps neighbors
            together; distances between groups say little. Class tokens, registers and sinks, which lie far away, have no place in it.
        dimensions: 2 or 3.
        criterion: Choice of the scale, see `factor_of`.
        heads: Numbers of the heads; None: all.
        seed: Seed of t-SNE and UMAP.

    Returns:
        For each layer the points of `LayerStates.some`, as queries and as keys; NaN without a place.

    Raises:
        OptionError: If the method is unknown, dimensions are not 2 or 3, a layer has no such heads, or there are fewer than five patches.
        MissingExtra: If scikit-learn or umap-learn is not installed.

    Reference:
        van der Maaten & Hinton, "Visualizing Data using t-SNE", JMLR 2008. McInnes et al., "UMAP", 2018, arXiv:1802.03426. AttentionViz
        runs UMAP with the cosine distance, in which the scale of queries and keys has no effect; here it is Euclidean.
    """
    one_of(method, get_args(Layout), "method")
    if dimensions not in (2, 3):
        raise OptionError(f"dimensions must be 2 or 3, got {dimensions}.")
    if method == "pca":
        return [
            _drawn(states, one, heads) for states, one in zip(space.layers, space.project(dimensions, criterion), strict=True)
        ]
    need(*_LIBRARIES[method])
    found = []
    with progress("heads", "head") as bar:
        for states in space.layers:
            points = []
            for head in _chosen(states, heads):
                both = space.joint(states.layer, head, criterion)
                points.append((*_neighborhood(states, both.queries, both.keys, method, dimensions, seed), both.factor))
                bar.update()
            queries, keys, factors = zip(*points, strict=True)
            shares = torch.full((len(points), dimensions), torch.nan)
            some, factor = tuple(_chosen(states, heads)), torch.tensor(factors, dtype=torch.float64)
            found.append(Projection(states.layer, some, torch.stack(queries), torch.stack(keys), shares, factor))
    return found


@typed()
@in_own_modes
def lay_out_images(space: Space, method: Layout = "pca", *, seed: int = 0) -> Tensor:
    """Lay out the images by their codes.

    Args:
        space: Queries and keys.
        method: See `lay_out`. Fewer than five images are laid out by their principal components.
        seed: Seed of t-SNE and UMAP.

    Returns:
        `(images, 2)` points; `(0, 2)` if the codes are not known.

    Raises:
        OptionError: If the method is unknown.
        MissingExtra: If scikit-learn or umap-learn is not installed.
    """
    one_of(method, get_args(Layout), "method")
    codes = space.codes.double()
    if not codes.shape[1]:
        return torch.empty(0, 2)
    if method == "pca" or len(codes) < _FEWEST:
        apart = codes - codes.mean(0)
        left, size, _ = torch.linalg.svd(apart, full_matrices=False)
        points = torch.zeros(len(codes), 2, dtype=torch.float64)
        known = min(2, left.shape[1])
        points[:, :known] = left[:, :known] * size[:known]
        return points.float()
    need(*_LIBRARIES[method])
    return torch.from_numpy(np.array(_fitted(codes.numpy(), method, 2, seed), np.float32))


def _chosen(states: LayerStates, heads: Sequence[int] | None) -> list[int]:
    known = range(len(states.queries))
    if heads is not None and not set(heads) <= set(known):
        raise OptionError(f"{states.layer} has heads 0 to {len(known) - 1}, got {', '.join(map(str, heads))}.")
    return list(known if heads is None else heads)


def _drawn(states: LayerStates, one: Projection, heads: Sequence[int] | None) -> Projection:
    some = _chosen(states, heads)
    return Projection(
        one.layer,
        tuple(some),
        one.queries[some][:, states.some],
        one.keys[some][:, states.some],
        one.shares[some],
        one.factors[some],
    )


def _neighborhood(
    states: LayerStates, queries: Tensor, keys: Tensor, method: Layout, dimensions: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Lay out the drawn patches of one head."""
    plain = states.tokens.plain[states.some]
    parts = [each[states.some][plain] for each in (queries, keys)]
    cloud = torch.cat(parts).numpy()
    if len(cloud) < _FEWEST:
        raise OptionError(f"a layout needs {_FEWEST} patches or more, got {len(cloud)}. Pass more points.")
    laid = _fitted(cloud, method, dimensions, seed)
    points = torch.full((2, len(plain), dimensions), torch.nan)
    points[:, plain] = torch.from_numpy(np.ascontiguousarray(laid, np.float32)).view(2, -1, dimensions)
    return points[0], points[1]


def _fitted(cloud: Any, method: Layout, dimensions: int, seed: int) -> Any:  # noqa: ANN401 - arrays of libraries without types
    if not np.ptp(cloud, axis=0).any():  # t-SNE divides by the spread, and its library then crashes
        return np.zeros((len(cloud), dimensions))
    if method == "tsne":
        from sklearn.manifold import TSNE

        perplexity = min(_PERPLEXITY, (len(cloud) - 1) / 3)
        return TSNE(
            dimensions, perplexity=perplexity, init="pca" if cloud.shape[1] >= dimensions else "random", random_state=seed
        ).fit_transform(cloud)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ImportWarning)  # it tells that TensorFlow, which we do not use, is missing
        import umap

    return umap.UMAP(
        n_components=dimensions, n_neighbors=min(_NEIGHBORS, len(cloud) - 1), random_state=seed, n_jobs=1
    ).fit_transform(cloud)
