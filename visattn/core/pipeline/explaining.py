"""Explanation of a photo by a model, from start to end.

A photo is preprocessed, the model runs under a capture, a method turns the recording into a map, and the map is placed on the photo.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from visattn._support.faces import Later
from visattn._support.language import option, worded
from visattn._support.modes import in_own_modes
from visattn._support.progress import progress
from visattn._support.spellings import spelled
from visattn._support.typed import typed
from visattn.core.families import labels as labels_of, task as task_of
from visattn.core.families.wrappers import unwrapped
from visattn.core.geometry import Geometry
from visattn.core.images import image_facts
from visattn.core.loading import load_model
from visattn.core.methods.selection import chain_refusal
from visattn.core.methods.sinks import find_sinks
from visattn.core.methods.table import MethodName
from visattn.core.pipeline.arguments import layer_of, target_of
from visattn.core.pipeline.detections import with_detection
from visattn.core.pipeline.explanation import DrawOptions, Explanation
from visattn.core.pipeline.inputs import Prepared, prepare_with, read
from visattn.core.pipeline.places import with_place
from visattn.core.pipeline.preprocessing import Preprocessing, PreprocessingOptions
from visattn.core.pipeline.question import Question, ask, check_layer, parameter_names
from visattn.core.pipeline.recordings import at_layer, layer_of_cam, recorded, replayed
from visattn.core.pipeline.run import scoring, telling_memory
from visattn.core.pipeline.targets import Of, Target, TargetOptions
from visattn.core.records import Recording
from visattn.errors import OptionError, ShapeError

if TYPE_CHECKING:
    from visattn.core.pipeline import prompts, tensors
else:
    prompts, tensors = (Later(f"{__package__}.{name}") for name in ("prompts", "tensors"))

__all__ = ["answer", "explain", "explain_prepared", "of_model", "pixel_to_input", "with_target"]

_MUCH = 0.4  # share of the photo; the usual crop of a photo of 16:9 shows more


@spelled(PreprocessingOptions, TargetOptions, DrawOptions, more=parameter_names)
@typed(but=("weights", "method"))
@in_own_modes
def explain(
    model: nn.Module | str,
    image: Any = None,  # noqa: ANN401 - a source of `load_image`, a picture or an array
    *,
    method: MethodName | str = "auto",  # editors complete the names
    target: Of = None,
    pixels: Tensor | None = None,
    inputs: Mapping[str, Any] | None = None,
    weights: str | os.PathLike[str] = "auto",
    seed: int = 0,
    device: str | torch.device = "cpu",
    **options: Any,  # noqa: ANN401 - fields of `Target` and `Preprocessing`, and the method's parameters
) -> Explanation:
    """Show where a model looks in an image.

    Args:
        model: Name of a timm model, or a model.
        image: PIL image, array, tensor, or a source of `load_image`. A model with other than one or three input channels needs an array
            `(H, W, C)` or `(C, H, W)`.
        method: Name from `visattn.methods.METHODS`, or `auto`. For a classifier, `auto` is relevance for the top class if attention
            can be multiplied across its layers, and Grad-CAM if it has no self-attention. Otherwise it is last-layer attention, or
            Grad-CAM if a target is given.
        target: Class to explain, by index or name; None: the top class. For dense outputs and detectors: `pixel:X,Y` (the class that is
            predicted at a pixel of the upright photo), `mask:K` (a class, or a mask, over its pixels) or `box:N` (the class of a
            detection). Any other model without a classification head needs a function from its output to one number per image. For
            class-specific methods only.
        pixels: Input `(1, C, H, W)` that is ready for the model, in place of the preprocessing. `image` is then the picture that they show
            as a whole; without it, the pixels are shown with their normalization undone.
        inputs: Inputs of the model by name, such as words, or all that a processor of transformers returns. Pixels among them must be
            those of the photo: what the model's own preprocessing makes of it, or an input that shows the photo as a whole.
        weights: See `load_model`; only if `model` is a name.
        seed: Seed of methods that draw samples, of models that draw in their forward pass and, if `model` is a name, of random weights.
        device: Device of a model that is given by name.
        options: Options of the target: `versus`, another class, whose score is subtracted; `target_space`, the score whose gradient
            is taken: `logit`, `prob` (after softmax) or `logprob`; `labels`, the names of the classes (`imagenet`: those of ImageNet;
            those of published weights are known); `task`, what the outputs are if that is not known, see `Target`; `prompt`, a text
            whose similarity to the image is explained, for models such as CLIP.
            Options of the preprocessing, see `Preprocessing`: `resize` (`auto`, `fit` or `model`), `img_size`, `mean`, `std`, `transform`,
            `color_profile`, `max_pixels`, `max_bytes`, `rgb`. All others are parameters of the method. A query is text, a pixel `(x, y)`
            of the upright photo, which selects the patch that covers it, or a tensor with one weight per token. A layer is an index, a
            dotted name or a module.

    Returns:
        The explanation; `.overlay()` draws it.

    Raises:
        OptionError: If the method, a parameter or the target is unknown, out of range, or does not fit the model.
        VisattnError: Any error of `load_image`, `load_model`, `prepare`, `prepare_tensor`, `capture` and the method.
    """
    model, prepared, question = asked(
        model, image, method, target=target, pixels=pixels, inputs=inputs, weights=weights, seed=seed, device=device, **options
    )
    return explain_prepared(model, prepared, question, seed=seed)


class Asked(NamedTuple):
    """Model, preprocessed photo and question of an explanation."""

    model: nn.Module
    prepared: Prepared
    question: Question


def asked(
    model: nn.Module | str,
    image: Any,  # noqa: ANN401
    method: MethodName | str,
    *,
    target: Of = None,
    pixels: Tensor | None = None,
    inputs: Mapping[str, Any] | None = None,
    weights: str | os.PathLike[str] = "auto",
    seed: int = 0,
    device: str | torch.device = "cpu",
    **options: Any,  # noqa: ANN401
) -> Asked:
    """Check the arguments of `explain`, load the model and prepare the image.

    Raises:
        VisattnError: The errors of `explain` before the model runs.
    """
    _check_given(image, pixels, inputs, options)
    how = Preprocessing(**{name: options.pop(name) for name in PreprocessingOptions.__annotations__ if name in options})
    told = {name: options.pop(name) for name in TargetOptions.__annotations__ if name in options}
    photo = None if image is None else read(image, how)  # a bad file fails before a model is loaded
    question = ask(method, options, Target(target_of(target), **told))
    if isinstance(model, str):
        model = load_model(model, weights=weights, seed=seed, img_size=how.img_size, device=device)
    compiled = isinstance(getattr(model, "_orig_mod", None), nn.Module)
    model = unwrapped(model)
    if inputs is not None:
        prepared = tensors.prepare_inputs(inputs, photo, model, how)
    elif pixels is None:
        prepared = prepare_with([photo], model, how)
    else:
        prepared = tensors.prepare_tensor(pixels, model, photos=None if photo is None else [photo], mean=how.mean, std=how.std)
    if compiled:
        prepared = replace(prepared, notes=(*prepared.notes, "the model is compiled, and ran without that"))
    return Asked(model, prepared, question)


def _check_given(
    image: Any,  # noqa: ANN401
    pixels: Tensor | None,
    inputs: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> None:
    """Check what only `explain` can know about its arguments.

    Raises:
        OptionError: If there is no image, or an option of pictures is among the options.
        ShapeError: If there are several inputs.
    """
    if pixels is not None and inputs is not None:
        raise OptionError("pixels are one of the inputs. Pass them among inputs, under the name that the model has for them.")
    if image is None and pixels is None and inputs is None:
        raise OptionError('image is missing. Pass a file name, a picture or an array: explain(model, "photo:chelsea").')
    if isinstance(image, Prepared):
        raise OptionError(
            "image is already preprocessed. Pass its two parts: explain(model, prepared.photo, pixels=prepared.pixels)."
        )
    if isinstance(pixels, Tensor) and pixels.ndim == 4 and len(pixels) > 1:
        raise ShapeError(
            f"pixels must be one input (1, C, H, W), got {len(pixels)}. Explain them one by one: pixels=pixels[i : i + 1]."
        )
    if drawing := [name for name in options if name in DrawOptions.__annotations__]:
        raise OptionError(f"{drawing[0]} is an option of the picture: explain(...).overlay({drawing[0]}=...), or .save or .show.")


@in_own_modes
def explain_prepared(model: nn.Module, prepared: Prepared, question: Question, *, seed: int = 0) -> Explanation:
    """Explain one preprocessed photo.

    Args:
        model: The model.
        prepared: The preprocessed photo.
        question: Method, parameters and target, from `ask`.
        seed: Seed of methods that draw samples, and of models that draw in their forward pass.

    Returns:
        The explanation.

    Raises:
        VisattnError: The errors of `explain` after preprocessing.
    """
    with telling_memory(prepared.pixels):
        return _explained(model, replace(prepared, seed=seed), question)


def _explained(model: nn.Module, prepared: Prepared, question: Question) -> Explanation:
    question = of_model(question, model)
    prepared, target = with_target(model, prepared, question.target)
    question = replace(question, target=target)
    method = question.method
    if method is not None and "score" in method.needs:
        if "seed" in method.parameters:
            question = replace(question, parameters={**question.parameters, "seed": prepared.seed})
        features: str | list[str] = "none"
        if "cam layer" in method.needs:
            question = at_layer(question, layer_of_cam(model, prepared, question.parameters))
            features = [str(question.parameters["layer"])]
        with scoring(model, prepared, question.target, features=features) as (recording, scored):
            return answer(recording, prepared, question, given={"scored": scored})
    settled, found = recorded(model, prepared, question)
    again = settled.method is not None and "replay" in settled.method.needs
    with progress("forward passes", "pass") as bar:
        given = {"replay": partial(replayed, model, prepared, settled, bar)} if again else {}
        explanation = answer(found.recording, prepared, settled, given=given, auto=question.method is None)
    made = with_detection(explanation.map, explanation.geometry, found.detections, question.target.labels)
    return replace(explanation, map=made)


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
    if target.prompt is not None:
        prepared, target = prompts.with_prompt(model, prepared, target)
    target = replace(
        target, task=target.task or task_of(model), labels=labels_of(model) if target.labels is None else target.labels
    )
    return prepared, with_place(prepared, target)


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
    how = "it explains a class" if chosen.targeted else "it does not depend on a class"
    notes: tuple[str, ...] = (f"method {name} was chosen automatically; {how}",) if auto else ()
    query = parameters.get("query")
    if isinstance(query, str) and query.startswith("pixel:"):
        parameters["query"] = pixel_to_input(query, recording, geometry)
    result = chosen.function(recording, **parameters, **given)
    if isinstance(query, str) and query.startswith("pixel:"):
        notes += (f"query {query} is {result.facts.query}",)
    if chosen.sinks and chain_refusal(recording) is None and not result.facts.sinks:
        result = replace(result, facts=replace(result.facts, sinks=find_sinks(recording)))
    source = image_facts(photo)
    provenance = result.provenance.but(image=source.name, image_sha256=source.sha256, geometry=geometry, notes=source.notes)
    found = replace(result, provenance=prepared.noted(provenance).but(notes=notes)).at(batch=image)
    if found.layout.holes:
        dropped = (
            f"{len(found.layout.holes)} of {math.prod(found.layout.grid)} patches are hatched: the model dropped their tokens"
        )
        found = replace(found, provenance=found.provenance.but(notes=(dropped,)))
    if geometry.share < _MUCH:
        fit = option("resize", "fit")
        unseen = f"the model received {geometry.share:.0%} of the photo; {fit} shows it all of it"
        found = replace(found, provenance=found.provenance.but(warnings=(unseen,)))
    if chosen.targeted and not bool(found.values.nan_to_num().any()):
        empty = "the map is zero everywhere: no positive evidence for the target, so the image is left unchanged"
        found = replace(found, provenance=found.provenance.but(warnings=(empty,)))
    return Explanation(photo, geometry, found)


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
