"""Training against timm's, and what drawing maps costs."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from statistics import median

from bench.parts.part import Options, Part, row, unbounded
from bench.parts.processes import progress, run_json
from bench.shared import TRAINING_BATCH
from visattn._support.tables import Row

RATIO = 0.95  # bound, relative to timm's images/s
STEPS = 120
LOADING, LOADING_ROUNDS = 1.3, 7  # bound on the CPU time, relative to torchvision's loop
PROCESSES = 5  # processes of each loop, which alternate
LOGGER = {"resnet18": 0.02, "vit_tiny_patch16_224": 0.02}  # bound on the share of time, with a figure every 100 steps
LOGGER_EVERY, LOGGER_ROUNDS = 100, 20


def rows(options: Options) -> Iterator[Row]:
    """Measure our training loop and timm's alternately, then the cost of figures of maps during training."""
    theirs = "timm's train.py"
    if options.timm_train is None:
        progress(f"{theirs} is left out: name it with --timm-train FILE; it is in timm's repository, not in the wheel")
    steps = STEPS // 3 if options.quick else STEPS
    runs = {
        "visattn.training.train": ["ours"],
        theirs: ["timm", *([] if options.timm_train is None else [str(options.timm_train)])],
    }
    speeds: dict[str, list[float]] = {run: [] for run in runs}
    with tempfile.TemporaryDirectory() as folder:
        run_json(sys.executable, "bench.training", "pictures", folder, str(steps * TRAINING_BATCH))
        for turn in range(1 if options.quick or options.timm_train is None else PROCESSES):
            for run, (kind, *file) in reversed(runs.items()) if turn % 2 else runs.items():
                if run == theirs and options.timm_train is None:
                    continue
                progress(f"training, {run}, {turn + 1}")
                speeds[run].append(run_json(sys.executable, "bench.training", kind, folder, *file)["speed"])
        progress("reading and augmenting images")
        read = run_json(sys.executable, "bench.training", "loading", folder, "2" if options.quick else str(LOADING_ROUNDS))
    for run, values in speeds.items():
        head: Row = {"run": run, "images/s": f"{median(values):.1f}" if values else "left out: --timm-train FILE"}
        if run == theirs or options.timm_train is None:
            yield unbounded(head)
            continue
        ratio = median(one / other for one, other in zip(values, speeds[theirs], strict=True))
        yield row(head, f"{ratio:.3f} x timm", ratio, RATIO, f">= {RATIO:g} x", "peer: timm's train.py")
    head = {"run": "reading and augmenting images, CPU time", "images/s": f"{1 / read['ours']:.0f}"}
    yield row(
        head,
        f"{read['ratio']:.3f} x a loop of torchvision",
        read["ratio"],
        LOADING,
        f"<= {LOADING:g} x",
        "peer: torchvision; ours resumes within an epoch",
    )
    for model, bound in LOGGER.items():
        progress(f"pages of maps, {model}")
        found = run_json(sys.executable, "bench.training", "logger", model, "5" if options.quick else str(LOGGER_ROUNDS))
        share = found["page"] / (LOGGER_EVERY * found["step"])
        head = {
            "run": f"AttentionLogger every {LOGGER_EVERY} steps, {model}",
            "images/s": f"{TRAINING_BATCH / found['step']:.1f}",
        }
        measured = f"a page of {found['page'] * 1e3:.0f} ms: {share:.2%}"
        yield row(head, measured, share, bound, f"<= {bound:.0%}", "promise: nobody turns it off for speed")


PART = Part(
    "Training",
    rows,
    protocol=(
        f"timm's resnet18 on JPEG files of 64 x 64, batch {TRAINING_BATCH}, SGD, no augmentation, one worker, one epoch of {STEPS} steps; "
        f"{PROCESSES} processes of `visattn.training.train` and of timm's train.py in turn. Reading: one thread, no worker, a random "
        f"resized crop, a flip and color jitter; {LOADING_ROUNDS} epochs of each loop in turn. Maps: the added time of a figure's step (8 "
        f"images at 64 px) and the next step, over {LOGGER_EVERY} steps without data.",
    ),
    headlines=(("training, images/s", r"visattn\.training\.train"),),
)
