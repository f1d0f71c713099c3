"""Sanity checks of every method: what is left of its map while a network's parameters become random, from the output to the input.

`sanity.py [--only NAME,NAME] [--photos N] [--write-docs]`. For each method it prints the Spearman correlation with the map of the trained
network after each step of the cascade, as a mean over photos with a 95 % bootstrap interval. A method whose correlation is above `MOST` at
the end, when all of the network is random, fails: its map shows the picture rather than what the network has learned. Those below `-MOST`
are told, too: they show it with the opposite sign. The edge map has 1,
and a constant map has no correlation.

These settings were chosen before any result: `PHOTOS`, `SEED`, `MOST` and the networks.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pages import folded, write_section
from PIL import Image
from pointing.photos import FOLDERS
from torch import nn
from truth.measure import Way, ways_of

import visattn
from visattn._support.tables import Row, to_markdown
from visattn.core.families import input_spec
from visattn.core.methods import METHODS, name_of
from visattn.data.scenes import Scenes
from visattn.errors import VisattnError
from visattn.evaluation import Cascade, Explainer, cascading_randomization, edge_map, mean_interval

DOCS = Path(__file__).parents[1] / "docs" / "trust.md"
PHOTOS = 20
SEED = 3  # of the scenes; networks were trained on seed 1
MOST = 0.3  # largest correlation at the end of a method that passes
NETWORKS = "scenes_cnn", "scenes_vit", "tf_efficientnet_lite0", "vit_small_patch14_dinov2"  # the latter two on real photos
GRID = 16, 16
BLIND = "edges", "a constant map"

Array = NDArray[np.float64]


def main() -> int:
    """Measure, print the tables, and write them to the page on request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(NETWORKS), metavar="NAME,NAME")
    parser.add_argument("--photos", type=int, default=PHOTOS, help="number of photos, at least 2")
    parser.add_argument("--write-docs", action="store_true", help=f"write the tables to docs/{DOCS.name}")
    options = parser.parse_args()
    if options.photos < 2 or not set(options.only) <= set(NETWORKS):
        parser.error(f"two photos or more are needed, and networks of {', '.join(NETWORKS)}.")
    torch.set_num_threads(1)
    for name in options.only:
        text = section(name, options.photos)
        print(f"## {name}\n\n{text}", flush=True)
        if options.write_docs:
            write_section(DOCS, f"sanity of {name}", text, into_files=True)
    return 0


def section(name: str, count: int) -> str:
    """Return the table of a network, and the methods that fail."""
    model = visattn.load_model(name)
    photos = pictures(name, model, count)
    cascades = defaultdict[str, list[Cascade]](list)
    for number, photo in enumerate(photos):
        for method, cascade in cascades_of(model, photo, name):
            cascades[method].append(cascade)
        print(f"\r  {name}: {number + 1} of {len(photos)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    tables = {method: np.array([one.correlations for one in several]) for method, several in cascades.items()}
    parts = next(iter(cascades.values()))[0].parts
    ends = {method: np.nanmean(table[:, -1]) for method, table in tables.items() if method not in BLIND}
    failing, negative = (", ".join(name for name in ends if sign * ends[name] > MOST) or "none" for sign in (1, -1))
    rows = [row_of(method, table) for method, table in tables.items()]
    steps: list[Row] = [
        {"method": method, **{part: told(table[:, step]) for step, part in enumerate(parts)}} for method, table in tables.items()
    ]
    verdict = f"Above {MOST} at the end: {failing} ({len(ends)} methods, {len(photos)} photos). Below -{MOST}: {negative}."
    return "\n".join([verdict, "", to_markdown(rows), folded("After each step", to_markdown(steps))])


def pictures(name: str, model: nn.Module, count: int) -> list[Image.Image]:
    """Return scenes for networks of scenes, else the photos of the project."""
    if name.startswith("scenes"):
        scenes = Scenes(count, input_spec(model).size, seed=SEED)
        return [Image.fromarray(scenes.scene(index).image) for index in range(count)]
    files = sorted(path for folder in FOLDERS for path in folder.iterdir() if path.suffix in (".png", ".jpg"))
    return [visattn.load_image(path) for path in files[:count]]


def cascades_of(model: nn.Module, photo: Image.Image, name: str) -> Iterator[tuple[str, Cascade]]:
    """Yield the cascade of each method that applies; real photos go without those that run the model many times."""
    scene: Any = Scenes(1, (64, 64), seed=SEED).scene(0)
    for method, way in ways_of(model, scene).items():
        if way.slow and not name.startswith("scenes"):
            continue
        try:
            explain = Explainer(model, photo, way.method, **way.parameters)
        except VisattnError:
            continue
        yield method, cascading_randomization(model, explain.pixels, explain.of)
    pixels = visattn.prepare(photo, model).pixels
    maps: dict[str, Callable[..., Any]] = {
        "edges": lambda _model, given: edge_map(np.zeros(GRID), given),
        "a constant map": lambda _model, _given: np.ones(GRID),
    }
    for method, drawn in maps.items():
        yield method, cascading_randomization(model, pixels, drawn)


def row_of(method: str, table: Array) -> Row:
    """Return the row of a method: correlations after the first step, at half of the steps, and at the end."""
    last, of_class = table[:, -1], method not in BLIND and is_of_a_class(method)
    undefined = int(np.isnan(last).sum())
    return {
        "method": method,
        "photos": len(table),
        "of a class": None if method in BLIND else "yes" if of_class else "no",
        "after the head": told(table[:, 0]) if of_class or method in BLIND else "not applicable",  # the head has no part in them
        "halfway": told(table[:, table.shape[1] // 2]),
        "at the end": told(last),
        "undefined at the end": str(undefined) if undefined else None,
        "passes": None if method in BLIND or undefined == len(last) else "yes" if abs(np.nanmean(last)) <= MOST else "no",
    }


def is_of_a_class(method: str) -> bool:
    """Check whether a map is of a class. Another map cannot change before the cascade reaches its layer."""
    way = Way("gates", {}) if method.startswith("gates of") else Way(method, {})
    return METHODS[name_of(way.method)].targeted


def told(values: Array) -> str:
    """Format a mean with its interval over photos for which it is defined."""
    defined = values[~np.isnan(values)]
    if len(defined) < 2:
        return "undefined"
    low, high = mean_interval(defined)
    return f"{defined.mean():.2f} ({float(low):.2f} to {float(high):.2f})"


if __name__ == "__main__":
    sys.exit(main())
