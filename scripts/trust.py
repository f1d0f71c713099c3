"""Whether metrics of maps rank them as a known cause does: causes x networks x methods x metrics.

`trust.py [--only NAME,NAME] [--scenes N] [--folder FOLDER] [--write-docs]`. Each network decides by one known thing, whose pixels are the
truth. Every method that applies draws its map, and stands beside the truth itself and maps that know nothing (`BESIDE`). A metric deserves
trust where it puts the truth first, those that know nothing last, and the methods in the order of how well they find the cause (AUROC).
Numbers are kept in FOLDER, a journal for each part of each network and then its rows, so that a run that was interrupted goes on.

These settings were chosen before any result: `SCENES`, `FEW`, `SEED`, `RANKING`, `COSTLY`, `HOW`, `CELLS`, `RADIUS` and `SAMPLES`, and
that the first network of each cause and kind is measured.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from pages import folded, write_section
from PIL import Image
from scipy.stats import rankdata
from torch import Tensor, nn
from truth.measure import Way, applicable, first_networks, ways_of

import visattn
from visattn._support.json_files import decoded
from visattn._support.tables import Row, to_markdown
from visattn._support.whole_files import write_whole
from visattn.core.geometry import Geometry
from visattn.data.scenes.causes import CausedScenes
from visattn.evaluation import (
    METRICS,
    Evaluation,
    Evaluator,
    Explainer,
    Protocol,
    center_prior,
    deletion,
    edge_map,
    max_sensitivity,
    road,
    shifted_copies,
    smooth_random,
)
from visattn.evaluation.causes.networks import CauseNetwork
from visattn.evaluation.given import on_input
from visattn.evaluation.journal_file import JournalFile
from visattn.evaluation.units import units_of

SCENES, FEW = 200, 50  # scenes for ranking metrics of methods that run the model a few times, and for all else
SEED = 3  # of the scenes; networks were trained on odd seeds of their own data, and other pages use 2
RANKING = "deletion", "insertion", "positive", "negative", "saco", "road"
COSTLY = "sensitivity_n", "infidelity"
HOW = Protocol(steps=32, by="pixels", batch_size=64, seed=0, nulls=0)
BLIND = "edges", "center prior", "smooth noise", "shifted truth"  # maps that know nothing of the network
BESIDE = "truth", *BLIND  # maps that no method drew
GRID = 16, 16  # of those among them that have no grid of their own
CELLS = 8, 8  # of maps for metrics that sum the values of cells
GROUPS = {"quick": "methods that run the model a few times", "every": "all methods"}
STABLE, RADIUS, SAMPLES = "max_sensitivity", 0.05, 5  # of methods that run the model a few times; noise in units of the input
RESAMPLES = 1000
DOCS = Path(__file__).parents[1] / "docs" / "trust.md"
BUILT = Path(__file__).parents[1] / "build" / "trust"

Array = NDArray[np.float64]


class Table(NamedTuple):
    """Names of maps, and their numbers `(scenes, maps)`."""

    maps: tuple[str, ...]
    numbers: Array


Tables = dict[str, Table]  # by metric


class _Stable(msgspec.Struct, forbid_unknown_fields=True):
    """Maximal sensitivity of a method on a scene."""

    map: str
    place: int
    value: float


class Found(msgspec.Struct, forbid_unknown_fields=True):
    """What is told of a network.

    Attributes:
        settings: What the rows depend on.
        rows: A row for each metric, by group; see `rows_of`.
        values: A row for each map and metric; see `values_of`.
    """

    settings: dict[str, Any]
    rows: dict[str, list[dict[str, Any]]]
    values: list[dict[str, Any]]


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


PARTS = (
    Part("ranking", False, RANKING, SCENES),
    Part("costly", False, COSTLY, FEW),
    Part("slow ranking", True, RANKING, FEW),
    Part("slow costly", True, COSTLY, FEW),
)


def main() -> int:
    """Measure what is missing, print the tables, and write them to the page on request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="NAME,NAME", help="networks; by default all")
    parser.add_argument("--scenes", type=int, default=SCENES, help="number of scenes, at least 2")
    parser.add_argument("--folder", type=Path, default=BUILT)
    parser.add_argument("--write-docs", action="store_true", help=f"write the tables to docs/{DOCS.name}")
    options = parser.parse_args()
    if options.scenes < 2:
        parser.error("two scenes or more are needed.")
    chosen = [one for one in first_networks(1) if options.only is None or one.name in options.only]
    options.folder.mkdir(parents=True, exist_ok=True)
    shares = ", ".join(f"{share:.1%} by {name}" for name, share in orders_above().items())
    additive = f"Orders of cells above the true one of a model that adds up: {shares} (200 orders of each of 10 models)."
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        tasks = [pool.submit(found_of, network, options.scenes, options.folder) for network in chosen]
        found = [task.result() for task in tasks]
    parts = []
    for group, title in GROUPS.items():
        rows = [row for one in found for row in one.rows[group]]
        each = folded(f"Each network by {title}", to_markdown([_told_row(row) for row in rows]))
        parts += [f"{title.capitalize()}:", "", to_markdown(summary(rows)), each]
    values = [row for one in found for row in one.values]
    text = "\n".join([*parts, folded("Each map", to_markdown(values)), additive, ""])
    print(text)
    if options.write_docs:
        write_section(DOCS, "metrics", text, into_files=True)
    return 0


def orders_above(models: int = 10, orders: int = 200) -> dict[str, float]:
    """Return the share of random orders of cells that a metric puts above the truth of a model that adds up, by metric.

    The model sums the values of an input's cells, so the order of the values is exact where a cell is replaced by zeros. ROAD fills pixels
    from their neighbors, so no order of whole cells need be the best.
    """
    above = {"deletion": 0, "road": 0}
    for seed in range(models):
        random, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        weights, x = torch.randn(1, 3, 32, 32, generator=generator), torch.rand(1, 3, 32, 32, generator=generator)
        cells = (weights * x).sum(1)[0].unfold(0, 8, 8).unfold(1, 8, 8).sum((-1, -2)).double().numpy()

        def score(inputs: Tensor, weights: Tensor = weights) -> Tensor:
            return (weights * inputs).sum((1, 2, 3))

        metrics: dict[str, Callable[[Array], float]] = {
            "deletion": lambda shown, score=score, x=x: -deletion(score, x, shown, steps=16, by="cells").area,  # type: ignore[misc]
            "road": lambda shown, score=score, x=x: road(score, x, shown, by="cells").combined,  # type: ignore[misc]
        }
        shuffled = [random.permutation(cells.ravel()).reshape(cells.shape) for _ in range(orders)]
        for name, metric in metrics.items():
            best = metric(cells)
            above[name] += sum(metric(shown) > best + 1e-9 for shown in shuffled)
    return {name: count / models / orders for name, count in above.items()}


def found_of(network: CauseNetwork, scenes: int, folder: Path) -> Found:
    """Return the rows of a network, from its file if an earlier run has ended with the same settings."""
    kept, ways = folder / f"{network.name}.json", ways_that_apply(network)
    settings = {
        "visattn": visattn.__version__,
        "weights": hashlib.sha256((network.folder / "model.safetensors").read_bytes()).hexdigest(),
        "scenes": [scenes, FEW, SEED],
        "metrics": [part._asdict() for part in PARTS],
        "protocol": asdict(HOW),
        "maps": [*BESIDE, GRID, CELLS, RADIUS, SAMPLES],
        "ways": {name: asdict(way) for name, way in ways.items()},
    }
    settings = msgspec.json.decode(encoded := msgspec.json.encode(settings))
    if kept.exists() and (found := decoded(kept.read_bytes(), Found, kept.name)).settings == settings:
        return found
    stem = folder / f"{network.name} {hashlib.sha256(encoded).hexdigest()[:12]}"  # of journals, which other settings do not share
    groups = measured(network, ways, scenes, stem)
    rows = {group: list(rows_of(network.name, tables)) for group, tables in groups.items()}
    found = Found(settings, rows, [dict(row) for row in values_of(network.name, groups)])
    write_whole(kept, msgspec.json.encode(found))
    return decoded(kept.read_bytes(), Found, kept.name)


def ways_that_apply(network: CauseNetwork) -> dict[str, Way]:
    """Return the methods that apply to a network."""
    first: Any = CausedScenes(network.cause, 1, seed=SEED).scene(0)  # type: ignore[arg-type]
    ways, _ = applicable(ways_of(network.model, first), network.model, first)
    return ways


def measured(network: CauseNetwork, ways: Mapping[str, Way], scenes: int, stem: Path) -> dict[str, Tables]:
    """Return the numbers of all maps of a network, by group and metric."""
    torch.set_num_threads(1)
    data = CausedScenes(network.cause, scenes, seed=SEED)  # type: ignore[arg-type]
    tables: dict[bool, Tables] = {False: {}, True: {}}
    for part in PARTS:
        some = {name: way for name, way in ways.items() if way.slow == part.slow}
        tables[part.slow] |= evaluated(network, part, some, data, stem)
    every = {metric: joined(table, tables[True][metric]) for metric, table in tables[False].items()}
    quick = {name: way for name, way in ways.items() if not way.slow}
    return {"quick": {**tables[False], STABLE: stable(network, quick, data, stem)}, "every": every}


def evaluated(network: CauseNetwork, part: Part, ways: Mapping[str, Way], data: CausedScenes, stem: Path) -> Tables:
    """Return the numbers of a part."""
    model, metrics = network.model, (*part.metrics, "auroc")
    names = [*ways, *(() if part.slow else BESIDE)]
    journal = stem.with_name(f"{stem.name} {part.name}.jsonl")
    evaluator = Evaluator(model, [], names, metrics, HOW, masked=True, journal=journal)
    for place in range(min(part.scenes, len(data))):
        scene = data.scene(place)
        picture = Image.fromarray(scene.image)
        maps = drawn(model, picture, ways, scene.masks[0], place)
        if part.metrics == COSTLY:  # they sum the values of cells, so all maps must have the same
            geometry = visattn.prepare(picture, model).geometry
            maps = {name: partial(pooled, shown, geometry) for name, shown in maps.items()}
        evaluator.add(picture, {name: maps[name] for name in names}, scene.masks[0], place)
        print(f"\r  {network.name}, {part.name}: {place + 1}", end="", file=sys.stderr, flush=True)
    return {metric: _table(evaluator.evaluation, metric) for metric in (part.metrics if part.metrics == COSTLY else metrics)}


def joined(one: Table, two: Table) -> Table:
    """Return both tables as one, on the scenes that both have."""
    count = min(len(one.numbers), len(two.numbers))
    return Table((*one.maps, *two.maps), np.concatenate([one.numbers[:count], two.numbers[:count]], 1))


def stable(network: CauseNetwork, ways: Mapping[str, Way], data: CausedScenes, stem: Path) -> Table:
    """Return the maximal sensitivity of methods."""
    settings = {"radius": RADIUS, "samples": SAMPLES, "scenes": SEED}
    journal = JournalFile(stem.with_name(f"{stem.name} {STABLE}.jsonl"), STABLE, settings, _Stable)
    known = {(line.map, line.place): line.value for line in journal.lines}
    count = min(FEW, len(data))
    for place in range(count):
        picture = Image.fromarray(data.scene(place).image)
        for name, way in ways.items():
            if (name, place) not in known:
                explain = Explainer(network.model, picture, way.method, **way.parameters)
                value = max_sensitivity(explain, explain.pixels, radius=RADIUS, samples=SAMPLES, seed=place)
                known[name, place] = journal.add(_Stable(name, place, value)).value
        print(f"\r  {network.name}, {STABLE}: {place + 1}", end="", file=sys.stderr, flush=True)
    return Table(tuple(ways), np.array([[known[name, place] for name in ways] for place in range(count)]))


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


def pooled(shown: Callable[[], Any], geometry: Geometry) -> Array:
    """Return the means of a map, as it is drawn over the input, in cells of one size."""
    (height, width), (rows, columns) = geometry.input, CELLS
    values = units_of(on_input(shown(), geometry), geometry.input, "pixels").values
    means: Array = values.reshape(rows, height // rows, columns, width // columns).mean((1, 3))
    return means


def _map(way: Way, model: nn.Module, picture: Image.Image, label: int) -> Any:  # noqa: ANN401 - a map
    return way.map(model, picture, label)[0]


def rows_of(name: str, tables: Tables) -> Iterator[dict[str, Any]]:
    """Yield a row for each metric: whether it orders methods as the cause does, and where it puts the truth and the blind maps.

    Intervals are the first number with the lower and the upper end after it.
    """
    for metric, (maps, numbers) in tables.items():
        if metric == "auroc":
            continue
        signed = numbers if metric in METRICS and METRICS[metric].higher else -numbers
        ranks = rankdata(-signed, axis=1)  # (scenes, maps)
        places = {shown: place for place, shown in enumerate(maps)}
        methods = [shown for shown in maps if shown not in BESIDE]
        of_methods = signed[:, [places[shown] for shown in methods]]
        causes = tables["auroc"]
        found = causes.numbers[: len(numbers), [causes.maps.index(shown) for shown in methods]]
        means = of_methods.mean(0)
        at = {shown: signed[:, places[shown]].mean() for shown in BESIDE if shown in places}
        ranked = {shown: _interval(_resampled(ranks[:, places[shown]])) for shown in BESIDE if shown in places}
        yield {
            "network": name,
            "metric": metric,
            "scenes": len(numbers),
            "methods": len(methods),
            "order of the cause": _interval(_order(of_methods[: len(found)], found)),
            "methods above the truth": int((means > at["truth"]).sum()) if "truth" in at else None,
            "methods below the edges": int((means < at["edges"]).sum()) if "edges" in at else None,
            **{f"rank of {shown}": ranked.get(shown) for shown in BESIDE},
        }


def summary(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return a row for each metric: ranges over networks."""
    lines = list[Row]()
    for metric in dict.fromkeys(row["metric"] for row in rows):
        chosen = [row for row in rows if row["metric"] == metric]
        orders = [row["order of the cause"][0] for row in chosen]
        line: dict[str, Any] = {
            "metric": metric,
            "networks": len(chosen),
            "order of the cause": f"{np.median(orders):.2f} ({min(orders):.2f} to {max(orders):.2f})",
        }
        for name in ("methods above the truth", "methods below the edges"):
            counts = [row[name] for row in chosen]
            line[name] = None if None in counts else f"{np.median(counts):g} ({min(counts)} to {max(counts)})"
        firsts = [row["methods above the truth"] for row in chosen]
        line["truth first in"] = None if None in firsts else f"{sum(count == 0 for count in firsts)} of {len(chosen)}"
        lines.append(line)
    return lines


def values_of(name: str, groups: Mapping[str, Tables]) -> Iterator[Row]:
    """Yield a row for each map and metric: the mean over scenes with its interval."""
    for group, tables in groups.items():
        for metric, (maps, numbers) in tables.items():
            for place, shown in enumerate(maps):
                if group == "quick" or shown not in groups["quick"][metric].maps:
                    value = _told(_interval(_resampled(numbers[:, place])))
                    yield {"network": name, "metric": metric, "map": shown, "scenes": len(numbers), "value": value}


def _table(evaluation: Evaluation, metric: str) -> Table:
    """Return the maps with numbers for every scene, and their numbers."""
    numbers = {(one.place, one.map): one.own.get(metric, np.nan) for one in evaluation.numbers}
    places = list(dict.fromkeys(place for place, _ in numbers))
    table = np.array([[numbers[place, shown] for shown in evaluation.maps] for place in places])
    kept = ~np.isnan(table).any(0)
    return Table(tuple(shown for shown, keeps in zip(evaluation.maps, kept, strict=True) if keeps), table[:, kept])


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


def _interval(numbers: Array) -> tuple[float, float, float]:
    """Return the first number, and the 95 % interval of the others."""
    low, high = np.quantile(numbers[1:], [0.025, 0.975])
    return float(numbers[0]), float(low), float(high)


def _told(interval: Sequence[float]) -> str:
    return f"{interval[0]:.3g} ({interval[1]:.3g} to {interval[2]:.3g})"


def _told_row(row: Mapping[str, Any]) -> Row:
    return {name: _told(value) if isinstance(value, list) else value for name, value in row.items()}


if __name__ == "__main__":
    sys.exit(main())
