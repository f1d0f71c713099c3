"""Remove-and-impute metric (ROAD): removed pixels are filled from their neighbors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from visattn._support.checks import between
from visattn._support.extras import need
from visattn._support.reprs import brief
from visattn.errors import OptionError
from visattn.evaluation.choices import By
from visattn.evaluation.given import MapLike
from visattn.evaluation.scores import Score, in_batches, one_input, scores_of
from visattn.evaluation.units import units_of

Array = NDArray[np.float64]
_WEIGHTS = {(down, across): 1 / 6 if 0 in (down, across) else 1 / 12 for down in (-1, 0, 1) for across in (-1, 0, 1)}
_WEIGHTS.pop((0, 0))
TENTHS = tuple(tenth / 10 for tenth in range(1, 10))


@dataclass(frozen=True, eq=False)
class Road:
    """Scores of an input without its most, and without its least relevant pixels.

    Attributes:
        fractions: `(levels,)` share of the pixels that are filled from their neighbors.
        most: `(levels,)` scores without the pixels of the largest values.
        least: `(levels,)` scores without those of the smallest values.
    """

    fractions: Array
    most: Array
    least: Array

    __repr__ = brief

    @property
    def combined(self) -> float:
        """Half the mean difference `least - most`: positive if the map ranks pixels as the score does."""
        return float((self.least - self.most).mean() / 2)


def road(
    score: Score,
    pixels: Tensor,
    shown: MapLike,
    *,
    fractions: Sequence[float] = TENTHS,
    noise: float = 0.01,
    by: By = "pixels",
    batch_size: int = 32,
    seed: int = 0,
) -> Road:
    """Fill the most, and the least relevant pixels from their neighbors, and compare the scores: remove and debias.

    A filled pixel is the weighted mean of its eight neighbors, filled ones included (1/6 beside, 1/12 diagonally), plus noise. So its
    outline tells the model less than that of a constant color does.

    Args:
        score: See `deletion`.
        pixels: See `deletion`.
        shown: See `deletion`.
        fractions: Shares of the pixels that are filled, above 0 and below 1.
        noise: Standard deviation of the noise on filled pixels, in the units of `pixels`.
        by: See `deletion`.
        batch_size: See `deletion`.
        seed: Seed of the noise, and of the order of equal values.

    Returns:
        The scores.

    Raises:
        MissingExtra: If scipy is not installed.
        OptionError: If a number is out of range, or a word unknown.
        ShapeError: See `deletion`.
        MapError: See `deletion`.

    Reference:
        Rong et al., "A Consistent and Efficient Evaluation Strategy for Attribution Methods", ICML 2022, arXiv:2202.00449; the combined
        number as in the package grad-cam. Differs: exact shares of pixels are removed, also where values are equal.
    """
    need("scipy", "flow", "road")
    shares = np.array([between(fraction, 0, 1, "a fraction") for fraction in fractions])
    if not len(shares) or shares.min() <= 0 or shares.max() >= 1:
        raise OptionError(f"fractions must lie above 0 and below 1, got {list(fractions)}.")
    between(noise, 0, float("inf"), "noise")
    pixels = one_input(pixels)
    units = units_of(shown, (pixels.shape[-2], pixels.shape[-1]), by, seed)
    counts = np.round(shares * len(units)).astype(int)
    random = np.random.default_rng(seed)

    def filled() -> Iterator[Tensor]:
        image = pixels[0].double().cpu().numpy()
        for ordered in (units, units.reversed()):
            ranks = ordered.ranks(torch.device("cpu")).numpy()
            for some in in_batches(counts.tolist(), batch_size):
                images = [imputed(image, ranks < count, noise, random) for count in some]
                yield torch.from_numpy(np.stack(images)).to(pixels)

    most, least = scores_of(score, filled()).reshape(2, -1)
    return Road(counts / len(units), most, least)


def imputed(image: Array, is_removed: NDArray[np.bool_], noise: float, random: np.random.Generator) -> Array:
    """Return an image `(C, height, width)` whose removed pixels are weighted means of their neighbors, plus noise.

    Raises:
        OptionError: If every pixel is removed.
    """
    from scipy.sparse import csc_array
    from scipy.sparse.linalg import splu

    if is_removed.all():
        raise OptionError("every pixel is removed, so there is none to fill from. Remove fewer.")
    if not is_removed.any():
        return image.copy()
    number = np.full(is_removed.shape, -1)
    rows, columns = np.nonzero(is_removed)
    count = len(rows)
    number[rows, columns] = np.arange(count)
    own, total = np.arange(count), np.zeros(count)
    known = np.zeros((count, len(image)))
    entries = list[tuple[Array, NDArray[np.int64], NDArray[np.int64]]]()
    for (down, across), weight in _WEIGHTS.items():
        row, column = rows + down, columns + across
        inside = (row >= 0) & (row < is_removed.shape[0]) & (column >= 0) & (column < is_removed.shape[1])
        total[inside] += weight
        neighbor = np.where(inside, number[row.clip(0, is_removed.shape[0] - 1), column.clip(0, is_removed.shape[1] - 1)], -1)
        unknown, given = neighbor >= 0, inside & (neighbor < 0)
        entries.append((np.full(unknown.sum(), -weight), own[unknown], neighbor[unknown]))
        known[given] += weight * image[:, row[given], column[given]].T
    entries.append((total, own, own))
    data, at, of = (np.concatenate(parts) for parts in zip(*entries, strict=True))
    symmetric = {"permc_spec": "MMD_AT_PLUS_A", "diag_pivot_thresh": 0.0, "options": {"SymmetricMode": True}}
    solution = splu(csc_array((data, (at, of)), (count, count)), **symmetric).solve(known)
    filled = image.copy()
    filled[:, rows, columns] = (solution + noise * random.standard_normal(solution.shape)).T
    return filled
