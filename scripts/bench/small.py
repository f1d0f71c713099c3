"""Time of captures and explanations where Python decides, as JSON: `python -m bench.small ROUNDS`, ViT-Ti at 64 px on one thread."""

from __future__ import annotations

import json
import sys

import timm
import torch

import visattn
from bench.counts import Empty
from bench.measuring import series
from visattn.core.capturing import forget

NAME, SIDE = "vit_tiny_patch16_224", 64
PHOTO = 224  # pixels; shrinking a large photo would cost as much as the forward pass
_THREADS = 1


def main(rounds: int) -> dict[str, float]:
    """Return the shortest seconds of each run; runs alternate."""
    torch.set_num_threads(_THREADS)
    torch.manual_seed(0)
    model = timm.create_model(NAME, img_size=SIDE).eval()
    photo = visattn.load_image("photo:coffee").resize((PHOTO, PHOTO))
    pixels = visattn.prepare(photo, model).pixels

    def plain() -> object:
        with torch.no_grad():
            return model(pixels)

    def empty() -> object:
        with torch.no_grad(), Empty():
            return model(pixels)

    def capture() -> object:
        with torch.no_grad(), visattn.capture(model):
            return model(pixels)

    def attention() -> object:
        return visattn.explain(model, photo, method="attention", query="cls")

    def first() -> object:
        forget()
        return attention()

    def relevance() -> object:
        return visattn.explain(model, photo, method="relevance", target=3)

    runs = {
        "plain forward": plain,
        "empty function mode": empty,
        "capture": capture,
        "explain, attention": attention,
        "explain, relevance": relevance,
    }
    alone = {"explain, attention, the first time": first}  # it forgets what all others keep
    seconds = series(runs, rounds, warmup=3) | series(alone, rounds, warmup=3)
    return {name: min(values) for name, values in seconds.items()}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))
