"""Images/s of our training loop and of timm's, and the cost of drawing maps, as JSON: `python -m bench.training RUN ARGUMENT ...`.

`pictures FOLDER COUNT` creates the training images. `ours FOLDER` and `timm FOLDER FILE` train one epoch each; FILE is timm's train.py.
`loading FOLDER ROUNDS` only reads and augments the images, as torchvision's loop does in turn.
`logger MODEL ROUNDS` times steps with and without a figure of maps.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import timm
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

import visattn
from bench.shared import THREADS, TRAINING_BATCH
from visattn import data
from visattn.core.loading.blueprints import Blueprint
from visattn.data import load_labeled
from visattn.training import AttentionLogger, Config, train
from visattn.training.batches import Samples, Stream, loader, training_transform

MODEL, SIDE = "resnet18", 64
CLASSES = tuple(data.PHOTOS)[:2]
EVERY, WARM = 10, 20  # steps between two log rows; warm-up steps that are not counted
LR, DECAY = 0.01, 5e-4
TESTED = 16  # test images
PAGE = 8  # images in a figure of maps
_ROW = re.compile(r"Train: 0 \[ *(\d+)/\d+ .*\(([\d.]+)s, +[\d.]+/s\)")


def pictures(folder: str, count: str) -> dict[str, int]:
    """Write random crops of two photos as JPEG files, in the size of the training images."""
    photos = [visattn.load_image(data.photo_path(name)) for name in CLASSES]
    generator = torch.Generator().manual_seed(0)
    for split, number in (("train", int(count)), ("test", TESTED)):
        for i in range(number):
            label = i % len(photos)
            photo = photos[label]
            left, top = (int(torch.randint(size - 2 * SIDE, (), generator=generator)) for size in photo.size)
            path = Path(folder, split, CLASSES[label], f"{i:05}.jpg")
            path.parent.mkdir(parents=True, exist_ok=True)
            part = photo.crop((left, top, left + 2 * SIDE, top + 2 * SIDE))
            part.resize((SIDE, SIDE), Image.Resampling.BILINEAR).save(path, quality=90)
    return {"pictures": int(count)}


def ours(folder: str) -> dict[str, float]:
    """Measure images/s of `visattn.training.train`, from its own log rows."""
    torch.set_num_threads(THREADS)
    config = Config(
        data=folder,
        img_size=SIDE,
        model=MODEL,
        epochs=1.0,
        batch_size=TRAINING_BATCH,
        opt="sgd",
        lr=LR,
        weight_decay=DECAY,
        warmup_epochs=0.0,
        label_smoothing=0.0,
        augment="none",
        device="cpu",
        workers=1,
        log_every=EVERY,
        save_every=10**6,
    )
    with tempfile.TemporaryDirectory() as run, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(config, Path(run))
        rows = [json.loads(line) for line in Path(run, "speed.jsonl").read_text().splitlines()]
    return {"speed": statistics.harmonic_mean(row["images_per_second"] for row in rows if row["step"] > WARM)}


def theirs(folder: str, script: str) -> dict[str, float]:
    """Measure images/s of timm's train.py with the same recipe, from the mean seconds per step that it prints."""
    recipe = {
        "data-dir": folder,
        "train-split": "train",
        "val-split": "test",
        "model": MODEL,
        "num-classes": len(CLASSES),
        "img-size": SIDE,
        "epochs": 1,
        "batch-size": TRAINING_BATCH,
        "opt": "sgd",
        "lr": LR,
        "weight-decay": DECAY,
        "warmup-epochs": 0,
        "smoothing": 0,
        "train-interpolation": "bilinear",
        "device": "cpu",
        "workers": 1,
        "log-interval": EVERY,
    }
    with tempfile.TemporaryDirectory() as output:
        options = [text for name, value in recipe.items() for text in (f"--{name}", str(value))]
        command = [sys.executable, script, *options, "--no-aug", "--output", output]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": str(THREADS)}
        )
    found = [(int(step) + 1, float(mean)) for step, mean in _ROW.findall(done.stdout + done.stderr)]
    if done.returncode or len(found) < 3:
        sys.exit(f"timm's train.py ended with status {done.returncode} and {len(found)} rows: {done.stderr[-2000:]}")
    (first, before), (last, after) = next(row for row in found if row[0] > WARM), found[-1]
    return {"speed": TRAINING_BATCH * (last - first) / (last * after - first * before)}


def logger(name: str, rounds: str) -> dict[str, float]:
    """Measure the median seconds of a plain step, and the added time of a step with a figure and of the step after it."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=len(CLASSES), img_size=SIDE) if "vit" in name else timm.create_model(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    pixels, labels = torch.rand(TRAINING_BATCH, 3, SIDE, SIDE), torch.arange(TRAINING_BATCH) % len(CLASSES)

    def step() -> float:
        began = time.perf_counter()
        torch.autograd.backward(torch.nn.functional.cross_entropy(model(pixels), labels))
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    with tempfile.TemporaryDirectory() as folder:
        draws = AttentionLogger(model, pixels[:PAGE], every=1, to=folder)
        plain, drawn = list[float](), list[float]()
        step()
        for turn in range(int(rounds)):
            plain += [step() for _ in range(3)]
            began = time.perf_counter()
            draws(turn)
            drawn.append(time.perf_counter() - began + step())
    usual = statistics.median(plain)
    return {"step": usual, "page": statistics.median(drawn) - usual}


def loading(folder: str, rounds: str) -> dict[str, float]:
    """Measure the CPU seconds per image of our data path and of torchvision's, alternately: decoding, crop, flip, jitter, normalization."""
    torch.set_num_threads(1)
    config = Config(data=folder, img_size=SIDE, augment="imagenet", batch_size=TRAINING_BATCH)
    blueprint = Blueprint(MODEL, CLASSES, 3, (SIDE, SIDE), (0.5,) * 3, (0.25,) * 3)
    pictures = load_labeled(folder, "train")
    steps = len(pictures) // TRAINING_BATCH
    samples = Samples(pictures, training_transform(config, blueprint), mode="RGB", seed=0, replace=True)
    usual = transforms.Compose(
        [
            transforms.RandomResizedCrop(SIDE),
            transforms.RandomHorizontalFlip(),
            transforms.ColorJitter(0.4, 0.4, 0.4),
            transforms.ToTensor(),
            transforms.Normalize(blueprint.mean, blueprint.std),
        ]
    )
    plain = datasets.ImageFolder(f"{folder}/train", usual)
    spent: dict[str, list[float]] = {"ours": [], "theirs": []}
    for turn in range(int(rounds) + 1):
        ours = loader(
            samples, Stream(len(pictures), TRAINING_BATCH, turn * steps * TRAINING_BATCH, steps, seed=0), 0, torch.device("cpu")
        )
        theirs = DataLoader(plain, TRAINING_BATCH, shuffle=True, drop_last=True)
        for name, batches in (("ours", ours), ("theirs", theirs)):
            began = time.process_time()
            for _ in batches:
                pass
            spent[name] += [(time.process_time() - began) / (steps * TRAINING_BATCH)] if turn else []
    ratio = statistics.median(one / other for one, other in zip(spent["ours"], spent["theirs"], strict=True))
    return {"ours": statistics.median(spent["ours"]), "theirs": statistics.median(spent["theirs"]), "ratio": ratio}


RUNS: dict[str, Callable[..., Mapping[str, float]]] = {
    "pictures": pictures,
    "ours": ours,
    "timm": theirs,
    "loading": loading,
    "logger": logger,
}

if __name__ == "__main__":
    print(json.dumps(RUNS[sys.argv[1]](*sys.argv[2:])))
