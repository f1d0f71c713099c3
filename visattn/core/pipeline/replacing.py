"""Scores of a photo while parts of an attention call's result are replaced, another part in each image of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from visattn._support.language import option
from visattn._support.modes import evaluating
from visattn._support.progress import progress
from visattn._support.reprs import in_pixels
from visattn.core.capturing.interventions import each_part
from visattn.core.families import describe
from visattn.core.images import image_facts
from visattn.core.methods.from_attention.patching import Patches
from visattn.core.pipeline.answering import answer, completed
from visattn.core.pipeline.captures import capture
from visattn.core.pipeline.explanation import Explanation
from visattn.core.pipeline.inputs import Prepared, prepare_with, read
from visattn.core.pipeline.passes import Pass, answer_of, as_the_model, check_classes, one_pass
from visattn.core.pipeline.preprocessing import Preprocessing
from visattn.core.pipeline.question import Question
from visattn.core.pipeline.several import takes_several
from visattn.core.pipeline.targets import Target
from visattn.core.records import Recording
from visattn.core.records.parts import Part
from visattn.errors import ShapeError

__all__ = ["AT_ONCE", "patched", "patching_from", "replacing", "results_of"]

AT_ONCE = 16  # images in a batch
Replaced = Callable[[Sequence[Part]], Tensor]


@contextmanager
def replacing(model: nn.Module, prepared: Prepared, score: Callable[[Any], Tensor], output: Any) -> Iterator[Replaced]:  # noqa: ANN401
    """Yield a function that returns the score of a photo with each of several parts of results of attention replaced.

    Args:
        model: The model.
        prepared: One preprocessed photo.
        score: Function from the model's output to one score for each image.
        output: What the model returned for the photo.
    """
    pixels, description = as_the_model(model, prepared.pixels), describe(model, None, 0)
    with evaluating(model, frozen=True), torch.no_grad(), progress("parts replaced", "part") as bar:
        at_once = AT_ONCE if takes_several(model, pixels, output, prepared) else 1

        def replaced(parts: Sequence[Part]) -> Tensor:
            scores = list[Tensor]()
            for start in range(0, len(parts), at_once):
                some = parts[start : start + at_once]
                with each_part(model, description, some):
                    scores.append(score(answer_of(model, pixels.expand(len(some), *pixels.shape[1:]), prepared)).double().cpu())
                bar.update(len(some))
            return torch.cat(scores)

        yield replaced


def results_of(model: nn.Module, prepared: Prepared) -> tuple[Recording, Any]:
    """Run a model on one photo; return a recording with the results of all attention calls, and the output."""
    with evaluating(model), torch.no_grad(), capture(model, features="none", gates=False, outputs=True) as recording:
        output = answer_of(model, as_the_model(model, prepared.pixels), prepared)
    return recording, output


@contextmanager
def patching_from(model: nn.Module, prepared: Prepared, donor: Any, target: Target) -> Iterator[tuple[Patches, Pass, str]]:  # noqa: ANN401
    """Yield what puts results of attention of another photo into the forward pass of a photo, that pass, and the name of the other photo.

    Raises:
        ShapeError: If the model receives the photos in different sizes.
        VisattnError: Any error of reading and preparing the donor, and of the target.
    """
    how = prepared.how or Preprocessing()
    other = prepare_with([read(donor, how)], model, how)
    if other.pixels.shape != prepared.pixels.shape:
        sizes = (in_pixels(each.pixels.shape[-2:]) for each in (other, prepared))
        raise ShapeError(
            f"the model receives {' pixels of the one photo and '.join(sizes)} of the other. Pass {option('img_size')}."
        )
    check_classes(model, prepared.spec_of(model), target)
    passed = one_pass(model, prepared, features="none")
    with evaluating(model), torch.no_grad():
        resolved = target.resolve(passed.output)
        recording, output = results_of(model, other)
        score, of_donor = (float(resolved.score(each).double().sum()) for each in (passed.output, output))
    provenance = passed.recording.provenance.but(target=resolved.texts, scores=resolved.scores)
    passed = passed._replace(recording=replace(passed.recording, provenance=provenance), resolved=resolved)
    with replacing(model, prepared, resolved.score, passed.output) as replaced:
        yield Patches(recording, score, of_donor, replaced), passed, image_facts(other.photo).name or "an image"


def patched(model: nn.Module, prepared: Prepared, question: Question) -> Explanation:
    """Explain by a method that puts results of attention of another photo into the forward pass."""
    with patching_from(model, prepared, question.parameters["donor"], question.target) as (patches, passed, name):
        question = replace(question, parameters={**question.parameters, "donor": name})
        explanation = answer(passed.recording, prepared, question, given={"patches": patches})
    return completed(explanation, passed, prepared, question.target)
