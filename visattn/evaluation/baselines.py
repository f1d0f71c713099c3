"""Maps that know nothing of the photo: what a map must be better than."""

from __future__ import annotations

import numpy as np
import torch

from visattn._support.checks import between
from visattn.errors import MapError, OptionError
from visattn.evaluation.cells import refuse_holes
from visattn.maps import AttentionMap


def center_prior(like: AttentionMap, spread: float = 0.25) -> AttentionMap:
    """A Gaussian about the middle, whatever the photo shows: photographers center their objects.

    Args:
        like: A map whose layout is taken.
        spread: Standard deviation as a share of each side.

    Returns:
        A map without further axes; its sum is 1.
    """
    refuse_holes(like)
    rows, columns = (np.exp(-0.5 * (((np.arange(side) + 0.5) / side - 0.5) / spread) ** 2) for side in like.layout.grid)
    values = torch.from_numpy(np.outer(rows, columns))
    provenance = like.provenance.but(method="center prior", parameters={"spread": spread}, sinks=())
    return AttentionMap(values / values.sum(), (), like.layout, {}, "center prior", provenance)


def smooth_random(like: AttentionMap, count: int = 20, seed: int = 0, spread: float = 0.1) -> AttentionMap:
    """White noise through a Gaussian: blobs as smooth as a map, at places that mean nothing.

    Opposite edges of the grid meet, so that every place is as likely to be the largest; noise that ends at the edges is largest there.

    Args:
        like: A map whose layout is taken.
        count: How many.
        seed: Of the noise.
        spread: Standard deviation of the Gaussian as a share of each side. At 0.1 blobs are about as large as an object that covers a
            twentieth of the picture.

    Returns:
        A map with the axis `copy`; the least value of each is 0, its sum 1.

    Raises:
        MapError: If the grid has one cell only.
        OptionError: If `count` is below 1 or `spread` is not from 0 to 1.
    """
    _check(like, count)
    between(spread, 0, 1, "spread")
    rows, columns = like.layout.grid
    noise = np.random.default_rng(seed).standard_normal((count, rows, columns))
    # the transform of a Gaussian whose tails go round
    down, across = (np.exp(-2 * (np.pi * spread * side * np.fft.fftfreq(side)) ** 2) for side in (rows, columns))
    fields = torch.from_numpy(np.fft.ifft2(np.fft.fft2(noise) * np.outer(down, across)).real)
    values = fields - fields.amin((-1, -2), keepdim=True)
    parameters = {"spread": spread, "copies": count, "seed": seed}
    provenance = like.provenance.but(method="smooth noise", parameters=parameters, sinks=())
    return AttentionMap(values / values.sum((-1, -2), keepdim=True), ("copy",), like.layout, {}, "smooth noise", provenance)


def shifted_copies(attention_map: AttentionMap, count: int = 20, seed: int = 0) -> AttentionMap:
    """The same map moved round the grid by random steps: what its values reach where their place means nothing.

    Args:
        attention_map: A map.
        count: How many copies.
        seed: Of the steps; no copy stays where it was.

    Returns:
        The map with one more axis in front, `copy`.

    Raises:
        MapError: If the grid has one cell only.
        OptionError: If `count` is below 1.
    """
    _check(attention_map, count)
    rows, columns = attention_map.layout.grid
    steps = np.random.default_rng(seed).choice(np.arange(1, rows * columns), size=count, replace=count >= rows * columns)
    moved = [attention_map.values.roll((int(step) // columns, int(step) % columns), (-2, -1)) for step in steps]
    provenance = attention_map.provenance.but(notes=(f"{count} copies, moved at random (seed {seed})",))
    return AttentionMap(
        torch.stack(moved),
        ("copy", *attention_map.axes),
        attention_map.layout,
        attention_map.labels,
        attention_map.meaning,
        provenance,
        attention_map.signed,
    )


def _check(like: AttentionMap, count: int) -> None:
    refuse_holes(like)
    if like.layout.cells < 2:
        raise MapError(f"a map must have two cells or more to be compared with others, got {like.layout.grid}.")
    if count < 1:
        raise OptionError(f"count must be at least 1, got {count}.")
