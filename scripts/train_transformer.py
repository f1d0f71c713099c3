"""A spatial transformer against the plain network, on items that are displaced, rotated and cluttered (`fashion-mnist-turned`).

`train_transformer.py -o runs/stn` trains both networks with the same classifier, epochs, optimizer and seeds, prints their test accuracies
and the mean difference, and writes the first network with a transformer to a folder for `visattn heads PHOTO --model runs/stn --method
gates`, which draws its window. Use `--epochs 1 --seeds 1 --train-count 2000` for a quick test.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from small_trainings import BATCH, Split, fit, named_right, standardized, whole
from torch import Tensor, nn

from visattn._support.reprs import in_pixels
from visattn.core.loading import model_folders as folders
from visattn.core.loading.blueprints import Blueprint
from visattn.core.loading.weights import WEIGHTS, digest
from visattn.data import LabeledDataset, load_labeled
from visattn.evaluation.intervals import mean_interval
from visattn.training.report.card import wilson

DATA = "fashion-mnist-turned"
RATE, EPOCHS, SEEDS = 2e-3, 8, 3
WARMUP = 500  # steps in which the rate rises; without them a window may leave the image at once, where it gets no gradient
NETWORKS: dict[str, dict[str, Any]] = {"spatial transformer": {}, "plain": {"transformer": False}}


def main() -> None:
    """Train the networks, print the table, and write the folder."""
    parser = argparse.ArgumentParser(description="Train a spatial transformer beside the plain network.")
    parser.add_argument("-o", "--output", type=Path, help="a new folder for the first network with a transformer")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of trainings of each network")
    parser.add_argument("--train-count", type=int, help="train on a random subset of this size")
    parser.add_argument("--root", type=Path, help="folder with the files of Fashion-MNIST")
    options = parser.parse_args()
    if options.output and options.output.exists():
        parser.error(f"{options.output} exists; choose a new folder.")
    sets = {"train": _read("train", options), "test": _read("test", options)}
    train, test, (mean, std) = standardized(whole(sets["train"]), whole(sets["test"]))
    size, classes = (train.pixels.shape[2], train.pixels.shape[3]), sets["train"].classes
    right: dict[str, list[NDArray[np.bool_]]] = {name: [] for name in NETWORKS}
    seconds = dict.fromkeys(NETWORKS, 0.0)
    kept: tuple[nn.Module, Blueprint] | None = None
    for seed in range(options.seeds):
        for name, changes in NETWORKS.items():
            blueprint = Blueprint("visattn_stn", classes, 1, size, (round(mean, 4),), (round(std, 4),), options=changes)
            torch.manual_seed(seed)
            model, began = blueprint.build(), time.perf_counter()
            fit(
                model,
                partial(lost, model, train),
                len(train.labels),
                epochs=options.epochs,
                seed=seed,
                rate=RATE,
                warmup=WARMUP,
            )
            seconds[name] += time.perf_counter() - began
            right[name].append(named_right(model, test))
            print(f"{name}, seed {seed}: {right[name][-1].mean():.2%}", file=sys.stderr, flush=True)
            kept = kept or (model, blueprint)
    table = told({name: np.stack(each) for name, each in right.items()}, seconds)
    print(table)
    if options.output and kept:
        facts = {
            "data": DATA,
            "test_accuracy": float(right["spatial transformer"][0].mean()),
            "seed": 0,
            "epochs": options.epochs,
        }
        folders.save(*kept, options.output, facts)
        (options.output / "README.md").write_text(card(options, sets, *kept, table), encoding="utf-8")
        print(f"wrote {options.output}", file=sys.stderr)


def _read(split: Literal["train", "test"], options: argparse.Namespace) -> LabeledDataset:
    return load_labeled(DATA, split, root=options.root, count=options.train_count if split == "train" else None)


def lost(model: nn.Module, data: Split, chosen: Tensor) -> Tensor:
    """Return the cross-entropy of some images."""
    return F.cross_entropy(model(data.pixels[chosen]), data.labels[chosen])


def told(right: dict[str, NDArray[np.bool_]], seconds: dict[str, float]) -> str:
    """Return the table of accuracies, and the mean difference in points; `right` are `(seeds, images)`."""
    lines = [
        "| network | accuracy of each seed | mean | 95 % interval of the first (Wilson) | training, s |",
        "|---|---|--:|--:|--:|",
    ]
    for name, found in right.items():
        low, high = wilson(float(found[0].mean()), found.shape[1])
        each = ", ".join(f"{share:.2%}" for share in found.mean(1))
        lines.append(f"| {name} | {each} | {found.mean():.2%} | {low:.2%} to {high:.2%} | {seconds[name]:.0f} |")
    apart = 100 * (right["spatial transformer"].mean(0) - right["plain"].mean(0))  # of each image, over the seeds
    low, high = (float(end) for end in mean_interval(apart))
    gain = f"The transformer gains {apart.mean():+.2f} points ({low:+.2f} to {high:+.2f}, 95 %, bootstrap over test images)."
    return "\n".join([*lines, "", gain])


def card(options: argparse.Namespace, sets: dict[str, LabeledDataset], model: nn.Module, blueprint: Blueprint, table: str) -> str:
    """Return the model card: contents of the folder, training procedure and results."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("visattn", "torch"))
    prints = "".join(f"- Fingerprint ({split}): `{part.fingerprint()}`.\n" for split, part in sets.items())
    return f"""# Spatial transformer on `{DATA}`

## Model details

- A classifier of the window that a spatial transformer predicts (Jaderberg et al., 2015): `visattn_stn`, a window of 28 x 28 pixels.
- Gray images of {in_pixels(blueprint.size)} pixels, {len(blueprint.classes)} classes:
  {", ".join(blueprint.classes)}.
- {sum(parameter.numel() for parameter in model.parameters()):,} parameters.
- Weights: sha256 `{digest(options.output / WEIGHTS)}`, random at the start.

## Training data

- `{DATA}`: items of Fashion-MNIST, MIT (Zalando SE), anywhere in a larger image, rotated by up to 60 degrees, among pieces of other items.
{prints}
## Training procedure

```console
{shlex.join(["python", "scripts/train_transformer.py", *sys.argv[1:]])}
```

Adam at a learning rate of {RATE:g} that rises for {WARMUP} steps and then falls along a cosine, batches of {BATCH},
{options.epochs} epochs, no augmentation; {versions}.

## Evaluation results

{table}

The plain network is the same classifier on the whole image.

## Limits

- This is the network of seed 0. The intervals of single networks cover the choice of test images only.
- The model predicts one of its classes for every image, whatever the image shows.
- The window shows what the classifier receives, not what it decides by.

## License

Apache-2.0
"""


if __name__ == "__main__":
    main()
