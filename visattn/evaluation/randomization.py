"""Sanity checks of maps: what is left of a map when the model's parameters are random, and whether it follows a flip of the input."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from visattn._support.reprs import brief
from visattn.errors import ShapeError
from visattn.evaluation.given import MapLike, one_map
from visattn.evaluation.scores import one_input

Array = NDArray[np.float64]
ExplainModel = Callable[[nn.Module, Tensor], MapLike]  # from a model and one input (1, C, H, W) to a map


@dataclass(frozen=True, eq=False)
class Cascade:
    """Similarity of a map to itself while more and more of the model is random.

    Attributes:
        parts: `(steps,)` names of the parts of the model in the order in which they become random, the last one before the output first.
        correlations: `(steps,)` Spearman correlation of the cells with those of the map of the trained model; NaN if one map is constant.
    """

    parts: tuple[str, ...]
    correlations: Array

    __repr__ = brief

    @property
    def last(self) -> float:
        """Correlation when all of the model is random."""
        return float(self.correlations[-1])


def cascading_randomization(model: nn.Module, pixels: Tensor, explain: ExplainModel, *, seed: int = 0) -> Cascade:
    """Make the parts of a model random one after the other, from the output to the input, and compare the maps.

    A map that hardly changes shows the image, not what the model has learned: an edge map has the correlation 1. Parts are blocks and
    single layers, in the reverse order of their registration. A layer gets its initial values (`reset_parameters`); the entries of
    parameters that have none, such as a class token, are shuffled. The model itself is not changed: a copy is.

    Args:
        model: The model, in evaluation mode.
        pixels: One input, `(C, H, W)` or `(1, C, H, W)`.
        explain: Function from a model and an input to the map. For a map of a class: always of the one that the trained model predicts.
        seed: Seed of the random values. The global random state is not changed.

    Returns:
        The correlations.

    Raises:
        ShapeError: If maps differ in their grids, or the input has another shape.

    Reference:
        Adebayo et al., "Sanity Checks for Saliency Maps", NeurIPS 2018, arXiv:1810.03292, section 3.1. Differs: signed values are compared,
        and shuffled parameters.
    """
    pixels = one_input(pixels)
    trained = cells_of_map(explain(model, pixels))
    randomized, parts, correlations = copy.deepcopy(model), list[str](), list[float]()
    with torch.random.fork_rng(devices=sorted({x.device for x in model.parameters() if x.is_cuda}, key=str)):
        torch.manual_seed(seed)
        for name, modules in _parts(randomized):
            for module in modules:
                _randomize(module)
            parts.append(name)
            correlations.append(spearman(trained, cells_of_map(explain(randomized, pixels))))
    return Cascade(tuple(parts), np.array(correlations))


def flip_equivariance(pixels: Tensor, explain: Callable[[Tensor], MapLike]) -> float:
    """Return the Spearman correlation of the map of the mirrored input with the mirrored map; NaN if one is constant.

    Args:
        pixels: One input, `(C, H, W)` or `(1, C, H, W)`.
        explain: Function from one input `(1, C, H, W)` to its map.

    Raises:
        ShapeError: If maps differ in their grids, or the input has another shape.
    """
    pixels = one_input(pixels)
    return spearman(cells_of_map(explain(pixels))[:, ::-1], cells_of_map(explain(pixels.flip(-1))))


def spearman(one: Array, two: Array) -> float:
    """Return the rank correlation of two arrays of one shape, with mean ranks for equal values; NaN if one is constant or empty.

    Raises:
        ShapeError: If the shapes differ.
    """
    if one.shape != two.shape:
        raise ShapeError(f"maps of one grid are needed, got {one.shape} and {two.shape}.")
    if one.size < 2 or np.ptp(one) == 0 or np.ptp(two) == 0:
        return float("nan")
    return float(np.corrcoef(_ranks(one.ravel()), _ranks(two.ravel()))[0, 1])


def _ranks(values: Array) -> Array:
    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    ends = sizes.cumsum()
    ranks: Array = (ends - (sizes - 1) / 2)[group]
    return ranks


def cells_of_map(shown: MapLike) -> Array:
    """Return the values of a map, `(rows, columns)`; of an explanation the mean over its heads and layers.

    Raises:
        ShapeError: If it has further axes.
    """
    values = one_map(shown).values
    if values.ndim != 2:
        raise ShapeError(f"a map must be (rows, columns), got {tuple(values.shape)}.")
    cells: Array = values.detach().double().cpu().numpy()
    return cells


def _parts(model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    """Yield the blocks and single layers that hold parameters, the last one first."""
    parts: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            parts.setdefault(_block_of(name), []).append(module)
    yield from reversed(parts.items())


def _block_of(name: str) -> str:
    """Return the name up to its last number, such as `blocks.3` of `blocks.3.attn.qkv`; the whole name without one."""
    words = name.split(".")
    last = max((place for place, word in enumerate(words) if word.isdigit()), default=len(words) - 1)
    return ".".join(words[: last + 1]) or "(the model itself)"


def _randomize(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()
        return
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            shuffled = parameter.flatten()[torch.randperm(parameter.numel()).to(parameter.device)]
            parameter.copy_(shuffled.view_as(parameter))
