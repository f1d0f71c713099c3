"""DRAW on binary Fashion-MNIST: the variational bound as it falls, and a film strip of what the network reads and writes.

`train_draw.py -o runs/draw` trains and writes the network, its card and `film.png`. `train_draw.py --film FOLDER -o film.png` draws the
strip of a trained network alone. A pixel counts as 1 if it is 0.5 or more. Use `--epochs 1 --train-count 2000` for a quick test.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from PIL import Image
from small_trainings import BATCH, fit, whole
from torch import Tensor

from visattn._support.reprs import in_pixels
from visattn._support.whole_files import write_whole
from visattn.core.drawing.marks import draw_box
from visattn.core.drawing.pages import Cell, sheet
from visattn.core.drawing.pictures import encoded
from visattn.core.geometry import Box
from visattn.core.loading.model_folders import write_folder
from visattn.core.loading.weights import FACTS, WEIGHTS, digest
from visattn.data import load_labeled
from visattn.evaluation.intervals import mean_interval
from visattn.models.draw import Draw, bound

DATA = "fashion-mnist"
RATE, CLIP, SEED, EPOCHS = 1e-3, 5.0, 0, 10
NETWORK: dict[str, Any] = {"steps": 10, "read_size": 5, "write_size": 5, "hidden_dim": 256, "latent_dim": 24}
SHOWN, SCALE = 4, 4  # test images on the strip; pixels for each of theirs
CYAN = (0, 220, 220)
READ, WRITTEN = "cyan box: what it read before", "white box: where it wrote"


def main() -> None:
    """Train the network and write its folder, or draw the strip of one."""
    parser = argparse.ArgumentParser(description="Train DRAW on binary Fashion-MNIST.")
    parser.add_argument("-o", "--output", type=Path, required=True, help="a new folder, or with --film a .png file")
    parser.add_argument("--film", type=Path, metavar="FOLDER", help="draw the strip of this trained network, and train nothing")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--train-count", type=int, help="train on a random subset of this size")
    parser.add_argument("--root", type=Path, help="folder with the files of Fashion-MNIST")
    options = parser.parse_args()
    if options.film:
        page = strip(load(options.film), binary("test", options.root, None)[:SHOWN])
        write_whole(options.output, encoded(page, "PNG"))
        return
    if options.output.exists():
        parser.error(f"{options.output} exists; choose a new folder.")
    train, test = binary("train", options.root, options.train_count), binary("test", options.root, None)
    torch.manual_seed(options.seed)
    model, began = Draw(img_size=(train.shape[2], train.shape[3]), **NETWORK), time.perf_counter()
    falling = trained(model, train, test, options.epochs, options.seed)
    seconds = time.perf_counter() - began
    facts = {
        "kind": "DRAW network",
        "options": {"img_size": list(model.img_size), **NETWORK},
        "data": DATA,
        "seed": options.seed,
    }
    write_folder(model, options.output, facts | {"bound_of_test_images": falling[-1][1]})
    write_whole(options.output / "film.png", encoded(strip(model, test[:SHOWN]), "PNG"))
    text = card(options, model, falling, (independent(train, test), seconds))
    (options.output / "README.md").write_text(text, encoding="utf-8")
    print(f"wrote {options.output}", file=sys.stderr)


def binary(split: Literal["train", "test"], root: Path | None, count: int | None) -> Tensor:
    """Load the images of a split as `(N, 1, H, W)` of zeros and ones."""
    return (whole(load_labeled(DATA, split, root=root, count=count)).pixels >= 128 / 255).float()


def trained(model: Draw, train: Tensor, test: Tensor, epochs: int, seed: int) -> list[tuple[float, float]]:
    """Train; return the bound of the training and of the test images after each epoch, in nats."""
    falling = list[tuple[float, float]]()

    def after(loss: float) -> None:
        falling.append((loss, float(measured(model, test).mean())))
        print(f"bound of the test images: {falling[-1][1]:.1f} nats", file=sys.stderr, flush=True)

    def lost(chosen: Tensor) -> Tensor:
        return bound(model(train[chosen]), train[chosen]).mean()

    fit(model, lost, len(train), epochs=epochs, seed=seed, rate=RATE, clip=CLIP, after=after)
    return falling


def measured(model: Draw, images: Tensor) -> Tensor:
    """Return the bound of each image, `(N,)`, from one sample of the latent vectors with a seed of its own."""
    model.train()  # it samples, as the bound needs
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        found = torch.cat([bound(model(some), some) for some in torch.split(images, 500)])
    model.eval()
    return found


def independent(train: Tensor, test: Tensor) -> float:
    """Return the negative log-likelihood of the test images if every pixel were independent, in nats: what a bound must beat."""
    chance = ((train.sum(0) + 1) / (len(train) + 2)).expand_as(test)
    return float(torch.nn.functional.binary_cross_entropy(chance, test, reduction="none").flatten(1).sum(1).mean())


def load(folder: Path) -> Draw:
    """Load the network of a folder that this script wrote."""
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    model = Draw(**facts["options"] | {"img_size": tuple(facts["options"]["img_size"])})
    model.load_state_dict(safetensors.torch.load_file(folder / WEIGHTS))
    return model.eval()


@torch.no_grad()
def strip(model: Draw, images: Tensor) -> Image.Image:
    """Draw images, and the canvas after each step with what was read and written; last a new image from the prior."""
    told = model(images)
    rows: list[list[Cell | None]] = []
    for number, image in enumerate(images):
        row: list[Cell | None] = [Cell(enlarged(image[0]), heading="image")]
        for step in range(model.steps):
            picture = enlarged(told.canvases[number, step, 0].sigmoid())
            picture = draw_box(picture, scaled(told.written[number, step]))
            picture = draw_box(picture, scaled(told.read[number, step]), color=CYAN)
            row.append(Cell(picture, heading=f"step {step + 1}"))
        rows.append(row)
    canvases, boxes = model.generate(1, torch.Generator().manual_seed(0))
    new: list[Cell | None] = [
        Cell(Image.new("RGB", (SCALE * model.img_size[1], SCALE * model.img_size[0]), "white"), heading="new")
    ]
    for step in range(model.steps):
        new.append(Cell(draw_box(enlarged(canvases[0, step, 0]), scaled(boxes[0, step])), heading=f"step {step + 1}"))
    return sheet(
        [*rows, new],
        panel=SCALE * model.img_size[1],
        title="DRAW",
        notes=[f"{READ}; {WRITTEN}; a box that is not seen lies outside the image", "last row: painted from the prior"],
    )


def enlarged(pixels: Tensor) -> Image.Image:
    """Return gray pixels `(H, W)` in [0, 1] as an RGB picture, `SCALE` times as large."""
    picture = Image.fromarray((pixels * 255).round().byte().numpy()).convert("RGB")
    return picture.resize((picture.width * SCALE, picture.height * SCALE), Image.Resampling.NEAREST)


def scaled(box: Tensor) -> Box:
    """Return a box in pixels of the enlarged picture."""
    return Box(*(float(side) * SCALE for side in box))


def card(options: argparse.Namespace, model: Draw, falling: list[tuple[float, float]], others: tuple[float, float]) -> str:
    """Return the model card: contents of the folder, training procedure and results."""
    test = measured(model, binary("test", options.root, None)).double().numpy()
    low, high = mean_interval(test)
    told = ", ".join(f"{name} {value}" for name, value in NETWORK.items())
    versions = ", ".join(f"{name} {version(name)}" for name in ("visattn", "torch"))
    table = "".join(f"| {epoch} | {one:.1f} | {other:.1f} |\n" for epoch, (one, other) in enumerate(falling, 1))
    return f"""# DRAW on binary `{DATA}`

## Model details

- A variational autoencoder that reads and writes through a grid of Gaussian filters (Gregor et al., 2015): `visattn.models.Draw`.
- Images of {in_pixels(model.img_size)} pixels that are 0 or 1. Options: {told}.
- {sum(parameter.numel() for parameter in model.parameters()):,} parameters.
- Weights: sha256 `{digest(options.output / WEIGHTS)}`, random at the start.

## Training data

- `{DATA}`, MIT (Zalando SE). A pixel is 1 if its value is 128 or more.

## Training procedure

```console
{shlex.join(["python", "scripts/train_draw.py", *sys.argv[1:]])}
```

Adam at a learning rate of {RATE:g} that falls along a cosine, gradients clipped to {CLIP:g}, batches of {BATCH}, {options.epochs} epochs,
{others[1]:.0f} s; {versions}.

## Evaluation results

The variational bound of {len(test):,} test images, an upper bound of their negative log-likelihood:
{test.mean():.1f} nats for each ({float(low):.1f} to {float(high):.1f}, 95 %). If every pixel were independent: {others[0]:.1f} nats.

| epoch | bound of the training images, nats | of the test images |
|--:|--:|--:|
{table}
## Limits

- One run, with seed {options.seed}. The interval covers the choice of test images only.
- Binary images: the bound says nothing of gray values.
- What the network reads is what helps it to paint, which need not be what a person would look at.

## License

Apache-2.0
"""


if __name__ == "__main__":
    main()
