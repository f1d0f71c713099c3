"""Every map of a network, of scenes whose object and watermark are known, measured against both."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from pointing.photos import COPIES, ITSELF, PRIOR
from torch import nn

import visattn
from visattn import evaluation
from visattn.data.scenes import Scene, Scenes
from visattn.errors import OptionError
from visattn.evaluation.cells import cells_of
from visattn.geometry import Geometry
from visattn.maps import AttentionMap
from visattn.methods import METHODS, method_of
from visattn.methods.gate_maps import PLACES
from visattn.pipeline.inputs import prepare_batch
from visattn.pipeline.run import look

Array = NDArray[np.float64]

NEAR = 4  # pixels, half a cell of 8


def touches(attention_map: AttentionMap, mask: NDArray[np.bool_], geometry: Geometry) -> Array:
    """Return whether the largest cell holds a pixel of the mask, `(*axes,)`; of cells that are alike, the share that do."""
    cells = cells_of(attention_map, mask, geometry)
    largest = cells.values == cells.values.max((-1, -2), keepdims=True)
    return np.asarray((largest & (cells.share > 0)).sum((-1, -2)) / largest.sum((-1, -2)))


METRICS: dict[str, Callable[[AttentionMap, NDArray[np.bool_], Geometry], Array]] = {
    "pointing game": evaluation.pointing_game,
    "near": partial(evaluation.pointing_game, tolerance=NEAR),
    "touches": touches,
    "AUROC": evaluation.auroc,
    "average precision": evaluation.average_precision,
    "lift": evaluation.lift,
    "share": evaluation.mass_on,
}
SIGNED = "lift", "share"  # what signed maps have none of
ONCE = "captum.saliency", "captum.input_x_gradient"  # they run the model once or twice, though they are handed it
LEFT_OUT = "similarity", "pca"  # they ask what is alike, not where the object is
PARAMETERS: dict[str, dict[str, Any]] = {
    "transition_attention": {"start_layer": 0},  # the paper's fourth of twelve is behind the last of a small network
    "captum.integrated_gradients": {"batch": 50},  # small pictures: more of them at once
    "captum.smoothgrad": {"batch": 50},
    "captum.occlusion": {"batch": 64, "cells": (16, 16)},
    "captum.kernel_shap": {"batch": 64},
    "captum.lime": {"batch": 64},
    "scorecam": {"batch": 64},
    "ablationcam": {"batch": 64},
}


@dataclass(frozen=True)
class Way:
    """How a map is made: a method and its parameters."""

    method: str
    parameters: dict[str, Any]

    @property
    def slow(self) -> bool:
        """Whether it runs the model many times."""
        return self.method not in ONCE and not method_of(self.method).needs.isdisjoint({"score", "replay"})

    def map(self, model: nn.Module, picture: Image.Image, label: int) -> tuple[AttentionMap, Geometry]:
        """Of the true class, where it explains one; the mean over heads."""
        target = label if method_of(self.method).targeted else None
        found = visattn.explain(model, picture, method=self.method, target=target, **self.parameters)
        return found.panel, found.geometry


@dataclass
class Measured:
    """What one map reached, scene by scene.

    Attributes:
        grid: Its rows and columns.
        numbers: Of each metric, a number for each scene; against the `object` and against the `mark`.
        empty: On how many scenes it was zero everywhere.
        seconds: How long its maps took, of which the table says nothing.
    """

    grid: tuple[int, ...]
    numbers: dict[str, dict[str, list[float]]] = field(default_factory=lambda: defaultdict(partial(defaultdict, list)))
    empty: int = 0
    seconds: float = 0

    def values(self, metric: str, truth: str = "object") -> Array | None:
        """`(scenes,)`; None where maps have both signs and the metric needs one."""
        found = np.array(self.numbers[truth][metric])
        return None if np.isnan(found).any() else found


@dataclass(frozen=True)
class Measures:
    """All maps of one network: by their own names, the same moved about, and what knows nothing of the picture."""

    maps: dict[str, Measured]
    moved: dict[str, Measured]
    references: dict[str, Measured]
    refused: tuple[str, ...]


def measured(model: nn.Module, scenes: Scenes, slow: int, extra: dict[str, Way] | None = None) -> Measures:
    """Every method that applies, on every scene.

    Args:
        model: A classifier of the scenes' shapes.
        scenes: What it is shown.
        slow: On how many of them methods are tried that run the model many times; 0 leaves these out.
        extra: Further ways to make maps.
    """
    found = Measures({}, {}, {}, ())
    every = {**_ways(model, scenes.scene(0)), **(extra or {})}
    tried = {name: way for name, way in every.items() if slow or not way.slow}
    ways, refused = _applicable(tried, model, scenes.scene(0))
    for index in range(len(scenes)):
        scene = scenes.scene(index)
        picture, likes = Image.fromarray(scene.image), {}
        for name, way in ways.items():
            if way.slow and index >= slow:
                continue
            started = time.perf_counter()
            shown, geometry = way.map(model, picture, scene.label)
            spent = time.perf_counter() - started
            whole = bool(shown.values.any())
            shown = shown if whole else replace(shown, values=torch.ones_like(shown.values))  # says nothing: as an even map
            _add(found.maps, name, shown, scene, geometry)
            _add(found.moved, name, evaluation.shifted_copies(shown, COPIES, index), scene, geometry)
            found.maps[name].empty += not whole
            found.maps[name].seconds += spent
            likes[shown.layout.grid] = shown, geometry
        for like, geometry in likes.values():
            for name, reference in _references(like, scene, geometry, index):
                _add(found.references, f"{name}, {size_of(like.layout.grid)}", reference, scene, geometry)
        print(f"\r  {index + 1} of {len(scenes)} scenes", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return replace(found, refused=refused)


def accuracy(model: nn.Module, scenes: Scenes) -> float:
    """Share of the scenes whose class the network tells."""
    right = 0
    for start in range(0, len(scenes), 100):
        some = [scenes[index] for index in range(start, min(start + 100, len(scenes)))]
        prepared = prepare_batch([picture for picture, _ in some], model)
        with torch.inference_mode():
            found = model(prepared.pixels).argmax(1).tolist()
        right += sum(one == label for one, (_, label) in zip(found, some, strict=True))
    return right / len(scenes)


def size_of(grid: Iterable[int]) -> str:
    """Rows and columns in words."""
    return " x ".join(map(str, grid))


def _ways(model: nn.Module, scene: Scene) -> dict[str, Way]:
    """The methods, the gates of each module one by one."""
    found = {name: Way(name, PARAMETERS.get(name, {})) for name in METHODS if name not in (*LEFT_OUT, "gates")}
    prepared = visattn.prepare(Image.fromarray(scene.image), model)
    gates = [feature.layer for feature in look(model, prepared, features="none").features if feature.role in PLACES]
    return found | {f"gates of {layer}": Way("gates", {"layer": layer}) for layer in gates}


def _applicable(ways: dict[str, Way], model: nn.Module, scene: Scene) -> tuple[dict[str, Way], tuple[str, ...]]:
    """Those that make a map of a scene, and the names of the others."""
    kept, refused = {}, []
    for name, way in ways.items():
        try:
            way.map(model, Image.fromarray(scene.image), scene.label)
            kept[name] = way
        except OptionError as error:
            print(f"  {name} is left out: {error}", file=sys.stderr)
            refused.append(name)
    return kept, tuple(refused)


def _references(like: AttentionMap, scene: Scene, geometry: Geometry, seed: int) -> Iterator[tuple[str, AttentionMap]]:
    """A habit of photographers, smooth noise, and the object itself as coarse as the map."""
    yield PRIOR, evaluation.center_prior(like)
    yield f"{COPIES} fields of smooth noise", evaluation.smooth_random(like, COPIES, seed)
    share = cells_of(like, scene.masks[0], geometry).share
    yield ITSELF, replace(like, values=torch.from_numpy(share), axes=(), labels={})


def _add(table: dict[str, Measured], name: str, shown: AttentionMap, scene: Scene, geometry: Geometry) -> None:
    """Every metric of a map against both truths; of several copies the mean."""
    row = table.setdefault(name, Measured(shown.layout.grid))
    signed = bool((shown.values < 0).any())
    for truth, mask in {"object": scene.masks[0], "mark": scene.watermark}.items():
        for metric, function in METRICS.items():
            value = np.nan if signed and metric in SIGNED else float(function(shown, mask, geometry).mean())
            row.numbers[truth][metric].append(value)
