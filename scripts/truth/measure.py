"""Evaluation of all maps of a network against the known object and the known watermark of scenes."""

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
from visattn.core.geometry import Geometry
from visattn.core.maps import AttentionMap
from visattn.core.methods import METHODS, name_of
from visattn.core.methods.gate_maps import PLACES
from visattn.core.pipeline.inputs import prepare_batch
from visattn.core.pipeline.passes import look
from visattn.core.pipeline.question import ask
from visattn.data.scenes import Scene, Scenes
from visattn.data.scenes.causes import CausedScene, CausedScenes
from visattn.errors import OptionError
from visattn.evaluation.causes.networks import PATCH, CauseNetwork, cause_networks
from visattn.evaluation.object_masks import cells_of

Array = NDArray[np.float64]

NEAR = 4  # pixels: half of an 8-pixel cell


def touches(attention_map: AttentionMap, mask: NDArray[np.bool_], geometry: Geometry) -> Array:
    """Check whether the largest cell contains a pixel of the mask, `(*axes,)`; for tied cells, return the share that do."""
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
    "share": evaluation.energy_inside,
}
SIGNED = "lift", "share"  # metrics that are undefined for signed maps
ONCE = "captum.saliency", "captum.input_x_gradient"  # these methods are given the model, but run it only two to four times
# similarity is no evidence for a class; patching needs a second photo; for contributions see contributions_of_causes.py
LEFT_OUT = "similarity", "pca", "positions", "patching", "contributions"
PARAMETERS: dict[str, dict[str, Any]] = {
    "transition_attention": {"start_layer": 0},  # the paper starts at the fourth of twelve layers; a small network has fewer
    "captum.integrated_gradients": {"batch_size": 50},  # images are small, so batches can be larger
    "captum.smoothgrad": {"batch_size": 50},
    "captum.occlusion": {"batch_size": 64, "grid_size": (16, 16)},
    "captum.kernel_shap": {"batch_size": 64},
    "captum.lime": {"batch_size": 64},
    "scorecam": {"batch_size": 64},
    "ablationcam": {"batch_size": 64},
}


def first_networks(count: int) -> list[CauseNetwork]:
    """Return the first networks of each known cause and kind that learned the cause."""
    several: dict[tuple[str, str], list[CauseNetwork]] = defaultdict(list)
    for network in cause_networks():
        several[network.cause, network.kind].append(network)
    return [network for networks in several.values() for network in networks[:count] if network.cause != PATCH]


@dataclass(frozen=True)
class Way:
    """Method and parameters that compute a map."""

    method: str
    parameters: dict[str, Any]

    @property
    def slow(self) -> bool:
        """True if the method runs the model many times."""
        return self.method not in ONCE and not METHODS[name_of(self.method)].needs.isdisjoint({"score", "replay"})

    def map(self, model: nn.Module, picture: Image.Image, label: int) -> tuple[AttentionMap, Geometry]:
        """Compute the map of an image as the mean over heads; a class-specific method explains the true class."""
        target = label if METHODS[name_of(self.method)].targeted else None
        found = visattn.explain(model, picture, method=self.method, target=target, **self.parameters)
        return found.panel, found.geometry


@dataclass
class Measured:
    """Results of one map for all scenes.

    Attributes:
        grid: Rows and columns of the map.
        numbers: One number per scene for each metric, against the `object` and against the `mark`.
        empty: Number of scenes on which the map was zero everywhere.
        seconds: Total time of its maps; not part of the table.
        shown: The maps, with the mark and the geometry of each scene.
    """

    grid: tuple[int, ...]
    numbers: dict[str, dict[str, list[float]]] = field(default_factory=lambda: defaultdict(partial(defaultdict, list)))
    empty: int = 0
    seconds: float = 0
    shown: list[tuple[AttentionMap, NDArray[np.bool_], Geometry]] = field(default_factory=list)

    def values(self, metric: str, truth: str = "object") -> Array | None:
        """Return the values `(scenes,)` of a metric; None if it is undefined because maps are signed."""
        found = np.array(self.numbers[truth][metric])
        return None if np.isnan(found).any() else found


@dataclass(frozen=True)
class Measures:
    """Results of all maps of one network, of their shifted copies, and of reference maps that do not depend on the image."""

    maps: dict[str, Measured]
    moved: dict[str, Measured]
    references: dict[str, Measured]
    refused: tuple[str, ...]


def measured(model: nn.Module, scenes: Scenes, slow: int, extra: dict[str, Way] | None = None) -> Measures:
    """Evaluate every applicable method on every scene.

    Args:
        model: A classifier of the scenes' shapes.
        scenes: Input scenes.
        slow: Number of scenes for methods that run the model many times; 0 skips these methods.
        extra: Further ways to compute maps.
    """
    found = Measures({}, {}, {}, ())
    every = {**ways_of(model, scenes.scene(0)), **(extra or {})}
    tried = {name: way for name, way in every.items() if slow or not way.slow}
    ways, refused = applicable(tried, model, scenes.scene(0))
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
            shown = (
                shown if whole else replace(shown, values=torch.ones_like(shown.values))
            )  # an empty map counts as a uniform map
            _add(found.maps, name, shown, scene, geometry)
            _add(found.moved, name, evaluation.shifted_copies(shown, COPIES, index), scene, geometry)
            found.maps[name].empty += not whole
            found.maps[name].seconds += spent
            found.maps[name].shown.append((shown, scene.watermark, geometry))
            likes[shown.layout.grid] = shown, geometry
        for like, geometry in likes.values():
            for name, reference in _references(like, scene, geometry, index):
                _add(found.references, f"{name}, {size_of(like.layout.grid)}", reference, scene, geometry)
        print(f"\r  {index + 1} of {len(scenes)} scenes", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    for row in found.maps.values():
        row.numbers["mark"]["without the mean map"] = [
            float(evaluation.auroc(unlike, mask, geometry))
            for unlike, (_, mask, geometry) in zip(without_the_mean([one for one, _, _ in row.shown]), row.shown, strict=True)
        ]
    return replace(found, refused=refused)


def without_the_mean(maps: list[AttentionMap]) -> list[AttentionMap]:
    """Subtract from each map the mean of the others, which is what they have in common: edges, the center, the place of a mark."""
    total = torch.stack([one.values for one in maps]).sum(0)
    return [replace(one, values=one.values - (total - one.values) / (len(maps) - 1)) for one in maps]


def accuracy(model: nn.Module, scenes: Scenes | CausedScenes) -> float:
    """Return the share of scenes that the network classifies correctly."""
    right = 0
    for start in range(0, len(scenes), 100):
        some = [scenes[index] for index in range(start, min(start + 100, len(scenes)))]
        prepared = prepare_batch([picture for picture, _ in some], model)
        with torch.inference_mode():
            found = model(prepared.pixels).argmax(1).tolist()
        right += sum(one == label for one, (_, label) in zip(found, some, strict=True))
    return right / len(scenes)


def size_of(grid: Iterable[int]) -> str:
    """Format rows and columns."""
    return " x ".join(map(str, grid))


def ways_of(model: nn.Module, scene: Scene | CausedScene) -> dict[str, Way]:
    """Return all methods; gates of each module count as a method of their own."""
    found = {name: Way(name, PARAMETERS.get(name, {})) for name in METHODS if name not in (*LEFT_OUT, "gates")}
    for way in found.values():
        ask(way.method, way.parameters)  # a wrong parameter is a fault of this script, not of the method
    prepared = visattn.prepare(Image.fromarray(scene.image), model)
    gates = [feature.layer for feature in look(model, prepared, features="none").features if feature.role in PLACES]
    return found | {f"gates of {layer}": Way("gates", {"layer": layer}) for layer in gates}


def applicable(ways: dict[str, Way], model: nn.Module, scene: Scene | CausedScene) -> tuple[dict[str, Way], tuple[str, ...]]:
    """Return the methods that apply to the model, and the names of the others."""
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
    """Yield reference maps: a center prior, smooth noise, and the object mask at the map's resolution."""
    yield PRIOR, evaluation.center_prior(like)
    yield f"{COPIES} fields of smooth noise", evaluation.smooth_random(like, COPIES, seed)
    share = cells_of(like, scene.masks[0], geometry).share
    yield ITSELF, replace(like, values=torch.from_numpy(share), axes=(), labels={})


def _add(table: dict[str, Measured], name: str, shown: AttentionMap, scene: Scene, geometry: Geometry) -> None:
    """Add all metrics of a map against object and mark; several copies are averaged."""
    row = table.setdefault(name, Measured(shown.layout.grid))
    signed = bool((shown.values < 0).any())
    for truth, mask in {"object": scene.masks[0], "mark": scene.watermark}.items():
        for metric, function in METRICS.items():
            value = np.nan if signed and metric in SIGNED else float(function(shown, mask, geometry).mean())
            row.numbers[truth][metric].append(value)
