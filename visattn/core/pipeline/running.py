"""Preprocessed photos through the model: those of one size together, if the model gives each what it gets alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch import nn

from visattn._support.modes import in_own_modes
from visattn._support.notes import note
from visattn._support.progress import progress
from visattn.core.pipeline.answering import answer, of_model, with_target
from visattn.core.pipeline.apart import known_apart
from visattn.core.pipeline.detections import with_detection
from visattn.core.pipeline.explanation import Explanation
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.joint import joined, keeps_apart
from visattn.core.pipeline.passes import one_pass, scoring, telling_memory
from visattn.core.pipeline.places import is_place
from visattn.core.pipeline.question import Question
from visattn.core.pipeline.recordings import at_layer, layer_of_cam, recorded, replayed
from visattn.core.records import Recording
from visattn.errors import ResourceError, VisattnError

__all__ = ["explained", "looked"]

_T = TypeVar("_T")
_ALONE = {"score", "replay"}  # needs of methods that run the model again for each image


@in_own_modes
def explained(model: nn.Module, prepared: Sequence[Prepared], question: Question, *, seed: int = 0) -> list[Explanation]:
    """Explain preprocessed photos, those of one size together.

    Args:
        model: The model.
        prepared: The photos, each prepared alone.
        question: Method, parameters and target, from `ask`.
        seed: Seed of methods that draw samples, and of models that draw in their forward pass.

    Returns:
        The explanations, in order.

    Raises:
        VisattnError: The errors of `explain` after preprocessing.
    """

    def run(some: Sequence[Prepared]) -> list[Explanation]:
        found = _together(model, some, question) if len(some) > 1 else None
        return found or [_alone(model, one, question) for one in some]

    return _by_size(run, prepared, seed, alone=_of_one_photo(question))


@in_own_modes
def looked(model: nn.Module, prepared: Sequence[Prepared], question: Question | None = None, *, seed: int = 0) -> list[Recording]:
    """Record preprocessed photos, those of one size with one pass if it gives each what it gets alone.

    Args:
        model: The model.
        prepared: The photos, each prepared alone.
        question: Question whose method decides what is recorded; None: all attention, and the last features.
        seed: Seed of what the model draws in its forward pass.

    Returns:
        The recording of each, in order.
    """

    def run(some: Sequence[Prepared]) -> list[Recording]:
        joint = joined(some)
        if len(some) == 1 or known_apart(model, joint.pixels) is not False:
            passed = one_pass(model, joint) if question is None else recorded(model, joint, question)[1]
            if len(some) == 1 or keeps_apart(model, some, passed):
                return [passed.recording.image(number) for number in range(len(some))]
        return [recording for one in some for recording in run([one])]

    return _by_size(run, prepared, seed)


def _by_size(
    run: Callable[[Sequence[Prepared]], list[_T]], prepared: Sequence[Prepared], seed: int, *, alone: bool = False
) -> list[_T]:
    """Run over photos, those of one size together unless each has to run alone; return the results in order."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for number, one in enumerate(prepared):
        groups[number if alone else tuple(one.pixels.shape)].append(number)
    found: dict[int, _T] = {}
    for numbers in groups.values():
        found |= zip(numbers, _in_halves(run, [replace(prepared[number], seed=seed) for number in numbers]), strict=True)
    return [found[number] for number in range(len(prepared))]


def _in_halves(run: Callable[[Sequence[Prepared]], list[_T]], prepared: Sequence[Prepared]) -> list[_T]:
    """Run over photos together; in halves if memory does not suffice."""
    try:
        with telling_memory(prepared[0].pixels):
            return run(prepared)
    except ResourceError:
        if len(prepared) == 1:
            raise
    count = len(prepared)  # the error and its frames are gone here, with the tensors that they held
    note(f"out of memory for {count} images together; they run in halves")
    return [one for half in (prepared[: count // 2], prepared[count // 2 :]) for one in _in_halves(run, half)]


def _of_one_photo(question: Question) -> bool:
    """Check whether the score of an image depends on its photo's geometry, or the method runs the model again for each image."""
    of, needs = question.target.of, question.method.needs if question.method else ()
    return bool(_ALONE & set(needs)) or is_place(of) or question.target.prompt is not None


def _together(model: nn.Module, prepared: Sequence[Prepared], question: Question) -> list[Explanation] | None:
    """Explain photos of one size with one pass; None if it does not give each what it gets alone."""
    try:
        question = of_model(question, model)
        joint, target = with_target(model, joined(prepared), question.target)
        if known_apart(model, joint.pixels) is False:
            return None
        settled, passed = recorded(model, joint, replace(question, target=target))
        settled = settled.settled(passed.recording)
        again = _ALONE & set(settled.method.needs if settled.method else ())
        if again or passed.detections is not None or not keeps_apart(model, prepared, passed):
            return None
        auto = question.method is None
        return [answer(passed.recording.image(number), one, settled, auto=auto) for number, one in enumerate(prepared)]
    except ResourceError:
        raise
    except VisattnError:  # of one image, which is told of it alone, or of the batch
        return None


def _alone(model: nn.Module, prepared: Prepared, question: Question) -> Explanation:
    """Explain one photo, with as many passes as its method needs."""
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
