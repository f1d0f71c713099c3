"""Evaluation of maps of photos by several metrics, each beside maps that know nothing."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from visattn._support.checks import as_list, at_least, one_each, one_of
from visattn._support.modes import in_own_modes
from visattn._support.options import with_options
from visattn._support.sampled_weights import sampled_weights
from visattn._support.typed import typed
from visattn.core.families import provenance_of
from visattn.core.images import image_facts
from visattn.core.methods.scored import ScoredImages
from visattn.core.pipeline.again import scoring
from visattn.core.pipeline.answering import with_target
from visattn.core.pipeline.asking import asked_of, model_of
from visattn.core.pipeline.inputs import Prepared, prepare_with, read
from visattn.core.pipeline.preprocessing import PreprocessingOptions
from visattn.core.pipeline.question import Question
from visattn.core.pipeline.running import explained
from visattn.core.pipeline.targets import Of, Target, TargetOptions
from visattn.errors import OptionError, VisattnError
from visattn.evaluation.evaluation_journal import Journal
from visattn.evaluation.given import MapLike
from visattn.evaluation.map_numbers import Evaluation, MapNumbers
from visattn.evaluation.metric_table import METRICS, Metric, MetricName, Protocol
from visattn.evaluation.nulls import nulls_of

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
    metrics: Sequence[MetricName] = STANDARD,
    nulls: int = 5,
    steps: int = 32,
    by: str = "pixels",
    batch_size: int = 32,
    journal: str | os.PathLike[str] | None = None,
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
        metrics: Names from `visattn.evaluation.METRICS`.
        nulls: Number of shifted copies of each map, and of maps of smooth noise, see `nulls_of`.
        steps: See `Protocol`.
        by: See `Protocol`.
        batch_size: See `Protocol`.
        journal: File that keeps the numbers of each map as soon as they are known (JSON lines). A run that finds it there goes on where the
            earlier one stopped.
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
    images, how = as_list(images), Protocol(steps, by, batch_size, seed)  # type: ignore[arg-type]
    given = maps or {}
    one_each(len(images), **{f"maps[{name!r}]": several for name, several in given.items()})
    chosen = [one_of(metric, tuple(METRICS), "metric") for metric in metrics]
    if not images or not chosen or not (methods or given):
        raise OptionError("there must be a photo, a metric, and a method or maps.")
    at_least("nulls", nulls)
    asked = {method: asked_of(method, target, options, seed) for method in methods}
    preprocessing = asked_of("auto", target, options, seed).how
    bare, notes = model_of(model, preprocessing, weights=weights, seed=seed, device=device)
    scored_target = _scored(target, {name: options[name] for name in TargetOptions.__annotations__ if name in options})
    settings = {
        "model": provenance_of(bare).model,
        "weights": _digest(bare),
        "methods": list(methods),
        "maps": list(given),
        "metrics": chosen,
        "nulls": nulls,
        "protocol": asdict(how),
        "target": repr(scored_target),
        "preprocessing": repr(preprocessing),
    }
    kept = Journal(None if journal is None else Path(journal), settings)
    numbers = list[MapNumbers]()
    for place, image in enumerate(images):
        photo = replace(prepare_with([read(image, preprocessing)], bare, preprocessing).with_notes(*notes), seed=seed)
        own = {name: several[place] for name, several in given.items()}
        questions = {name: one.question for name, one in asked.items()}
        sha256 = image_facts(photo.photo).sha256 or ""
        known = {name: kept.known(place, sha256, name) for name in (*questions, *own)}
        missing = {name: shown for name, shown in {**questions, **own}.items() if known[name] is None}
        if missing:
            found = _of_photo(bare, photo, scored_target, missing, chosen, how, nulls, place)
            known |= {one.map: kept.add(place, sha256, one) for one in found}
        numbers += [one for one in known.values() if one is not None]
    return Evaluation(numbers, chosen)


def _digest(model: nn.Module) -> str:
    """Return a digest of some values of all weights, by which a later run knows them."""
    return hashlib.sha256(json.dumps(sampled_weights(model)).encode()).hexdigest()


def _scored(target: Of, options: Mapping[str, Any]) -> Target:
    """Return the target whose score is followed: the probability of a class, where nothing else is asked for."""
    asked = Target(target, **options)
    is_class = asked.prompt is None and asked.named is None and not callable(target) and asked.task in (None, "classes")
    return replace(asked, target_space="prob") if is_class and "target_space" not in options else asked


def _of_photo(
    model: nn.Module,
    photo: Prepared,
    target: Target,
    maps: Mapping[str, Question | MapLike],
    metrics: Sequence[str],
    how: Protocol,
    nulls: int,
    place: int,
) -> Iterator[MapNumbers]:
    name = image_facts(photo.photo).name or f"photo {place}"
    prepared, completed = with_target(model, photo, target)
    with scoring(model, prepared, completed) as (recording, scored):
        of = ", ".join(recording.provenance.target or ())
        for method, shown in maps.items():
            began = time.perf_counter()
            try:
                drawn = explained(model, [photo], shown, seed=how.seed)[0].panel if isinstance(shown, Question) else shown
            except VisattnError as error:
                yield MapNumbers(name, of, method, {}, {}, left_out=str(error))
                continue
            made = time.perf_counter()
            own, of_nulls = _numbers(scored, drawn, metrics, how, nulls, place)
            yield MapNumbers(name, of, method, own, of_nulls, (made - began, time.perf_counter() - made))


def _numbers(
    photo: ScoredImages, shown: MapLike, metrics: Sequence[str], how: Protocol, nulls: int, place: int
) -> tuple[dict[str, float], dict[str, dict[str, list[float]]]]:
    """Return the number of a map by metric, and those of its nulls by metric and kind."""
    others = nulls_of(shown, photo.pixels, count=nulls, seed=how.seed + place)

    def number(metric: Metric, one: MapLike) -> float:
        return metric.compute(photo, one, how)

    own = {name: number(METRICS[name], shown) for name in metrics}
    of_nulls = {
        name: {kind: [number(METRICS[name], null) for null in several] for kind, several in others.items()} for name in metrics
    }
    return own, of_nulls
