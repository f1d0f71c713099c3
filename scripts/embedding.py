"""Report on the heads of DINOv2 ViT-S/14 over photos in the public domain: `embedding.py [--crops N] [--write-docs]`.

Prints what heads attend to, with nulls and intervals over photos, and how well closeness in the joint space stands for attention, by layer.
Then it tests a region that was drawn by hand around points of half of the photos: on the other half, do its patches share a property?
`--write-docs` writes the tables between the marks of `docs/embedding.md`, and large ones to `docs/embedding`. Exits 1 if they do not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pages import folded, write_section
from PIL import Image

import visattn
from visattn._support.tables import Row, to_markdown
from visattn.embedding import LayerStates, Moments, Space, crops_of, gather, head_numbers, joined, joint_axes
from visattn.evaluation import HeadScores, find_heads

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "embedding.md"
FOLDERS = ROOT / "visattn" / "core" / "shipped" / "photos", ROOT / "assets" / "objects"
MASKS = ROOT / "assets" / "objects" / "masks"
MODEL = "vit_small_patch14_dinov2"
SIDE = 224
LEVEL = 0.01
DRAWN = 1_000  # random sets


@dataclass(frozen=True)
class Region:
    """Region of a head's plane, drawn by hand around points of the first half of the photos.

    Attributes:
        layer: Number of the layer.
        head: Number of the head.
        side: Whether queries or keys were enclosed.
        corners: `(x, y)` in the plane of the principal components, which are fitted to the first half.
        name: The property that the enclosed patches seem to share.
    """

    layer: int
    head: int
    side: str
    corners: tuple[tuple[float, float], ...]
    name: str


REGIONS = (
    Region(10, 0, "query", ((3.0, 3.5), (5.5, 7.0), (8.5, 4.0), (9.0, 0.0), (6.5, -1.5), (4.5, 0.0)), "object"),
    Region(6, 4, "query", ((-4.5, 3.0), (-2.2, 3.0), (-2.6, 1.2), (-1.9, -0.6), (-3.5, -0.2), (-4.3, 1.0)), "brightness"),
)


def main() -> int:
    """Measure, print the tables, and write them to the page on request."""
    parser = argparse.ArgumentParser(description="Report on the heads of DINOv2 ViT-S/14 over photos in the public domain.")
    parser.add_argument("--crops", type=int, default=4, help="random crops of each photo")
    parser.add_argument("--keep", type=Path, help="folder from which an interrupted run goes on")
    parser.add_argument("--write-docs", action="store_true", help=f"write the tables to {DOCS.relative_to(ROOT)}")
    options = parser.parse_args()
    space = gathered(options.crops, options.keep)
    untrained = {one.name: one for one in random_scores([scores.name for scores in space.scores])}
    numbers = head_numbers(space, images=30)
    right, regions = tested(space)
    count = len(set(space.groups))
    about = f"{count} photos, {options.crops} random crops of each, {SIDE} x {SIDE} pixels; intervals are over photos."
    heads = [
        folded(f"The ten highest heads for {one.name}", to_markdown([_short(row) for row in one.rows()[:10]]))
        for one in space.scores
    ]
    found = to_markdown([finding(one, untrained[one.name]) for one in space.scores])
    texts = {
        "findings": f"{about}\n\n{found}\n" + "\n".join(heads),
        "correlations": folded("Heads of each layer: mean, lowest and highest", to_markdown(by_layer(numbers))),
        "regions": regions,
    }
    for name, text in texts.items():
        print(text, flush=True)
        if options.write_docs:
            write_section(DOCS, name, text, into_files=True)
    return int(not right)


def photos() -> Iterator[tuple[Image.Image, NDArray[np.bool_]]]:
    """Yield each photo in the public domain with the mask of its object."""
    for folder in FOLDERS:
        for file in sorted(folder.iterdir()):
            if file.suffix in (".jpg", ".png"):
                yield visattn.load_image(file), np.asarray(Image.open(MASKS / f"{file.stem}.png").convert("L")) > 0


def gathered(crops: int, keep: Path | None) -> Space:
    """Gather the photos and their crops, with the masks cut in the same way."""
    images, masks, groups = [], [], []
    for number, (photo, mask) in enumerate(photos()):
        images += [photo, *crops_of(photo, crops, seed=number)]
        covered = Image.fromarray(mask).convert("RGB")
        masks += [np.asarray(part)[..., 0] > 0 for part in (covered, *crops_of(covered, crops, seed=number))]
        groups += [number] * (1 + crops)
    return gather(MODEL, images, masks=masks, groups=groups, img_size=SIDE, points=20 * len(images), keep=keep)


def random_scores(names: Sequence[Any]) -> list[HeadScores]:
    """Score the same architecture with random weights, on the whole photos."""
    model = visattn.load_model(MODEL, weights="none", img_size=SIDE)
    every = list(photos())
    images, masks = [photo for photo, _ in every], [mask for _, mask in every]
    return [find_heads(model, images, name, masks=masks, img_size=SIDE, resize="model") for name in names]


def finding(scores: HeadScores, untrained: HeadScores) -> Row:
    """Return a row on one property: how many heads exceed the null, where, and the highest one."""
    rows, over = scores.rows(), above(scores)
    layers = [int(row["layer"].split(".")[1]) for row in over]
    best = rows[0]
    return {
        "property": scores.name,
        "heads above their null": f"{len(over)} of {len(rows)}",
        "in layers 0-3 / 4-7 / 8-11": " / ".join(str(sum(first <= layer < first + 4 for layer in layers)) for first in (0, 4, 8)),
        "highest head": f"layer {best['layer'].split('.')[1]}, head {best['head']}",
        "score": f"{best['score']:.2f}",
        "null": f"{best['null']:.2f}",
        "score less null": f"{best['low']:.2f} to {best['high']:.2f}",
        "random weights: heads, highest score": f"{len(above(untrained))}, {untrained.rows()[0]['score']:.2f}",
    }


def above(scores: HeadScores) -> list[Row]:
    """Return the heads that exceed their null, over photos too."""
    return [row for row in scores.rows() if row["p"] <= LEVEL and row["low"] > 0]


def _short(row: Row) -> Row:
    layer = row["layer"].split(".")[1]
    return {
        "layer": layer,
        "head": row["head"],
        "score": f"{row['score']:.3f}",
        "null": f"{row['null']:.3f}",
        "p": f"{row['p']:.2f}",
        "score less null": f"{row['low']:.3f} to {row['high']:.3f}",
    }


def by_layer(numbers: Sequence[Row]) -> list[Row]:
    """Return for each layer the mean over its heads, with the lowest and the highest head."""
    names = ("row_pearson", "row_spearman", "attention_spearman", "weighted", "pooled_pearson", "norm_ratio", "null_attention")
    found: list[Row] = []
    for layer in dict.fromkeys(row["layer"] for row in numbers):
        own = [row for row in numbers if row["layer"] == layer]
        told = {}
        for name in names:
            values = np.array([row[name] for row in own])
            told[name] = f"{values.mean():.2f} ({values.min():.2f} to {values.max():.2f})"
        found.append({"layer": layer.split(".")[1], **told})
    return found


@dataclass(frozen=True)
class Plane:
    """Points of one head in the plane that the first half of the photos gives.

    Attributes:
        points: `(N, 2)` points of all patches that are no sinks.
        image: `(N,)` their images.
        place: `(N,)` their places in the grid.
        first: `(N,)` whether their photo is of the first half.
        shared: Properties of the patches.
    """

    points: NDArray[np.float64]
    image: NDArray[np.int64]
    place: NDArray[np.int64]
    first: NDArray[np.bool_]
    shared: dict[str, NDArray[np.float64]]


def plane_of(space: Space, layer: int, head: int, side: str) -> Plane:
    """Fit scale, translation and axes of a head to the first half of the photos, and project all photos."""
    states: LayerStates = space.layer(layer)
    of = states.tokens
    plain = of.plain
    group = torch.tensor(space.groups)[of.image]
    first = plain & (group % 2 == 0)
    queries, keys = (each.double() for each in states.head(head))
    both = joined(queries[first], keys[first])
    moments = []
    for part in (queries[first], keys[first]):
        gathered_ = Moments.empty(1, part.shape[1])
        gathered_.add(part[None])
        moments.append(gathered_)
    axes, _ = joint_axes(moments[0], moments[1], torch.tensor([both.factor], dtype=torch.float64))
    middle = both.queries.mean(0)
    every = queries * both.factor if side == "query" else keys / both.factor + both.shift
    points = ((every[plain] - middle) @ axes[0].T).numpy()
    color = of.color[plain].double().numpy()
    chroma = color.max(1) - color.min(1)
    shared = {
        "brightness": color @ np.array([0.299, 0.587, 0.114]),
        "chroma": chroma,
        "object": of.object[plain].double().numpy(),
        "row": of.row[plain].double().numpy(),
    }
    place = (of.row * of.grid[1] + of.column)[plain].numpy()
    return Plane(points, of.image[plain].numpy(), place, (group % 2 == 0)[plain].numpy(), shared)


def tested(space: Space) -> tuple[bool, str]:
    """Test every region on the second half of the photos; return whether all hold, and the table."""
    rows: list[Row] = []
    right = True
    for region in REGIONS:
        plane = plane_of(space, region.layer, region.head, region.side)
        within = enclosed(plane.points, region.corners)
        own, other = within & plane.first, within & ~plane.first
        value = float(plane.shared[region.name][other].mean())
        null = random_sets(plane, other, region.name)
        p = (1 + int((null >= value).sum())) / (1 + len(null))
        right &= p <= LEVEL
        rows.append(
            {
                "head": f"layer {region.layer}, head {region.head}, {region.side}",
                "property": region.name,
                "drawn half: patches inside, their mean": f"{int(own.sum()):,}, {plane.shared[region.name][own].mean():.2f}",
                "other half: patches inside, their mean": f"{int(other.sum()):,}, {value:.2f}",
                f"{DRAWN:,} random sets: mean, largest": f"{null.mean():.2f}, {null.max():.2f}",
                "all patches of the other half": f"{plane.shared[region.name][~plane.first].mean():.2f}",
                "p": f"{p:.3f}",
            }
        )
    return right, to_markdown(rows)


def random_sets(plane: Plane, chosen: NDArray[np.bool_], name: str) -> NDArray[np.float64]:
    """Return the mean of a property over random sets with as many patches of each image, and as many at each place, as the chosen ones.

    Images and places of the chosen patches are paired anew at random. A pair that is a sink has no patch, and is left out.
    """
    value = {(int(i), int(p)): v for i, p, v in zip(plane.image, plane.place, plane.shared[name], strict=True)}
    image, place = plane.image[chosen], plane.place[chosen]
    random = np.random.default_rng(0)
    found = []
    for _ in range(DRAWN):
        pairs = zip(image.tolist(), place[random.permutation(len(place))].tolist(), strict=True)
        found.append(np.mean([value[pair] for pair in pairs if pair in value]))
    return np.array(found)


def enclosed(points: NDArray[np.float64], corners: Sequence[tuple[float, float]]) -> NDArray[np.bool_]:
    """Return which points lie in a polygon."""
    x, y = points.T
    odd = np.zeros(len(points), bool)
    for (x1, y1), (x2, y2) in zip(corners, [*corners[1:], corners[0]], strict=True):
        crosses = (y1 > y) != (y2 > y)
        with np.errstate(divide="ignore", invalid="ignore"):
            odd ^= crosses & (x < x1 + (y - y1) * (x2 - x1) / (y2 - y1))
    return odd


if __name__ == "__main__":
    sys.exit(main())
