"""Whether metrics of maps rank them as a known cause does: causes x networks x methods x metrics.

`trust.py [--only NAME,NAME] [--scenes N] [--folder FOLDER]`. Each network decides by one known thing, whose pixels are the truth. Every
method that applies draws its map, and stands beside the truth itself, the edges of the input, and nulls. A metric deserves trust where it
puts the truth first, the edges low, and the methods in the order of how well they find the cause (AUROC). Numbers are kept in FOLDER, two
files for each network, so that a run that was interrupted goes on.

These settings were chosen before any result: `SCENES`, `SEED`, `RANKING`, `DENSE`, `HOW` and `STEPS`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy.stats import spearmanr
from torch import nn
from train_causes import FOLDER, combinations, name_of
from truth.measure import Way, applicable, ways_of

import visattn
from visattn._support.tables import Row, to_markdown
from visattn.data.scenes.causes import CAUSES, CausedScenes
from visattn.evaluation import METRICS, Evaluation, Evaluator, Protocol, edge_map

SCENES, SLOW = 200, 50  # scenes for methods that run the model a few times, and for the others
SEED = 3  # of the scenes; networks were trained on odd seeds of their own data, and other pages use 2
SEEDS = 2  # networks of each cause and kind
RANKING = "deletion", "insertion", "positive", "negative", "saco", "sensitivity_n", "road", "infidelity"
HOW = Protocol(steps=32, by="pixels", batch_size=64, seed=0, nulls=3)
BESIDE = "truth", "edges"  # maps that no method drew
BUILT = Path(__file__).parents[1] / "build" / "trust"


@dataclass(frozen=True)
class Network:
    """A network and the cause that it decides by."""

    cause: str
    kind: str
    seed: int

    @property
    def name(self) -> str:
        """Name of its folder."""
        return name_of(self.cause, self.kind, self.seed)


def main() -> int:
    """Measure what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="NAME,NAME", help="networks; by default all")
    parser.add_argument("--scenes", type=int, default=SCENES)
    parser.add_argument("--folder", type=Path, default=BUILT)
    options = parser.parse_args()
    networks = [Network(*key) for key in combinations(list(CAUSES), SEEDS)]
    chosen = [network for network in networks if options.only is None or network.name in options.only]
    options.folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        tasks = [pool.submit(measured, network, options.scenes, options.folder) for network in chosen]
        rows = [row for task, network in zip(tasks, chosen, strict=True) for row in rows_of(network, task.result())]
    print(to_markdown(rows))
    return 0


def measured(network: Network, scenes: int, folder: Path) -> Evaluation:
    """Return the numbers of all maps of a network."""
    torch.set_num_threads(1)
    model = visattn.load_model(str(FOLDER / network.name))
    data = CausedScenes(network.cause, scenes, seed=SEED)  # type: ignore[arg-type]
    first: Any = data.scene(0)
    ways, _ = applicable(ways_of(model, first), model, first)
    quick = {name: way for name, way in ways.items() if not way.slow}
    slow = {name: way for name, way in ways.items() if way.slow}
    numbers = []
    for kind, some, count in (("quick", quick, scenes), ("slow", slow, min(SLOW, scenes))):
        names = [*BESIDE, *some] if kind == "quick" else list(some)
        evaluator = Evaluator(
            model, [], names, [*RANKING, "auroc"], HOW, masked=True, journal=folder / f"{network.name}_{kind}.jsonl"
        )
        for place in range(count):
            scene = data.scene(place)
            picture = Image.fromarray(scene.image)
            evaluator.add(picture, drawn(model, picture, some, scene.masks[0], names), scene.masks[0], place)
            print(f"\r  {network.name}, {kind}: {place + 1} of {count}", end="", file=sys.stderr, flush=True)
        numbers += evaluator.numbers
    return Evaluation(numbers, [*RANKING, "auroc"])


def drawn(
    model: nn.Module, picture: Image.Image, ways: Mapping[str, Way], mask: NDArray[np.bool_], names: Sequence[str]
) -> dict[str, Callable[[], Any]]:
    """Return a function for each map of a scene, which draws it. Methods explain the class that the network predicts."""
    pixels = visattn.prepare(picture, model).pixels
    with torch.no_grad():
        label = int(model(pixels).argmax())
    made: dict[str, Callable[[], Any]] = {name: partial(_map, way, model, picture, label) for name, way in ways.items()}
    made |= {"truth": lambda: mask.astype(float), "edges": lambda: edge_map(np.zeros((16, 16)), pixels)}
    return {name: made[name] for name in names}


def _map(way: Way, model: nn.Module, picture: Image.Image, label: int) -> Any:  # noqa: ANN401 - a map
    return way.map(model, picture, label)[0]


def rows_of(network: Network, evaluation: Evaluation) -> Iterator[Row]:
    """Yield a row for each metric: where it puts the truth and the edges, and whether it orders methods as the cause does."""
    values = {(str(row["metric"]), str(row["map"])): row["value"] for row in evaluation.rows()}
    methods = [name for name in evaluation.maps if name not in BESIDE and values["auroc", name] is not None]
    for metric in RANKING:
        sign = 1 if METRICS[metric].higher else -1
        measured = {name: sign * values[metric, name] for name in (*methods, *BESIDE) if values[metric, name] is not None}
        ranked = [name for name in methods if name in measured]
        order = spearmanr([measured[name] for name in ranked], [values["auroc", name] for name in ranked]).statistic
        yield {
            "network": network.name,
            "metric": metric,
            "methods": str(len(ranked)),
            "order of the cause": f"{order:.2f}",
            "above the truth": _above("truth", measured, ranked),
            "below the edges": None
            if "edges" not in measured
            else str(sum(measured[name] < measured["edges"] for name in ranked)),
        }


def _above(name: str, measured: Mapping[str, float], methods: Sequence[str]) -> str | None:
    return None if name not in measured else str(sum(measured[method] > measured[name] for method in methods))


if __name__ == "__main__":
    sys.exit(main())
