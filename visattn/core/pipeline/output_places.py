"""Targets in dense outputs: a pixel, a class or a mask.

`pixel:X,Y` is the score of the class that is predicted at a pixel of the upright photo, `mask:K` the mean score of a class or a mask over
the pixels that it has. Class and pixels are those of the unedited image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from visattn._support import nested
from visattn._support.checks import printable, whole_number
from visattn._support.language import worded
from visattn.core.geometry import Box, Geometry
from visattn.core.maps import Detection
from visattn.core.pipeline import class_names
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.outputs import class_name, tensor_of
from visattn.core.pipeline.targets import Target
from visattn.errors import OptionError

_MASKS = "masks_queries_logits", "pred_masks"  # of mask transformers, `(B, masks, h, w)`; those of SAM have one axis more
_DENSE = "logits", "out", "predicted_depth"


def completed(_model: nn.Module, prepared: Prepared, target: Target) -> tuple[Prepared, Target]:
    """Return a target that names a place in the output as a function of it.

    Args:
        prepared: The preprocessed photo.
        target: The target, with the class names if they are known.

    Returns:
        The photo as it was given, and the target.

    Raises:
        OptionError: If the text is malformed, the pixel is not in the part of the photo that the model received, or `versus` or
            `target_space` is given too.
    """
    assert target.named is not None  # noqa: S101 - the step was looked up by it
    kind, which = target.named
    check_plain(target)
    settle: Callable[[Any], Score]
    if kind == "pixel":
        geometry = prepared.geometry
        x, y = _numbers(which, geometry)
        geometry.patch_at(y, x, geometry.input, Box(0, 0, *geometry.input))  # raises if the model did not receive the pixel
        down, across = geometry.to_input(y, x)
        share = down / geometry.input[0], across / geometry.input[1]
        settle = lambda output: _at_pixel(output, share, f"pixel {x:g},{y:g}", target)  # noqa: E731
    else:
        settle = lambda output: _of_mask(output, which, target)  # noqa: E731
    return prepared, replace(target, of=Place(settle, on_image=True))


class Score(NamedTuple):
    """Score of an output.

    Attributes:
        function: Function that returns one number per image.
        described: The score in words.
        corners: Function that returns the corners of the box whose score it is; None if it is of no box.
        detection: The box and the name of its class; None if it is of no box.
    """

    function: Callable[[Any], Tensor]
    described: str
    corners: Callable[[Any], Tensor] | None = None
    detection: Detection | None = None

    def __call__(self, output: Any) -> Tensor:  # noqa: ANN401
        """Return one number per image."""
        return self.function(output)


@dataclass(frozen=True)
class Place:
    """A place in an output, which is settled on the output for the unedited image.

    Attributes:
        settled: Function that returns the score of the place in that output.
        on_image: Whether it is a place in the image, as a box or a mask, and not in a list of numbers.
    """

    settled: Callable[[Any], Score]
    on_image: bool = False

    def __call__(self, output: Any) -> Tensor:  # noqa: ANN401
        """Return the score of each image."""
        return self.settled(output)(output)


def check_plain(target: Target) -> None:
    """Check that a named target has no options of classes.

    Raises:
        OptionError: If it has.
    """
    if target.named is not None and (target.versus is not None or target.target_space != "logit"):
        kind, which = target.named
        raise OptionError(f"target {kind}:{printable(which)} has no versus and no target_space. Leave them out.")


def _numbers(which: str, geometry: Geometry) -> tuple[float, float]:
    try:
        x, y = (float(part) for part in which.split(","))
    except ValueError as error:
        top, left, bottom, right = geometry.seen()
        raise OptionError(
            f"a pixel target must be pixel:X,Y with numbers, got 'pixel:{printable(which)}'. The model received x {left:g} to {right:g} "
            f"and y {top:g} to {bottom:g} of the photo."
        ) from error
    return x, y


def _dense(output: Any) -> Tensor:  # noqa: ANN401
    """Return a dense output as `(B, classes, h, w)`."""
    dense = tensor_of(output, *_DENSE)
    if dense is not None and dense.ndim == 3:
        dense = dense[:, None]
    if dense is None or dense.ndim != 4:
        shape = tuple(dense.shape) if dense is not None else nested.described(output)
        raise OptionError(
            f"this target needs a dense output (B, classes, h, w), the model returned {shape}. "
            + worded("Pass a function of it.", "Choose another target.")
        )
    return dense


def _channel(index: int, target: Target) -> tuple[str, str]:
    """Return how the score of a channel and the channel are called: as a class, if that is known."""
    if target.task == "classes" or (target.task is None and target.labels is not None):
        return "logit", class_name(index, target.labels)
    return "output", f"channel {index}"


def _at_pixel(output: Any, share: tuple[float, float], where: str, target: Target) -> Score:  # noqa: ANN401
    dense = _dense(output).detach()
    row, column = (min(int(part * side), side - 1) for part, side in zip(share, dense.shape[-2:], strict=True))
    best = int(dense[0, :, row, column].argmax())
    word, named = _channel(best, target)
    rank = "which is predicted" if word == "logit" else "the largest"
    what = f"{word} of {named}, {rank}" if dense.shape[1] > 1 else "output"

    def score(output: Any) -> Tensor:  # noqa: ANN401
        return _dense(output)[:, best, row, column]

    return Score(score, f"{what} at {where} = {float(dense[0, best, row, column]):.3g}")


def masks_in(output: Any) -> tuple[Tensor, bool]:  # noqa: ANN401
    """Return masks or classes `(B, K, h, w)`, and whether they are masks, each apart from the others."""
    masks = tensor_of(output, *_MASKS)
    if masks is not None and masks.ndim in (4, 5):
        return masks.flatten(1, -3), True
    return _dense(output), False


def _threshold(mask: Tensor) -> float:
    """Return the value above which a pixel belongs to a mask: 0.5 if all values lie in [0, 1], as after a sigmoid, else 0."""
    return 0.5 if bool(((mask >= 0) & (mask <= 1)).all()) else 0.0


def _of_mask(output: Any, which: str, target: Target) -> Score:  # noqa: ANN401
    masks, apart = masks_in(output)
    masks, count = masks.detach(), masks.shape[1]
    index = index_of("mask", which, count, None if apart else target.labels or ())
    word, name = ("logit", f"mask {index}") if apart else _channel(index, target)
    is_alone = apart or count == 1  # it is there or not, whatever other channels are
    least = _threshold(masks[0, index])
    here = masks[0, index] > least if is_alone else masks[0].argmax(0) == index
    word = "value" if is_alone and least else word
    if not bool(here.any()):
        if is_alone:
            highest = float(masks[0, index].max())
            raise OptionError(
                f"no pixel belongs to {name}, so it has no score: its largest value is {highest:.3g}, not above {least:g}."
            )
        others = [_channel(other, target)[1] for other in torch.unique(masks[0].argmax(0)).tolist()]
        there = f"Pixels belong to {class_names.listed(others)}" if len(others) > 1 else f"All belong to {others[0]}"
        raise OptionError(f"no pixel belongs to {name}, so it has no score. {there}.")

    def score(output: Any) -> Tensor:  # noqa: ANN401
        mask_scores = masks_in(output)[0][:, index]
        return mask_scores[:, here].mean(1)

    where = f"pixels above {least:g}" if is_alone else "its pixels"
    share, mean = float(here.float().mean()), float(masks[0, index][here].mean())
    return Score(score, f"mean {word} of {name} over {where} ({share:.1%} of the input) = {mean:.3g}")


def index_of(kind: str, which: str, count: int, labels: Sequence[str] | None) -> int:
    """Return the number of a mask or box, or of a class that is given by name.

    Args:
        kind: `query`, `box` or `mask`.
        which: What was given after the colon.
        count: How many there are.
        labels: Names of the classes; empty if they are classes without known names, None if they are none.

    Raises:
        OptionError: If there is none; the message says how many there are, or lists the closest names.
    """
    number = whole_number(which)
    if number is None and which and labels:
        return class_names.index_of(which, labels, count)
    if number is None or not 0 <= number < count:
        plural = {"query": "queries", "box": "boxes", "mask": "masks or classes"}[kind]
        if not count:
            raise OptionError(f"target {kind}:{printable(which)}: the model returned no {plural} for this photo.")
        several = f"{count} {plural}" if count > 1 else f"1 {kind}"
        last = f"{kind}:0 to {kind}:{count - 1}" if count > 1 else f"{kind}:0"
        given = worded("labels=[...]", "--labels FILE")
        named = "" if labels is None else ", or a class by name" if labels else f"; names of classes come with {given}"
        raise OptionError(f"target {kind}:{printable(which)}: the model returned {several}. Pass {last}{named}.")
    return number
