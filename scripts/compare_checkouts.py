"""Time comparison of two checkouts: `compare_checkouts.py OLD NEW [--rounds 60]`.

Each checkout runs in its own process, with this Python and one thread. Rounds alternate, so that both run under the same conditions.
Timed are a repeated capture, `overlay` of a finished heatmap, and an explanation with its picture. Printed is the median of the ratios
new / old over all rounds, with a 95 % bootstrap interval (2,000 resamples, seed 0).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import numpy as np

CHILD = """
import sys, time
import numpy as np, torch, visattn
from visattn import data

torch.set_num_threads(1)
torch.manual_seed(0)
model = visattn.load_model("vit_small_patch16_224", weights="none")
pixels = torch.randn(2, 3, 224, 224)
photo = visattn.load_image(data.photo_path("coffee")).resize((1024, 768))
found = visattn.explain(model, photo, method="rollout")
heat = found.heatmap()

def capture():
    with torch.inference_mode(), visattn.capture(model, features="none"):
        model(pixels)

runs = {
    "capture": capture,
    "overlay": lambda: visattn.overlay(photo, heat),
    "explanation": lambda: visattn.explain(model, photo, method="rollout").overlay(),
}
print(visattn.__file__, flush=True)
for line in sys.stdin:
    run, count = runs[line.split()[0]], int(line.split()[1])
    start = time.perf_counter()
    for _ in range(count):
        run()
    print(time.perf_counter() - start, flush=True)
"""
COUNTS = {"capture": 2, "overlay": 20, "explanation": 2}  # calls in one round
WARMUP = 4
# never return memory to the system: otherwise glibc sometimes maps a picture's memory again in each call, half the time of an overlay
KEEPS = {"MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_MAX_": "0"}


def child(checkout: Path) -> subprocess.Popen[str]:
    """Start the process of one checkout."""
    environment = {**os.environ, **KEEPS, "PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1"}
    made = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd="/",
    )
    loaded = _stream(made.stdout).readline().strip()
    if not Path(loaded).is_relative_to(checkout.resolve()):
        sys.exit(f"{checkout}: {loaded or 'nothing'} was imported instead")
    return made


def seconds(process: subprocess.Popen[str], run: str) -> float:
    """Time one round."""
    stdin = _stream(process.stdin)
    stdin.write(f"{run} {COUNTS[run]}\n")
    stdin.flush()
    return float(_stream(process.stdout).readline())


def _stream(stream: IO[str] | None) -> IO[str]:
    assert stream is not None  # noqa: S101 - it is a pipe
    return stream


def main() -> None:
    """Run the comparison and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=60)
    given = parser.parse_args()
    old, new = child(given.old), child(given.new)
    random = np.random.default_rng(0)
    for run in COUNTS:
        pairs = []
        for number in range(given.rounds + WARMUP):
            first, second = (old, new) if number % 2 else (new, old)
            times = {id(process): seconds(process, run) for process in (first, second)}
            pairs.append(times[id(new)] / times[id(old)])
        ratios = np.array(pairs[WARMUP:])
        drawn = np.median(random.choice(ratios, (2000, len(ratios))), axis=1)
        low, high = np.percentile(drawn, (2.5, 97.5))
        print(f"{run:<12} new / old {np.median(ratios):.3f} ({low:.3f} to {high:.3f}), {given.rounds} rounds")
    for process in (old, new):
        process.kill()


if __name__ == "__main__":
    main()
