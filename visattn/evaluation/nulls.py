"""Maps that know nothing of what a model decides by, made for one map: what a metric says of them is what chance is worth."""

from __future__ import annotations

from torch import Tensor

from visattn._support.checks import at_least
from visattn.core.maps import AttentionMap
from visattn.evaluation.baselines import center_prior, edge_map, flipped_copies, shifted_copies, smooth_random
from visattn.evaluation.given import MapLike

NULLS = "shifted copies", "flipped copies", "smooth noise", "center prior", "edges"


def nulls_of(shown: MapLike, pixels: Tensor, *, count: int = 10, seed: int = 0) -> dict[str, list[AttentionMap]]:
    """Return maps to compare one map with, by kind.

    Independent values in each cell are not among them: a metric that interpolates sees no structure in them, so any smooth map beats them.

    Args:
        shown: Map of one input without further axes.
        pixels: That input, `(C, H, W)` or `(1, C, H, W)`.
        count: Number of shifted copies, and of maps of smooth noise.
        seed: Seed of both.

    Returns:
        Maps of the kinds `shifted copies` (`count`), `flipped copies` (3), `smooth noise` (`count`), `center prior` and `edges` (1 each).

    Raises:
        OptionError: If `count` is less than 1.
        ShapeError: If the input or an array has another shape.
        MapError: If the map has one cell or holes, or was made for another input.
    """
    return copies_of(shown, count=count, seed=seed) | blind_maps(shown, pixels, count=count, seed=seed)


def copies_of(shown: MapLike, *, count: int, seed: int) -> dict[str, list[AttentionMap]]:
    """Return the kinds of `nulls_of` that have the values of the map itself."""
    at_least("count", count)
    return {
        "shifted copies": _apart(shifted_copies(shown, count, seed)),
        "flipped copies": _apart(flipped_copies(shown)),
    }


def blind_maps(shown: MapLike, pixels: Tensor, *, count: int, seed: int) -> dict[str, list[AttentionMap]]:
    """Return the kinds of `nulls_of` that depend on the layout of the map only."""
    at_least("count", count)
    return {
        "smooth noise": _apart(smooth_random(shown, count, seed)),
        "center prior": [center_prior(shown)],
        "edges": [edge_map(shown, pixels)],
    }


def _apart(several: AttentionMap) -> list[AttentionMap]:
    return [several.at(copy=copy) for copy in range(len(several.values))]
