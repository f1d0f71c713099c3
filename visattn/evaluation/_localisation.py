from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from visattn.errors import MapError, ShapeError
from visattn.geometry import Geometry
from visattn.maps import AttentionMap


def lift(attention_map: AttentionMap, mask: NDArray[np.bool_], geometry: Geometry) -> NDArray[np.float64]:
    """How much denser a map lies on an object than over all that the model saw: 1 is chance, 1 / share of area the most there is.

    The share of the map's sum that lies on the object, over the object's share of the area; a cell that the outline cuts counts by
    the share of its pixels.

    Args:
        attention_map: Of one photo; not negative.
        mask: `(height, width)` of the photo, true on the object.
        geometry: Where the model's input lies on the photo.

    Returns:
        A number for each entry of the map's axes, `(*axes,)`.

    Raises:
        ShapeError: If the mask is not of the photo's size.
        MapError: If values are negative or all zero, or nothing of the object or everything that the model saw is object.
    """
    if mask.shape != geometry.photo:
        raise ShapeError(f"the mask must be of the photo's size {geometry.photo}, got {mask.shape}.")
    values = attention_map.values.double().cpu().numpy()
    if values.min() < 0 or not (values.sum((-1, -2)) > 0).all():
        raise MapError(f"a lift needs non-negative values with a positive sum; {attention_map.meaning} has none.")
    share, area = _cells(attention_map, mask, geometry)
    covered = float((share * area).sum() / area.sum())
    if not 0 < covered < 1:
        raise MapError(f"the object must cover a part of what the model saw, it covers {covered:.0%}.")
    found: NDArray[np.float64] = np.asarray((values * share).sum((-1, -2)) / values.sum((-1, -2)) / covered)
    return found


def _cells(
    attention_map: AttentionMap, mask: NDArray[np.bool_], geometry: Geometry
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The object's share of each cell, and the number of photo pixels of each cell."""
    rows, columns = attention_map.layout.grid
    share, area = np.zeros((rows, columns)), np.zeros((rows, columns))
    height, width = geometry.photo
    for row in range(rows):
        for column in range(columns):
            box = geometry.patch_box(row, column, (rows, columns), attention_map.layout.box)
            top, bottom = (min(max(round(y), 0), height) for y in (box.top, box.bottom))
            left, right = (min(max(round(x), 0), width) for x in (box.left, box.right))
            inside = mask[top:bottom, left:right]
            area[row, column] = inside.size
            share[row, column] = inside.mean() if inside.size else 0
    return share, area


def centre_prior(like: AttentionMap, spread: float = 0.25) -> AttentionMap:
    """A Gaussian about the middle, whatever the photo shows: photographers centre their objects.

    Args:
        like: A map whose layout is taken.
        spread: Standard deviation as a share of each side.

    Returns:
        A map without further axes; its sum is 1.
    """
    rows, columns = (np.exp(-0.5 * (((np.arange(side) + 0.5) / side - 0.5) / spread) ** 2) for side in like.layout.grid)
    values = torch.from_numpy(np.outer(rows, columns))
    provenance = like.provenance.but(method="centre prior", parameters={"spread": spread}, sinks=())
    return AttentionMap(values / values.sum(), (), like.layout, {}, "centre prior", provenance)


def shifted_copies(attention_map: AttentionMap, count: int = 20, seed: int = 0) -> AttentionMap:
    """The same map moved round the grid by random steps: what its values reach where their place means nothing.

    Args:
        attention_map: A map.
        count: How many copies.
        seed: Of the steps; no copy stays where it was.

    Returns:
        The map with one more axis in front, `copy`.
    """
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
    )
