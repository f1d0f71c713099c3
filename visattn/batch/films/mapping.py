"""Maps of the frames of a film: each frame alone, or for features all frames together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from typing import NamedTuple, TypedDict, get_args

import torch
from torch import Tensor, nn

from visattn._support.checks import between, one_of
from visattn._support.language import option
from visattn._support.progress import progress
from visattn._support.typed import check_types
from visattn._support.types import LARGEST_BATCH, View
from visattn.batch.films.frames import Film, Frame
from visattn.batch.films.walking import Walk
from visattn.core.geometry import Geometry
from visattn.core.maps import AttentionMap
from visattn.core.methods.selection import tokens_of
from visattn.core.pipeline.answering import answer, of_model, pixel_to_input
from visattn.core.pipeline.asking import Asked
from visattn.core.pipeline.explaining import BATCH, explain_each
from visattn.core.pipeline.explanation import Explanation
from visattn.core.pipeline.inputs import Prepared, prepare_with
from visattn.core.pipeline.recordings import recorded
from visattn.core.pipeline.running import looked
from visattn.core.records import FeatureRecord, Recording
from visattn.errors import OptionError, ResourceError

TOGETHER = "pca", "similarity"  # methods that compare features of all frames
_MOST_SMOOTH = 0.99
_MOST_RATE, _MOST_STEPS = 1000, 10_000
_MOST_FEATURES = 500_000_000  # numbers; principal components need 16 bytes for each


class FilmOptions(TypedDict, total=False):
    """Options of `Looks`."""

    view: View
    rate: float | None
    smooth: float
    batch_size: int
    walk: int | None


@dataclass(frozen=True)
class Looks:
    """Look of a film, and how it is made.

    Attributes:
        view: `overlay`; `beside`: the frame and its overlay; `heads`: a panel for each head.
        rate: Most frames a second, up to 1000; None: all. Of a walk, steps a second; None: 12.
        smooth: Weight, from 0 to 0.99, of the last map in the mean with which each map is replaced; 0 leaves maps as they are.
        batch_size: Frames that run through the model together.
        walk: Number of frames, from 2 to 10,000, of a photo over which the query walks; None: the source is a film.

    Raises:
        OptionError: If one is out of range.
    """

    view: View = "overlay"
    rate: float | None = None
    smooth: float = 0.0
    batch_size: int = BATCH
    walk: int | None = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            OptionError: If one is out of range.
        """
        check_types(type(self), vars(self))
        one_of(self.view, get_args(View), "view")
        between(self.smooth, 0, _MOST_SMOOTH, "smooth")
        if self.rate is not None and not 0 < self.rate <= _MOST_RATE:
            raise OptionError(f"rate must be above 0 and at most {_MOST_RATE} frames a second, got {self.rate}.")
        between(self.batch_size, 1, LARGEST_BATCH, "batch_size")
        if self.walk is not None:
            between(self.walk, 2, _MOST_STEPS, "walk")


class Shown(NamedTuple):
    """Map of a frame, and its position."""

    map: AttentionMap
    geometry: Geometry


def exact(rate: float) -> Fraction:
    """Return a rate as a fraction: of a second, or of the seconds of a frame."""
    return Fraction(rate).limit_denominator(1000) if rate >= 1 else 1 / (1 / Fraction(rate)).limit_denominator(1000)


def chosen(film: Film | Walk, rate: float | None) -> Iterator[Frame]:
    """Yield the frames of a film, at most so many a second; of a walk all."""
    due = Fraction(0)
    for frame in film.frames():
        if rate is None or isinstance(film, Walk):
            yield frame
        elif frame.at >= due:
            due = (frame.at * exact(rate) // 1 + 1) / exact(rate)  # the next tick of a clock of this rate
            yield frame


def maps_of(model: nn.Module, film: Film | Walk, asked: Asked, looks: Looks) -> list[Shown]:
    """Return what is drawn of the map of each frame.

    Raises:
        OptionError: If the view does not fit the method.
        ResourceError: If the features of all frames are too many.
        VisattnError: Any error of `explain`.
    """
    asked = asked._replace(question=of_model(asked.question, model))
    question = asked.question
    if looks.view == "heads" and question.name in TOGETHER:
        raise OptionError(f"view heads needs a map with heads, not {question.name}. Choose method attention.")
    if isinstance(film, Walk):
        return [_shown(one, looks.view) for one in _walked(model, film, asked)]
    if question.name in TOGETHER:
        return _together(model, film, asked, looks)
    found: list[Shown] = []
    with progress("maps", "frame") as bar:
        for one in explain_each(model, (frame.image for frame in chosen(film, looks.rate)), asked, looks.batch_size):
            found.append(_shown(one, looks.view))
            bar.update()
    return found


def _shown(one: Explanation, view: View) -> Shown:
    if view == "heads" and one.map.axes != ("head",):
        raise OptionError(f"view heads needs a map with heads, not one of {one.map.meaning}. Choose method attention.")
    shown = one.map if view == "heads" else one.panel
    return Shown(replace(shown, values=shown.values.detach().cpu()), one.geometry)  # GPUs have less memory


def _walked(model: nn.Module, walk: Walk, asked: Asked) -> Iterator[Explanation]:
    """Explain the photo with each query, from one forward pass."""
    prepared = prepare_with([walk.photo], model, asked.how)
    _, passed = recorded(model, prepared, asked.question)
    for query in walk.queries(prepared.geometry.seen()):
        parameters = {**asked.question.parameters, "query": query}
        yield answer(passed.recording, prepared, replace(asked.question, parameters=parameters))


def _together(model: nn.Module, film: Film, asked: Asked, looks: Looks) -> list[Shown]:
    """Compute one map of all frames from their features: components have one basis, and the query lies in the first frame."""
    parameters = dict(asked.question.parameters)
    if parameters.get("of", "tokens") != "tokens":
        raise OptionError(f"of a film, only tokens are compared, not {parameters['of']}. Leave of out.")
    values: list[Tensor] = []
    geometries: list[Geometry] = []
    first: tuple[Recording, FeatureRecord, Prepared] | None = None
    frames = chosen(film, looks.rate)
    with progress("maps", "frame") as bar:
        while some := list(islice(frames, looks.batch_size)):
            every = [prepare_with([frame.image], model, asked.how) for frame in some]
            for recording in looked(model, every, asked.question, seed=asked.seed):
                feature = tokens_of(recording, parameters.get("layer", -1))
                values.append(feature.value.detach().half().cpu())
                first = first or (recording, feature, every[0])
            geometries += [one.geometry for one in every]
            if sum(value.numel() for value in values) > _MOST_FEATURES:
                raise ResourceError(
                    f"the features of more than {len(geometries)} frames do not fit. Pass a lower {option('rate')}."
                )
            bar.update(len(some))
    assert first is not None  # noqa: S101 - a film has a frame
    recording, feature, prepared = first
    query = parameters.get("query")
    if isinstance(query, str) and query.startswith("pixel:"):
        parameters["query"] = pixel_to_input(query, recording, geometries[0])
    whole = replace(recording, features=[replace(feature, value=torch.cat(values).float())])
    assert asked.question.method is not None  # noqa: S101 - it is named
    found = asked.question.method.function(whole, **parameters)
    found = replace(found, provenance=prepared.noted(found.provenance))
    return [Shown(found.at(batch=number), geometry) for number, geometry in enumerate(geometries)]


def smoothed(maps: list[Shown], weight: float) -> list[Shown]:
    """Replace each map by a mean of it and those before it, whose weights fall by the factor `weight`."""
    found = maps[:1]
    for one in maps[1:]:
        before = found[-1].map
        if weight and before.layout == one.map.layout:
            mean = replace(one.map, values=weight * before.values + (1 - weight) * one.map.values)
            one = one._replace(map=mean)
        found.append(one)
    return found
