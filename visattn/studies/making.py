"""Making of a study: every photo runs once under a capture, and the methods compute their maps."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from visattn._support.checks import printable
from visattn._support.language import worded
from visattn._support.modes import in_own_modes
from visattn._support.options import with_options
from visattn._support.progress import progress
from visattn._support.typed import typed
from visattn.core.families import labels as labels_of, task as task_of
from visattn.core.images import image_facts
from visattn.core.maps import AttentionMap
from visattn.core.methods import METHODS
from visattn.core.methods.from_attention.contributions import others, parts_of
from visattn.core.pipeline.answering import answer, with_target
from visattn.core.pipeline.arguments import target_of
from visattn.core.pipeline.asking import model_of
from visattn.core.pipeline.explanation import Explanation
from visattn.core.pipeline.inputs import Prepared, prepare_with, read
from visattn.core.pipeline.outputs import outputs_of, predicted_classes
from visattn.core.pipeline.own_targets import for_each, once_each
from visattn.core.pipeline.passes import Pass, with_readout
from visattn.core.pipeline.preprocessing import Preprocessing, PreprocessingOptions
from visattn.core.pipeline.question import Question, ask
from visattn.core.pipeline.recordings import layer_of_cam
from visattn.core.pipeline.running import explained
from visattn.core.pipeline.shared_passes import SharedPasses
from visattn.core.pipeline.targets import Of, Target, TargetOptions
from visattn.core.pipeline.tensors import prepare_inputs
from visattn.core.records import Recording
from visattn.errors import NoAttentionCaptured, OptionError
from visattn.evaluation import head_importance
from visattn.studies.sequence import Study
from visattn.studies.views import Contributions, Importance, LayerContributions, View, from_recording
from visattn.studies.words import texts_of

Asked = Mapping[str, Question]


@with_options(PreprocessingOptions, TargetOptions)
@typed(but=("weights", "methods"))
@in_own_modes
def study(
    model: nn.Module | str,
    images: Any = None,  # noqa: ANN401 - a source of `load_image`, a picture or an array, or a list of them
    *,
    methods: Sequence[str] | Mapping[str, Mapping[str, Any]] | None = None,
    target: Of | Sequence[Of] = None,
    inputs: Mapping[str, Any] | None = None,
    name: str = "",
    weights: str | os.PathLike[str] = "auto",
    seed: int = 0,
    device: str | torch.device = "cpu",
    check: float | None = None,
    **options: Any,  # noqa: ANN401 - fields of `Target` and `Preprocessing`
) -> Study:
    """Look at images with a model, and keep everything: recordings, maps, classes, and where all of it lies on the photos.

    Each image runs once under a capture. Methods that need gradients or other passes run the model again.

    Args:
        model: Name of a timm model, or a model.
        images: One image, or a list; see `visattn.explain`.
        methods: Names of methods; or names of maps, each with the options of its method, as in `{"the dog": {"method": "relevance",
            "target": "beagle"}}`. None: rollout, relevance, Grad-CAM and gates, as far as they apply.
        target: Target of the class-specific methods, see `visattn.explain`, or a list with one for each image; by default each photo's
            top class.
        inputs: Inputs of the model for one image, such as words, or all that a processor of transformers returns; see `visattn.explain`.
            Words are shown as the tokenizer beside the weights spells them.
        name: Name of the views, such as a step of a training; it comes first in titles.
        weights: See `load_model`; only if `model` is a name.
        seed: Seed of methods that draw samples and, if `model` is a name, of random weights.
        device: Device of a model that is given by name.
        check: Seconds for tests of how far each map can be trusted, see `visattn.evaluation.check`; their numbers stand in the notes of the
            view and of the map. None: no tests.
        options: Other options of the target, see `Target`, and of the preprocessing, see `Preprocessing`.

    Returns:
        A study with one view per image.

    Raises:
        OptionError: If there are no images, or a method or an option is unknown or does not fit the model.
        VisattnError: Any error of `visattn.explain`.
    """
    how = Preprocessing(**{name: options.pop(name) for name in PreprocessingOptions.__annotations__ if name in options})
    told = {name: options.pop(name) for name in TargetOptions.__annotations__ if name in options}
    photos = _photos(images, inputs, how)  # a bad file fails before a model is loaded
    make = once_each(lambda of: Target(of, **told))
    targets = [make(of) for of in for_each(target, len(photos))]
    asked = {id(of): None if methods is None else _asked(methods, of) for of in targets}
    model, notes = model_of(model, how, weights=weights, seed=seed, device=device)
    views = []
    with progress("photos", "photo") as bar:
        for photo, of in zip(photos, targets, strict=True):
            prepared = prepare_with([photo], model, how) if inputs is None else prepare_inputs(inputs, photo, model, how)
            view = view_of(model, prepared.with_notes(*notes), asked[id(of)], of, seed, check)
            views.append(replace(view, name=name, texts=texts_of(model, inputs or {}, view.recording)))
            bar.update()
    return Study(tuple(views))


def _photos(images: Any, inputs: Mapping[str, Any] | None, how: Preprocessing) -> list[Any]:  # noqa: ANN401
    """Read the images, unless they stand beside inputs: they may then be one of them."""
    found = list(images) if isinstance(images, (list, tuple)) else [images]
    if not found or (inputs is None and found == [None]):
        raise OptionError("no images were given. Pass one or a list of them.")
    if inputs is not None and len(found) > 1:
        raise OptionError(f"inputs are those of one image, and {len(found)} were given. Make a study of each, and add them.")
    return [image if inputs is not None else read(image, how) for image in found]


def _asked(methods: Sequence[str] | Mapping[str, Mapping[str, Any]], target: Target) -> Asked:
    """Validate the methods of a study; the target goes to those that take one."""
    if isinstance(methods, str) or not isinstance(methods, (Sequence, Mapping)):
        raise OptionError(f"methods must be a list of names or a mapping, got {methods!r}. Pass methods=[{methods!r}].")
    if not isinstance(methods, Mapping):
        return {name: _question(name, {}, target) for name in methods}
    found = {}
    for name, given in methods.items():
        own = dict(given)
        method = own.pop("method", name)
        of = replace(target, of=target_of(own.pop("target"))) if "target" in own else target
        found[name] = _question(method, own, of)
    return found


def _question(method: str, parameters: Mapping[str, Any], target: Target) -> Question:
    question = ask(method, parameters)
    takes = question.method is None or question.method.targeted
    return replace(question, target=target) if takes else question


@in_own_modes
def view_of(
    model: nn.Module, prepared: Prepared, asked: Asked | None, target: Target, seed: int, check: float | None = None
) -> View:
    """Run the model on one photo, and compute its maps."""
    passes = SharedPasses()
    passed = _recorded(model, prepared, passes)
    source = image_facts(prepared.photo)
    made = passed.recording.provenance.but(
        image=source.name, image_sha256=source.sha256, geometry=prepared.geometry, notes=source.notes
    )
    recording = replace(passed.recording, provenance=prepared.noted(made))
    classifies = prepared.spec_of(model).classifier and outputs_of(passed.output) is not None
    labels, task = target.labels or labels_of(model), target.task or task_of(model)
    classes = predicted_classes(passed.output, task, labels) if classifies else ()
    questions = _usual(recording, classifies and task != "embedding", target) if asked is None else asked
    of_class = any(question.method is None or question.method.targeted for question in questions.values())
    if target.of is not None and not of_class:
        maps_of = ", ".join(questions) or "no map"
        named = worded("methods=['relevance']", "--methods relevance")
        raise OptionError(
            f"target {printable(str(target.of))} changes nothing here: {maps_of} of {recording.provenance.model} explains no target. "
            f"Name a method that does, such as {named}, or leave the target out."
        )
    maps: dict[str, AttentionMap] = {}
    for name, question in questions.items():
        if check is not None:
            found = explained(model, [prepared], question, seed=seed)[0]
            recording = replace(recording, provenance=recording.provenance.but(notes=_checked(name, found, check)))
            maps[name] = found.map
        elif from_recording(question):
            maps[name] = answer(recording, prepared, question).map
        else:
            maps[name] = explained(model, [prepared], question, seed=seed, passes=passes)[0].map
    importance = _importance(model, prepared, target, passes) if of_class and classifies and len(recording) else None
    summed = next((question for question in questions.values() if question.runs_alone == "terms"), None)
    contributions = None if summed is None else _contributions(model, prepared, summed.target, passes)
    shown = classes[0] if classes else ()
    return View(prepared.photo, prepared.geometry, recording, maps, shown, importance=importance, contributions=contributions)


def _checked(name: str, found: Explanation, seconds: float) -> tuple[str, ...]:
    """Return notes on how far a map can be trusted, or why it cannot be checked."""
    try:
        return tuple(f"{name}, check: {line}" for line in found.check(seconds=seconds).lines())
    except OptionError as error:
        return (f"{name}, check: {error}",)


def _contributions(model: nn.Module, prepared: Prepared, target: Target, passes: SharedPasses) -> Contributions:
    """Return the terms of the target's score, which one of the maps is made of."""
    prepared, target = with_target(model, prepared, target)
    passed = passes(model, prepared, target=target, terms=True)
    terms, parts = parts_of(passed.recording)
    assert passed.resolved is not None and terms.score is not None  # noqa: S101, PT018 - there is a target
    layers = tuple(
        LayerContributions(part.layer, part.layout, torch.cat([part.tokens, part.patches], 1).float(), part.bias)
        for part in parts
    )
    return Contributions(passed.resolved.texts[0].partition(" = ")[0], terms.score, layers, tuple(others(terms, parts)))


def _importance(model: nn.Module, prepared: Prepared, target: Target, passes: SharedPasses) -> Importance | None:
    """Return the importance of the heads for the target; None where some attention has no gradient."""
    prepared, target = with_target(model, prepared, target)
    passed = passes(model, prepared, target=target)
    try:
        found = head_importance(passed.recording)
    except OptionError:
        return None
    assert passed.resolved is not None  # noqa: S101 - there is a target
    score = passed.resolved.texts[0].partition(" = ")[0]
    return Importance(score, tuple(tuple(heads[0].tolist()) for heads in found))


def _recorded(model: nn.Module, prepared: Prepared, passes: SharedPasses) -> Pass:
    """Record attention and the last tokens; of a model without attention, its gates or the features of its last layer."""
    try:
        passed = passes(model, prepared, gates=True)
        return passed._replace(recording=with_readout(model, prepared, passed.recording))
    except NoAttentionCaptured:
        return passes(model, prepared, features=[layer_of_cam(model, prepared, {})])


def _usual(recording: Recording, classifies: bool, target: Target) -> Asked:
    """Return the usual methods that apply: rollout and relevance where layers form a chain, else Grad-CAM; gates if there are any."""
    chained = METHODS["rollout"].accepts(recording) is None
    names = ["rollout"] * chained + ["relevance" if chained else "gradcam"] * classifies
    names += ["gates"] * (METHODS["gates"].accepts(recording) is None)
    return {name: _question(name, {}, target) for name in names}
