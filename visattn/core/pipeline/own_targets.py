"""Photos with targets of their own: one for each image of a batch or a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, Sized
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import count, islice
from typing import Any, NamedTuple, NoReturn, TypeVar

from torch import Tensor, nn

from visattn._support.checks import shown
from visattn._support.modes import in_own_modes
from visattn.core.families.weight_facts import facts_read_once
from visattn.core.pipeline import together
from visattn.core.pipeline.arguments import target_of
from visattn.core.pipeline.asking import Asked
from visattn.core.pipeline.explanation import Explanation
from visattn.core.pipeline.inputs import Prepared, prepare_with, read
from visattn.core.pipeline.passes import one_pass
from visattn.core.pipeline.question import Question
from visattn.core.pipeline.running import alone, by_size, explained
from visattn.errors import OptionError

__all__ = ["explain_each_target", "for_each", "once_each"]

_Ask = Callable[[Any], Asked]  # from a target to the question about one image
_KEPT = 256  # targets that are kept for further images
T = TypeVar("T")


class Posed(NamedTuple):
    """A preprocessed photo with its own question, and its number among all."""

    prepared: Prepared
    question: Question
    number: int

    @property
    def pixels(self) -> Tensor:
        """Pixels of the photo, `(1, C, H, W)`."""
        return self.prepared.pixels


def explain_each_target(
    model: nn.Module, images: Iterable[Any], targets: Iterable[Any], ask: _Ask, size: int, notes: tuple[str, ...] = ()
) -> Iterator[Explanation]:
    """Yield the explanation of each image for its own target, of `size` images at a time.

    Args:
        model: The model.
        images: Images, see `explain`.
        targets: A target for each, see `explain`.
        ask: Function that returns the question about one image for its target.
        size: Images that are read at once.
        notes: Notes that are added to each.

    Raises:
        OptionError: If there are more or fewer targets than images, before the first explanation if both numbers are known.
    """
    if isinstance(targets, (Mapping, Set, bytes)):
        raise OptionError(f"target must be one, or a list with one for each image, in their order, got {shown(targets)}.")
    if isinstance(images, Sized) and isinstance(targets, Sized) and len(images) != len(targets):
        _refuse(len(targets), len(images))
    return _in_batches(model, _pairs(images, targets), once_each(ask), size, notes)


def _in_batches(
    model: nn.Module, pairs: Iterator[tuple[Any, Any]], ask: _Ask, size: int, notes: tuple[str, ...]
) -> Iterator[Explanation]:
    numbers = count()
    while some := list(islice(pairs, size)):
        with facts_read_once():
            posed = [_posed(model, image, target, ask, next(numbers)) for image, target in some]
            explanations = explained_each(model, [one._replace(prepared=one.prepared.with_notes(*notes)) for one in posed])
        yield from explanations


def _posed(model: nn.Module, image: Any, target: Any, ask: _Ask, number: int) -> Posed:  # noqa: ANN401
    with _naming(number):
        question, how, seed = ask(target)
    return Posed(replace(prepare_with([read(image, how)], model, how), seed=seed), question, number)


@in_own_modes
def explained_each(model: nn.Module, posed: Sequence[Posed]) -> list[Explanation]:
    """Explain photos, each with its own question. Those with a class of their own share a pass, and so do those with one target."""
    groups: dict[Any, list[int]] = {}
    for place, one in enumerate(posed):
        groups.setdefault("classes" if _class_of(one.question) is not None else id(one.question), []).append(place)
    results: dict[int, Explanation] = {}
    for kind, places in groups.items():
        some = [posed[place] for place in places]
        results |= zip(places, _of_classes(model, some) if kind == "classes" else _of_one_target(model, some), strict=True)
    return [results[place] for place in range(len(posed))]


def _of_one_target(model: nn.Module, posed: Sequence[Posed]) -> list[Explanation]:
    first, steps = posed[0], posed[0].question.target.steps
    if not steps:
        return explained(model, [one.prepared for one in posed], first.question, seed=first.prepared.seed)
    return by_size(lambda some: [_alone(model, one) for one in some], posed, each=True)


def _of_classes(model: nn.Module, posed: Sequence[Posed]) -> list[Explanation]:
    """Explain photos, each with a class of its own; the score of each is that of its own row of the output."""

    def run(some: Sequence[Posed]) -> list[Explanation]:
        first, classes = some[0].question, [_class_of(one.question) for one in some]
        joint = replace(first, target=replace(first.target, of=[of for of in classes if of is not None]))
        photos = [one.prepared for one in some]
        explanations = together.explained_together(model, photos, joint) if len(some) > 1 else None
        return explanations or [_alone(model, one) for one in some]

    return by_size(run, posed, each=bool(posed[0].question.runs_alone))


def _alone(model: nn.Module, one: Posed) -> Explanation:
    with _naming(one.number):
        return alone(model, one.prepared, one.question, one_pass)


@contextmanager
def _naming(number: int) -> Iterator[None]:
    """Name the image in what is said of its target."""
    try:
        yield
    except OptionError as error:
        error.args = (f"image {number}: {error}",)
        raise


def _class_of(question: Question) -> int | str | None:
    """Return the class that is the target, by index or name; None if the target is another one, or a step has to complete it."""
    of = question.target.of
    return of if isinstance(of, (int, str)) and not question.target.steps else None


def once_each(make: Callable[[Any], T]) -> Callable[[Any], T]:
    """Return a function that makes one object for equal targets, so that what is found out for a target is found out once."""
    kept = lru_cache(_KEPT, typed=True)(make)

    def made(target: Any) -> T:  # noqa: ANN401
        target = target_of(target)
        try:
            hash(target)
        except TypeError:
            return make(target)
        return kept(target)

    return made


def for_each(target: Any, images: int) -> list[Any]:  # noqa: ANN401
    """Return the target of each of some images, from one for all or a list with one for each.

    Raises:
        OptionError: If there are more or fewer targets than images.
    """
    target = target_of(target)
    if not isinstance(target, (list, tuple)):
        return [target] * images
    if len(target) != images:
        _refuse(len(target), images)
    return list(target)


def _pairs(images: Iterable[Any], targets: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield each image with its target.

    Raises:
        OptionError: If one of them ends before the other.
    """
    ours, theirs, none = iter(images), iter(targets), object()
    number = 0
    while (image := next(ours, none)) is not none:
        if (target := next(theirs, none)) is none:
            _refuse(number, None)
        yield image, target
        number += 1
    if next(theirs, none) is not none:
        _refuse(None, number)


def _refuse(targets: int | None, images: int | None) -> NoReturn:
    """Tell how many there are of both; None: more than of the other.

    Raises:
        OptionError: Always.
    """
    least = (targets if images is None else images) or 0
    numbers = {"target": targets, "image": images}
    of_targets, of_images = (
        f"{'more than ' * (number is None)}{least if number is None else number} {noun}{'s' * (number != 1)}"
        for noun, number in numbers.items()
    )
    raise OptionError(
        f"target must be one for each image: got {of_targets} for {of_images}. Pass as many, or one target for all."
    )
