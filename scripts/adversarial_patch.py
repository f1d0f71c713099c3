"""An adversarial patch as a known cause: trained to turn a network of the scenes to one class, and where the maps look when it does.

`adversarial_patch.py --train` trains a patch for each network and writes them to `models/patches`; `adversarial_patch.py [--scenes N]
[--write-docs]` measures them. It prints the share of scenes of other classes that the patch turns to its class, beside the plain scenes, a
gray square, and the patch with shuffled pixels. For each method it prints how well the map for this class finds the patch (AUROC) in scenes
that were turned, beside controls: the same map shifted around the grid, a center prior, and the same method on the scene without the patch.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pages import folded, write_section
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.functional import pil_to_tensor, to_pil_image
from truth.measure import ways_of

import visattn
from visattn._support.tables import Row, to_markdown
from visattn.core.families import input_spec
from visattn.data.scenes import CLASSES, Scenes
from visattn.evaluation import find_causes
from visattn.evaluation.causes.findings import CONTROLS
from visattn.evaluation.causes.networks import cause_networks
from visattn.training.report.card import wilson

DOCS = Path(__file__).parents[1] / "docs" / "known_truth.md"
FOLDER = Path(__file__).parents[1] / "models" / "patches"
NETWORKS = {"scenes_cnn": "cnn", "scenes_vit": "vit"}
SIDE, TARGET = 16, 0  # pixels of the patch, a sixteenth of a scene; index in CLASSES
STEPS, BATCH, RATE, SEED = 600, 64, 0.1, 0
TRAIN_SEED, TEST_SEED = 1, 2  # of the scenes; the networks were trained on the first
TRAIN, TEST = 5000, 1000  # scenes
WAYS = "the patch", "its pixels shuffled", "a gray square", "nothing"


def main() -> int:
    """Train the patches, or measure them and print the tables."""
    parser = argparse.ArgumentParser(description="Train and measure adversarial patches.")
    parser.add_argument("--train", action="store_true", help="train the patches, and measure nothing")
    parser.add_argument("--scenes", type=int, default=60, help="number of turned scenes on which maps are measured, at most")
    parser.add_argument("--tests", type=int, default=TEST, help="number of scenes on which the share is measured")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--write-docs", action="store_true", help=f"write the tables to docs/{DOCS.name}")
    options = parser.parse_args()
    models = {name: visattn.load_model(name).requires_grad_(False) for name in NETWORKS}
    if options.train:
        options.folder.mkdir(parents=True, exist_ok=True)
        for name, model in models.items():
            to_pil_image(trained(model, options.steps)).save(options.folder / f"{name}.png")
        return 0
    rows: list[Row] = []
    texts: dict[str, str] = {}
    for name, model in models.items():
        patch = pil_to_tensor(Image.open(options.folder / f"{name}.png").convert("RGB")).float() / 255
        shares = turning(model, patch, options.tests)
        rows += [{"network": name, "covered by": way, f"called {CLASSES[TARGET]}": shares[way]} for way in WAYS]
        texts[f"patch on {name}"] = looking(NETWORKS[name], options.scenes)
    texts = {"patch": to_markdown(rows), **texts}
    for name, text in texts.items():
        print(f"## {name}\n\n{text}", flush=True)
        if options.write_docs:
            write_section(DOCS, name, text, into_files=True)
    return 0


def trained(model: nn.Module, steps: int) -> Tensor:
    """Train a patch `(3, side, side)` in [0, 1] that turns scenes of other classes to the target class, wherever it lies.

    Brown et al., "Adversarial Patch", 2017, arXiv:1712.09665, without rotation and scaling.
    """
    images, labels = scenes(TRAIN, TRAIN_SEED)
    images = images[labels != TARGET]
    generator = torch.Generator().manual_seed(SEED)
    raw = (0.1 * torch.randn(3, SIDE, SIDE, generator=generator)).requires_grad_()
    optimizer, see, began = torch.optim.Adam([raw], RATE), seen(model), time.perf_counter()
    wanted = torch.full((BATCH,), TARGET)
    for step in range(steps):
        some = images[torch.randint(len(images), (BATCH,), generator=generator)]
        covered, _ = put(some, raw.sigmoid(), generator)
        loss = F.cross_entropy(see(covered), wanted)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            seconds = time.perf_counter() - began
            print(f"step {step}: cross-entropy {float(loss.detach()):.2f}, {seconds:.0f} s", file=sys.stderr, flush=True)
    return raw.detach().sigmoid()


def scenes(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the images of scenes `(N, 3, H, W)` in [0, 1], and their labels."""
    drawn = Scenes(count, seed=seed)
    every = [drawn.scene(number) for number in range(count)]
    pixels = torch.from_numpy(np.stack([scene.image for scene in every])).permute(0, 3, 1, 2).float() / 255
    return pixels, torch.tensor([scene.label for scene in every])


def put(images: Tensor, patch: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Cover each image by the patch at a random place; return the images and the masks `(N, H, W)` of the covered pixels."""
    count, _, height, width = images.shape
    side = patch.shape[-1]
    top = torch.randint(height - side + 1, (count,), generator=generator)
    left = torch.randint(width - side + 1, (count,), generator=generator)
    row, column = torch.arange(height)[None] - top[:, None], torch.arange(width)[None] - left[:, None]
    inside = ((row >= 0) & (row < side))[:, :, None] & ((column >= 0) & (column < side))[:, None]  # (N, H, W)
    rows, columns = row.clamp(0, side - 1), column.clamp(0, side - 1)
    spread = patch[:, rows[:, :, None], columns[:, None]].transpose(0, 1)  # (N, 3, H, W)
    return torch.where(inside[:, None], spread, images), inside


def seen(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the model as a function of pixels in [0, 1]."""
    spec = input_spec(model, None)
    mean, std = (torch.tensor(part).view(-1, 1, 1) for part in (spec.mean, spec.std))
    return lambda images: model((images - mean) / std)


@torch.no_grad()
def turning(model: nn.Module, patch: Tensor, count: int) -> dict[str, str]:
    """Return the share of scenes of other classes that are called the target with each cover."""
    images, labels = scenes(count, TEST_SEED)
    images, see = images[labels != TARGET], seen(model)
    order = torch.randperm(SIDE * SIDE, generator=torch.Generator().manual_seed(SEED))
    covers = {
        "the patch": patch,
        "its pixels shuffled": patch.flatten(1)[:, order].view_as(patch),
        "a gray square": torch.full_like(patch, 0.5),
    }
    shares = {}
    for way in WAYS:
        at = torch.Generator().manual_seed(SEED)  # the same places for each
        covered = put(images, covers[way], at)[0] if way in covers else images
        called = torch.cat([see(some).argmax(1) for some in torch.split(covered, 100)]) == TARGET
        share = float(called.float().mean())
        low, high = wilson(share, len(called))
        shares[way] = f"{share:.1%} ({low:.1%} to {high:.1%})"
    return shares


def looking(kind: str, count: int) -> str:
    """Return the table of how well each map for the target finds the patch in scenes that it turned."""
    (network,) = (one for one in cause_networks() if (one.cause, one.kind) == ("patch", kind))
    first: Any = Scenes(1, seed=TEST_SEED).scene(0)
    ways = {name: way for name, way in ways_of(network.model, first).items() if not way.slow}
    methods = {name: {"method": way.method, **way.parameters} for name, way in ways.items()}
    rows = find_causes(methods, networks=[network.name], scenes=count, seed=TEST_SEED).rows()
    told = [
        {
            "method": row["map"],
            "cells": row["cells"],
            "AUROC": f"{row['auroc']:.2f} ({row['low']:.2f} to {row['high']:.2f})",
            "largest cell touches it": f"{row['largest cell touches']:.0%}",
            **{name: f"{row[name]:.2f}" for name in CONTROLS},
            "found": row["found"],
        }
        for row in sorted(rows, key=lambda row: -float(row["auroc"]))
    ]
    return f"{rows[0]['scenes']} scenes that the patch turned.\n\n{folded('Maps for the class of the patch', to_markdown(told))}"


if __name__ == "__main__":
    sys.exit(main())
