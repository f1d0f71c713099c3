"""Train small networks on scenes of every cause: `train_causes.py [--only CAUSE,CAUSE] [--seeds N] [-o FOLDER]`.

Each network is trained by `visattn.training` with the settings below. Its folder gets the weights and the model card of the run. A network
that is there is not trained again. Two networks are trained beside each other, on one thread each.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
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
from safetensors.torch import load_file, save_file
from truth.measure import accuracy

import visattn
from visattn.data.scenes.causes import CAUSES, VALUES, Cause, CausedScenes
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
SEEDS = 5  # networks of each cause and kind
WITH, WITHOUT = (
    0.95,
    1 / VALUES + 0.05,
)  # bounds on the accuracy of a network that counts: with its cause, and with an unrelated one
TESTS, TEST_SEED = 1000, 2
ACCURACY = "accuracy.json"  # both accuracies of a network that does not count, whose weights are not kept


def main() -> int:
    """Train what is missing."""
    parser = argparse.ArgumentParser(description="Train small networks on scenes of every cause.")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(CAUSES), metavar="CAUSE,CAUSE")
    parser.add_argument("--seeds", type=int, default=SEEDS)
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
    return [(cause, kind, seed) for seed in range(seeds) for cause in causes for kind in NETWORKS]


def name_of(cause: str, kind: str, seed: int) -> str:
    """Return the name of a network's folder."""
    return f"{cause}_{kind}_{seed}"


def _trained(task: tuple[Config, Path]) -> str:
    """Train a network, and keep its card, and its weights if it depends on its cause."""
    config, folder = task
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        run = Path(place) / "run"
        result = train(config, run)
        shutil.copy(run / "README.md", run / "final" / "README.md")
        halve(run / "final")
        shares = dependence(run / "final", config.data.removeprefix("scenes-by-"))
        counts = shares[0] >= WITH and shares[1] <= WITHOUT
        if not counts:
            for name in ("model.safetensors", "model.json"):
                (run / "final" / name).unlink()
            (run / "final" / ACCURACY).write_text(json.dumps(shares) + "\n")
        (run / "final").rename(folder)
    kept = "kept" if counts else "not kept"
    return f"{folder.name}: {shares[0]:.4f} with its cause, {shares[1]:.4f} with another, {kept}, {result.images_per_second:.0f} images/s"


def halve(folder: Path) -> None:
    """Round weights to half precision, so that they take half the space; the card tells it, with the new digest."""
    file, card = folder / "model.safetensors", folder / "README.md"
    tensors = {name: x.half() if x.is_floating_point() else x for name, x in load_file(file).items()}
    save_file(tensors, file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    facts = folder / "model.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"sha256": digest}, indent=2) + "\n")
    text, count = re.subn(
        r"- Final weights: sha256 `\w+`\.", f"- Final weights, rounded to half precision: sha256 `{digest}`.", card.read_text()
    )
    assert count == 1, card  # noqa: S101
    card.write_text(text)


def dependence(folder: Path, cause: str) -> list[float]:
    """Return the accuracy of a network with its cause, and with one that is unrelated to the label."""
    model, shown = visattn.load_model(str(folder)), ("label", "random")
    return [accuracy(model, CausedScenes(cause, TESTS, seed=TEST_SEED, shown=what)) for what in shown]  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
