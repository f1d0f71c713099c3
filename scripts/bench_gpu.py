"""Exactness and speed on a GPU: `bench_gpu.py [--device cuda] [--smoke]`.

Prints a table with bounds; returns 1 if one is exceeded, 2 without a GPU. `--device cpu --smoke` runs the same code on small inputs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
from bench.counts import Empty
from bench.parts.part import row, unbounded
from torch import Tensor, nn

import visattn
from visattn import data
from visattn._support.tables import Row, to_text
from visattn.core import methods
from visattn.core.pipeline.inputs import prepare_with
from visattn.core.pipeline.preprocessing import Preprocessing
from visattn.core.pipeline.question import ask
from visattn.core.pipeline.running import explained

PATCH = 14
EXACT = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of outputs, whose own rounding is 2**-8 in bfloat16
ROLLOUT, BATCH = 1.5, 1.1  # bounds, relative to the forward pass alone
CALLS = {"capture": 1.5, "explain, attention": 4.0}  # bounds, relative to the forward pass alone
SIDE = 224
ROUNDS = 7


def main() -> int:
    """Measure, print the table, and return the status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--smoke", action="store_true", help="small inputs")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("bench-gpu: no GPU here, so nothing was measured. Run it on a machine with one.", file=sys.stderr)
        return 2
    if device.type == "cuda":
        torch.cuda.set_device(device)
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"Machine: {place}; torch {torch.__version__}; TF32 off.")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model = visattn.load_model(data.OFFLINE_MODEL, weights=data.offline_weights(), device=options.device)
    small, large = (8, 12) if options.smoke else (37, 127)  # patches along a side: 1,370 and 16,130 tokens
    rows = [*exactness(model, small), *calls(model), *rollout(model, large), *batch(model, 4 if options.smoke else 64)]
    print(to_text(rows), end="")
    bounded = [row for row in rows if row["bound"]]
    over = sum(row["verdict"] == "over" for row in bounded)
    print(f"{over} of {len(bounded)} bounds exceeded")
    return int(bool(over))


def exactness(model: nn.Module, side: int) -> Iterator[Row]:
    """Compare outputs of recorded attention with those of the model's own kernels."""
    for dtype, bound in EXACT.items():
        model.to(dtype)
        image = pixels(side).to(next(model.parameters()).device, dtype)
        with visattn.capture(model, gradients=True) as recording:
            model(image)
        worst = max(record.error() for record in recording)
        name = str(dtype).removeprefix("torch.")
        head = {"what": f"attention x values against the kernel's output, {name}"}
        yield row(head, f"{worst:.1e} of the maximum", worst, bound, f"<= {bound:g}", "limit: rounding of this type")
    model.float()


def calls(model: nn.Module) -> Iterator[Row]:
    """Measure a capture, and a call from a photo, against the forward pass alone, where launches and Python decide."""
    photo = visattn.load_image("photo:coffee").resize((SIDE, SIDE))
    image = visattn.prepare(photo, model, img_size=SIDE).pixels.to(next(model.parameters()).device)

    def empty() -> None:
        with torch.inference_mode(), Empty():
            model(image)

    def capture() -> None:
        with torch.inference_mode(), visattn.capture(model):
            model(image)

    runs = {
        "empty function mode": empty,
        "capture": capture,
        "explain, attention": lambda: visattn.explain(model, photo, method="attention", img_size=SIDE),
        "explain, rollout": lambda: visattn.explain(model, photo, method="rollout", img_size=SIDE),
    }
    seconds = medians({"plain": lambda: plain(model, image), **runs})
    for name in runs:
        ratio = seconds[name] / seconds["plain"]
        head: Row = {"what": f"{name}, {SIDE} px / forward pass"}
        measured = f"{ratio:.2f} x {seconds['plain'] * 1e3:.1f} ms"
        if name in CALLS:
            yield row(head, measured, ratio, CALLS[name], f"<= {CALLS[name]:g}", "limit: Python beside the launches")
        else:
            yield unbounded(head, measured)


def rollout(model: nn.Module, side: int) -> Iterator[Row]:
    """Measure rollout against the forward pass alone, in the dtype whose kernels are fast."""
    model.to(torch.bfloat16)
    image = pixels(side).to(next(model.parameters()).device, torch.bfloat16)

    def rolled() -> None:
        with torch.inference_mode():
            with visattn.capture(model) as recording:
                model(image)
            methods.rollout(recording)

    seconds = medians({"plain": lambda: plain(model, image), "rollout": rolled})
    model.float()
    ratio = seconds["rollout"] / seconds["plain"]
    head = {"what": f"rollout of {side**2 + 1:,} tokens / forward pass, bfloat16"}
    yield row(
        head,
        f"{ratio:.2f} x {seconds['plain'] * 1e3:.1f} ms",
        ratio,
        ROLLOUT,
        f"<= {ROLLOUT:g}",
        "limit: the pass, then the weights of each layer times one row",
    )


def batch(model: nn.Module, count: int) -> Iterator[Row]:
    """Measure the explanations of a batch against its forward pass alone."""
    photo, how, question = visattn.load_image("photo:coffee"), Preprocessing(resize="model", img_size=224), ask("attention")
    prepared = [prepare_with([photo], model, how) for _ in range(count)]
    images = torch.cat([one.pixels for one in prepared])
    seconds = medians({"plain": lambda: plain(model, images), "batch": lambda: explained(model, prepared, question)})
    ratio = seconds["batch"] / seconds["plain"]
    head = {"what": f"{count} photos explained / forward pass"}
    yield row(
        head,
        f"{ratio:.2f} x {seconds['plain'] * 1e3:.1f} ms",
        ratio,
        BATCH,
        f"<= {BATCH:g}",
        "limit: the pass, and one row of weights",
    )


def pixels(side: int) -> Tensor:
    """Return random pixels of so many patches along a side."""
    return torch.randn(1, 3, PATCH * side, PATCH * side, generator=torch.Generator().manual_seed(0))


def plain(model: nn.Module, image: Tensor) -> object:
    """Run only the forward pass."""
    with torch.inference_mode():
        return model(image)


def medians(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return median seconds of runs in turn, after a first round; each ends when the GPU has ended."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(ROUNDS + 1):
        for name, run in runs.items():
            synchronize()
            start = time.perf_counter()
            run()
            synchronize()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def synchronize() -> None:
    """Wait for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
