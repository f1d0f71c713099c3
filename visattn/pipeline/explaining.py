"""The sentence that is the architecture.

A photo is prepared, the model runs under a capture, a method turns the recording into a map, and the map is brought onto the photo.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from visattn._support.typed import typed
from visattn.errors import OptionError
from visattn.families import labels as labels_of
from visattn.geometry import Geometry
from visattn.images import facts
from visattn.loading import load_model
from visattn.methods.selection import chain_refusal
from visattn.methods.sinks import find_sinks
from visattn.pipeline.explanation import Explanation
from visattn.pipeline.inputs import Prepared, prepare_any, read
from visattn.pipeline.preprocessing import Preprocessing, PreprocessingOptions
from visattn.pipeline.question import Question, ask
from visattn.pipeline.recordings import layer_of_cam, recorded, replayed
from visattn.pipeline.run import scoring
from visattn.pipeline.targets import Of, Target, TargetOptions
from visattn.records import Recording


@typed()
def explain(
    model: nn.Module | str,
    image: Any,  # noqa: ANN401 - a path, a picture or an array
    *,
    method: str = "auto",
    target: Of = None,
    weights: str | os.PathLike[str] = "auto",
    seed: int = 0,
    device: str | torch.device = "cpu",
    **options: Any,  # noqa: ANN401 - fields of `Target` and `Preprocessing`, and the method's parameters
) -> Explanation:
    """Where does this model look in this photo?

    Args:
        model: A timm name, or a model.
        image: A path, a picture or an array; for a model of other than one or three channels an array `(H, W, C)` or `(C, H, W)`.
        method: A name of `visattn.methods.METHODS`; `auto` is relevance for the top class of a classifier whose layers compose,
            Grad-CAM for one without self-attention, else last-layer attention; of a class that was asked for, Grad-CAM.
        target: The class that is explained, by index or name; None: the top class; or a function from the model's output to a
            number for each image, which a model without a classification head needs. For class-specific methods only.
        weights: See `load_model`; for a name only.
        seed: Of random weights, for a name only, and of methods that draw samples.
        device: Where a named model runs.
        options: Of the target: `versus`, another class, whose score is subtracted; `target_space`, whose gradient is taken: `logit`,
            `prob` (after softmax) or `logprob`; `labels`, names of the classes (ImageNet's are known). Of the photo, see
            `Preprocessing`: `resize` (`auto`, `fit` or `model`), `img_size`, `color_profile`, `max_pixels`, `rgb`. All others are
            parameters of the method; a query `pixel:X,Y` of the upright photo becomes the patch that covers it.

    Returns:
        The explanation; `.overlay()` is the picture.

    Raises:
        OptionError: If the method, a parameter or the target is unknown or out of range, or does not go with the model.
        VisattnError: As `load_image`, `load_model`, `prepare`, `capture` and the method raise.
    """
    how = Preprocessing(**{name: options.pop(name) for name in PreprocessingOptions.__annotations__ if name in options})
    told = {name: options.pop(name) for name in TargetOptions.__annotations__ if name in options}
    photo = read(image, how)  # before a model is loaded
    question = ask(method, options, Target(target, **told))
    if isinstance(model, str):
        model = load_model(model, weights=weights, seed=seed, img_size=how.img_size, device=device)
    return explain_prepared(model, prepare_any(photo, model, how), question, seed=seed)


def explain_prepared(model: nn.Module, prepared: Prepared, question: Question, *, seed: int = 0) -> Explanation:
    """Answer a question about one photo that is prepared.

    Args:
        model: The model.
        prepared: The photo.
        question: What `ask` made.
        seed: Of methods that draw samples.

    Returns:
        The explanation.

    Raises:
        VisattnError: As `explain` raises, once the photo is prepared.
    """
    if question.target.labels is None:
        question = replace(question, target=replace(question.target, labels=labels_of(model)))
    method = question.method
    if method is not None and "score" in method.needs:
        if "seed" in method.parameters:
            question = replace(question, parameters={**question.parameters, "seed": seed})
        features = [layer_of_cam(model, prepared, question.parameters)] if "cam layer" in method.needs else "none"
        with scoring(model, prepared, question.target, features=features) as (recording, scored):
            return answer(recording, prepared, question, given={"scored": scored})
    settled, (recording, _) = recorded(model, prepared, question)
    again = settled.method is not None and "replay" in settled.method.needs
    given = {"replay": partial(replayed, model, prepared, settled)} if again else {}
    return answer(recording, prepared, settled, given=given, auto=question.method is None)


def answer(
    recording: Recording,
    prepared: Prepared,
    question: Question,
    image: int = 0,
    *,
    given: Mapping[str, Any] = MappingProxyType({}),
    auto: bool = False,
) -> Explanation:
    """One method's map of one image of the batch, with the photo's facts and the sinks written into its provenance.

    Args:
        recording: What the method wants.
        prepared: The photos.
        question: What `ask` made; `auto` is settled by the recording.
        image: Which image of the batch.
        given: The arguments of methods that run the model again: `replay`, `scored`.
        auto: Whether the method was chosen, which a note says.

    Returns:
        The explanation.

    Raises:
        OptionError: If the method does not apply.
    """
    question = question.settled(recording)
    name, chosen = question.name, question.method
    assert chosen is not None  # noqa: S101 - it is settled
    if reason := chosen.accepts(recording):
        raise OptionError(f"{recording.provenance.model}: method '{name}' does not apply: {reason}")
    geometry, photo = prepared.geometries[image], prepared.photos[image]
    parameters = dict(question.parameters)
    how = "it explains a class" if chosen.targeted else "it does not depend on a class"
    notes: tuple[str, ...] = (f"method {name} was chosen; {how}",) if auto else ()
    query = parameters.get("query")
    if isinstance(query, str) and query.startswith("pixel:"):
        parameters["query"] = pixel_to_input(query, recording, geometry)
    result = chosen.function(recording, **parameters, **given)
    if isinstance(query, str) and query.startswith("pixel:"):
        notes += (f"query {query} is {result.facts.query}",)
    if chosen.sinks and chain_refusal(recording) is None and not result.facts.sinks:
        result = replace(result, facts=replace(result.facts, sinks=find_sinks(recording)))
    source = facts(photo)
    provenance = result.provenance.but(image=source.name, image_sha256=source.sha256, geometry=geometry, notes=source.notes)
    found = replace(result, provenance=prepared.noted(provenance).but(notes=notes)).at(batch=image)
    if found.layout.holes:
        dropped = (
            f"{len(found.layout.holes)} of {math.prod(found.layout.grid)} patches are hatched: the model dropped their tokens"
        )
        found = replace(found, provenance=found.provenance.but(notes=(dropped,)))
    if chosen.targeted and not bool(found.values.nan_to_num().any()):
        empty = "nothing in the image speaks for the target: no positive evidence, so the photo is left as it is"
        found = replace(found, provenance=found.provenance.but(warnings=(empty,)))
    return Explanation(photo, geometry, found)


def pixel_to_input(query: str, recording: Recording, geometry: Geometry) -> str:
    """`pixel:X,Y` of the upright photo as `input:Y,X` of the model's input.

    Raises:
        OptionError: If it is no pixel of the photo that the model saw.
    """
    try:
        x, y = (float(part) for part in query.removeprefix("pixel:").split(","))
    except ValueError as error:
        raise OptionError(f"a pixel query must be pixel:X,Y with numbers, got '{query}'.") from error
    layouts = [record.keys for record in recording] + [feature.layout for feature in recording.features if feature.layout]
    layout = next(layout for layout in layouts if len(layout.grid) == 2)
    geometry.patch_at(y, x, (layout.grid[0], layout.grid[1]), layout.box)  # says what is wrong with a pixel outside
    at = geometry.to_input(y, x)
    return f"input:{at[0]:g},{at[1]:g}"
