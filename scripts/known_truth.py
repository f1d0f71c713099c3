"""Maps against a known truth: scenes whose one telling object is known to the pixel, and networks that learned a watermark instead.

`known_truth.py [--scenes N] [--slow-scenes N] [--only NAME,NAME] [--write-docs]`. Networks were trained on scenes of other seeds; every
method that applies explains the true class. Prints tables and, on request, puts them between the marks of `docs/known_truth.md`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from pages import write_section
from pointing.photos import COPIES, PRIOR, ROOT
from torch import nn
from truth.mark import Part, exchanged, layer_by_layer
from truth.measure import NEAR, Array, Measured, Measures, Way, accuracy, measured, size_of

import visattn
from visattn._support.tables import Row, to_markdown
from visattn.data.scenes import CLASSES, Mark, Scenes
from visattn.evaluation.intervals import mean_interval
from visattn.families import input_spec

DOCS = ROOT / "docs" / "known_truth.md"
CHECKPOINTS = ROOT / "assets" / "checkpoints"
PARTS: dict[str, Part] = {"channels": "channel", "places": "spatial"}
SEED = 2  # of the test scenes of `scenes`; networks were trained on 1
LAST_BLOCK = {  # what the mean over patches is taken of
    f"{method}, last block": Way(method, {"layer": "blocks.3"}) for method in ("cam", "gradcam")
}


@dataclass(frozen=True)
class Network:
    """A network that was trained on scenes.

    Attributes:
        title: In words.
        load: From the folder of checkpoints to the network.
        twin: The same network, trained without a watermark, for one that was trained with a mark that tells the class.
        extra: Ways to make maps beside every method.
        layers: Of a CNN with CBAM that learned a mark: where it is asked why the map of its last layer misses it.
    """

    title: str
    load: Callable[[Path], nn.Module]
    twin: str | None = None
    extra: Mapping[str, Way] = field(default_factory=dict)
    layers: tuple[str, ...] = ()


def folder(name: str) -> Callable[[Path], nn.Module]:
    """How a network is loaded that `visattn train` wrote."""
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
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(description="Maps against a known truth.")
    parser.add_argument("--scenes", type=int, default=100, help="how many scenes (two or more)")
    parser.add_argument("--slow-scenes", type=int, default=12, help="how many for methods that run the model many times, or 0")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(NETWORKS), metavar="NAME,NAME")
    parser.add_argument("--checkpoints", type=Path, default=CHECKPOINTS, help="where the folders of the networks are")
    parser.add_argument("--write-docs", action="store_true", help=f"put the tables into {DOCS.relative_to(ROOT)}")
    options = parser.parse_args()
    if options.scenes < 2 or options.slow_scenes < 0 or options.slow_scenes == 1 or not set(options.only) <= set(NETWORKS):
        parser.error(f"two scenes or more are needed, of the networks {', '.join(NETWORKS)}.")
    torch.set_num_threads(1)
    for name in options.only:
        print(f"{name} ...", file=sys.stderr)
        text = section(NETWORKS[name], options.checkpoints, options.scenes, min(options.slow_scenes, options.scenes))
        print(f"## {NETWORKS[name].title}\n\n{text}", flush=True)
        if options.write_docs:
            write_section(DOCS, name, text)
    return 0


def section(network: Network, checkpoints: Path, count: int, slow: int) -> str:
    """What is told of one network, in Markdown."""
    model = network.load(checkpoints)
    extra = dict(network.extra)

    def scenes(mark: Mark) -> Scenes:
        return Scenes(count, input_spec(model).size, seed=SEED, watermark=mark)

    if network.twin is None:
        found = measured(model, scenes("none"), slow, extra)
        lines = [f"It tells the class of {accuracy(model, scenes('none')):.1%} of {count} scenes.", "", on_objects(found.maps)]
        lines += [
            verdict(found),
            "",
            "What knows nothing of the picture, and the object itself:",
            "",
            on_objects(found.references),
        ]
        lines += [f"The same maps, each moved round the grid {COPIES} times:", "", on_objects(found.moved)]
    else:
        found = measured(model, scenes("label"), slow, extra)
        twin = measured(NETWORKS[network.twin].load(checkpoints), scenes("label"), slow, extra)
        rates = {mark: accuracy(model, scenes(mark)) for mark in ("label", "none", "random")}
        lines = [
            f"It tells the class of {rates['label']:.1%} of {count} scenes whose mark tells it too, of {rates['none']:.1%} without a "
            f"mark, and of {rates['random']:.1%} with the mark of a class at random (chance: {1 / len(CLASSES):.1%}).",
            "",
            on_marks(found, twin),
        ]
        if network.layers:
            lines += [why(model, network.layers, scenes("label"), scenes("none")), ""]
    if found.refused:
        lines.append(f"Do not apply: {', '.join(found.refused)}.")
    spent = {name: row.seconds / len(row.numbers["object"]["AUROC"]) for name, row in found.maps.items()}
    print("  seconds a scene: " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in spent.items()), file=sys.stderr)
    return "\n".join(lines)


def on_objects(table: dict[str, Measured]) -> str:
    """How maps lie on the object."""
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
    """How maps lie on the watermark, beside those of a network that never saw one."""
    rows: list[Row] = []
    for name, row in ranked(found.maps, "mark"):
        share, lift, other = row.values("share", "mark"), row.values("lift", "mark"), twin.maps.get(name)
        rows.append(
            {
                **title(name, row),
                "share of the map on the mark": told(share, percent=True),
                "times its area": told(lift),
                "AUROC of the mark": told(row.values("AUROC", "mark")),
                "largest cell: its middle is on the mark": told(row.values("pointing game", "mark"), percent=True),
                "it touches the mark": told(row.values("touches", "mark"), percent=True),
                "of the network without a watermark: AUROC of the mark": told(other.values("AUROC", "mark") if other else None),
                "AUROC of the object": told(row.values("AUROC")),
            }
        )
    some = next(iter(found.references.values()))
    area = some.values("share", "mark"), some.values("lift", "mark")
    return f"The mark covers {mean(area[0]) / mean(area[1]):.1%} of the picture.\n\n{to_markdown(rows)}"


def why(model: nn.Module, layers: Sequence[str], marked: Scenes, plain: Scenes) -> str:
    """How Grad-CAM finds the mark layer by layer, and what becomes of the accuracy when gates are exchanged."""
    rows: list[Row] = []
    for layer, seen in layer_by_layer(model, layers, marked, plain).items():
        values = {name: np.array(numbers) for name, numbers in seen.numbers.items()}
        rows.append(
            {
                "layer": layer,
                "cells": size_of(seen.grid),
                "AUROC of the mark": told(values["AUROC"]),
                "without the mean map": told(values["without the mean map"]),
                "largest cell: its middle is on the mark": told(values["middle"], percent=True),
                "it touches the mark": told(values["touches"], percent=True),
                "the same place without a mark": told(values["touches the place"], percent=True),
                "marked corner": told(values["marked corner"]),
                "other corners": told(values["other corners"]),
                "inside": told(values["inside"]),
            }
        )
    gates = [
        f"- gates of {part}: {exchanged(model, marked, plain, which):.1%} of the marked scenes with the gates of their unmarked "
        f"twins, {exchanged(model, plain, marked, which):.1%} of the unmarked ones with those of their marked twins."
        for part, which in PARTS.items()
    ]
    return "\n".join(
        [
            "Grad-CAM of its layers, of the same scenes. The mean map is that of the other marked scenes. The last columns are values "
            "as multiples of the map's mean: of the cells that touch the mark, of these in the other three corners, and of all that "
            "touch no edge of the map.",
            "",
            to_markdown(rows),
            f"Of {len(marked)} scenes it tells {exchanged(model, marked, marked, 'channel'):.1%} with a mark and "
            f"{exchanged(model, plain, plain, 'channel'):.1%} without. When the gates of all CBAM modules are exchanged between a "
            "marked scene and its unmarked twin, it tells",
            "",
            *gates,
        ]
    )


def title(name: str, row: Measured) -> dict[str, str]:
    """The first columns: what it is, on how many cells and of how many scenes."""
    count = len(row.numbers["object"]["AUROC"])
    note = f" (nothing on {row.empty})" if row.empty else ""
    cells = size_of(row.grid)
    return {"map": name.removesuffix(f", {cells}") + note, "cells": cells, "scenes": str(count)}


def verdict(found: Measures) -> str:
    """Which maps are above what knows nothing of the picture, by the difference of AUROC on the same scenes."""
    above: dict[bool, dict[bool, list[str]]] = {copies: {prior: [] for prior in (True, False)} for copies in (True, False)}
    for name, row in ranked(found.maps):
        own = scores(row)
        prior = scores(found.references[f"{PRIOR}, {size_of(row.grid)}"])[: len(own)]  # slow methods see the first scenes
        above[exceeds(own, scores(found.moved[name]))][exceeds(own, prior)].append(name)
    kinds = {
        "Above both its moved copies and the center prior": above[True][True],
        "Above its moved copies only": above[True][False],
        "Above the center prior only": above[False][True],
        "Above neither": above[False][False],
    }
    listed = [f"- {kind}: {', '.join(names)}." for kind, names in kinds.items() if names]
    return "\n".join(["By the 95 % interval of the difference of AUROC on the same scenes:", "", *listed])


def scores(row: Measured) -> Array:
    """AUROC on the object, which every map has."""
    return np.array(row.numbers["object"]["AUROC"])


def exceeds(values: Array, others: Array) -> bool:
    """Whether the 95 % interval of the mean difference lies above 0."""
    return float(mean_interval(values - others)[0]) > 0


def ranked(table: dict[str, Measured], truth: str = "object") -> list[tuple[str, Measured]]:
    """The highest mean AUROC first."""
    return sorted(table.items(), key=lambda item: -round(mean(item[1].values("AUROC", truth)), 5))


def mean(values: Array | None) -> float:
    """NaN where there are none."""
    return float("nan") if values is None else float(values.mean())


def told(values: Array | None, *, percent: bool = False) -> str | None:
    """The mean over scenes and its 95 % interval."""
    if values is None:
        return None
    low, high = mean_interval(values)
    one = "{:.1%}" if percent else "{:.2f}"
    return f"{one} ({one} to {one})".format(float(values.mean()), float(low), float(high))


if __name__ == "__main__":
    sys.exit(main())
