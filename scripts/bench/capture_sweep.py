"""Time of captures of all models of the coverage sweep, as JSON: `python -m bench.capture_sweep ROUNDS [NAME ...]`.

Each model runs on one thread. As many models run beside each other as there are CPUs.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from multiprocessing import get_context

import timm
import torch

import visattn
from bench.measuring import medians
from bench.zoo import MODELS
from visattn.core.capturing import forget
from visattn.core.capturing.trace.tape import TAPES
from visattn.errors import NoAttentionCaptured

_THREADS, _BATCH = 1, 2


def main(rounds: int, names: list[str]) -> dict[str, dict[str, float | bool]]:
    """Return for each model the ratios of a first and of a later capture, and whether the later one reused token positions."""
    chosen = [(name, rounds) for name in MODELS if not names or name in names]
    with get_context("spawn").Pool(os.cpu_count()) as pool:
        return dict(pool.imap(_of, chosen, chunksize=1))


def _of(chosen: tuple[str, int]) -> tuple[str, dict[str, float | bool]]:
    """Build a model and measure it."""
    name, rounds = chosen
    torch.set_num_threads(_THREADS)
    warnings.filterwarnings("ignore")
    size, arguments = MODELS[name]
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, **arguments).eval()
    side = size or timm.data.resolve_model_data_config(model)["input_size"][-1]
    found = measured(model, torch.randn(_BATCH, 3, side, side), rounds)
    print(f"{name}: {found}", file=sys.stderr, flush=True)
    del model
    gc.collect()
    return name, found


def measured(model: torch.nn.Module, image: torch.Tensor, rounds: int) -> dict[str, float | bool]:
    """Measure the ratios of one model."""

    def plain() -> None:
        with torch.inference_mode():
            model(image)

    def capture() -> None:
        try:
            with torch.inference_mode(), visattn.capture(model, features="none"):
                model(image)
        except NoAttentionCaptured:  # the pass was traced all the same
            pass

    def first() -> None:
        forget()
        capture()

    early = medians({"plain": plain, "first": first}, max(rounds // 2, 2), warmup=1)
    capture()
    capture()  # models that cache tensors in the first forward pass, such as biases, run other operations in the second
    tapes = TAPES.of(model)
    later = medians({"plain": plain, "capture": capture}, rounds, warmup=1)
    known = bool(tapes) and TAPES.of(model)[0] is tapes[0]
    return {"first": early["first"] / early["plain"], "later": later["capture"] / later["plain"], "remembered": known}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), sys.argv[2:])))
