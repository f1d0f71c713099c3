"""Several images with one forward pass, if the model gives each what it gets alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from visattn._support.modes import evaluating
from visattn.core.pipeline.answering import answer, completed, of_model, with_target
from visattn.core.pipeline.apart import apart, known_apart
from visattn.core.pipeline.explanation import Explanation
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.passes import Pass, answer_of, as_the_model, one_pass
from visattn.core.pipeline.question import Question
from visattn.core.pipeline.recordings import recorded
from visattn.core.records import Recording
from visattn.errors import ResourceError, VisattnError


def explained_together(model: nn.Module, prepared: Sequence[Prepared], question: Question) -> list[Explanation] | None:
    """Explain photos of one size with one pass; None if it does not give each what it gets alone."""
    try:
        question = of_model(question, model)
        joint, target = with_target(model, _joined(prepared), question.target)
        if known_apart(model, joint.pixels) is False:
            return None
        settled, passed = recorded(model, joint, replace(question, target=target))
        settled = settled.settled(passed.recording)
        if not _keeps_apart(model, prepared, passed):
            return None
        auto = question.method is None
        answers = [answer(passed.recording.image(number), photo, settled, auto=auto) for number, photo in enumerate(prepared)]
        return [completed(alone, passed, joint, target, number) for number, alone in enumerate(answers)]
    except ResourceError:
        raise
    except VisattnError:  # of one image, which is told of it alone, or of the batch
        return None


def recorded_together(model: nn.Module, prepared: Sequence[Prepared], question: Question | None) -> list[Recording] | None:
    """Record photos of one size with one pass; None if it does not give each what it gets alone."""
    joint = _joined(prepared)
    if known_apart(model, joint.pixels) is False:
        return None
    passed = one_pass(model, joint) if question is None else recorded(model, joint, question)[1]
    if not _keeps_apart(model, prepared, passed):
        return None
    return [passed.recording.image(number) for number in range(len(prepared))]


def _joined(prepared: Sequence[Prepared]) -> Prepared:
    """Return photos of one size as a batch."""
    return replace(
        prepared[0],
        pixels=torch.cat([photo.pixels for photo in prepared]),
        photos=tuple(photo.photo for photo in prepared),
        geometries=tuple(photo.geometry for photo in prepared),
    )


def _keeps_apart(model: nn.Module, prepared: Sequence[Prepared], passed: Pass) -> bool:
    """Check that a pass over several images gave each what it gets alone.

    It did if all attention could be placed, which the images of a batch may prevent, and if the model keeps them `apart`.

    Args:
        model: The model.
        prepared: The photos, of one size.
        passed: The pass over all of them.
    """
    if any(record.reason is not None or record.operator.shape[0] != len(prepared) for record in passed.recording):
        return False
    pixels = as_the_model(model, torch.cat([photo.pixels for photo in prepared]))

    def alone() -> Any:  # noqa: ANN401 - a model's own
        with evaluating(model), torch.no_grad():
            return answer_of(model, pixels[-1:], prepared[-1])

    return apart(model, pixels, passed.output, alone)
