"""Explanation of many images, with one forward pass for several of them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from visattn._support.checks import between
from visattn._support.modes import in_own_modes
from visattn._support.notes import note
from visattn._support.spellings import spelled
from visattn._support.typed import typed
from visattn._support.types import LARGEST_BATCH
from visattn.core.families.wrappers import unwrapped
from visattn.core.loading import load_model
from visattn.core.methods.table import MethodName
from visattn.core.pipeline.apart import known_apart
from visattn.core.pipeline.arguments import target_of
from visattn.core.pipeline.explaining import answer, explain_prepared, of_model, with_target
from visattn.core.pipeline.explanation import DrawOptions, Explanation
from visattn.core.pipeline.inputs import Prepared, prepare_with, read
from visattn.core.pipeline.joint import joined, keeps_apart
from visattn.core.pipeline.places import is_place
from visattn.core.pipeline.preprocessing import Preprocessing, PreprocessingOptions
from visattn.core.pipeline.question import Question, ask, parameter_names
from visattn.core.pipeline.recordings import recorded
from visattn.core.pipeline.run import one_pass, telling_memory
from visattn.core.pipeline.targets import Of, Target, TargetOptions
from visattn.core.records import Recording
from visattn.errors import OptionError, ResourceError, VisattnError

__all__ = ["BATCH", "Asked", "asked_of", "explain_batch", "explain_each", "explained", "looked"]

_T = TypeVar("_T")
BATCH = 16
_ALONE = {"score", "replay"}  # needs of methods that run the model again for each image


class Asked(NamedTuple):
    """Question that is asked of each image.

    Attributes:
        question: Method, parameters and target.
        how: Preprocessing.
        seed: Seed of methods that draw samples.
    """

    question: Question
    how: Preprocessing
    seed: int = 0


@spelled(PreprocessingOptions, TargetOptions, DrawOptions, more=parameter_names)
@typed(but=("weights", "method"))
def explain_batch(
    model: nn.Module | str,
    images: Iterable[Any],
    *,
    method: MethodName | str = "auto",
    target: Of = None,
    batch_size: int = BATCH,
    weights: str | os.PathLike[str] = "auto",
    seed: int = 0,
    device: str | torch.device = "cpu",
    **options: Any,  # noqa: ANN401 - as in `explain`
) -> Iterator[Explanation]:
    """Show where a model looks in many images: the explanations of `explain`, with one forward pass for several images.

    Images are read as they are needed, so they may be a generator, and any number of them fits into memory. Those of a batch whose inputs
    have one size run through the model together, or in halves if memory does not suffice. Methods that run the model many times for one
    image, such as Score-CAM, and questions whose answer depends on the place in a photo, are computed one by one.

    Args:
        model: Name of a timm model, or a model.
        images: Images, see `explain`.
        method: See `explain`.
        target: See `explain`; one target for all images, or None: the top class of each.
        batch_size: Images that are read at once, 1 to 65,536. Image `i` is in batch `i // batch_size`, whatever the others are.
        weights: See `load_model`; only if `model` is a name.
        seed: See `explain`.
        device: Device of a model that is given by name.
        options: See `explain`.

    Yields:
        The explanation of each image, in order.

    Raises:
        OptionError: If `batch_size` is out of range, or any such error of `explain`.
        VisattnError: Any error of `explain`. Those of an image are raised when its batch is reached.
    """
    between(batch_size, 1, LARGEST_BATCH, "batch_size")
    if drawing := [name for name in options if name in DrawOptions.__annotations__]:
        raise OptionError(f"{drawing[0]} is an option of the picture: .overlay({drawing[0]}=...) of each explanation.")
    asked = asked_of(method, target, options, seed)
    if isinstance(model, str):
        model = load_model(model, weights=weights, seed=seed, img_size=asked.how.img_size, device=device)
    return explain_each(unwrapped(model), images, asked, batch_size)


def asked_of(method: MethodName | str, target: Of, options: Mapping[str, Any], seed: int) -> Asked:
    """Return the question that options of preprocessing, target and method ask, see `explain`.

    Raises:
        OptionError: If one is unknown or out of range.
    """
    of_photos, of_target = (
        {name: options[name] for name in kind.__annotations__ if name in options}
        for kind in (PreprocessingOptions, TargetOptions)
    )
    rest = {name: value for name, value in options.items() if name not in {**of_photos, **of_target}}
    return Asked(ask(method, rest, Target(_of_all(target_of(target)), **of_target)), Preprocessing(**of_photos), seed)


def _of_all(of: Of) -> Of:
    """Return the target of all images, which may be in a list of its own.

    Raises:
        OptionError: If there are several.
    """
    if isinstance(of, Sequence) and not isinstance(of, str):
        if len(of) != 1:
            raise OptionError(f"target must be one for all images, got {len(of)}. Explain each image with its own: explain(...).")
        return of[0]
    return of


def explain_each(model: nn.Module, images: Iterable[Any], asked: Asked, size: int = BATCH) -> Iterator[Explanation]:
    """Yield the explanations of `explain_batch`, for a question that was asked."""
    left = iter(images)
    while some := list(islice(left, size)):
        prepared = [prepare_with([read(image, asked.how)], model, asked.how) for image in some]
        yield from explained(model, prepared, asked.question, seed=asked.seed)


@in_own_modes
def explained(model: nn.Module, prepared: Sequence[Prepared], question: Question, *, seed: int = 0) -> list[Explanation]:
    """Explain preprocessed photos, those of one size together.

    Args:
        model: The model.
        prepared: The photos, each prepared alone.
        question: Method, parameters and target, from `ask`.
        seed: Seed of methods that draw samples.

    Returns:
        The explanations, in order.

    Raises:
        VisattnError: The errors of `explain` after preprocessing.
    """
    groups: dict[Any, list[int]] = defaultdict(list)
    for number, one in enumerate(prepared):
        groups[number if _alone(question) else tuple(one.pixels.shape)].append(number)
    found: dict[int, Explanation] = {}
    for numbers in groups.values():
        found |= zip(numbers, _of_one_size(model, [prepared[number] for number in numbers], question, seed), strict=True)
    return [found[number] for number in range(len(prepared))]


def _of_one_size(model: nn.Module, prepared: Sequence[Prepared], question: Question, seed: int) -> list[Explanation]:
    """Explain photos of one size together; in halves if memory does not suffice."""

    def explain_some(some: Sequence[Prepared]) -> list[Explanation]:
        found = _together(model, [replace(one, seed=seed) for one in some], question) if len(some) > 1 else None
        return found or [explain_prepared(model, one, question, seed=seed) for one in some]

    return _in_halves(explain_some, prepared)


def _in_halves(run: Callable[[Sequence[Prepared]], list[_T]], prepared: Sequence[Prepared]) -> list[_T]:
    """Run over photos together; in halves if memory does not suffice."""
    try:
        return run(prepared)
    except ResourceError:
        if len(prepared) == 1:
            raise
    count = len(prepared)  # the error and its frames are gone here, with the tensors that they held
    note(f"out of memory for {count} images together; they run in halves")
    return [one for half in (prepared[: count // 2], prepared[count // 2 :]) for one in _in_halves(run, half)]


def _alone(question: Question) -> bool:
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
        with telling_memory(joint.pixels):
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

    def record(some: Sequence[Prepared]) -> list[Recording]:
        with telling_memory(some[0].pixels):
            joint = joined(some)
            if len(some) == 1 or known_apart(model, joint.pixels) is not False:
                passed = one_pass(model, joint) if question is None else recorded(model, joint, question)[1]
                if len(some) == 1 or keeps_apart(model, some, passed):
                    return [passed.recording.image(number) for number in range(len(some))]
        return [recording for one in some for recording in record([one])]

    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, one in enumerate(prepared):
        groups[tuple(one.pixels.shape)].append(number)
    found: dict[int, Recording] = {}
    for numbers in groups.values():
        found |= zip(numbers, _in_halves(record, [replace(prepared[number], seed=seed) for number in numbers]), strict=True)
    return [found[number] for number in range(len(prepared))]
