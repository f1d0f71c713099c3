"""Preprocessed photos through the model: those of one size together, if the model gives each what it gets alone."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor, nn

from visattn._support.faces import Later
from visattn._support.modes import in_own_modes
from visattn._support.notes import note
from visattn.core.families.weight_facts import facts_read_once
from visattn.core.pipeline.answering import answer, completed, of_model, with_target
from visattn.core.pipeline.explanation import Explanation
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.passes import Run, one_pass, telling_memory
from visattn.core.pipeline.question import Question
from visattn.core.pipeline.recordings import recorded
from visattn.core.records import Recording
from visattn.errors import ResourceError

if TYPE_CHECKING:
    from visattn.core.pipeline import again, together

    class _Sized(Protocol):
        @property
        def pixels(self) -> Tensor: ...
else:
    again, together = Later(f"{__package__}.again"), Later(f"{__package__}.together")

__all__ = ["explained", "looked"]

T = TypeVar("T")
P = TypeVar("P", bound="_Sized")


@in_own_modes
@facts_read_once()
def explained(
    model: nn.Module, prepared: Sequence[Prepared], question: Question, *, seed: int = 0, passes: Run = one_pass
) -> list[Explanation]:
    """Explain preprocessed photos, those of one size together.

    Args:
        model: The model.
        prepared: The photos, each prepared alone.
        question: Method, parameters and target, from `ask`.
        seed: Seed of methods that draw samples, and of models that draw in their forward pass.
        passes: `one_pass`, or `SharedPasses` of one photo, for a photo that is explained alone.

    Returns:
        The explanations, in order.

    Raises:
        VisattnError: The errors of `explain` after preprocessing.
    """

    def run(some: Sequence[Prepared]) -> list[Explanation]:
        explanations = together.explained_together(model, some, question) if len(some) > 1 else None
        return explanations or [alone(model, one, question, passes) for one in some]

    posed = [replace(photo, seed=seed) for photo in prepared]
    explanations = by_size(run, posed, each=bool(question.runs_alone or question.target.steps))
    for explanation, photo in zip(explanations, posed, strict=True):
        vars(explanation)["made_by"] = weakref.ref(model), photo, question  # for `check`
    return explanations


@in_own_modes
def looked(
    model: nn.Module, prepared: Sequence[Prepared], question: Question | None = None, *, seed: int = 0, values: bool = False
) -> list[Recording]:
    """Record preprocessed photos, those of one size with one pass if it gives each what it gets alone.

    Args:
        model: The model.
        prepared: The photos, each prepared alone.
        question: Question whose method decides what is recorded; None: all attention, and the last features.
        seed: Seed of what the model draws in its forward pass.
        values: Whether to record values too, if there is no question.

    Returns:
        The recording of each, in order.
    """

    def run(some: Sequence[Prepared]) -> list[Recording]:
        recordings = together.recorded_together(model, some, question) if len(some) > 1 and not values else None
        return recordings or [_recorded_alone(model, one, question, values) for one in some]

    alone_each = question is not None and question.runs_alone == "terms"
    return by_size(run, [replace(photo, seed=seed) for photo in prepared], each=alone_each)


def _recorded_alone(model: nn.Module, prepared: Prepared, question: Question | None, values: bool) -> Recording:
    passed = one_pass(model, prepared, values=values) if question is None else recorded(model, prepared, question)[1]
    return passed.recording.image(0)


def by_size(run: Callable[[Sequence[P]], list[T]], photos: Sequence[P], *, each: bool = False) -> list[T]:
    """Run over photos, those of one size together unless `each` has to run alone; return the results in order."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for number, photo in enumerate(photos):
        groups[number if each else tuple(photo.pixels.shape)].append(number)
    results: dict[int, T] = {}
    for numbers in groups.values():
        results |= zip(numbers, _in_halves(run, [photos[number] for number in numbers]), strict=True)
    return [results[number] for number in range(len(photos))]


def _in_halves(run: Callable[[Sequence[P]], list[T]], photos: Sequence[P]) -> list[T]:
    """Run over photos together; in halves if memory does not suffice."""
    try:
        with telling_memory(photos[0].pixels):
            return run(photos)
    except ResourceError:
        if len(photos) == 1:
            raise
    count = len(photos)  # the error and its frames are gone here, with the tensors that they held
    note(f"out of memory for {count} images together; they run in halves")
    return [result for half in (photos[: count // 2], photos[count // 2 :]) for result in _in_halves(run, half)]


def alone(model: nn.Module, prepared: Prepared, question: Question, passes: Run) -> Explanation:
    """Explain one photo, with as many passes as its method needs."""
    question = of_model(question, model)
    prepared, target = with_target(model, prepared, question.target)
    question = replace(question, target=target)
    if (need := question.runs_alone) and need != "terms":
        explanation: Explanation = again.ANSWERS[need](model, prepared, question)
        return explanation
    settled, passed = recorded(model, prepared, question, passes)
    explanation = answer(passed.recording, prepared, settled, auto=question.method is None)
    return completed(explanation, passed, prepared, target)
