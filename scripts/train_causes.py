"""Train small networks on scenes of every cause: `train_causes.py [--only CAUSE,CAUSE] [--seeds N] [-o FOLDER]`.

Each network is trained by `visattn.training` with the settings below. Its folder gets the weights and the model card of the run. A network
that is there is not trained again. Two networks are trained beside each other, on one thread each.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from visattn.data.scenes.causes import CAUSES, Cause
from visattn.training import Config, train

FOLDER = Path(__file__).parents[1] / "models" / "causes"
SHARED = Config(
    train_count=12_000,
    test_count=1_000,
    epochs=8.0,
    batch_size=64,
    opt="adamw",
    lr=0.003,
    weight_decay=0.05,
    augment="none",
    label_smoothing=0.0,
    device="cpu",
    log_every=100,
    license="Apache-2.0",
)
NETWORKS = {
    "cnn": replace(SHARED, model="visattn_resnet14", widths=(12, 24, 48), attention="cbam"),
    "vit": replace(SHARED, model="visattn_vit_c", model_kwargs={"embed_dim": 48}, epochs=10.0, lr=0.002, ema=0.998),
}
_MORE = {"train_count": 30_000, "epochs": 12.0, "model_kwargs": {"embed_dim": 64}}
HARDER: dict[
    tuple[str, str], dict[str, Any]
] = {  # here a network must first find the object that decides; it learns 12,000 images by heart
    ("color", "cnn"): {"train_count": 30_000},
    ("companion", "cnn"): {"train_count": 30_000},
    ("color", "vit"): _MORE,
    ("companion", "vit"): _MORE,
}
ONCE = ("color", "vit"), ("companion", "vit")  # trained with the first seed only, as each takes as long as six others
NOT_LEARNED = ("position", "vit")  # stays at chance for 10 epochs


def main() -> int:
    """Train what is missing."""
    parser = argparse.ArgumentParser(description="Train small networks on scenes of every cause.")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(CAUSES), metavar="CAUSE,CAUSE")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path, default=FOLDER)
    options = parser.parse_args()
    if not set(options.only) <= set(CAUSES):
        parser.error(f"causes are {', '.join(CAUSES)}.")
    tasks = [
        (
            replace(NETWORKS[kind], data=f"scenes-by-{cause}", seed=seed, **HARDER.get((cause, kind), {})),
            options.output / name_of(cause, kind, seed),
        )
        for cause, kind, seed in combinations(options.only, options.seeds)
    ]
    tasks.sort(key=lambda task: -task[0].epochs * task[0].train_count)  # the longest first, so that both processes end together
    options.output.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:  # its workers may start others, to draw scenes
        for told in as_completed([pool.submit(_trained, task) for task in tasks if not task[1].exists()]):
            print(told.result(), flush=True)
    return 0


def combinations(causes: Sequence[Cause], seeds: int) -> list[tuple[Cause, str, int]]:
    """Return cause, kind and seed of each network that is trained."""
    return [
        (cause, kind, seed)
        for seed in range(seeds)
        for cause in causes
        for kind in NETWORKS
        if (cause, kind) != NOT_LEARNED and (seed == 0 or (cause, kind) not in ONCE)
    ]


def name_of(cause: str, kind: str, seed: int) -> str:
    """Return the name of a network's folder."""
    return f"{cause}_{kind}_{seed}"


def _trained(task: tuple[Config, Path]) -> str:
    """Train a network, and keep its weights and its card."""
    config, folder = task
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        run = Path(place) / "run"
        result = train(config, run)
        shutil.copy(run / "README.md", run / "final" / "README.md")
        (run / "final").rename(folder)
    return f"{folder.name}: accuracy {result.accuracy:.4f}, {result.images_per_second:.0f} images/s"


if __name__ == "__main__":
    sys.exit(main())
