"""Worth of maps for each kind of evidence: networks that decide by one known cause, and every method that applies to them.

`causes.py [--scenes N] [--slow-scenes N] [--only CAUSE,CAUSE] [--write-docs]`. For each network it prints the accuracy with the cause and
with a cause that is unrelated to the label, which shows that the network depends on it. For each method it prints how well the map finds
the pixels of the cause (AUROC), beside three controls: the same map shifted around the grid, a center prior, and the same method on a
network that decides by another cause. Exits 1 if a network does not depend on its cause.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pages import folded, write_section
from PIL import Image
from pointing.photos import COPIES
from pytorch_grad_cam import EigenCAM, GradCAM, LayerCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import nn
from train_causes import FOLDER, NETWORKS, combinations, name_of
from truth.mark import Part, exchanged, layer_by_layer
from truth.measure import accuracy, applicable, size_of, ways_of

import visattn
from visattn import evaluation
from visattn._support.tables import Row, to_markdown
from visattn.core.families import cam_layer
from visattn.data.scenes import Mark
from visattn.data.scenes.causes import CAUSES, TITLES, VALUES, Cause, CausedScene, CausedScenes
from visattn.evaluation.intervals import mean_interval

DOCS = Path(__file__).parents[1] / "docs" / "known_truth.md"
SEED = 2  # of the test scenes; networks were trained on odd seeds
SEEDS = 2  # networks of each kind
NULLS = "shifted copies", "another network", "center prior"
SURE = 0.8  # AUROC from which a map is trusted
WITH, WITHOUT = 0.95, 1 / VALUES + 0.05  # bounds on the accuracy
OTHERS: dict[str, Any] = {"grad-cam: GradCAM": GradCAM, "grad-cam: LayerCAM": LayerCAM, "grad-cam: EigenCAM": EigenCAM}
GATED: tuple[Cause, ...] = "mark", "border"  # causes of CNNs with CBAM that can be left out
PARTS: tuple[Part, ...] = "channel", "spatial"
LAYERS = "bn1", "layer1", "layer2", "layer3"
TITLES_OF_KINDS = {"cnn": "CNN", "vit": "Vision transformer"}

Scores = dict[str, list[float]]  # AUROC of each scene, by map
Maps = Callable[..., Mapping[str, tuple[Any, Any]]]  # map and geometry of each method


def main() -> int:
    """Measure, print the tables, and write them to the page on request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenes", type=int, default=60, help="number of scenes of each cause, at least 2")
    parser.add_argument(
        "--slow-scenes", type=int, default=0, help="number of scenes for methods that run the model many times; 0: none"
    )
    parser.add_argument("--tests", type=int, default=1000, help="number of scenes on which accuracy is measured")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(CAUSES), metavar="CAUSE,CAUSE")
    parser.add_argument("--checkpoints", type=Path, default=FOLDER)
    parser.add_argument("--write-docs", action="store_true", help=f"write the tables to docs/{DOCS.name}")
    options = parser.parse_args()
    if options.scenes < 2 or len(options.only) < 2 or not set(options.only) <= set(CAUSES):
        parser.error(f"two scenes or more are needed, of two or more of the causes {', '.join(CAUSES)}.")
    torch.set_num_threads(1)
    models = {key: visattn.load_model(str(options.checkpoints / name_of(*key))) for key in combinations(options.only, SEEDS)}
    rows, failed = dependence(models, options.tests)
    texts = {"causes": folded("Accuracy of each network, with its cause and with an unrelated one", to_markdown(rows))}
    print(texts["causes"], flush=True)
    for kind in NETWORKS:
        own = {key: model for key, model in models.items() if key[1] == kind}
        texts[f"causes of {kind}"] = table(own, options.scenes, options.slow_scenes)
        print(f"## {TITLES_OF_KINDS[kind]}\n\n{texts[f'causes of {kind}']}", flush=True)
    chosen = [cause for cause in GATED if cause in options.only]
    if chosen:
        gates, depth = gates_and_depth(models, chosen, options.scenes)
        texts["gates"] = folded("Accuracy after the exchange of gates", to_markdown(gates))
        texts["depth"] = folded("Grad-CAM of each stage, on the same scenes", to_markdown(depth))
        print(f"## Gates\n\n{texts['gates']}\n## Depth\n\n{texts['depth']}", flush=True)
    for name, text in texts.items() if options.write_docs else ():
        write_section(DOCS, name, text, into_files=True)
    return int(failed)


def dependence(models: Mapping[tuple[Cause, str, int], nn.Module], count: int) -> tuple[list[Row], bool]:
    """Return the accuracy of each network with its cause and without it, and whether one does not depend on it."""
    rows: list[Row] = []
    failed = False
    for (cause, kind, seed), model in models.items():
        kinds: tuple[Mark, Mark] = "label", "random"
        shares = [accuracy(model, CausedScenes(cause, count, seed=SEED, shown=shown)) for shown in kinds]
        failed = failed or shares[0] < WITH or shares[1] > WITHOUT
        rows.append(
            {
                "cause": cause,
                "what decides the label": TITLES[cause],
                "network": f"{TITLES_OF_KINDS[kind]}, seed {seed}",
                "accuracy": f"{shares[0]:.1%}",
                "with an unrelated cause": f"{shares[1]:.1%}",
            }
        )
        print(f"  {cause} {kind} {seed}: {shares[0]:.3f} {shares[1]:.3f}", file=sys.stderr, flush=True)
    return rows, failed


def table(models: Mapping[tuple[Cause, str, int], nn.Module], count: int, slow: int) -> str:
    """Return the table of one kind of network: a row for each method, and a column for each cause."""
    causes = list(dict.fromkeys(cause for cause, _, _ in models))
    found: dict[str, dict[str, float]] = defaultdict(dict)
    above: dict[str, list[str]] = defaultdict(list)
    details: list[Row] = []
    for cause in causes:
        scenes = CausedScenes(cause, count, seed=SEED)
        other = causes[(causes.index(cause) + 1) % len(causes)]
        scores: dict[str, Scores] = {kind: defaultdict(list) for kind in ("own", *NULLS)}
        for (_, kind, seed), model in [(key, model) for key, model in models.items() if key[0] == cause]:
            stranger = models.get((other, kind, seed), models[other, kind, 0])
            maps, others = (maps_of(one, scenes, slow) for one in (model, stranger))
            for index in range(count):
                scene = scenes.scene(index)
                mask = scene.masks[0]
                for name, (shown, geometry) in maps(scene, slow=index < slow).items():
                    scores["own"][name].append(float(evaluation.auroc(shown, mask, geometry)))
                    copies = evaluation.shifted_copies(shown, COPIES, index)
                    scores["shifted copies"][name].append(float(np.mean(evaluation.auroc(copies, mask, geometry))))
                    scores["center prior"][name].append(float(evaluation.auroc(evaluation.center_prior(shown), mask, geometry)))
                for name, (shown, geometry) in others(scene, slow=index < slow).items():
                    scores["another network"][name].append(float(evaluation.auroc(shown, mask, geometry)))
            print(f"  {cause}, seed {seed}", file=sys.stderr, flush=True)
        for name, values in scores["own"].items():
            nulls = {null: scores[null].get(name, []) for null in NULLS}
            found[name][cause] = float(np.mean(values))
            above[name] += [cause] if all(beyond(values, null) for null in nulls.values()) else []
            details.append(
                {
                    "method": name,
                    "cause": cause,
                    "AUROC": told(values),
                    **{null: told(numbers) if numbers else None for null, numbers in nulls.items()},
                }
            )
    order = sorted(found, key=lambda name: -len(above[name]))
    rows = [
        {
            "method": name,
            **{cause: f"{score:.2f}" + "*" * (cause in above[name]) for cause, score in found[name].items()},
            "trusted for": ", ".join(trusted(found[name], above[name])),
        }
        for name in order
    ]
    return "\n".join([to_markdown(rows), folded("All controls", to_markdown(details))])


def trusted(scores: Mapping[str, float], above: Sequence[str]) -> list[str]:
    """Return the causes for which a method may be trusted: it finds them with an AUROC of `SURE` or more, and above all controls."""
    return [cause for cause in above if scores[cause] >= SURE]


def gates_and_depth(
    models: Mapping[tuple[Cause, str, int], nn.Module], causes: list[Cause], count: int
) -> tuple[list[Row], list[Row]]:
    """Return the accuracy after an exchange of gates between a scene and its copy without the cause, and Grad-CAM of each layer."""
    gates: list[Row] = []
    depth: list[Row] = []
    for cause, seed in product(causes, range(SEEDS)):
        model = models[cause, "cnn", seed]
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


def maps_of(model: nn.Module, scenes: CausedScenes, slow: int) -> Maps:
    """Return a function from a scene to the maps of every method that applies, ours and those of grad-cam as plain arrays."""
    first: Any = scenes.scene(0)
    tried = {name: way for name, way in ways_of(model, first).items() if slow or not way.slow}
    ways, _ = applicable(tried, model, first)
    layer = cam_layer(model)
    peers = {}
    if layer is not None and not hasattr(model, "blocks"):  # grad-cam needs a feature map
        peers = {name: kind(model, [model.get_submodule(layer)]) for name, kind in OTHERS.items()}

    def maps(scene: CausedScene, *, slow: bool) -> dict[str, tuple[Any, Any]]:
        picture = Image.fromarray(scene.image)
        found: dict[str, tuple[Any, Any]] = {
            name: way.map(model, picture, scene.label) for name, way in ways.items() if slow or not way.slow
        }
        prepared = visattn.prepare(picture, model)
        for name, peer in peers.items():
            array: NDArray[np.float32] = peer(prepared.pixels, [ClassifierOutputTarget(scene.label)])[0]
            found[name] = array, prepared.geometry
        return found

    return maps


def beyond(values: list[float], null: list[float]) -> bool:
    """Check whether the 95 % interval of the mean difference from a control lies above 0."""
    return len(values) == len(null) and float(mean_interval(np.array(values) - np.array(null))[0]) > 0


def told(values: list[float]) -> str:
    """Format a mean with its 95 % interval over scenes."""
    low, high = mean_interval(np.array(values))
    return f"{np.mean(values):.2f} ({float(low):.2f} to {float(high):.2f})"


if __name__ == "__main__":
    sys.exit(main())
