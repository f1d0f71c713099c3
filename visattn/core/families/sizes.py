"""Input sizes that a model accepts, from dry runs on the `meta` device."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from visattn._support.attempts import Attempt
from visattn._support.memory import OfStructure
from visattn.core.families.feature_maps import dry

USUAL = (224, 256, 384, 32, 64, 96, 128, 160, 192, 240, 288, 299, 320, 336, 448, 512, 518, 28, 48, 56, 112)  # sides in pixels
_sides: OfStructure[int | None] = OfStructure()


def first_size(model: nn.Module, channels: int) -> tuple[int, int]:
    """Return the first size in `USUAL` at which a model runs; the first of all if it runs at none, or cannot run on the meta device.

    A size does not count if what comes from the image is repeated to fit weights, such as a single patch for a table of all positions.

    Args:
        model: Image model; it is not modified.
        channels: Channels of its input.
    """
    sides = () if any(isinstance(module, nn.RNNBase) for module in model.modules()) else USUAL

    def found() -> int | None:
        for side in sides:
            attempt = _attempted(model, channels, (side, side), repeating=False)
            if not attempt.failed:
                return side
            if not attempt.lasts:
                return None
        return USUAL[0]

    side = _sides.of(model, channels, found) or USUAL[0]
    return side, side


def takes(model: nn.Module, channels: int, size: tuple[int, int]) -> bool:
    """Check by a dry run whether a model accepts images with this number of channels; False if it cannot run on the meta device.

    Args:
        model: Image model; it is not modified.
        channels: Channels of the images.
        size: Height and width of the images.
    """
    return not _attempted(model, channels, size, repeating=True).failed


def _attempted(model: nn.Module, channels: int, size: tuple[int, int], *, repeating: bool) -> Attempt:
    pixels = torch.empty(1, channels, *size, device="meta")
    with Attempt() as attempt, dry(model) as bare, torch.no_grad(), nullcontext() if repeating else _WithoutRepeats(pixels):
        bare(pixels)
    return attempt


class _WithoutRepeats(TorchDispatchMode):
    """Dry run in which no operation repeats what comes from the image, to fit a tensor that does not."""

    def __init__(self, pixels: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of_image = {id(pixels): pixels}  # the tensors are kept, so that no other gets their ids

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        result = func(*args, **(kwargs or {}))
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        of_image = [value for value in given if id(value) in self._of_image]
        if of_image:
            results = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
            self._of_image |= {id(value): value for value in results}
            if torch.Tag.pointwise in func.tags and len(of_image) < len(given) and _is_repeated(of_image, results[0]):
                raise ValueError
        return result


def _is_repeated(operands: list[Tensor], result: Tensor) -> bool:
    """Check whether all operands have one element where the result has several, on an axis other than the first."""
    axes = range(1, result.ndim)
    return any(all(_extent(operand, axis - result.ndim) == 1 for operand in operands) and result.shape[axis] > 1 for axis in axes)


def _extent(tensor: Tensor, axis: int) -> int:
    return tensor.shape[axis] if -axis <= tensor.ndim else 1
