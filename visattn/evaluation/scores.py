"""Scores of changed inputs, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from visattn._support.checks import at_least, shown
from visattn.errors import OptionError, ShapeError

Score: TypeAlias = Callable[[Tensor], Tensor]  # from inputs (B, C, H, W) to one number for each, (B,)
Baseline: TypeAlias = float | Tensor | Literal["image mean", "blur"]
_BLUR = 11, 5.0  # size and standard deviation of the Gaussian of RISE, in pixels


def scores_of(score: Score, batches: Iterable[Tensor]) -> NDArray[np.float64]:
    """Return the score of each input of all batches, without gradients.

    Raises:
        ShapeError: If the function does not return one finite number for each.
    """
    with torch.no_grad():
        return np.concatenate([checked(score)(inputs).double().cpu().numpy() for inputs in batches])


def checked(score: Score) -> Score:
    """Return the same function, which raises ShapeError if it does not return one finite number for each input.

    It gets a copy, as it may write into its input.
    """

    def scored(inputs: Tensor) -> Tensor:
        scores = score(inputs.clone())
        if not isinstance(scores, Tensor):
            raise ShapeError(f"score must return a tensor, got {type(scores).__name__}.")
        is_one_each = scores.shape == (len(inputs),) and not scores.is_complex()
        if not is_one_each or not bool(scores.isfinite().all()):
            got = "NaN or infinity" if is_one_each else f"{scores.dtype} {tuple(scores.shape)}"
            raise ShapeError(f"score must return one finite number for each of {len(inputs)} inputs, got {got}.")
        return scores if scores.is_floating_point() else scores.double()

    return scored


def one_input(pixels: Tensor) -> Tensor:
    """Return one input with a batch axis, `(1, C, H, W)`.

    Raises:
        ShapeError: If it is anything else, or holds NaN.
    """
    batched = pixels[None] if isinstance(pixels, Tensor) and pixels.ndim == 3 else pixels
    if not isinstance(batched, Tensor) or batched.ndim != 4 or len(batched) != 1 or not batched.is_floating_point():
        got = f"{pixels.dtype} {tuple(pixels.shape)}" if isinstance(pixels, Tensor) else type(pixels).__name__
        raise ShapeError(f"pixels must be one input of the model, (C, H, W) or (1, C, H, W), got {got}.")
    if not bool(batched.isfinite().all()):
        raise ShapeError("pixels hold NaN or infinity.")
    return batched.detach()


def background(pixels: Tensor, baseline: Baseline) -> Tensor:
    """Return what replaces removed pixels, `(1, C, H, W)`; see `deletion`.

    Raises:
        OptionError: If the word is unknown.
        ShapeError: If a tensor cannot be broadcast to the input.
    """
    if isinstance(baseline, str):
        if baseline == "image mean":
            return pixels.mean((-1, -2), keepdim=True).expand_as(pixels)
        if baseline == "blur":
            return _blurred(pixels)
        raise OptionError(f"baseline must be a number, a tensor, 'image mean' or 'blur', got '{baseline}'.")
    try:
        return torch.as_tensor(baseline, dtype=pixels.dtype, device=pixels.device).expand_as(pixels)
    except (RuntimeError, TypeError, ValueError):
        got = tuple(baseline.shape) if isinstance(baseline, Tensor) else shown(baseline)
        raise ShapeError(f"the baseline {got} cannot be broadcast to the input {tuple(pixels.shape)}.") from None


def _blurred(pixels: Tensor) -> Tensor:
    """Return an input under a Gaussian, whose weights are those of RISE; at the edges only pixels of the input count."""
    size, deviation = _BLUR
    offsets = torch.arange(size, dtype=pixels.dtype, device=pixels.device) - size // 2
    line = (-(offsets**2) / (2 * deviation**2)).exp()
    channels = pixels.shape[1]
    kernel = torch.outer(line, line).expand(channels, 1, size, size)

    def summed(x: Tensor) -> Tensor:
        return F.conv2d(x, kernel, padding=size // 2, groups=channels)

    return summed(pixels) / summed(torch.ones_like(pixels))


def in_batches(items: Sequence[int], batch_size: int) -> Iterator[Sequence[int]]:
    """Yield consecutive parts of a sequence."""
    at_least("batch_size", batch_size)
    for start in range(0, len(items), batch_size):
        yield items[start : start + batch_size]
