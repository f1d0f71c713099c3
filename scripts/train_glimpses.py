"""Comparison of the recurrent attention model with a network of the same size that reads every pixel, on Fashion-MNIST.

`train_glimpses.py -o runs/glimpses` trains both, and a third with random glimpses, with the same epochs, optimizer and seed. It prints a
table of test accuracies, and writes the recurrent attention model to a folder for `visattn overlay PHOTO --model runs/glimpses --method
glimpses`, in about 20 minutes on one core. Use `--epochs 1 --train-count 6000` for a quick test. REINFORCE is the same as for hard
attention.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal, cast

import torch
import torch.nn.functional as F
from pages import write_section
from small_trainings import BATCH, Split, fit, named_right, standardized, whole
from torch import Tensor, nn

from visattn._support.reprs import in_pixels
from visattn.core.loading import model_folders as folders
from visattn.core.loading.blueprints import Blueprint
from visattn.core.loading.weights import WEIGHTS, digest
from visattn.data import LabeledDataset, load_labeled
from visattn.models import ram
from visattn.training.report.card import wilson

DATA = "fashion-mnist"
DOCS = Path(__file__).parents[1] / "docs" / "captions.md"
RATE, SEED, EPOCHS = 2e-3, 0, 12
POLICY = 0.05  # learning rate of the location network, relative to the others; theirs moves glimpses to the border
GLIMPSES = {"glimpse_size": 8, "num_scales": 1, "num_glimpses": 6, "hidden_dim": 256, "std": 0.1}


class FullImage(nn.Module):
    """Classifier with two hidden layers over all pixels, as wide as `parameters` allows."""

    def __init__(self, size: tuple[int, int], classes: int, parameters: int) -> None:
        """Build the layers with PyTorch's default initialization and about `parameters` parameters."""
        super().__init__()
        pixels = size[0] * size[1]

        def cost(width: int) -> int:
            return (pixels + 1) * width + (width + 1) * width + (width + 1) * classes

        width = min(range(1, parameters // pixels + 1), key=lambda one: abs(cost(one) - parameters))
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(pixels, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Compute class scores `(B, classes)` of images `(B, 1, H, W)`."""
        scores: Tensor = self.layers(images)
        return scores


class Anywhere(nn.Module):
    """Replacement for the location network that returns random locations, independent of the state."""

    def forward(self, state: Tensor) -> Tensor:
        """Return values that tanh turns into uniform locations; `state` is `(B, hidden)`."""
        return torch.atanh(torch.rand(len(state), 2) * 1.98 - 0.99)


def main() -> None:
    """Train the models, print the table, and write the folder."""
    parser = argparse.ArgumentParser(description="Train the recurrent attention model on Fashion-MNIST.")
    parser.add_argument("-o", "--output", type=Path, help="a new folder for the recurrent attention model")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--train-count", type=int, help="train on a random subset of this size")
    parser.add_argument("--root", type=Path, help="folder with the files of Fashion-MNIST")
    parser.add_argument("--write-docs", action="store_true", help="write the table to docs/captions.md")
    options = parser.parse_args()
    if options.output and options.output.exists():
        parser.error(f"{options.output} exists; choose a new folder.")
    sets = {split: load_labeled(DATA, split, root=options.root, count=count) for split, count in _counts(options.train_count)}
    train, test, (mean, std) = standardized(whole(sets["train"]), whole(sets["test"]))
    classes, size = sets["train"].classes, (train.pixels.shape[2], train.pixels.shape[3])
    blueprint = Blueprint("visattn_ram", classes, 1, size, (round(mean, 4),), (round(std, 4),), options=dict(GLIMPSES))
    torch.manual_seed(options.seed)
    glimpsing = blueprint.build()
    full = FullImage(size, len(classes), parameters_of(glimpsing))
    torch.manual_seed(options.seed)
    aimless = blueprint.build()
    aimless.location = Anywhere()
    rows, reached = [], {}
    for name, model, loss, seen in (
        ("recurrent attention", glimpsing, ram.loss, GLIMPSES["num_glimpses"] * GLIMPSES["glimpse_size"] ** 2),
        ("recurrent attention, glimpses at random", aimless, ram.loss, GLIMPSES["num_glimpses"] * GLIMPSES["glimpse_size"] ** 2),
        ("full image", full, F.cross_entropy, size[0] * size[1]),
    ):
        began = time.perf_counter()
        torch.manual_seed(options.seed)  # of the locations that are sampled
        fit(
            model,
            partial(lost, model, loss, train),
            len(train.labels),
            epochs=options.epochs,
            seed=options.seed,
            rate=RATE,
            slower=("location.", POLICY),
        )
        seconds = time.perf_counter() - began
        reached[name] = float(named_right(model, test).mean())
        low, high = wilson(reached[name], len(test.labels))
        rows.append(
            f"| {name} | {parameters_of(model):,} | {seen:g} | {reached[name]:.2%} | {low:.2%} to {high:.2%} | {seconds:.0f} |"
        )
        print(f"{name}: {reached[name]:.2%} after {seconds:.0f} s", file=sys.stderr, flush=True)
    table = "\n".join(
        (
            "| network | parameters | pixels read | test accuracy | 95 % interval (Wilson) | training, s |",
            "|---|--:|--:|--:|--:|--:|",
            *rows,
        )
    )
    print(table)
    if options.write_docs:
        write_section(DOCS, "glimpses", table)
    if options.output:
        facts = {"data": DATA, "test_accuracy": reached["recurrent attention"], "seed": options.seed, "epochs": options.epochs}
        folders.save(glimpsing, blueprint, options.output, facts)
        (options.output / "README.md").write_text(card(options, sets, blueprint, table), encoding="utf-8")
        print(f"wrote {options.output}", file=sys.stderr)


def _counts(train: int | None) -> tuple[tuple[Literal["train", "test"], int | None], ...]:
    return ("train", train), ("test", None)


def lost(model: nn.Module, loss: Callable[..., Tensor], data: Split, chosen: Tensor) -> Tensor:
    """Return the loss of some images."""
    value: Tensor = loss(model(data.pixels[chosen]), data.labels[chosen])
    return value


def parameters_of(model: nn.Module) -> int:
    """Count the trainable parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def card(
    options: argparse.Namespace, sets: dict[Literal["train", "test"], LabeledDataset], blueprint: Blueprint, table: str
) -> str:
    """Return the model card: contents of the folder, training procedure and results."""
    command = shlex.join(["python", "scripts/train_glimpses.py", *sys.argv[1:]])
    told = ", ".join(f"{name} {value:g}" for name, value in cast("dict[str, float]", blueprint.options).items())
    versions = ", ".join(f"{name} {version(name)}" for name in ("visattn", "torch"))
    prints = "".join(f"- Fingerprint ({split}): `{part.fingerprint()}`.\n" for split, part in sets.items())
    return f"""# `visattn_ram` on `{DATA}`

## Model details

- An image classifier that looks through a few glimpses and chooses where to look (Mnih et al., 2014).
- Gray images of {in_pixels(blueprint.size)} pixels, {len(blueprint.classes)} classes:
  {", ".join(blueprint.classes)}.
- Options: {told}.
- Weights: sha256 `{digest(options.output / WEIGHTS)}`, random at the start.

## Training data

- `{DATA}`, MIT (Zalando SE): {len(sets["train"]):,} training images, {len(sets["test"]):,} test images.
{prints}
## Training procedure

```console
{command}
```

Adam at a learning rate of {RATE:g}, of the location network {POLICY * RATE:g}, that falls along a cosine, batches of {BATCH},
{options.epochs} epochs, no augmentation; {versions}.

## Evaluation results

{table}

## Limits

- One run, with seed {options.seed}. The interval covers the choice of test images only; the accuracy with another seed may lie outside it.
- The model predicts one of its classes for every image, whatever the image shows.
- The model looks where looking was rewarded during training, which need not be where all evidence lies.

## License

Apache-2.0
"""


if __name__ == "__main__":
    main()
