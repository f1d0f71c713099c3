"""Baseline maps that do not depend on the image, for comparison with real maps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from visattn._support.checks import between
from visattn.core.maps import AttentionMap, MapFacts
from visattn.errors import MapError, OptionError
from visattn.evaluation.given import MapLike, as_map
from visattn.evaluation.object_masks import refuse_holes
from visattn.evaluation.scores import one_input
from visattn.evaluation.units import units_of


def center_prior(like: MapLike, spread: float = 0.25) -> AttentionMap:
    """Return a Gaussian around the image center, a baseline for center bias, as photographers center their objects.

    Args:
        like: Map, explanation or array whose layout is used.
        spread: Standard deviation as a share of each side.

    Returns:
        A map without leading axes, with sum 1.
    """
    like = as_map(like)
    refuse_holes(like)
    rows, columns = (np.exp(-0.5 * (((np.arange(side) + 0.5) / side - 0.5) / spread) ** 2) for side in like.layout.grid)
    values = torch.from_numpy(np.outer(rows, columns))
    provenance = like.provenance.but(method="center prior", parameters={"spread": spread}, sinks=())
    return AttentionMap(values / values.sum(), (), like.layout, {}, "center prior", provenance)


def smooth_random(like: MapLike, count: int = 20, seed: int = 0, spread: float = 0.1) -> AttentionMap:
    """Return white noise smoothed by a Gaussian: blobs as smooth as a map, at random locations.

    The noise wraps around the edges, so that its maximum is equally likely in every cell. Without wrapping, it would be largest at
    the edges.

    Args:
        like: Map, explanation or array whose layout is used.
        count: Number of maps.
        seed: Seed of the noise.
        spread: Standard deviation of the Gaussian as a share of each side. At 0.1, a blob is about as large as an object that covers a
            twentieth of the image.

    Returns:
        A map with the axis `copy`. Each copy has minimum 0 and sum 1.

    Raises:
        MapError: If the grid has only one cell.
        OptionError: If `count` is less than 1 or `spread` is not in [0, 1].
    """
    like = as_map(like)
    _check(like, count)
    between(spread, 0, 1, "spread")
    rows, columns = like.layout.grid
    noise = np.random.default_rng(seed).standard_normal((count, rows, columns))
    # Fourier transform of a Gaussian that wraps around
    down, across = (np.exp(-2 * (np.pi * spread * side * np.fft.fftfreq(side)) ** 2) for side in (rows, columns))
    fields = torch.from_numpy(np.fft.ifft2(np.fft.fft2(noise) * np.outer(down, across)).real)
    values = fields - fields.amin((-1, -2), keepdim=True)
    parameters = {"spread": spread, "copies": count, "seed": seed}
    provenance = like.provenance.but(method="smooth noise", parameters=parameters, sinks=())
    return AttentionMap(values / values.sum((-1, -2), keepdim=True), ("copy",), like.layout, {}, "smooth noise", provenance)


def shifted_copies(attention_map: MapLike, count: int = 20, seed: int = 0) -> AttentionMap:
    """Return randomly shifted (circular) copies of a map, which preserve its values and smoothness but destroy location.

    Args:
        attention_map: Map, explanation or array to shift.
        count: Number of copies.
        seed: Seed of the shifts; no shift is zero.

    Returns:
        A map with `copy` as additional first axis.

    Raises:
        MapError: If the grid has only one cell.
        OptionError: If `count` is less than 1.
    """
    attention_map = as_map(attention_map)
    _check(attention_map, count)
    rows, columns = attention_map.layout.grid
    steps = np.random.default_rng(seed).choice(np.arange(1, rows * columns), size=count, replace=count >= rows * columns)
    moved = [attention_map.values.roll((int(step) // columns, int(step) % columns), (-2, -1)) for step in steps]
    provenance = attention_map.provenance.but(notes=(f"{count} copies, randomly shifted (seed {seed})",))
    return AttentionMap(
        torch.stack(moved),
        ("copy", *attention_map.axes),
        attention_map.layout,
        attention_map.labels,
        attention_map.meaning,
        provenance,
        attention_map.signed,
    )


def flipped_copies(attention_map: MapLike) -> AttentionMap:
    """Return a map mirrored left to right, top to bottom, and both: copies that preserve its values and smoothness.

    Args:
        attention_map: Map, explanation or array to mirror.

    Returns:
        A map with `copy` as additional first axis, of three entries.

    Raises:
        MapError: If the grid has only one cell, or the map holes.
    """
    attention_map = as_map(attention_map)
    _check(attention_map, 1)
    values = torch.stack([attention_map.values.flip(axes) for axes in ((-1,), (-2,), (-2, -1))])
    provenance = attention_map.provenance.but(notes=("three copies, mirrored",))
    return replace(attention_map, values=values, axes=("copy", *attention_map.axes), provenance=provenance)


def edge_map(like: MapLike, pixels: Tensor) -> AttentionMap:
    """Return the edges of a model's input: how much its brightness changes in each cell. No model takes part.

    Args:
        like: Map of this input, explanation or array whose layout is used.
        pixels: One preprocessed input, `(C, H, W)` or `(1, C, H, W)`.

    Returns:
        A map without leading axes: the mean length of the gradient (Sobel) of the mean over channels.

    Raises:
        ShapeError: If the input has another shape.
        MapError: If the map was made for another input, or has holes.
    """
    like, pixels = as_map(like), one_input(pixels)
    provenance = like.provenance.but(method="edges", parameters={}, sinks=())
    blank = AttentionMap(
        torch.zeros(like.layout.grid), (), like.layout, {}, "edges", provenance, facts=MapFacts(input_size=like.facts.input_size)
    )
    units = units_of(blank, (pixels.shape[-2], pixels.shape[-1]), "cells")
    if len(units) < like.layout.cells:
        raise MapError(f"{like.layout.cells - len(units)} cells of the map hold no pixel of the input, so they have no edges.")
    gray = F.pad(pixels.double().cpu().mean(1, keepdim=True), (1, 1, 1, 1), "replicate")
    across = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]], dtype=torch.float64)
    lengths = F.conv2d(gray, torch.stack([across, across.T])[:, None])[0].norm(dim=0).numpy()
    inside = units.index >= 0
    means = np.bincount(units.index[inside], lengths[inside]) / np.bincount(units.index[inside])
    return replace(blank, values=torch.from_numpy(means).view(like.layout.grid))


def _check(like: AttentionMap, count: int) -> None:
    refuse_holes(like)
    if like.layout.cells < 2:
        raise MapError(f"a map to compare must have at least two cells, got the grid {like.layout.grid}.")
    if count < 1:
        raise OptionError(f"count must be at least 1, got {count}.")
