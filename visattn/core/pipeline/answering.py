"""Answers: a method's map of a recording, with what the photo and the model add to its provenance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import nn

from visattn._support.faces import Later
from visattn._support.language import option, worded
from visattn._support.modes import in_own_modes
from visattn.core.families import labels as labels_of, task as task_of
from visattn.core.geometry import Geometry
from visattn.core.images import image_facts
from visattn.core.methods.selection import chain_refusal
from visattn.core.pipeline.arguments import layer_of
from visattn.core.pipeline.explanation import Explanation
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.passes import Pass
from visattn.core.pipeline.question import Question, check_layer
from visattn.core.pipeline.targets import Target
from visattn.core.records import Recording
from visattn.errors import OptionError

if TYPE_CHECKING:
    from visattn.core.methods import sinks
else:
    sinks = Later("visattn.core.methods.sinks")

__all__ = ["answer", "of_model", "pixel_to_input", "with_target"]

_BOXES: Any = Later(f"{__package__}.detections")  # completes a map of such a query, or of a box
_MUCH = 0.4  # share of the photo; the usual crop of a photo of 16:9 shows more


def of_model(question: Question, model: nn.Module) -> Question:
    """Return the question with the layer named as in the model.

    Raises:
        OptionError: If the model has no such layer, or feature maps of all layers are asked for, which are several explanations.
    """
    if "layer" not in question.parameters:
        return question
    layer = layer_of(question.parameters["layer"], model)
    question = replace(question, parameters={**question.parameters, "layer": layer})
    check_layer(question)
    if layer == "all" and "cam layer" in (question.method.needs if question.method else ()):
        raise OptionError(
            "feature maps of several layers are several explanations. Use "
            + worded("visattn.explain_stages.", "visattn overlay --layer all.")
        )
    return question


def with_target(model: nn.Module, prepared: Prepared, target: Target) -> tuple[Prepared, Target]:
    """Complete a target with what the model and the photo tell: class names, tokens of a prompt, the place of a pixel.

    Raises:
        OptionError: If the model has no text tower, or the place is outside the model's input.
    """
    labels = labels_of(model) if target.labels is None else target.labels
    target = replace(target, task=target.task or task_of(model), labels=labels)
    for step in target.steps:
        prepared, target = Later(f"{__package__}.{step}").completed(model, prepared, target)
    return prepared, target


@in_own_modes
def answer(
    recording: Recording,
    prepared: Prepared,
    question: Question,
    image: int = 0,
    *,
    given: Mapping[str, Any] = MappingProxyType({}),
    auto: bool = False,
) -> Explanation:
    """Compute one method's map of one image of the batch, and add the photo's facts and the attention sinks to its provenance.

    Args:
        recording: Recording with everything that the method needs.
        prepared: The preprocessed photos.
        question: Method, parameters and target, from `ask`; the recording decides which method `auto` stands for.
        image: Index of the image in the batch.
        given: Arguments of methods that run the model again: `replay`, `scored`.
        auto: Whether the method was chosen automatically; a note then states it.

    Returns:
        The explanation.

    Raises:
        OptionError: If the method does not apply to the model.
    """
    question = question.settled(recording)
    name, chosen = question.name, question.method
    assert chosen is not None  # noqa: S101 - `settled` chose it
    if reason := chosen.accepts(recording):
        raise OptionError(f"{recording.provenance.model}: method '{name}' does not apply: {reason}")
    geometry, photo = prepared.geometries[image], prepared.photos[image]
    parameters = dict(question.parameters)
    how = "it explains the target" if chosen.targeted else "it does not depend on a class"
    notes: tuple[str, ...] = (f"method {name} was chosen automatically; {how}",) if auto else ()
    query = parameters.get("query")
    if isinstance(query, str) and query.startswith("pixel:"):
        parameters["query"] = pixel_to_input(query, recording, geometry)
    result = chosen.function(recording, **parameters, **given)
    if isinstance(query, str) and query.startswith("pixel:"):
        notes += (f"query {query} is {result.facts.query}",)
    if chosen.sinks and chain_refusal(recording) is None and not result.facts.sinks:
        result = replace(result, facts=replace(result.facts, sinks=sinks.find_sinks(recording, layer=result.facts.layer)))
    source = image_facts(photo)
    provenance = result.provenance.but(image=source.name, image_sha256=source.sha256, geometry=geometry, notes=source.notes)
    attention_map = replace(result, provenance=prepared.noted(provenance).but(notes=notes)).at(batch=image)
    if holes := attention_map.layout.holes:
        of = math.prod(attention_map.layout.grid)
        dropped = f"{len(holes)} of {of} patches are hatched: the model dropped their tokens"
        attention_map = replace(attention_map, provenance=attention_map.provenance.but(notes=(dropped,)))
    if geometry.share < _MUCH:
        fit = option("resize", "fit")
        unseen = f"the model received {geometry.share:.0%} of the photo; with {fit} it receives all"
        attention_map = replace(attention_map, provenance=attention_map.provenance.but(warnings=(unseen,)))
    if chosen.targeted and not bool(attention_map.values.nan_to_num().any()):
        empty = "the map is zero everywhere: no positive evidence for the target, so the image is left unchanged"
        attention_map = replace(attention_map, provenance=attention_map.provenance.but(warnings=(empty,)))
    return Explanation(photo, geometry, attention_map)


def completed(explanation: Explanation, passed: Pass, prepared: Prepared, target: Target, image: int = 0) -> Explanation:
    """Add the box of the target, or of the query that was chosen."""
    detection = getattr(passed.resolved and passed.resolved.score, "detection", None)
    if detection is None and explanation.map.facts.query.partition(":")[0] not in ("object", "query"):
        return explanation
    with_boxes: Explanation = _BOXES.completed(explanation, passed.output, prepared.inputs, target.labels, image, detection)
    return with_boxes


def pixel_to_input(query: str, recording: Recording, geometry: Geometry) -> str:
    """Convert a query `pixel:X,Y` of the upright photo to `input:Y,X` in pixels of the model's input.

    Raises:
        OptionError: If the pixel is not in the part of the photo that the model received.
    """
    try:
        x, y = (float(part) for part in query.removeprefix("pixel:").split(","))
    except ValueError as error:
        raise OptionError(f"a pixel query must be pixel:X,Y with numbers, got '{query}'.") from error
    layouts = [record.keys for record in recording] + [feature.layout for feature in recording.features if feature.layout]
    layout = next(layout for layout in layouts if len(layout.grid) == 2)
    geometry.patch_at(y, x, (layout.grid[0], layout.grid[1]), layout.box)  # raises if the pixel is outside
    at = geometry.to_input(y, x)
    return f"input:{at[0]:g},{at[1]:g}"
