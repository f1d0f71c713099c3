"""Answers of methods that run the model again for each image: on edited pixels, or with another score."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from visattn._support import norm_gradients
from visattn._support.faces import Later
from visattn._support.modes import evaluating
from visattn._support.progress import progress
from visattn.core.families import provenance_of
from visattn.core.methods.scored import ScoredImages
from visattn.core.pipeline.answering import answer
from visattn.core.pipeline.explanation import Explanation
from visattn.core.pipeline.inputs import Prepared
from visattn.core.pipeline.passes import answer_of, as_the_model, check_classes, check_size, look, modes_of
from visattn.core.pipeline.question import Question
from visattn.core.pipeline.recordings import at_layer, layer_of_cam, recorded
from visattn.core.pipeline.several import takes_several
from visattn.core.pipeline.targets import Target
from visattn.core.records import Recording
from visattn.errors import ShapeError

__all__ = ["scoring"]

if TYPE_CHECKING:
    from visattn.core.pipeline import replacing
else:
    replacing = Later(f"{__package__}.replacing")


def replayed(model: nn.Module, prepared: Prepared, question: Question) -> Explanation:
    """Explain by a method that records passes over edited pixels, with the gradient of the target's score."""
    settled, passed = recorded(model, prepared, question)
    with progress("forward passes", "pass") as bar:

        def replay(edit: Callable[[Tensor], Tensor]) -> Recording:
            bar.update()
            return look(model, prepared, target=settled.target, edit=edit, features="none")

        return answer(passed.recording, prepared, settled, given={"replay": replay})


def scored(model: nn.Module, prepared: Prepared, question: Question) -> Explanation:
    """Explain by a method that reads the target's score of edited pixels."""
    assert question.method is not None  # noqa: S101 - `auto` chooses no such method
    needs = question.method.needs
    features: str | list[str] = "none"
    if "seed" in question.method.parameters:
        question = replace(question, parameters={**question.parameters, "seed": prepared.seed})
    if "cam layer" in needs:
        question = at_layer(question, layer_of_cam(model, prepared, question.parameters, question.target))
        features = [str(question.parameters["layer"])]
    with scoring(model, prepared, question.target, features=features) as (recording, images):
        return answer(recording, prepared, question, given={"scored": images})


def patched(model: nn.Module, prepared: Prepared, question: Question) -> Explanation:
    """Explain by a method that puts activations of another photo in."""
    return replacing.patched(model, prepared, question)


ANSWERS = {"score": scored, "replay": replayed, "patch": patched}  # by what a method needs


@contextmanager
def scoring(
    model: nn.Module, prepared: Prepared, target: Target, *, features: str | Sequence[str] = "none"
) -> Iterator[tuple[Recording, ScoredImages]]:
    """Yield the model as a function from pixels to the target's score, in evaluation mode; restore its training flags afterward.

    Args:
        model: Any model, with or without attention.
        prepared: One preprocessed photo. The target is resolved once, on its unedited pixels.
        target: Target to explain.
        features: See `capture`.

    Yields:
        A recording with the features and the names of model and target, and the score function.

    Raises:
        NoClasses: If the target is a class and the model has none.
        OptionError: If the target does not fit the model.
        ShapeError: If there are several photos.
        UnsupportedModel: If the model takes another input size.
    """
    spec, pixels = prepared.spec_of(model), as_the_model(model, prepared.pixels)
    if len(pixels) != 1:
        raise ShapeError(f"a score needs a batch of one photo, got {len(pixels)}. Explain them one by one.")
    check_classes(model, spec, target)
    check_size(spec, pixels)
    modes = modes_of(model, pixels)
    with evaluating(model, frozen=True), progress("edited images", "image") as bar:
        with torch.no_grad():
            output = answer_of(model, pixels, prepared)
            resolved, alone = target.resolve(output), not takes_several(model, pixels, output, prepared)

        def score(edited: Tensor) -> Tensor:
            pieces = torch.split(edited, 1 if alone else max(len(edited), 1))
            scores = torch.cat([resolved.score(answer_of(model, piece, prepared)) for piece in pieces])
            if alone or len(edited) == 1:
                norm_gradients.set_right(scores)
            bar.update(len(edited))
            return scores

        seen = [] if features == "none" else look(model, prepared, features=features).features
        provenance = provenance_of(model).but(target=resolved.texts, scores=resolved.scores, notes=modes)
        recording = Recording(features=seen, input_size=(pixels.shape[-2], pixels.shape[-1]), provenance=provenance)
        yield recording, ScoredImages(pixels, score, spec.mean, spec.std, spec.stride, model, alone)
