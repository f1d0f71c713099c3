"""Whether metrics of maps rank them as a known cause does: causes x networks x methods x metrics.

`trust.py [--only NAME,NAME] [--scenes N] [--folder FOLDER] [--write-docs]`. Each network decides by one known thing, whose pixels are the
truth. Every method that applies draws its map, and stands beside the truth itself and maps that know nothing (`BESIDE`). A metric deserves
trust where it puts the truth first, those that know nothing last, and the methods in the order of how well they find the cause (AUROC).
Numbers are kept in FOLDER, three files for each network, so that a run that was interrupted goes on.

These settings were chosen before any result: `SCENES`, `FEW`, `SEED`, `RANKING`, `COSTLY`, `HOW` and `NOISE`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy.stats import rankdata
from torch import nn
from train_causes import FOLDER, combinations, name_of
from truth.measure import Way, applicable, ways_of

import visattn
from visattn._support.tables import Row, to_markdown
from visattn.data.scenes.causes import CAUSES, CausedScenes
from visattn.evaluation import (
    Evaluation,
    Evaluator,
    Protocol,
    center_prior,
    edge_map,
    is_higher_better,
    shifted_copies,
    smooth_random,
)

SCENES, FEW = 200, 50  # scenes for ranking metrics of methods that run the model a few times, and for all else
SEED = 3  # of the scenes; networks were trained on odd seeds of their own data, and other pages use 2
SEEDS = 2  # networks of each cause and kind
RANKING = "deletion", "insertion", "positive", "negative", "saco", "road"
COSTLY = "sensitivity_n", "infidelity"
HOW = Protocol(steps=32, by="pixels", batch_size=64, seed=0, nulls=0)
BLIND = "edges", "center prior", "smooth noise", "shifted truth"  # maps that know nothing of the network
BESIDE = "truth", *BLIND  # maps that no method drew
GRID = 16, 16  # of those among them that have no grid of their own
RESAMPLES = 1000
BUILT = Path(__file__).parents[1] / "build" / "trust"

Array = NDArray[np.float64]


class Part(NamedTuple):
    """Part of the numbers of a network, which has a journal of its own.

    Attributes:
        name: Name of the part.
        slow: Whether it holds the methods that run the model many times, instead of the others and the maps beside.
        metrics: Its metrics.
        scenes: Number of scenes, at most.
    """

    name: str
    slow: bool
    metrics: tuple[str, ...]
    scenes: int


PARTS = Part("ranking", False, RANKING, SCENES), Part("costly", False, COSTLY, FEW), Part("slow", True, (*RANKING, *COSTLY), FEW)


def main() -> int:
    """Measure what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="NAME,NAME", help="networks; by default all")
    parser.add_argument("--scenes", type=int, default=SCENES)
    parser.add_argument("--folder", type=Path, default=BUILT)
    options = parser.parse_args()
    keys = {name_of(*key): key[0] for key in combinations(list(CAUSES), SEEDS)}
    chosen = [name for name in keys if options.only is None or name in options.only]
    options.folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        tasks = [pool.submit(measured, name, keys[name], options.scenes, options.folder) for name in chosen]
        rows = [row for task, name in zip(tasks, chosen, strict=True) for row in rows_of(name, task.result())]
    print(to_markdown(rows))
    return 0


def measured(name: str, cause: str, scenes: int, folder: Path) -> dict[str, Evaluation]:
    """Return the numbers of all maps of a network, by part."""
    torch.set_num_threads(1)
    model = visattn.load_model(str(FOLDER / name))
    data = CausedScenes(cause, scenes, seed=SEED)  # type: ignore[arg-type]
    first: Any = data.scene(0)
    ways, _ = applicable(ways_of(model, first), model, first)
    found = {}
    for part in PARTS:
        some = {method: way for method, way in ways.items() if way.slow == part.slow}
        names = [*some, *(() if part.slow else BESIDE)]
        evaluator = Evaluator(
            model, [], names, [*part.metrics, "auroc"], HOW, masked=True, journal=folder / f"{name}_{part.name}.jsonl"
        )
        for place in range(min(part.scenes, scenes)):
            scene = data.scene(place)
            picture = Image.fromarray(scene.image)
            maps = drawn(model, picture, some, scene.masks[0], place)
            evaluator.add(picture, {name: maps[name] for name in names}, scene.masks[0], place)
            print(f"\r  {name}, {part.name}: {place + 1}", end="", file=sys.stderr, flush=True)
        found[part.name] = evaluator.evaluation
    return found


def drawn(
    model: nn.Module, picture: Image.Image, ways: Mapping[str, Way], mask: NDArray[np.bool_], place: int
) -> dict[str, Callable[[], Any]]:
    """Return a function for each map of a scene, which draws it. Methods explain the class that the network predicts."""
    pixels, truth, blank = visattn.prepare(picture, model).pixels, mask.astype(float), np.zeros(GRID)
    with torch.no_grad():
        label = int(model(pixels).argmax())
    return {
        **{name: partial(_map, way, model, picture, label) for name, way in ways.items()},
        "truth": lambda: truth,
        "edges": lambda: edge_map(blank, pixels),
        "center prior": lambda: center_prior(blank),
        "smooth noise": lambda: smooth_random(blank, 1, place).at(copy=0),
        "shifted truth": lambda: shifted_copies(truth, 1, place).at(copy=0),
    }


def _map(way: Way, model: nn.Module, picture: Image.Image, label: int) -> Any:  # noqa: ANN401 - a map
    return way.map(model, picture, label)[0]


def rows_of(name: str, found: Mapping[str, Evaluation]) -> Iterator[Row]:
    """Yield a row for each part and metric: whether it orders methods as the cause does, and where it puts the truth and the blind."""
    for part in PARTS[:2]:
        for metric in part.metrics:
            maps, values = _table(found[part.name], metric)
            _, causes = _table(found[part.name], "auroc")
            signed = values if is_higher_better(metric) else -values
            ranks = rankdata(-signed, axis=1)  # (scenes, maps)
            methods = [place for place, shown in enumerate(maps) if shown not in BESIDE]
            yield {
                "network": name,
                "metric": metric,
                "scenes": len(values),
                "methods": len(methods),
                "order of the cause": _told(_order(signed[:, methods], causes[:, methods])),
                "methods above the truth": int((signed[:, methods].mean(0) > signed[:, maps.index("truth")].mean()).sum()),
                **{f"rank of {shown}": _told(_resampled(ranks[:, maps.index(shown)])) for shown in BESIDE if shown in maps},
            }


def _table(evaluation: Evaluation, metric: str) -> tuple[list[str], Array]:
    """Return the maps with numbers for every scene, and their numbers `(scenes, maps)`."""
    numbers = {(one.place, one.map): one.own.get(metric, np.nan) for one in evaluation.numbers}
    places = list(dict.fromkeys(place for place, _ in numbers))
    table = np.array([[numbers[place, shown] for shown in evaluation.maps] for place in places])
    kept = ~np.isnan(table).any(0)
    return [shown for shown, keeps in zip(evaluation.maps, kept, strict=True) if keeps], table[:, kept]


def _resampled(values: Array) -> Array:
    """Return the mean of numbers over scenes, then means of resampled scenes."""
    random = np.random.default_rng(0)
    drawn = random.integers(len(values), size=(RESAMPLES, len(values)))
    means: Array = np.concatenate([[values.mean(0)], values[drawn].mean(1)])
    return means


def _order(values: Array, causes: Array) -> Array:
    """Return the Spearman correlation over methods of mean numbers with mean AUROC, then those of resampled scenes."""
    ranked = [rankdata(_resampled(numbers), axis=1) for numbers in (values, causes)]
    first, second = (ranks - ranks.mean(1, keepdims=True) for ranks in ranked)
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    order: Array = (first * second).sum(1) / lengths
    return order


def _told(numbers: Array) -> str:
    """Format the first number with the 95 % interval of the others."""
    low, high = np.quantile(numbers[1:], [0.025, 0.975])
    return f"{numbers[0]:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    sys.exit(main())
