"""Maps as segmentations, by the two protocols of published tables: Chefer's on ImageNet-Segmentation, and DINO's on VOC 2012."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from visattn._support.checks import between
from visattn._support.reprs import brief
from visattn.errors import MapError, OptionError, ShapeError
from visattn.evaluation.given import MapLike, as_map
from visattn.evaluation.object_masks import refuse_holes
from visattn.evaluation.units import units_of

Array = NDArray[np.float64]
VOID = -1


@dataclass(frozen=True, eq=False)
class SegmentationScores:
    """Scores of maps as segmentations, from 0 to 1.

    Attributes:
        pixel_accuracy: Share of all labeled pixels of all photos that are on the right side.
        mean_iou: Mean of two ratios, of the foreground and of the background: intersection over union, each summed over all photos.
        mean_ap: Mean over photos of the average precision.
        photos: Number of photos.
    """

    pixel_accuracy: float
    mean_iou: float
    mean_ap: float
    photos: int

    __repr__ = brief


class Segmentation:
    """Segmentation of photos by their maps, photo by photo: foreground is where a map is above its own mean.

    The protocol of ImageNet-Segmentation: the map is interpolated between the centers of its cells to the size of the mask, 224 x 224
    pixels in the paper, onto which photo and mask are squeezed. Pixel accuracy and intersection over union are summed over all photos. The
    average precision of a photo ranks twice as many entries as it has pixels: each pixel by its value for the foreground, and by one minus
    it for the background, with values scaled to [0, 1].

    Reference:
        Chefer et al., "Transformer Interpretability Beyond Attention Visualization", CVPR 2021, arXiv:2012.09838, section 4, as in the
        authors' code.
    """

    def __init__(self) -> None:
        """Begin without photos."""
        self._right = self._pixels = 0
        self._inside, self._union, self._precisions = np.zeros(2), np.zeros(2), list[float]()

    __repr__ = brief

    def add(self, shown: MapLike, labels: NDArray[Any]) -> None:
        """Add a photo.

        Args:
            shown: Its map; an array covers the whole input.
            labels: `(height, width)` of the model's input: 0 is background, -1 counts nowhere, all else is foreground.

        Raises:
            ShapeError: If the labels are no integers or booleans of two axes.
            MapError: If the map has further axes, holes or NaN, is constant, or does not cover the input.
        """
        known, is_object = _truth(labels)
        values = _pixels_of(shown, known.shape)[known]
        truth = is_object[known]
        if not np.isfinite(values).all() or np.ptp(values) == 0:
            raise MapError("the map is constant or not finite, so it has no foreground.")
        scaled = (values - values.min()) / np.ptp(values)
        foreground = scaled > scaled.mean()
        self._right += int((foreground == truth).sum())
        self._pixels += truth.size
        for side, (found, wanted) in enumerate(((~foreground, ~truth), (foreground, truth))):
            self._inside[side] += (found & wanted).sum()
            self._union[side] += (found | wanted).sum()
        self._precisions.append(_average_precision(np.concatenate([1 - scaled, scaled]), np.concatenate([~truth, truth])))

    @property
    def scores(self) -> SegmentationScores:
        """Scores so far.

        Raises:
            OptionError: If there is no photo.
        """
        if not self._precisions:
            raise OptionError("no photo was added.")
        ratios = self._inside / np.maximum(self._union, 1)
        precision = float(np.mean(self._precisions))
        return SegmentationScores(self._right / self._pixels, float(ratios.mean()), precision, len(self._precisions))


def best_head_jaccard(
    shown: MapLike, objects: NDArray[np.bool_], *, mass: float = 0.6, void: NDArray[np.bool_] | None = None
) -> float:
    """Compute how well the best head segments each object of a photo: intersection over union, a mean over its objects.

    A head's segmentation are the fewest cells that hold a share of its sum. The best head of an object is chosen by the object itself, so
    the number says what some head can do, not what a user gets.

    Args:
        shown: Map of heads, `(heads, rows, columns)` or with one axis `head`, not negative; an array covers the whole input.
        objects: `(objects, height, width)` masks on the model's input, which is 480 x 480 pixels in the paper.
        mass: Share of the sum.
        void: `(height, width)` pixels that count nowhere, such as the outlines of VOC.

    Returns:
        A number from 0 to 1; NaN without objects.

    Raises:
        OptionError: If `mass` is out of range.
        ShapeError: If the masks have another shape.
        MapError: If the map has other axes, holes or negative values.

    Reference:
        Caron et al., "Emerging Properties in Self-Supervised Vision Transformers", ICCV 2021, arXiv:2104.14294, figure 4.
    """
    between(mass, 0, 1, "mass")
    heads = _heads_of(shown)
    masks = np.asarray(objects)
    if masks.ndim != 3 or masks.dtype != np.bool_ or (void is not None and void.shape != masks.shape[1:]):
        raise ShapeError(
            f"objects must be booleans (objects, height, width), and void (height, width); got {masks.dtype} {masks.shape}."
        )
    kept = [_largest(head, mass) for head in heads]
    rows, columns = (
        np.minimum(((np.arange(side) + 0.5) * cells / side).astype(int), cells - 1)
        for side, cells in zip(masks.shape[1:], kept[0].shape, strict=True)
    )
    seen = ~void if void is not None else np.ones(masks.shape[1:], bool)
    ratios = list[float]()
    for mask in masks:
        found = [(region[rows][:, columns] & seen, mask & seen) for region in kept]
        ratios.append(max(float((one & two).sum() / max((one | two).sum(), 1)) for one, two in found))
    return float(np.mean(ratios)) if ratios else float("nan")


def _truth(labels: NDArray[Any]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which pixels count, and which are foreground."""
    array = np.asarray(labels)
    if array.ndim != 2 or array.dtype.kind not in "iub":
        raise ShapeError(f"labels must be integers or booleans (height, width), got {array.dtype} {array.shape}.")
    known = np.ones(array.shape, bool) if array.dtype.kind == "b" else array != VOID
    return known, array.astype(bool)


def _pixels_of(shown: MapLike, size: tuple[int, ...]) -> Array:
    """Return a map at the pixels of the input."""
    units = units_of(shown, (size[0], size[1]), "pixels")
    if (units.index < 0).any():
        raise MapError("the map does not cover the input.")
    return units.values[units.index]


def _heads_of(shown: MapLike) -> Array:
    """Return the maps of heads, `(heads, rows, columns)`."""
    if isinstance(shown, np.ndarray) and shown.ndim == 3:
        heads = shown.astype(np.float64)
    else:
        found = as_map(shown)
        refuse_holes(found)
        if found.axes not in ((), ("head",)):
            raise MapError(f"a map of heads is needed, this one has the axes {found.axes}.")
        heads = found.values.detach().double().cpu().numpy().reshape(-1, *found.layout.grid)
    if not np.isfinite(heads).all() or (heads < 0).any():
        raise MapError("the map has negative values or NaN, so no share of its sum is known.")
    return heads


def _largest(head: Array, mass: float) -> NDArray[np.bool_]:
    """Return the fewest cells that hold a share of the sum."""
    order = np.argsort(head, axis=None, kind="stable")
    below = head.ravel()[order].cumsum() / max(head.sum(), np.finfo(float).tiny)
    kept = np.zeros(head.size, bool)
    kept[order] = below > 1 - mass
    return kept.reshape(head.shape)


def _average_precision(values: Array, truth: NDArray[np.bool_]) -> float:
    """Return the sum over falling thresholds of precision times the rise of recall."""
    order = np.argsort(-values, kind="stable")
    ranked, hits = values[order], truth[order].cumsum()
    last = np.flatnonzero(np.append(np.diff(ranked) != 0, True))  # equal values come at one threshold
    precision, recall = hits[last] / (last + 1), hits[last] / max(hits[-1], 1)
    return float((np.diff(recall, prepend=0) * precision).sum())
