"""Worth of maps for each kind of evidence: networks that decide by one known cause, and every method that applies to them.

`causes.py [--scenes N] [--slow-scenes N] [--only CAUSE,CAUSE] [--write-docs]`. For each network it prints the accuracy with the cause and
with a cause that is unrelated to the label, which shows that the network depends on it. For each method it prints in how many networks of a
cause it finds the pixels of the cause, see `visattn.evaluation.find_causes`, and how well it does in the worst of them. Exits 1 if a
network does not depend on its cause.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pages import folded, write_section
from pytorch_grad_cam import EigenCAM, GradCAM, LayerCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import Tensor, nn
from train_causes import ACCURACY, FOLDER, NETWORKS, WITH, WITHOUT
from truth.mark import Part, exchanged, layer_by_layer
from truth.measure import accuracy, size_of, ways_of

from visattn._support.json_files import decoded
from visattn._support.tables import Row, to_markdown
from visattn.core.families import cam_layer
from visattn.data.scenes import Mark
from visattn.data.scenes.causes import CAUSES, TITLES, Cause, CausedScenes
from visattn.evaluation import Causes, find_causes
from visattn.evaluation.causes.networks import CauseNetwork, cause_networks
from visattn.evaluation.intervals import mean_interval

DOCS = Path(__file__).parents[1] / "docs" / "known_truth.md"
JOURNALS = Path(__file__).parents[1] / "build" / "causes"
SEED = 2  # of the test scenes; networks were trained on odd seeds
OTHERS: dict[str, Any] = {"grad-cam: GradCAM": GradCAM, "grad-cam: LayerCAM": LayerCAM, "grad-cam: EigenCAM": EigenCAM}
GATED: tuple[Cause, ...] = "mark", "border"  # causes of CNNs with CBAM that can be left out
GATED_SEEDS = 2
PARTS: tuple[Part, ...] = "channel", "spatial"
LAYERS = "bn1", "layer1", "layer2", "layer3"
TITLES_OF_KINDS = {"cnn": "CNN", "vit": "Vision transformer"}


def main() -> int:
    """Measure, print the tables, and write them to the page on request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenes", type=int, default=60, help="number of scenes of each network, at least 2")
    parser.add_argument(
        "--slow-scenes", type=int, default=0, help="number of scenes for methods that run the model many times; 0: none"
    )
    parser.add_argument("--tests", type=int, default=1000, help="number of scenes on which accuracy is measured")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(CAUSES), metavar="CAUSE,CAUSE")
    parser.add_argument("--journals", type=Path, default=JOURNALS, help="folder of journals, from which a later run goes on")
    parser.add_argument("--write-docs", action="store_true", help=f"write the tables to docs/{DOCS.name}")
    options = parser.parse_args()
    if options.scenes < 2 or options.slow_scenes == 1 or not set(options.only) <= set(CAUSES):
        parser.error(f"two scenes or more are needed, of the causes {', '.join(CAUSES)}.")
    torch.set_num_threads(1)
    networks = [network for network in cause_networks() if network.cause in options.only]
    rows, failed = dependence(networks, options.tests)
    texts = {"causes": folded("Accuracy of each network, with its cause and with an unrelated one", to_markdown(rows))}
    print(texts["causes"], flush=True)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        names = {kind: [network.name for network in networks if network.kind == kind] for kind in NETWORKS}
        tasks = {
            kind: pool.submit(measured, kind, names[kind], options.scenes, options.slow_scenes, options.journals)
            for kind in NETWORKS
            if names[kind]
        }
        for kind, task in tasks.items():
            texts[f"causes of {kind}"] = table(task.result())
            print(f"## {TITLES_OF_KINDS[kind]}\n\n{texts[f'causes of {kind}']}", flush=True)
    chosen = [cause for cause in GATED if cause in options.only]
    if chosen:
        gates, depth = gates_and_depth(chosen, options.scenes)
        texts["gates"] = folded("Accuracy after the exchange of gates", to_markdown(gates))
        texts["depth"] = folded("Grad-CAM of each stage, on the same scenes", to_markdown(depth))
        print(f"## Gates\n\n{texts['gates']}\n## Depth\n\n{texts['depth']}", flush=True)
    for name, text in texts.items() if options.write_docs else ():
        write_section(DOCS, name, text, into_files=True)
    return int(failed)


def dependence(networks: Sequence[CauseNetwork], count: int) -> tuple[list[Row], bool]:
    """Return the accuracy of each network with its cause and without it, and whether one that counts does not depend on it.

    Networks that did not learn their cause are told too; they do not count.
    """
    rows: list[Row] = []
    failed = False
    for network in networks:
        kinds: tuple[Mark, Mark] = "label", "random"
        shares = [accuracy(network.model, CausedScenes(network.cause, count, seed=SEED, shown=shown)) for shown in kinds]  # type: ignore[arg-type]
        failed = failed or shares[0] < WITH or shares[1] > WITHOUT
        rows.append(_dependence(network.cause, network.kind, network.seed, shares, "yes"))
        print(f"  {network.name}: {shares[0]:.3f} {shares[1]:.3f}", file=sys.stderr, flush=True)
    causes = {network.cause for network in networks}
    for path in sorted(FOLDER.glob(f"*/{ACCURACY}")):
        cause, kind, seed = path.parent.name.split("_")
        if cause in causes:
            rows.append(_dependence(cause, kind, int(seed), decoded(path.read_bytes(), list[float], ACCURACY), "no"))
    return rows, failed


def _dependence(cause: str, kind: str, seed: int, shares: Sequence[float], counts: str) -> Row:
    return {
        "cause": cause,
        "what decides the label": TITLES[cause],  # type: ignore[index]
        "network": f"{TITLES_OF_KINDS[kind]}, seed {seed}",
        "accuracy": f"{shares[0]:.1%}",
        "with an unrelated cause": f"{shares[1]:.1%}",
        "counts": counts,
    }


def measured(kind: str, networks: list[str], scenes: int, slow: int, journals: Path) -> Causes:
    """Return the findings of all methods on networks of one kind."""
    torch.set_num_threads(1)
    first = next(network for network in cause_networks() if network.name == networks[0])
    scene: Any = CausedScenes(first.cause, 1, seed=SEED).scene(0)  # type: ignore[arg-type]
    ways = ways_of(first.model, scene)
    quick: dict[str, Any] = {name: {"method": way.method, **way.parameters} for name, way in ways.items() if not way.slow}
    if kind == "cnn":  # grad-cam needs a feature map
        quick |= {name: _peer(method) for name, method in OTHERS.items()}
    found = find_causes(quick, networks=networks, scenes=scenes, seed=SEED, journal=journals / f"{kind}.jsonl", quiet=False)
    if not slow:
        return found
    rest: dict[str, Any] = {name: {"method": way.method, **way.parameters} for name, way in ways.items() if way.slow}
    more = find_causes(rest, networks=networks, scenes=slow, seed=SEED, journal=journals / f"{kind}_slow.jsonl", quiet=False)
    return Causes([*found.findings, *more.findings])


def _peer(method: Any) -> Any:  # noqa: ANN401 - a class of grad-cam
    """Return a class of grad-cam as a function of a network, its input and the class."""

    def drawn(model: nn.Module, pixels: Tensor, label: int) -> Any:  # noqa: ANN401 - an array
        layer = cam_layer(model)
        assert layer is not None  # noqa: S101 - a CNN has one
        with method(model, [model.get_submodule(layer)]) as cam:
            return cam(pixels, [ClassifierOutputTarget(label)])

    drawn.source = f"{method.__name__} of grad-cam {version('grad-cam')}"  # type: ignore[attr-defined]
    return drawn


def table(found: Causes) -> str:
    """Return the table of one kind of network: a row for each method, and a column for each cause."""
    verdicts = found.verdicts()
    causes = list(dict.fromkeys(str(row["cause"]) for row in verdicts))
    by_map: dict[str, dict[str, Row]] = {}
    for row in verdicts:
        by_map.setdefault(str(row["map"]), {})[str(row["cause"])] = row
    order = sorted(by_map, key=lambda name: -sum(int(row["found"]) for row in by_map[name].values()))
    rows = [
        {
            "method": name,
            **{cause: _brief(by_map[name].get(cause)) for cause in causes},
            "may be trusted with": ", ".join(
                cause for cause, row in by_map[name].items() if str(row["verdict"]) == "may be trusted"
            ),
        }
        for name in order
    ]
    verdict_rows = [{name: _rounded(value) for name, value in row.items()} for row in verdicts]
    details = [{name: _rounded(value) for name, value in row.items()} for row in found.rows()]
    folds = folded("Verdicts in full", to_markdown(verdict_rows)), folded("Each network", to_markdown(details))
    return "\n".join([to_markdown(rows), *folds])


def _brief(row: Row | None) -> str | None:
    """Return in how many networks a cause is found, and the lowest numbers of any of them.

    They are the AUROC and the share of scenes in which the largest cell touches the cause; then in how many networks the map is inverted.
    With few scenes there are only the numbers.
    """
    if row is None:
        return None
    numbers = f"{row['worst auroc']:.2f}, {row['least touches']:.0%}"
    if str(row["verdict"]).startswith("none"):
        return f"({numbers})"
    inverted = f", inverted in {row['inverted']}" if row["inverted"] else ""
    return f"{row['found']} of {row['networks']} ({numbers}{inverted})"


def _rounded(value: Any) -> Any:  # noqa: ANN401 - of a table
    return value if not isinstance(value, float) else f"{value:.1e}" if 0 < value < 0.005 else f"{value:.2f}"


def gates_and_depth(causes: list[Cause], count: int) -> tuple[list[Row], list[Row]]:
    """Return the accuracy after an exchange of gates between a scene and its copy without the cause, and Grad-CAM of each layer."""
    gates: list[Row] = []
    depth: list[Row] = []
    for cause, seed in product(causes, range(GATED_SEEDS)):
        model = CauseNetwork(cause, "cnn", seed).model
        marked, plain = (CausedScenes(cause, count, seed=SEED, shown=shown) for shown in ("label", "none"))
        row: dict[str, Any] = {"cause": cause, "seed": seed}
        for part in PARTS:
            row[f"with the cause, {part} gates of the copy without"] = f"{exchanged(model, marked, plain, part):.0%}"
            row[f"without it, {part} gates of the copy with"] = f"{exchanged(model, plain, marked, part):.0%}"
        own = {"accuracy with the cause": marked, "without": plain}
        gates.append({**row, **{name: f"{exchanged(model, some, some, 'channel'):.0%}" for name, some in own.items()}})
        for layer, seen in layer_by_layer(model, LAYERS, marked, plain).items():
            depth.append(
                {
                    "cause": cause,
                    "seed": seed,
                    "layer": layer,
                    "cells": size_of(seen.grid),
                    "AUROC of the cause": told(seen.numbers["AUROC"]),
                    "after subtracting the mean map": told(seen.numbers["without the mean map"]),
                    "largest cell touches it": f"{np.mean(seen.numbers['touches']):.0%}",
                    "the same cells without it": f"{np.mean(seen.numbers['touches the place']):.0%}",
                }
            )
        print(f"  gates and depth of {cause}, seed {seed}", file=sys.stderr, flush=True)
    return gates, depth


def told(values: Sequence[float]) -> str:
    """Format a mean with its 95 % interval over scenes."""
    low, high = mean_interval(np.array(values))
    return f"{np.mean(values):.2f} ({float(low):.2f} to {float(high):.2f})"


if __name__ == "__main__":
    sys.exit(main())
