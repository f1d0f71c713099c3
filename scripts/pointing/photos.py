"""Photos with object masks, reference maps for comparison, and tables of lifts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

import visattn
from visattn import evaluation
from visattn._support.tables import Row
from visattn._support.types import Resize
from visattn.core.maps import AttentionMap
from visattn.core.pipeline.inputs import Prepared
from visattn.evaluation.intervals import mean_interval

ROOT = Path(__file__).parents[2]
FOLDERS = ROOT / "visattn" / "core" / "shipped" / "photos", ROOT / "assets" / "objects"
MASKS = ROOT / "assets" / "objects" / "masks"
LARGEST = 0.5  # photos with a larger share of object are left out: there is little to localize
COPIES = 20
PRIOR = "center prior"
ITSELF = "object mask at the map's resolution"
_NONE = -1e9  # replaces log(0): -inf times a weight of 0 would make sums of the bootstrap NaN


@dataclass(frozen=True)
class Photo:
    """Preprocessed photo with the mask of its object."""

    name: str
    prepared: Prepared
    mask: NDArray[np.bool_]

    @property
    def seen(self) -> NDArray[np.bool_]:
        """Mask inside the model's input."""
        top, left, bottom, right = map(int, self.prepared.geometry.seen())
        return self.mask[top:bottom, left:right]

    def lift(self, shown: AttentionMap) -> NDArray[np.float64]:
        """Compute the lift of a map of this photo."""
        return evaluation.lift(shown, self.mask, self.prepared.geometry)


@dataclass(frozen=True)
class Measured:
    """Facts and lifts of one photo, by name."""

    facts: dict[str, str]
    lifts: dict[str, float]


Part = dict[str, Measured]  # by the photo's name


def photos(model: nn.Module, resize: Resize) -> Iterator[Photo]:
    """Load and preprocess the photos with a mask, except those that the object fills."""
    for file in sorted((path for folder in FOLDERS for path in folder.iterdir()), key=lambda path: path.stem):
        place = MASKS / f"{file.stem}.png"
        if not place.exists() or file.is_dir():
            continue
        with Image.open(place) as picture:
            mask = np.asarray(picture) > 0
        photo = Photo(file.stem, visattn.prepare(visattn.load_image(file), model, resize=resize), mask)
        if photo.seen.mean() > LARGEST:
            print(f"{photo.name} is left out: the object covers {photo.seen.mean():.0%}", file=sys.stderr)
            continue
        yield photo
        print(f"  ... {photo.name}", file=sys.stderr, flush=True)


def copies_of(photo: Photo, shown: AttentionMap, name: str) -> tuple[str, float]:
    """Compute the lift of shifted copies of a map, whose positions are meaningless."""
    return f"{COPIES} shifted copies of {name}", float(photo.lift(evaluation.shifted_copies(shown, COPIES)).mean())


def references(photo: Photo, like: AttentionMap) -> Iterator[tuple[str, float]]:
    """Compute reference lifts: of a center prior, and of the object mask at the map's resolution."""
    yield PRIOR, float(photo.lift(evaluation.center_prior(like)))
    cells, grid = like.layout.cells, like.layout.grid
    each = photo.lift(replace(like, values=torch.eye(cells).view(cells, *grid), axes=("cell",)))
    mask = torch.from_numpy(each).view(grid)  # the lift of a single cell is proportional to the object's share of that cell
    yield ITSELF, float(photo.lift(replace(like, values=mask)))


def over_photos(part: Part) -> list[Row]:
    """Return rows of geometric means with bootstrap intervals over photos, highest first."""
    names = list(next(iter(part.values())).lifts)
    logarithms = np.stack([_logarithms(part, name) for name in names], 1)
    beyond = logarithms - logarithms[:, [names.index(PRIOR)]]
    (means, low, high), (ratio, ratio_low, ratio_high) = map(geometric, (logarithms, beyond))
    empty, above, above_prior = (x.sum(0) for x in (logarithms == _NONE, logarithms > 0, beyond > 0))
    rows: list[Row] = [
        {
            "map": name,
            "lift": f"{means[i]:.2f}" + (f" (0 on {empty[i]} of {len(part)})" if empty[i] else ""),
            "95 % interval": f"{low[i]:.2f} to {high[i]:.2f}",
            "photos above chance": f"{above[i]} of {len(part)}",
            "above the center prior": None if name == PRIOR else f"{above_prior[i]} of {len(part)}",
            "times the center prior": None if name == PRIOR else f"{ratio[i]:.2f} ({ratio_low[i]:.2f} to {ratio_high[i]:.2f})",
        }
        for i, name in enumerate(names)
    ]
    return [rows[i] for i in np.argsort(-means.round(5), kind="stable")]  # rows that differ only by rounding keep their order


def by_photo(part: Part, columns: dict[str, str]) -> list[Row]:
    """Return one row per photo; `columns` maps titles to names of lifts."""
    return [
        {"photo": name, **measured.facts, **{title: f"{measured.lifts[key]:.2f}" for title, key in columns.items()}}
        for name, measured in part.items()
    ]


def times(part: Part, name: str, other: str | None = None) -> tuple[float, float, float]:
    """Return the geometric mean over photos of a lift, or of its ratio to another lift, and both ends of its interval."""
    logarithms = _logarithms(part, name) - (0 if other is None else _logarithms(part, other))
    mean, low, high = (float(x[0]) for x in geometric(logarithms[:, None]))
    return mean, low, high


def geometric(logarithms: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return geometric means of `(photos, ...)` and both ends of their intervals; a lift of 0 makes the mean of any resample with it 0."""
    low, high = mean_interval(logarithms)
    return np.exp(logarithms.mean(0)), np.exp(low), np.exp(high)


def _logarithms(part: Part, name: str) -> NDArray[np.float64]:
    lifts = np.array([measured.lifts[name] for measured in part.values()])
    found = np.full(len(lifts), _NONE)
    np.log(lifts, out=found, where=lifts > 0)
    return found
