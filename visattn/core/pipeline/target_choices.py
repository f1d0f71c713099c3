"""Targets that a model takes, each with an example that was resolved on the output for a photo."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from visattn._support.language import option
from visattn._support.modes import evaluating, in_own_modes
from visattn.core.families import detections as detections_of, labels as labels_of, task as task_of
from visattn.core.methods import METHODS
from visattn.core.pipeline.answering import with_target
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.output_boxes import is_listed
from visattn.core.pipeline.output_places import masks_in
from visattn.core.pipeline.outputs import Meaning, class_name, tensor_of
from visattn.core.pipeline.passes import answer_of, as_the_model, check_classes
from visattn.core.pipeline.targets import Target
from visattn.core.records import Recording
from visattn.errors import VisattnError

__all__ = ["Choice", "choices_of", "queries_of"]

_NEEDS = "an example needs a PHOTO"
_MASKS = 20  # that are tried until one has a pixel
_UNKNOWN = {  # task: when it is the right one
    "classes": "if one of the outputs is true",
    "multi_label": "if each output is true or not",
}


class Choice(NamedTuple):
    """A kind of target, or a query, that a model takes.

    Attributes:
        option: `target` or `query`.
        example: A value that runs as it stands; with capital letters in place of what depends on the photo, if there is none.
        what: What the example is, and how many there are.
    """

    option: str
    example: str
    what: str


@in_own_modes
def choices_of(model: nn.Module, prepared: Prepared, output: Any) -> list[Choice]:  # noqa: ANN401
    """Return the targets that a model takes, told by its output for a photo. Each example was resolved on that output.

    Args:
        model: The model.
        prepared: The preprocessed photo; without a photo, its places, masks and boxes are only named.
        output: What the model returned for it.
    """
    candidates = [*_numbers(model, prepared, output), *_dense(model, prepared, output), *_boxes(model, prepared, output)]
    candidates += [
        Choice("target", "similar:photo:coffee", "how similar the photo is to another image"),
        Choice("target", "text:a photo", "how similar the photo is to a text"),
    ]
    choices: list[Choice] = []
    for one in candidates:
        has_one = one.example.startswith("mask:") and any(other.example.startswith("mask:") for other in choices)
        if not has_one and (one.example[-1:].isupper() or _resolves(model, prepared, output, one.example)):
            choices.append(one)
    return choices


def _resolves(model: nn.Module, prepared: Prepared, output: Any, example: str) -> bool:  # noqa: ANN401
    """Check that a target has a score for the photo."""
    alone = replace(prepared, inputs={}) if example.startswith(("similar", "text")) else prepared
    try:
        completed, target = with_target(model, alone, Target(example))
        check_classes(model, prepared.spec_of(model), target)
        with evaluating(model, frozen=True), torch.no_grad():
            if completed.inputs is not prepared.inputs:
                output = answer_of(model, as_the_model(model, completed.pixels), completed)
            target.resolve(output)
    except VisattnError:
        return False
    return True


def _numbers(model: nn.Module, prepared: Prepared, output: Any) -> Iterator[Choice]:  # noqa: ANN401
    """Yield the targets of an output `(B, k)`, or `(B,)`: a class, a label or a number, by what is known of it."""
    numbers = tensor_of(output, "logits")
    if numbers is None or numbers.ndim not in (1, 2) or not numbers.is_floating_point():
        return
    outputs = numbers.detach().reshape(len(numbers), -1)
    labels, best, count = labels_of(model), int(outputs[0].argmax()), outputs.shape[1]
    meaning = Meaning.of(outputs, task_of(model), labels if labels is not None and len(labels) >= count else None)
    top = best if prepared.photos else 0
    rank = "predicted, " if prepared.photos else ""
    unknown = meaning.kind == "unknown" and prepared.spec_of(model).classifier
    if count > 1 and (meaning.noun == "class" or unknown):
        named = "" if meaning.names is None else f"{meaning.called(top)}, by index or by name, "
        why = _why("classes") if unknown else ""
        yield Choice("target", f"class:{top}", f"{named}{rank}of {count} classes{why}")
    if meaning.noun == "label" or unknown:
        named = "" if meaning.names is None else f"{meaning.called(top)}, by index or by name, "
        why = _why("multi_label") if unknown else ""
        yield Choice("target", f"label:{top}", f"{named}of {_several(count, 'label')}{why}")
        if count > 1:
            yield Choice("target", "label:0,1", f"the sum of some of {count} labels{why}")
    yield Choice("target", "output:0", f"one of {count} numbers" if count > 1 else "the only number")
    yield Choice("target", "output:-0", "what makes that number smaller")


def _why(task: str) -> str:
    return f", {_UNKNOWN[task]}, which nothing tells; {option('task', task)} states it"


def _dense(model: nn.Module, prepared: Prepared, output: Any) -> Iterator[Choice]:  # noqa: ANN401
    """Yield the targets of an output that has places: a pixel, and each class or mask, those with most pixels first."""
    plain = tensor_of(output, "logits", "out")
    try:
        masks, apart = masks_in(output)
    except VisattnError:
        return
    if plain is not None and plain.ndim == 3 and not apart:  # tokens, more likely than places
        return
    count, labels = masks.shape[1], labels_of(model)
    of = f"one of {_several(count, 'mask' if apart else 'channel')}"
    if not prepared.photos:
        yield from [] if apart else [Choice("target", "pixel:X,Y", f"what is largest at a pixel of the photo; {_NEEDS}")]
        yield Choice("target", "mask:K", f"{of} over its pixels; {_NEEDS}")
        return
    top, left, bottom, right = prepared.geometry.seen()
    if not apart:
        yield Choice(
            "target", f"pixel:{int(left + right) // 2},{int(top + bottom) // 2}", "what is largest at this pixel of the photo"
        )
    most = torch.bincount(masks[0].argmax(0).flatten(), minlength=count).argsort(descending=True, stable=True)
    for index in range(min(count, _MASKS)) if apart else most[:_MASKS].tolist():
        named = f", {class_name(index, labels)}" if labels is not None and not apart else ""
        yield Choice("target", f"mask:{index}", f"{of}{named}, over its pixels")


def _boxes(model: nn.Module, prepared: Prepared, output: Any) -> Iterator[Choice]:  # noqa: ANN401
    """Yield the targets of a detector: a detection of this photo, or a query."""
    labels, boxes = labels_of(model), tensor_of(output, "pred_boxes")
    listed = detections_of(model, output)
    if is_listed(listed):
        count = len(listed[0]["boxes"])
        if not prepared.photos:
            yield Choice("target", "box:N", f"the score of a detection; {_NEEDS}")
        elif count:
            named = class_name(int(listed[0]["labels"][0]), labels)
            yield Choice("target", "box:0", f"{named}, one of {_several(count, 'detection')} of this photo")
        return
    logits = tensor_of(output, "logits", "pred_logits")
    if logits is None or boxes is None or logits.ndim != 3:
        return
    chances = logits[0].detach().float().softmax(-1)
    best = int((chances[:, :-1] if labels is None or chances.shape[1] > len(labels) else chances).amax(1).argmax())
    yield Choice("target", f"query:{best if prepared.photos else 0}", f"one of {_several(len(chances), 'query')} and its box")
    yield Choice("target", "box:0" if prepared.photos else "box:N", "a detection of this photo, the most probable first")


def queries_of(recording: Recording) -> list[Choice]:
    """Return the queries whose attention can be drawn, each with an example that `attention` drew on a recording."""
    record = next((record for record in reversed(list(recording)) if record.reason is None), None)
    if record is None:
        return []
    layout, grid = record.queries, record.queries.grid
    named = {re.sub(r"\d+$", "", name): name for name in reversed(layout.prefix)}
    of = f"one of {_several(len(layout.prefix), 'token')} apart from patches"
    candidates = [Choice("query", _query_of(name), of) for name in named.values()]
    if len(grid) == 2:
        middle = f"patch:{grid[0] // 2},{grid[1] // 2}"
        candidates.append(Choice("query", middle, f"one of {grid[0]} x {grid[1]} patches; pixel:X,Y of the photo selects one"))
    return [one for one in candidates if _draws(recording, one.example)]


def _query_of(name: str) -> str:
    """Return the query that selects a named token: `register:0` for `register0`."""
    stem = re.sub(r"\d+$", "", name)
    return name if stem == name else f"{stem}:{name.removeprefix(stem)}"


def _draws(recording: Recording, query: str) -> bool:
    attention = METHODS["attention"]
    try:
        if attention.accepts(recording) is not None:
            return False
        attention.function(recording, query=query)
    except VisattnError:
        return False
    return True


def _several(count: int, noun: str) -> str:
    plural = {"class": "classes", "query": "queries"}.get(noun, f"{noun}s")
    return f"{count} {noun if count == 1 else plural}"
