"""Targets that a model takes, by what it returned in a forward pass, each with an example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from visattn._support.attempts import Attempt
from visattn._support.modes import in_own_modes
from visattn.core.families import labels as labels_of, task as task_of
from visattn.core.pipeline.answering import with_target
from visattn.core.pipeline.inputs import Prepared, prepare
from visattn.core.pipeline.outputs import Meaning, tensor_of
from visattn.core.pipeline.passes import answer_of, check_classes
from visattn.core.pipeline.targets import Target

__all__ = ["Choice", "choices_of"]

_DETECTION = {"boxes", "scores", "labels"}  # of one image in torchvision


class Choice(NamedTuple):
    """A target that a model takes.

    Attributes:
        target: An example; `X,Y` stands for a pixel of your photo.
        score: What it is the score of.
    """

    target: str
    score: str


@in_own_modes
def choices_of(model: nn.Module, prepared: Prepared, output: Any) -> list[Choice]:  # noqa: ANN401
    """Return the targets that a model takes.

    What the forward pass has not proven is left out. Where nothing tells whether outputs are classes or labels, both are listed, and what
    states it.

    Args:
        model: The model.
        prepared: What the model was given.
        output: What it returned.
    """
    others = (
        Choice("similar:photo:coffee", "cosine similarity of the output to that for another image"),
        Choice("text:a cat", "similarity to a text"),
    )
    numbers = (one for one in _of_numbers(model, prepared, output) if _has_score(model, prepared, one.target, output))
    return [*numbers, *_of_places(output), *_of_boxes(output), *(one for one in others if _is_similarity(model, one.target))]


def _has_score(model: nn.Module, prepared: Prepared, example: str, output: Any) -> bool:  # noqa: ANN401
    """Check that a target has a score in an output."""
    with Attempt() as attempt:
        _, target = with_target(model, prepared, Target(example))
        check_classes(model, prepared.spec_of(model), target)
        target.resolve(output)
    return not attempt.failed


def _is_similarity(model: nn.Module, example: str) -> bool:
    """Check by a photo that a model computes the similarity to another image, or to a text."""
    with Attempt() as attempt, torch.no_grad():
        prepared, target = with_target(model, prepare("photo:chelsea", model), Target(example))
        target.resolve(answer_of(model, prepared.pixels, prepared))
    return not attempt.failed


def _of_numbers(model: nn.Module, prepared: Prepared, output: Any) -> Iterator[Choice]:  # noqa: ANN401
    """Yield the targets of numbers `(B, k)` or `(B,)`."""
    numbers = tensor_of(output, "logits")
    if numbers is None or numbers.ndim > 2 or not numbers.is_floating_point():
        return
    rows = numbers.detach().reshape(len(numbers), -1)
    names, count = labels_of(model), rows.shape[1]
    meaning = Meaning.of(rows, task_of(model), names if names is not None and len(names) >= count else None)
    is_open = meaning.kind == "unknown" and prepared.spec_of(model).classifier
    if count > 1 and (meaning.noun == "class" or is_open):
        yield Choice("class:0", f"{_called(meaning)}one of {count} classes" + ", if you state --task classes" * is_open)
    if meaning.noun == "label" or is_open:
        yield Choice("label:0", f"{_called(meaning)}one of {count} labels" + ", if you state --task multi_label" * is_open)
    if count > 1 and (meaning.noun == "label" or is_open):
        yield Choice("label:0,1", "the sum of several labels")
    yield Choice("output:0", f"one of {count} numbers" if count > 1 else "the only number")
    yield Choice("output:-0", "what makes that number smaller")


def _called(meaning: Meaning) -> str:
    return "" if meaning.names is None else f"{meaning.called(0)}, by index or name, "


def _of_places(output: Any) -> Iterator[Choice]:  # noqa: ANN401
    """Yield the targets of an output that has places."""
    dense, depth = tensor_of(output, "logits", "out"), tensor_of(output, "predicted_depth")
    masks = tensor_of(output, "masks_queries_logits", "pred_masks")
    if dense is not None and dense.ndim == 4:
        yield Choice("pixel:X,Y", "what is predicted at a pixel of the photo")
        yield Choice("mask:0", f"one of {dense.shape[1]} channels, over the pixels where it is predicted")
    elif depth is not None:
        yield Choice("pixel:X,Y", "the value at a pixel of the photo")
    elif masks is not None:
        yield Choice("mask:0", f"one of {masks.shape[-3]} masks")


def _of_boxes(output: Any) -> Iterator[Choice]:  # noqa: ANN401
    """Yield the targets of detectors."""
    logits, boxes = tensor_of(output, "logits", "pred_logits"), tensor_of(output, "pred_boxes")
    if isinstance(output, (list, tuple)) and output and isinstance(output[0], Mapping) and output[0].keys() >= _DETECTION:
        yield Choice("box:0", "a box that is found in the photo, in the order of the model")
    elif isinstance(logits, Tensor) and isinstance(boxes, Tensor) and logits.ndim == boxes.ndim == 3:
        yield Choice("box:0", "a box that is found in the photo, the most probable first")
        yield Choice("query:0", f"one of {boxes.shape[1]} queries")
