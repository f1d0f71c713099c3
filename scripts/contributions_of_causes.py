"""Do direct contributions lie on what a network decides by? ViTs of one known cause, beside the exchange of the cause and two nulls.

`contributions_of_causes.py [--scenes N] [--only CAUSE,CAUSE] [--write-docs]`. Each scene is drawn twice, with two values of its cause and
all else alike. The score is the logit of the one value minus that of the other. For each network it prints, as means over scenes with 95 %
bootstrap intervals:

- the share of the magnitudes of direct contributions of patches that lies on the pixels of the cause;
- the same share for 20 shifted copies of each map, and for the maps of a network that decides by another cause (the two nulls);
- how much of the score comes from the cause's patches directly, and how much the score falls when the cause takes the other value;
- the same fall for the other network.

The cause is found if the lower end of the share lies above the upper ends of both nulls.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pages import write_section
from PIL import Image
from torch import nn
from truth.measure import first_networks

import visattn
from visattn import evaluation
from visattn._support.tables import Row, to_markdown, to_text
from visattn.core.maps import AttentionMap
from visattn.data.scenes.causes import CAUSES, CausedScenes
from visattn.evaluation.causes.networks import another
from visattn.evaluation.intervals import mean_interval
from visattn.evaluation.object_masks import cells_of

DOCS = Path(__file__).parents[1] / "docs" / "contributions.md"
SEED = 2  # of the test scenes; networks were trained on odd seeds
SCENES, COPIES, SEEDS = 200, 20, 2

Array = NDArray[np.float64]


class Scene(NamedTuple):
    """A scene, the same with the other value of its cause, both values, and the pixels of the cause."""

    image: Image.Image
    exchanged: Image.Image
    value: int
    other: int
    cause: NDArray[np.bool_]


def main() -> int:
    """Measure, print the table, and write it to the page on request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--scenes", type=int, default=SCENES, help="number of scenes of each cause; those with twice the same value drop out"
    )
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(CAUSES), metavar="CAUSE,CAUSE")
    parser.add_argument("--write-docs", action="store_true", help=f"write the table to docs/{DOCS.name}")
    options = parser.parse_args()
    if len(options.only) < 2 or not set(options.only) <= set(CAUSES):
        parser.error(f"two or more of the causes {', '.join(CAUSES)} are needed.")
    torch.set_num_threads(1)
    vits = [one for one in first_networks(SEEDS) if one.kind == "vit" and one.cause in options.only]
    rows = list[Row]()
    for network in vits:
        scenes = scenes_of(network.cause, options.scenes)
        rows.append(
            {"cause": network.cause, "seed": network.seed, **measured(network.model, another(network, vits).model, scenes)}
        )
        print(rows[-1], file=sys.stderr, flush=True)
    found = sum(row["found"] == "yes" for row in rows)
    print(to_text(rows))
    print(f"found in {found} of {len(rows)} networks")
    if options.write_docs:
        text = f"{to_markdown(rows)}\nThe cause is found in {found} of {len(rows)} networks ({options.scenes} scenes each, seed {SEED}).\n"
        write_section(DOCS, "causes", text)
    return 0


def scenes_of(cause: str, count: int) -> list[Scene]:
    """Return scenes whose cause has another value in a second drawing."""
    shown, others = (CausedScenes(cause, count, seed=SEED, shown=what) for what in ("label", "random"))  # type: ignore[arg-type]
    pairs = [(shown.scene(number), others.scene(number)) for number in range(count)]
    return [
        Scene(Image.fromarray(one.image), Image.fromarray(other.image), one.value, other.value, one.masks[0])
        for one, other in pairs
        if one.value != other.value
    ]


def measured(model: nn.Module, stranger: nn.Module, scenes: list[Scene]) -> Row:
    """Return the row of a network."""
    numbers: dict[str, list[float]] = {
        name: [] for name in ("area", "own", "shifted", "another", "direct", "falls", "falls there")
    }
    for number, scene in enumerate(scenes):
        target: dict[str, Any] = {"target": scene.value, "versus": scene.other}
        for name, network in (("own", model), ("another", stranger)):
            found = visattn.explain(network, scene.image, method="contributions", **target)
            covered = cells_of(found.map, scene.cause, found.geometry).share
            numbers[name].append(share_on(found.map, covered))
            if name == "own":
                copies = evaluation.shifted_copies(found.map, COPIES, number)
                numbers["shifted"].append(float(np.mean([share_on(copies.at(copy=copy), covered) for copy in range(COPIES)])))
                numbers["direct"].append(float((values_of(found.map) * covered).sum()))
                numbers["area"].append(float(covered.mean()))
        for name, network in (("falls", model), ("falls there", stranger)):
            before, after = (score(network, image, scene) for image in (scene.image, scene.exchanged))
            numbers[name].append(before - after)
    ends = {name: mean_interval(np.array(values)) for name, values in numbers.items()}
    is_found = float(ends["own"][0]) > max(float(ends[null][1]) for null in ("shifted", "another"))
    return {
        "scenes": len(scenes),
        "area of the cause": f"{np.mean(numbers['area']):.1%}",
        "on the cause": percent(numbers["own"], ends["own"]),
        "shifted copies": percent(numbers["shifted"], ends["shifted"]),
        "another network": percent(numbers["another"], ends["another"]),
        "direct, logits": plain(numbers["direct"], ends["direct"]),
        "exchange, logits": plain(numbers["falls"], ends["falls"]),
        "exchange, another network": plain(numbers["falls there"], ends["falls there"]),
        "found": "yes" if is_found else "no",
    }


def values_of(shown: AttentionMap) -> Array:
    """Return the values of a map."""
    values: Array = shown.values.double().numpy()
    return values


def share_on(shown: AttentionMap, covered: Array) -> float:
    """Return the share of the magnitudes of a map that lies on a cause, which covers a part of each cell."""
    sizes = np.abs(values_of(shown))
    return float((sizes * covered).sum() / sizes.sum())


@torch.no_grad()
def score(model: nn.Module, image: Image.Image, scene: Scene) -> float:
    """Return the logit of the one value of a cause minus that of the other."""
    logits = model(visattn.prepare(image, model).pixels)[0]
    return float(logits[scene.value] - logits[scene.other])


def percent(values: list[float], ends: Any) -> str:  # noqa: ANN401
    """Format a mean share with its interval."""
    return f"{np.mean(values):.1%} ({float(ends[0]):.1%} to {float(ends[1]):.1%})"


def plain(values: list[float], ends: Any) -> str:  # noqa: ANN401
    """Format a mean with its interval."""
    return f"{np.mean(values):.2f} ({float(ends[0]):.2f} to {float(ends[1]):.2f})"


if __name__ == "__main__":
    sys.exit(main())
