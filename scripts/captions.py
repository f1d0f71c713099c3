"""Captioners on scenes with synthetic ground truth: are captions correct, and does each word attend to the object that it names?

`captions.py [--scenes N] [--only NAME,NAME] [--checkpoints FOLDER] [--write-docs]`. Captioners were trained on scenes of another seed,
without the color-shape pairs of `scenes-new`. Prints tables; `--write-docs` also writes them to `docs/captions`, with links between the
marks of `docs/captions.md`.
Exits 1 if the share of exact sets is below `BOUNDS`.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pages import folded, write_section
from PIL import Image

from visattn._support.tables import Row, to_markdown
from visattn.captioning import Caption, Captioner, caption_scores, exact_set, load_captioner, slot_accuracy
from visattn.data.captions.captioned_images import CaptionSceneDataset
from visattn.data.scenes import Scene, SceneObject
from visattn.evaluation.intervals import mean_interval
from visattn.evaluation.object_masks import cells_of
from visattn.training.report.card import wilson

ORDERS = 400  # of shuffled images
ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "captions.md"
CHECKPOINTS = ROOT / "models"
CAPTIONERS = {"soft": "captions_soft", "hard": "captions_hard", "local": "captions_local", "uniform": "captions_uniform"}
DATA = {"scenes": "known pairs", "scenes-new": "a new pair in each scene", "scenes-any": "all pairs, any position"}
WORDS = {"any word of the phrase": slice(None), "color word": slice(1, 2), "shape word": slice(2, 3)}
BOUNDS = {"soft": 0.95, "hard": 0.90}  # lowest share of exact sets over scenes of known and new pairs
AT_ONCE = 50
BEAM = 5


def main() -> int:
    """Measure, print the tables, and write them to the page on request."""
    parser = argparse.ArgumentParser(description="Evaluate captioners on scenes with synthetic ground truth.")
    parser.add_argument("--scenes", type=int, default=1000, help="number of scenes of each kind, at least 2")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(CAPTIONERS), metavar="NAME,NAME")
    parser.add_argument("--checkpoints", type=Path, default=CHECKPOINTS, help="folder that contains the captioners' folders")
    parser.add_argument("--write-docs", action="store_true", help=f"write the tables to {DOCS.relative_to(ROOT)}")
    options = parser.parse_args()
    if options.scenes < 2 or not set(options.only) <= set(CAPTIONERS):
        parser.error(f"two scenes or more are needed, of the captioners {', '.join(CAPTIONERS)}.")
    torch.set_num_threads(1)
    captioners = {name: load_captioner(options.checkpoints / CAPTIONERS[name]) for name in options.only}
    right, text = said(captioners, options.scenes)
    for name, table in (("said", text), ("looked", looked(captioners, options.scenes))):
        print(table, flush=True)
        if options.write_docs:
            write_section(DOCS, name, table, into_files=True)
    return int(any(right[name] < bound for name, bound in BOUNDS.items() if name in right))


def said(captioners: dict[str, Captioner], count: int) -> tuple[dict[str, float], str]:
    """Evaluate captions, and controls with less information; return the share of exact sets of each captioner, and the table."""
    rows: list[Row] = []
    apart: list[Row] = []
    kinds: dict[str, tuple[dict[str, list[str]], list[str]]] = {}
    for data, title in DATA.items():
        pictures = CaptionSceneDataset(data, "test", count, (64, 64), 0)
        photos = [pictures[i][0] for i in range(count)]
        truth = [pictures.captions(i)[0] for i in range(count)]
        told = {f"{name} attention": texts(captioner, photos) for name, captioner in captioners.items()}
        told |= {
            f"{name} attention, context zeroed (beta = 0)": texts(blind(captioner), photos)
            for name, captioner in captioners.items()
        }
        if "hard" in captioners:
            told["hard attention, expected context"] = texts(captioners["hard"], photos, how="expected")
        if "soft" in captioners:
            if data == "scenes":
                told["soft attention, greedy"] = texts(captioners["soft"], photos, beam=1)
            gray = Image.new("RGB", photos[0].size, tuple(round(255 * level) for level in captioners["soft"].blueprint.mean))
            told["soft attention, blank image"] = texts(captioners["soft"], [gray]) * count
        print(f"  {data}: {count} scenes", file=sys.stderr)
        rows += [{"scenes": title, "captioner": name, **measured(candidates, truth)} for name, candidates in told.items()]
        for name in captioners:
            chance, row = shuffled(told[f"{name} attention"], truth)
            rows.append({"scenes": title, "captioner": f"{name} attention, given shuffled images", **row})
            without = exact_set(told[f"{name} attention, context zeroed (beta = 0)"], truth)
            apart.append(
                {"scenes": title, "captioner": f"{name} attention", "exact set": difference(without, chance, len(truth))}
            )
        kinds[data] = told, truth
    (known, first), (new, second) = kinds["scenes"], kinds["scenes-new"]
    right = {}
    for name in captioners:
        both = known[f"{name} attention"] + new[f"{name} attention"]
        right[name] = exact_set(both, first + second)
        rows.append(
            {"scenes": "known and new pairs together", "captioner": f"{name} attention", **measured(both, first + second)}
        )
    accuracy = folded("Accuracy and scores of each captioner and control", to_markdown(rows))
    above = "Difference from chance: exact captions with beta = 0 less those with shuffled images, in points"
    return right, f"{count} scenes of each kind, beam size {BEAM}.\n\n{accuracy}\n{folded(above, to_markdown(apart))}"


def blind(captioner: Captioner) -> Captioner:
    """Return a copy with beta = 0 for every word: the decoder receives only the mean of all features, in its initial state."""
    model = copy.deepcopy(captioner.model)
    with torch.no_grad():
        model.gate.weight.zero_()
        model.gate.bias.fill_(-1e4)
    return Captioner(model, captioner.blueprint, captioner.provenance)


def texts(captioner: Captioner, photos: Sequence[Image.Image], beam: int = BEAM, how: str | None = None) -> list[str]:
    """Generate a caption for each photo."""
    told: list[str] = []
    for start in range(0, len(photos), AT_ONCE):
        told += [caption.text for caption in captioner.generate(photos[start : start + AT_ONCE], beam_size=beam, sampling=how)]
    return told


def measured(candidates: list[str], truth: list[str]) -> Row:
    """Compute the columns of one row."""
    slots, scores = slot_accuracy(candidates, truth), caption_scores(candidates, truth)
    low, high = wilson(exact_set(candidates, truth), len(truth))
    return {
        "exact set": f"{exact_set(candidates, truth):.1%} ({low:.1%} to {high:.1%})",
        "different captions": f"{len(set(candidates)):,}",
        **{name: f"{slots[name]:.1%}" for name in ("color", "shape", "place", "count")},
        **{name: f"{scores[name]:.3f}" for name in ("BLEU-4", "CIDEr-D", "ROUGE-L")},
    }


def shuffled(candidates: list[str], truth: list[str]) -> tuple[float, Row]:
    """Compute exact sets of shuffled captions, as the mean over many orders, and the columns of their row with the middle 95 %."""
    orders = [np.random.RandomState(seed).permutation(len(truth)) for seed in range(ORDERS)]
    shares = [exact_set([candidates[i] for i in order], truth) for order in orders]
    low, high = np.percentile(shares, [2.5, 97.5])
    first = measured([candidates[i] for i in orders[0]], truth)
    return float(np.mean(shares)), {**first, "exact set": f"{np.mean(shares):.1%} ({low:.1%} to {high:.1%})"}


def difference(one: float, other: float, count: int) -> str:
    """Format the difference of two shares of `count` scenes, with its 95 % interval (Newcombe 1998, method 10)."""
    (low, high), (least, most) = (wilson(share, count) for share in (one, other))
    apart = one - other
    ends = apart - math.hypot(one - low, most - other), apart + math.hypot(high - one, other - least)
    return f"{100 * apart:+.1f} ({100 * ends[0]:+.1f} to {100 * ends[1]:+.1f})"


def looked(captioners: dict[str, Captioner], count: int) -> str:
    """Measure how much the words of an object attend to it, compared with an object of another scene with the same number."""
    pictures = CaptionSceneDataset("scenes", "test", count, (64, 64), 0)
    scenes = [pictures.scenes.scene(i) for i in range(count)]
    others = exchanged([len(scene.things) for scene in scenes])
    rows: list[Row] = []
    for name, captioner in captioners.items():
        own: dict[str, list[list[float]]] = {word: [] for word in WORDS}
        moved: dict[str, list[list[float]]] = {word: [] for word in WORDS}
        best: list[list[float]] = []
        for start in range(0, count, AT_ONCE):
            some = range(start, min(start + AT_ONCE, count))
            photos = [Image.fromarray(scenes[i].image) for i in some]
            for i, caption in zip(some, captioner.score(photos, [scenes[i].caption for i in some]), strict=True):
                parts = list(enumerate(phrases(scenes[i])))
                for word, which in WORDS.items():
                    own[word].append([on(caption, phrase[which], mask(scenes[i], order)) for order, phrase in parts])
                    moved[word].append([on(caption, phrase[which], mask(scenes[others[i]], order)) for order, phrase in parts])
                best.append([most(caption, mask(scenes[i], order)) for order, _ in parts])
        for word in WORDS:
            rows.append(
                {
                    "captioner": name,
                    "measure": "chosen cell at least half covered" if name == "hard" else "share of attention",
                    "word": word,
                    "on the object": interval(own[word]),
                    "on an object of another scene": interval(moved[word]),
                    "best possible": interval(best),
                }
            )
    fields = ", ".join(f"{name} {'x'.join(map(str, captioner.field))}" for name, captioner in captioners.items())
    told = f"{count} scenes. Receptive field of a cell, in pixels of 64 x 64: {fields}."
    return f"{told}\n\n{folded('Attention of each word on its object', to_markdown(rows))}"


def exchanged(things: list[int]) -> list[int]:
    """Return for each scene the index of another scene with the same number of objects."""
    found = list(range(len(things)))
    for number in set(things):
        same = [i for i, one in enumerate(things) if one == number]
        for here, there in zip(same, [*same[1:], same[0]], strict=True):
            found[here] = there
    return found


def phrases(scene: Scene) -> list[range]:
    """Return for each object the range of words of the caption that describe it."""
    found, first = [], 0
    for part in scene.caption.split(", "):
        words = len(part.split())
        found.append(range(first, first + words))
        first += words
    return found


def mask(scene: Scene, order: int) -> NDArray[np.bool_]:
    """Return the mask of the object that the caption names at position `order`."""
    covered: NDArray[np.bool_] = scene.masks[in_order(scene)[order]]
    return covered


def in_order(scene: Scene) -> list[int]:
    """Return the objects' indices in the order of the caption."""

    def place(number: int) -> tuple[int, float]:
        thing: SceneObject = scene.things[number]
        return min(int(3 * thing.center[0]), 2), thing.center[1]

    return sorted(range(len(scene.things)), key=place)


def on(caption: Caption, words: range, covered: NDArray[np.bool_]) -> float:
    """Return the maximum over words of the attention on the mask; for hard attention, of whether the chosen cell is half covered."""
    cells = cells_of(caption.map, covered, caption.geometry)
    if caption.chosen_cells[0] is not None:
        return max(float(cells.share[cell] >= 0.5) for word in words if (cell := caption.chosen_cells[word]) is not None)
    return max(float((cells.values[word] * cells.share).sum() / cells.values[word].sum()) for word in words)


def most(caption: Caption, covered: NDArray[np.bool_]) -> float:
    """Return the value of a map whose attention is entirely in the best cell."""
    share = cells_of(caption.map, covered, caption.geometry).share
    return float(share.max() >= 0.5) if caption.chosen_cells[0] is not None else float(share.max())


def interval(values: list[list[float]]) -> str:
    """Format the mean over scenes of the mean over their objects, with its 95 % interval."""
    array = np.array([np.mean(things) for things in values])
    low, high = mean_interval(array)
    return f"{array.mean():.2f} ({float(low):.2f} to {float(high):.2f})"


if __name__ == "__main__":
    sys.exit(main())
