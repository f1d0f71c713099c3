"""Evaluation of maps on synthetic ground truth: scenes with a known label object, and networks that learned a watermark instead.

`known_truth.py [--scenes N] [--slow-scenes N] [--only NAME,NAME] [--write-docs]`. Networks were trained on scenes of another seed. Every
applicable method explains the true class. Prints tables; `--write-docs` also writes them between the marks of `docs/known_truth.md`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from pages import folded, write_section
from pointing.photos import COPIES, PRIOR, ROOT
from torch import nn
from truth.figure import Compared, two_questions
from truth.mark import Part, exchanged, layer_by_layer
from truth.measure import NEAR, Array, Measured, Measures, Way, accuracy, measured, size_of

import visattn
from visattn._support.tables import Row, to_markdown
from visattn.core.families import input_spec
from visattn.data.scenes import CLASSES, Mark, Scenes
from visattn.evaluation.intervals import mean_interval

DOCS = ROOT / "docs" / "known_truth.md"
PICTURE = ROOT / "assets" / "gallery" / "known_truth_scores.png"
CHECKPOINTS = ROOT / "models"
PARTS: tuple[Part, ...] = ("channel", "spatial")
SEED = 2  # seed of the test scenes; networks were trained on seed 1
LAST_BLOCK = {  # the features whose mean over patches the model reads out
    f"{method}, last block": Way(method, {"layer": "blocks.3"}) for method in ("cam", "gradcam")
}
SHOWN = (  # rows of the first table and picture of the page
    "gradcam",
    "eigencam",
    "attention",
    "rollout",
    "relevance",
    "legrad",
    "captum.saliency",
    "captum.integrated_gradients",
    "captum.occlusion",
    "captum.lime",
)


class Result(NamedTuple):
    """Text about a network, its maps, and those of the same network trained without a mark if it learned one."""

    text: str
    found: Measures
    twin: Measures | None


@dataclass(frozen=True)
class Network:
    """Network trained on scenes.

    Attributes:
        title: Heading of its section.
        load: Function from the folder of checkpoints to the network.
        twin: Name of the same network trained without a watermark, if this one was trained with a mark that reveals the class.
        extra: Further ways to compute maps, in addition to all methods.
        layers: Layers of a CNN with CBAM that learned a mark, for the analysis of why the map of its last layer misses the mark.
    """

    title: str
    load: Callable[[Path], nn.Module]
    twin: str | None = None
    extra: Mapping[str, Way] = field(default_factory=dict)
    layers: tuple[str, ...] = ()


def folder(name: str) -> Callable[[Path], nn.Module]:
    """Return a function that loads a network written by `visattn train`."""
    return lambda checkpoints: visattn.load_model(str(checkpoints / name))


NETWORKS = {
    "scenes_cnn": Network("CNN with CBAM", folder("scenes_cnn")),
    "scenes_vit": Network("Vision transformer", folder("scenes_vit"), extra=LAST_BLOCK),
    "scenes_cnn_shortcut": Network(
        "CNN with CBAM that learned a watermark",
        folder("scenes_cnn_shortcut"),
        "scenes_cnn",
        layers=("layer1", "layer2", "layer3"),
    ),
    "scenes_vit_shortcut": Network(
        "Vision transformer that learned a watermark", folder("scenes_vit_shortcut"), "scenes_vit", LAST_BLOCK
    ),
}


def main() -> int:
    """Measure, print the tables, and write them to the page on request."""
    parser = argparse.ArgumentParser(description="Evaluate maps on scenes with synthetic ground truth.")
    parser.add_argument("--scenes", type=int, default=100, help="number of scenes, at least 2")
    parser.add_argument("--slow-scenes", type=int, default=12, help="number of scenes for slow methods; 0 skips these methods")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(NETWORKS), metavar="NAME,NAME")
    parser.add_argument("--checkpoints", type=Path, default=CHECKPOINTS, help="folder that contains the networks' folders")
    parser.add_argument("--write-docs", action="store_true", help=f"write the tables to {DOCS.relative_to(ROOT)}")
    options = parser.parse_args()
    if options.scenes < 2 or options.slow_scenes < 0 or options.slow_scenes == 1 or not set(options.only) <= set(NETWORKS):
        parser.error(f"two scenes or more are needed, of the networks {', '.join(NETWORKS)}.")
    torch.set_num_threads(1)
    results = {}
    for name in options.only:
        print(f"{name} ...", file=sys.stderr)
        results[name] = section(NETWORKS[name], options.checkpoints, options.scenes, min(options.slow_scenes, options.scenes))
        print(f"## {NETWORKS[name].title}\n\n{results[name].text}", flush=True)
        if options.write_docs:
            write_section(DOCS, name, results[name].text, into_files=True)
    if results.keys() == NETWORKS.keys():
        text = summary(results).strip()
        print(f"## Summary\n\n{text}")
        if options.write_docs:
            write_section(DOCS, "summary", text)
            shown = {_column(name): {method: compared(result, method) for method in SHOWN} for name, result in results.items()}
            PICTURE.write_bytes(two_questions(shown))
    return 0


def summary(results: Mapping[str, Result]) -> str:
    """Return a table of ten methods: how well each finds the object, and how well it finds the mark that decides instead."""
    rows: list[dict[str, str | None]] = [{"method": method} for method in SHOWN]
    for name, result in results.items():
        for row in rows:
            found = compared(result, str(row["method"]))
            row[_column(name)] = None if found is None else f"{found.own.mean():.2f}{'*' * found.above}"
    return to_markdown(rows)


def _column(name: str) -> str:
    truth = "object" if NETWORKS[name].twin is None else "mark"
    return f"{truth}, {'ViT' if 'vit' in name else 'CNN'}"


def compared(result: Result, method: str) -> Compared | None:
    """Return the AUROC of a method's maps beside its controls; None if the method does not apply."""
    if (row := result.found.maps.get(method)) is None:
        return None
    truth, other = "object", result.found.references[f"{PRIOR}, {size_of(row.grid)}"]
    if result.twin is not None:
        truth, other = "mark", result.twin.maps[method]
    own, moved, control = (np.array(one.numbers[truth]["AUROC"]) for one in (row, result.found.moved[method], other))
    control = control[: len(own)]  # slow methods run only on the first scenes
    return Compared(own, (moved, control), exceeds(own, moved) and exceeds(own, control))


def section(network: Network, checkpoints: Path, count: int, slow: int) -> Result:
    """Return the section about one network as Markdown, and what it is made of."""
    model = network.load(checkpoints)
    twin: Measures | None = None
    extra = dict(network.extra)

    def scenes(mark: Mark) -> Scenes:
        return Scenes(count, input_spec(model).size, seed=SEED, watermark=mark)

    if network.twin is None:
        found = measured(model, scenes("none"), slow, extra)
        controls = "Controls: the object mask itself, a center prior, and smooth noise"
        lines = [
            f"Accuracy: {accuracy(model, scenes('none')):.1%} of {count} scenes.",
            "",
            verdict(found),
            "",
            folded(f"Scores of {len(found.maps)} maps", on_objects(found.maps)),
            folded(controls, on_objects(found.references)),
            folded(f"The same maps, each shifted {COPIES} times around the grid", on_objects(found.moved)),
        ]
        if found.refused:
            lines.append(f"Not applicable: {', '.join(found.refused)}.")
    else:
        found = measured(model, scenes("label"), slow, extra)
        twin = measured(NETWORKS[network.twin].load(checkpoints), scenes("label"), slow, extra)
        rates = {mark: accuracy(model, scenes(mark)) for mark in ("label", "none", "random")}
        lines = [
            f"Accuracy on {count} scenes: {rates['label']:.1%} with the mark of the class, {rates['none']:.1%} without a mark, "
            f"{rates['random']:.1%} with the mark of a random class (chance: {1 / len(CLASSES):.1%}).",
            "",
            on_marks(found, twin),
        ]
        if network.layers:
            lines += [why(model, network.layers, scenes("label"), scenes("none")), ""]
    spent = {name: row.seconds / len(row.numbers["object"]["AUROC"]) for name, row in found.maps.items()}
    print("  seconds a scene: " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in spent.items()), file=sys.stderr)
    return Result("\n".join(lines), found, twin)


def on_objects(table: dict[str, Measured]) -> str:
    """Return the rows about maps and the label object."""
    rows: list[Row] = [
        {
            **title(name, row),
            "pointing game": told(row.values("pointing game")),
            f"within {NEAR} pixels": told(row.values("near")),
            "AUROC": told(row.values("AUROC")),
            "average precision": told(row.values("average precision")),
            "lift": told(row.values("lift")),
        }
        for name, row in ranked(table)
    ]
    return to_markdown(rows)


def on_marks(found: Measures, twin: Measures) -> str:
    """Return the rows about maps and the watermark, compared with a network trained without one."""
    rows: list[Row] = []
    for name, row in ranked(found.maps, "mark"):
        share, lift, other = row.values("share", "mark"), row.values("lift", "mark"), twin.maps.get(name)
        rows.append(
            {
                **title(name, row),
                "share of the map on the mark": told(share, percent=True),
                "relative to its area": told(lift),
                "AUROC of the mark": told(row.values("AUROC", "mark")),
                "after subtracting the mean map": told(row.values("without the mean map", "mark")),
                "largest cell: center on the mark": told(row.values("pointing game", "mark"), percent=True),
                "largest cell touches the mark": told(row.values("touches", "mark"), percent=True),
                "AUROC of the mark, network trained without it": told(other.values("AUROC", "mark") if other else None),
                "AUROC of the object": told(row.values("AUROC")),
            }
        )
    some = next(iter(found.references.values()))
    area = some.values("share", "mark"), some.values("lift", "mark")
    table = folded(f"Scores of {len(rows)} maps", to_markdown(rows))
    return f"The mark covers {mean(area[0]) / mean(area[1]):.1%} of the image.\n\n{table}"


def why(model: nn.Module, layers: Sequence[str], marked: Scenes, plain: Scenes) -> str:
    """Return tables of how well Grad-CAM finds the mark in each layer, and of the accuracy after exchanging gates."""
    rows: list[Row] = []
    for layer, seen in layer_by_layer(model, layers, marked, plain).items():
        values = {name: np.array(numbers) for name, numbers in seen.numbers.items()}
        rows.append(
            {
                "layer": layer,
                "cells": size_of(seen.grid),
                "AUROC of the mark": told(values["AUROC"]),
                "AUROC after subtracting the mean map": told(values["without the mean map"]),
                "largest cell: center on the mark": told(values["middle"], percent=True),
                "largest cell touches the mark": told(values["touches"], percent=True),
                "the same cells without a mark": told(values["touches the place"], percent=True),
                "marked corner": told(values["marked corner"]),
                "other corners": told(values["other corners"]),
                "inside": told(values["inside"]),
            }
        )
    own = {"accuracy with a mark": marked, "without a mark": plain}
    unchanged = {name: f"{exchanged(model, scenes, scenes, 'channel'):.1%}" for name, scenes in own.items()}
    gates: list[Row] = [
        {
            "gates": part,
            "marked scenes with the gates of their unmarked copies": f"{exchanged(model, marked, plain, part):.1%}",
            "unmarked scenes with the gates of their marked copies": f"{exchanged(model, plain, marked, part):.1%}",
            **unchanged,
        }
        for part in PARTS
    ]
    return folded("Grad-CAM of each layer, on the same scenes", to_markdown(rows)) + folded(
        "Accuracy after an exchange of gates, of all CBAM modules, between a scene and its copy", to_markdown(gates)
    )


def title(name: str, row: Measured) -> dict[str, str]:
    """Return the first columns: name, grid and number of scenes."""
    count = len(row.numbers["object"]["AUROC"])
    note = f" (empty on {row.empty})" if row.empty else ""
    cells = size_of(row.grid)
    return {"map": name.removesuffix(f", {cells}") + note, "cells": cells, "scenes": str(count)}


def verdict(found: Measures) -> str:
    """List which maps are better than controls that do not depend on the image, by the difference of AUROC on the same scenes."""
    above: dict[bool, dict[bool, list[str]]] = {copies: {prior: [] for prior in (True, False)} for copies in (True, False)}
    for name, row in ranked(found.maps):
        own = scores(row)
        prior = scores(found.references[f"{PRIOR}, {size_of(row.grid)}"])[: len(own)]  # slow methods run only on the first scenes
        above[exceeds(own, scores(found.moved[name]))][exceeds(own, prior)].append(name)
    kinds = {
        "Above both its shifted copies and the center prior": above[True][True],
        "Above its shifted copies only": above[True][False],
        "Above the center prior only": above[False][True],
        "Above neither": above[False][False],
    }
    listed = [f"- {kind}: {', '.join(names)}." for kind, names in kinds.items() if names]
    return "\n".join(["By the 95 % interval of the AUROC difference on the same scenes:", "", *listed])


def scores(row: Measured) -> Array:
    """Return the AUROC on the object, which is defined for every map."""
    return np.array(row.numbers["object"]["AUROC"])


def exceeds(values: Array, others: Array) -> bool:
    """Check whether the 95 % interval of the mean difference lies above 0."""
    return float(mean_interval(values - others)[0]) > 0


def ranked(table: dict[str, Measured], truth: str = "object") -> list[tuple[str, Measured]]:
    """Sort maps by mean AUROC, highest first."""
    return sorted(table.items(), key=lambda item: -round(mean(item[1].values("AUROC", truth)), 5))


def mean(values: Array | None) -> float:
    """Return the mean; NaN if there are no values."""
    return float("nan") if values is None else float(values.mean())


def told(values: Array | None, *, percent: bool = False) -> str | None:
    """Format the mean over scenes and its 95 % interval."""
    if values is None:
        return None
    low, high = mean_interval(values)
    one = "{:.1%}" if percent else "{:.2f}"
    return f"{one} ({one} to {one})".format(float(values.mean()), float(low), float(high))


if __name__ == "__main__":
    sys.exit(main())
