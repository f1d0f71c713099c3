"""Evaluation of maps of photos by several metrics, each beside maps that know nothing."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch
from torch import nn

from visattn._support.checks import as_list, one_each, one_of
from visattn._support.modes import in_own_modes
from visattn._support.options import with_options
from visattn._support.typed import typed
from visattn.core.families import provenance_of
from visattn.core.images import image_facts
from visattn.core.loading.weights import state_digest
from visattn.core.maps import AttentionMap
from visattn.core.methods import METHODS, name_of
from visattn.core.pipeline.again import scoring
from visattn.core.pipeline.answering import with_target
from visattn.core.pipeline.asking import Asked, asked_of, model_of
from visattn.core.pipeline.inputs import Prepared, prepare_with, read
from visattn.core.pipeline.preprocessing import Preprocessing, PreprocessingOptions
from visattn.core.pipeline.question import Question
from visattn.core.pipeline.running import explained
from visattn.core.pipeline.targets import Of, Target, TargetOptions
from visattn.errors import MapError, MissingExtra, OptionError, ResourceError, VisattnError
from visattn.evaluation.choices import By, LocatedName, MetricName, Replacement
from visattn.evaluation.curves import Curve
from visattn.evaluation.evaluation_journal import EvaluationJournal
from visattn.evaluation.given import MapLike, MaskLike, as_map, as_mask, on_input, one_map
from visattn.evaluation.map_numbers import Curves, Evaluation, MapNumbers
from visattn.evaluation.metric_table import LOCATED, METRICS, Protocol, ScoredPhoto
from visattn.evaluation.nulls import blind_maps, copies_of

Drawing: TypeAlias = Callable[[], MapLike]
Found: TypeAlias = float | Curve
ByKind: TypeAlias = dict[str, dict[str, list[Found]]]  # what metrics find for nulls, by metric and kind
_NO_FILE = "image"  # name of a photo that was no file, whose digest is that of its pixels
STANDARD: tuple[MetricName, ...] = ("deletion", "insertion", "saco")


@with_options(PreprocessingOptions, TargetOptions)
@typed(but=("weights",))
@in_own_modes
def evaluate(
    model: nn.Module | str,
    images: Any,  # noqa: ANN401 - sources of `load_image`, pictures or arrays
    methods: Sequence[str] = ("auto",),
    *,
    maps: Mapping[str, Sequence[Any]] | None = None,
    masks: Sequence[Any] | None = None,
    metrics: Sequence[MetricName | LocatedName] = STANDARD,
    nulls: int = 5,
    steps: int = 32,
    by: By = "pixels",
    batch_size: int = 32,
    baseline: Replacement | None = None,
    journal: str | os.PathLike[str] | None = None,
    anew: bool = False,
    target: Of = None,
    weights: str | os.PathLike[str] = "auto",
    seed: int = 0,
    device: str | torch.device = "cpu",
    **options: Any,  # noqa: ANN401 - of the target and the preprocessing
) -> Evaluation:
    """Measure how well maps tell what a score depends on, beside maps that know nothing.

    The score is the probability of the target, or its score where `target_space` says so; without a target, that of the class that the
    model predicts. A map with heads and layers is their mean.

    Args:
        model: Name of a timm model, or a model.
        images: Photos, see `visattn.explain`.
        methods: Names of methods, with their default parameters. Those that need no class are asked without the target.
        maps: Maps of other origin, by name: one for each photo, see `deletion`.
        masks: Masks of objects, one for each photo or None, see `auroc`.
        metrics: Names from `visattn.evaluation.METRICS`; with masks also from `visattn.evaluation.LOCATED`.
        nulls: Number of shifted copies of each map, and of maps of smooth noise, see `nulls_of`; 0: no nulls of any kind.
        steps: See `Protocol`.
        by: See `Protocol`.
        batch_size: See `Protocol`.
        baseline: See `Protocol`.
        journal: File that keeps the numbers of each map as soon as they are known (JSON lines). A run that finds it there goes on where the
            earlier one stopped.
        anew: Whether to forget what the journal holds.
        target: See `visattn.explain`.
        weights: See `visattn.load_model`; only if `model` is a name.
        seed: Seed of nulls and metrics, and of random weights.
        device: Device of a model that is given by name.
        options: Options of the target and the preprocessing, see `visattn.explain`.

    Returns:
        The numbers.

    Raises:
        OptionError: If a name is unknown, or a number out of range.
        OutputError: If the journal is of a run with other settings, or cannot be read or written.
        VisattnError: Any error of `visattn.explain` that concerns all photos. A method that does not apply to a photo is left out, and says
            why.
    """
    images, given = as_list(images), maps or {}
    one_each(len(images), masks=masks, **{f"maps[{name!r}]": several for name, several in given.items()})
    if not images:
        raise OptionError("there must be a photo.")
    how = Protocol(steps, by, batch_size, seed, nulls, baseline)
    evaluator = Evaluator(
        model,
        methods,
        list(given),
        metrics,
        how,
        masked=masks is not None,
        journal=journal,
        anew=anew,
        target=target,
        weights=weights,
        device=device,
        **options,
    )
    for place, image in enumerate(images):
        own = {name: several[place] for name, several in given.items()}
        evaluator.add(image, own, None if masks is None else masks[place], place)
    return evaluator.evaluation


class Evaluator:
    """Evaluation of photos that are given one by one; see `evaluate`.

    Attributes:
        how: How metrics are computed.
        numbers: Numbers of each map of each photo so far.
        provenance: Model and weights.
    """

    def __init__(
        self,
        model: nn.Module | str,
        methods: Sequence[str],
        maps: Sequence[str],
        metrics: Sequence[str],
        how: Protocol,
        *,
        masked: bool = False,
        journal: str | os.PathLike[str] | None = None,
        anew: bool = False,
        target: Of = None,
        weights: str | os.PathLike[str] = "auto",
        device: str | torch.device = "cpu",
        **options: Any,  # noqa: ANN401 - of the target and the preprocessing
    ) -> None:
        """Check what is asked, load the model, and read the journal.

        Args:
            model: See `evaluate`.
            methods: See `evaluate`.
            maps: Names of maps of other origin.
            metrics: See `evaluate`.
            how: How metrics are computed.
            masked: Whether photos have masks.
            journal: See `evaluate`.
            anew: See `evaluate`.
            target: See `evaluate`.
            weights: See `evaluate`.
            device: See `evaluate`.
            options: See `evaluate`.

        Raises:
            OptionError: See `evaluate`.
            OutputError: See `evaluate`.
        """
        known = (*METRICS, *LOCATED) if masked else tuple(METRICS)
        self._metrics = [one_of(metric, known, "metric") for metric in metrics]
        if not metrics or not (methods or maps):
            raise OptionError("there must be a metric, and a method or maps.")
        for what, names in (("metrics", metrics), ("maps", (*methods, *maps))):
            if len(set(names)) < len(names):
                raise OptionError(f"two {what} have one name: {', '.join(names)}.")
        questions = {method: _asked(method, target, options, how.seed) for method in methods}
        self._questions = {name: asked.question for name, asked in questions.items()}
        self._preprocessing = asked_of("auto", target, options, how.seed).how
        self._model, self._notes = model_of(model, self._preprocessing, weights=weights, seed=how.seed, device=device)
        self._target = _scored(target, {name: options[name] for name in TargetOptions.__annotations__ if name in options})
        self.how, self.provenance, self.numbers = how, provenance_of(self._model), list[MapNumbers]()
        settings = {
            "model": self.provenance.model,
            "weights": state_digest(self._model),
            "visattn": version("visattn"),
            "methods": list(methods),
            "maps": list(maps),
            "metrics": sorted(self._metrics),
            "protocol": asdict(how),
        }
        if journal is not None:
            settings |= {
                name: self._settled(asked) for name, asked in (("target", self._target), ("preprocessing", self._preprocessing))
            }
        self._journal = EvaluationJournal(None if journal is None else Path(journal), settings, anew=anew)

    def _settled(self, asked: Target | Preprocessing) -> str:
        """Return a target or a preprocessing as a journal keeps it: in brief, with a digest of the whole.

        Raises:
            OptionError: If it holds a function.
        """

        def told(value: Any) -> str:  # noqa: ANN401 - what JSON cannot hold
            if hasattr(value, "image"):  # a target that compares with an image
                return str(image_facts(read(value.image, self._preprocessing)).sha256)
            raise OptionError("a journal cannot tell one function from another. Leave journal out.")

        return f"{asked!r} {hashlib.sha256(msgspec.json.encode(vars(asked), enc_hook=told)).hexdigest()[:16]}"

    @property
    def evaluation(self) -> Evaluation:
        """Numbers so far, with their tables."""
        return Evaluation(self.numbers, self._metrics)

    def add(
        self,
        image: Any,  # noqa: ANN401 - see `evaluate`
        maps: Mapping[str, MapLike | Drawing],
        mask: MaskLike | None = None,
        place: int | None = None,
    ) -> None:
        """Measure all maps of a photo that are not in the journal.

        Args:
            image: The photo.
            maps: Its maps of other origin, by name, or functions that draw them if they are not in the journal.
            mask: Its mask, for metrics of places.
            place: Number of the photo, which decides its nulls; None: that of photos so far.

        Raises:
            VisattnError: If the photo cannot be read or does not fit the model.
        """
        place = len({one.place for one in self.numbers}) if place is None else place
        prepared = prepare_with([read(image, self._preprocessing)], self._model, self._preprocessing)
        photo = replace(prepared.with_notes(*self._notes), seed=self.how.seed)
        asked = {**self._questions, **maps}
        sources = {name: _source(photo, shown, mask) for name, shown in asked.items()}
        known = {name: self._journal.known(place, sources[name], name) for name in asked}
        missing = {name: shown for name, shown in asked.items() if known[name] is None}
        if missing:
            for numbers in self._measured(photo, missing, mask, place):
                known[numbers.map] = self._journal.add(sources[numbers.map], numbers)
        self.numbers += [numbers for numbers in known.values() if numbers is not None]

    def _measured(
        self, photo: Prepared, maps: Mapping[str, Question | MapLike | Drawing], mask: MaskLike | None, place: int
    ) -> Iterator[MapNumbers]:
        name = image_facts(photo.photo).name or f"photo {place}"
        prepared, target = with_target(self._model, photo, self._target)
        with scoring(self._model, prepared, target) as (recording, scored):
            of, shared = ", ".join(recording.provenance.target or ()), _OfPhoto(ScoredPhoto(scored), mask, place)
            for method, shown in maps.items():
                began = time.perf_counter()
                try:
                    drawn = self._drawn(photo, shown)
                    made = time.perf_counter()
                    own, nulls = self._of_map(shared, drawn)
                except (MissingExtra, ResourceError):  # which concern the machine, not the map
                    raise
                except VisattnError as error:
                    yield MapNumbers(place, name, of, method, {}, {}, left_out=str(error))
                    continue
                spent = made - began, time.perf_counter() - made
                yield MapNumbers(place, name, of, method, _areas(own), _areas(nulls), _curves(own, nulls), spent)

    def _drawn(self, photo: Prepared, shown: Question | MapLike | Drawing) -> AttentionMap:
        """Return the map that answers a question, or one that is given, on the input of the model."""
        if isinstance(shown, Question):
            return explained(self._model, [photo], shown, seed=self.how.seed)[0].panel
        return _own_map(shown() if callable(shown) else shown, photo)

    def _of_map(self, photo: _OfPhoto, shown: AttentionMap) -> tuple[dict[str, Found], ByKind]:
        """Return what each metric finds for a map, and for its nulls by kind."""
        own = {name: self._found(name, photo, shown) for name in self._metrics}
        if not self.how.nulls:
            return own, {name: {} for name in self._metrics}
        seed, count = self.how.seed + photo.place, self.how.nulls
        layout = shown.layout.grid, shown.layout.box
        if layout not in photo.blind:
            photo.blind[layout] = self._by_kind(photo, blind_maps(shown, photo.scored.pixels, count=count, seed=seed))
        copies, blind = self._by_kind(photo, copies_of(shown, count=count, seed=seed)), photo.blind[layout]
        return own, {name: copies[name] | blind[name] for name in self._metrics}

    def _by_kind(self, photo: _OfPhoto, nulls: Mapping[str, list[AttentionMap]]) -> ByKind:
        return {
            name: {kind: [self._found(name, photo, null) for null in several] for kind, several in nulls.items()}
            for name in self._metrics
        }

    def _found(self, name: str, photo: _OfPhoto, shown: AttentionMap) -> Found:
        if name in METRICS:
            return METRICS[name].compute(photo.scored, shown, self.how)
        try:
            return math.nan if photo.mask is None else float(LOCATED[name].compute(shown, photo.mask))
        except MapError:  # such as a share of a sum with negative values
            return math.nan


@dataclass
class _OfPhoto:
    """What all maps of a photo share.

    Attributes:
        scored: The input with its score.
        mask: Its mask, if there is one.
        place: Number of the photo.
        blind: What metrics find for nulls that depend on the layout only, by layout.
    """

    scored: ScoredPhoto
    mask: MaskLike | None
    place: int
    blind: dict[Any, ByKind] = field(default_factory=dict)


def _areas(found: Any) -> Any:  # noqa: ANN401 - the same nesting of numbers
    """Return what metrics found, with the areas of curves in their place."""
    if isinstance(found, dict):
        return {name: _areas(part) for name, part in found.items()}
    if isinstance(found, list):
        return [_areas(part) for part in found]
    return found.area if isinstance(found, Curve) else found


def _curves(own: Mapping[str, Found], nulls: ByKind) -> dict[str, Curves]:
    """Return the curves of a map by metric, each beside the mean curve of its nulls."""
    curves = dict[str, Curves]()
    for name, curve in own.items():
        if isinstance(curve, Curve):
            others = [null.scores for several in nulls[name].values() for null in several if isinstance(null, Curve)]
            mean = np.mean(others, 0).round(6).tolist() if others else []
            curves[name] = Curves(curve.fractions.round(6).tolist(), curve.scores.round(6).tolist(), mean)
    return curves


def _source(photo: Prepared, shown: Question | MapLike | Drawing, mask: MaskLike | None) -> str:
    """Return a digest of a photo, its mask, and a map that is given."""
    digest = hashlib.sha256(photo.pixels.cpu().numpy().tobytes())
    if mask is not None:
        digest.update(as_mask(mask).tobytes())
    if not isinstance(shown, Question) and not callable(shown):
        digest.update(_content(shown))
    return digest.hexdigest()


def _content(shown: MapLike) -> bytes:
    """Return what tells a map that is given from others; nothing for one that is refused later."""
    try:
        found = as_map(shown)
    except VisattnError:
        return b""
    return repr((found.values.shape, found.layout)).encode() + found.values.detach().double().cpu().numpy().tobytes()


def _asked(method: str, target: Of, options: Mapping[str, Any], seed: int) -> Asked:
    """Return the question of a method; one that needs no class is asked without the target and its options."""
    if method != "auto" and not METHODS[name_of(method)].targeted:
        target, options = None, {name: value for name, value in options.items() if name not in TargetOptions.__annotations__}
    return asked_of(method, target, options, seed)


def _own_map(shown: MapLike, photo: Prepared) -> AttentionMap:
    """Return a map that is given, with its place on the photo.

    Raises:
        MapError: If it is known to be of another photo, or of another part of it.
    """
    found = one_map(shown)
    facts, known = image_facts(photo.photo), found.provenance
    is_other_file = facts.sha256 != known.image_sha256 and not {facts.name, known.image} & {_NO_FILE, None}
    if is_other_file or known.geometry not in (None, photo.geometry):
        raise MapError("the map was made for another photo, or for another crop of it.")
    return on_input(found, photo.geometry)


def _scored(target: Of, options: Mapping[str, Any]) -> Target:
    """Return the target whose score is followed: the probability of a class, where nothing else is asked for."""
    asked = Target(target, **options)
    is_class = asked.prompt is None and asked.named is None and not callable(target) and asked.task in (None, "classes")
    return replace(asked, target_space="prob") if is_class and "target_space" not in options else asked
