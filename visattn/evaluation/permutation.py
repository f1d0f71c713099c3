"""Whether a model's answer depends on where its attention lies: it runs with shuffled attention weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from glob import escape

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from visattn._support.checks import at_least
from visattn._support.modes import evaluating
from visattn._support.reprs import brief
from visattn.core.capturing.interventions import AttentionCall
from visattn.core.pipeline.captures import capture
from visattn.core.pipeline.editing import intervene
from visattn.errors import OptionError, ShapeError
from visattn.evaluation.scores import one_input

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class AttentionPermutation:
    """How much the class probabilities change when attention weights are shuffled.

    Attributes:
        layers: Names of the layers with attention.
        distances: `(layers, count)` total variation distance, from 0 to 1, with the weights of one layer shuffled.
        every: `(count,)` the same with the weights of all layers shuffled.
    """

    layers: tuple[str, ...]
    distances: Array
    every: Array

    __repr__ = brief


def attention_permutation(model: nn.Module, pixels: Tensor, *, count: int = 10, seed: int = 0) -> AttentionPermutation:
    """Shuffle the attention weights of each query among its keys, and compare the class probabilities.

    Where they hardly change, the answer does not depend on where that layer attends, and a map of its attention explains nothing of it.
    The opposite does not follow: weights that matter need not lie on what the answer depends on.

    Args:
        model: A classifier with attention, in evaluation mode.
        pixels: One input, `(C, H, W)` or `(1, C, H, W)`.
        count: Number of shuffles.
        seed: Seed of them. The global random state is not changed.

    Returns:
        The distances.

    Raises:
        OptionError: If the model has no attention, or `count` is less than 1.
        ShapeError: If the output is not `(1, classes)`, or the input has another shape.

    Reference:
        Jain & Wallace, "Attention is not Explanation", NAACL 2019, arXiv:1902.10186, section 4.2.1. Differs: all heads of a layer, or of
        all layers, are shuffled, not one pooling layer.
    """
    at_least("count", count)
    pixels = one_input(pixels)
    with evaluating(model), torch.no_grad():
        with capture(model) as recording:
            before = _probabilities(model, pixels)
        layers = tuple(dict.fromkeys(record.layer for record in recording))
        if not layers:
            raise OptionError("the model has no attention whose weights could be shuffled.")
        distances = [list(_distances(model, pixels, before, escape(layer), count, seed)) for layer in layers]
        every = list(_distances(model, pixels, before, "*", count, seed))
    return AttentionPermutation(layers, np.array(distances), np.array(every))


def _distances(model: nn.Module, pixels: Tensor, before: Tensor, layer: str, count: int, seed: int) -> Iterator[float]:
    for number in range(count):
        generator = torch.Generator().manual_seed(seed + number)

        def shuffled(weights: Tensor, _call: AttentionCall, generator: torch.Generator = generator) -> Tensor:
            order = torch.rand(weights.shape, generator=generator).argsort(-1).to(weights.device)
            return weights.gather(-1, order)

        with intervene(model, layer, edit=shuffled):
            after = _probabilities(model, pixels)
        yield float((after - before).abs().sum() / 2)


def _probabilities(model: nn.Module, pixels: Tensor) -> Tensor:
    output = model(pixels)
    if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != 1:
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ShapeError(f"the model must return the scores of classes, (1, classes), got {got}.")
    return output.double().softmax(-1)
