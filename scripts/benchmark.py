"""Speed and memory, compared with the plain forward pass and with other libraries; exits 1 if a bound is exceeded.

`benchmark.py [--only PART,PART] [--quick] [--write-docs] [--timm-train FILE]`. Each part runs in its own processes
(`python -m bench.timing` and so on). Peers that no extra of visattn installs have their own environment, `.bench/peers`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from pages import folded

from visattn._support.tables import Row, to_markdown, to_text
from visattn.errors import VisattnError

ROOT = Path(__file__).parents[1]
PEERS = ROOT / ".bench" / "peers"
DOCS = ROOT / "docs" / "benchmarks.md"
PARTS = {
    "time": "Time against the plain forward pass",
    "memory": "Memory against the plain forward pass",
    "capture": "Capture alone against the plain forward pass",
    "methods": "Methods against the forward, whole matrices and peers",
    "overlay": "Overlay against its peers",
    "modules": "Attention modules against their peers",
    "cams": "Grad-CAM against the plain forward pass and its peers",
    "training": "Training against timm's, and what drawing maps costs",
    "captions": "Captions by beam search against a loop over pictures",
    "calls": "Calls from Python against bare passes and timm",
    "commands": "CPU time of whole commands",
    "viewer": "The viewer's page",
    "spaces": "All heads in one space",
    "batches": "Many images in one run",
    "films": "Films",
}
HEADLINES = (  # rows at the top of the page: name, part, and the pattern at the beginning of its row
    ("capture and rollout, DINOv2 ViT-S/14, 224 px", "time", r"224 \| \d+ \| rollout"),
    ("capture and rollout, 1036 px", "time", r"1036 \| \d+ \| rollout"),
    ("capture and heads of the last layer, 224 px", "time", r"224 \| \d+ \| last-layer heads"),
    ("memory of rollout against the plain forward pass, 1036 px", "memory", r"1036 \| peak of rollout / .*?"),
    ("later capture alone, all models of the coverage sweep", "capture", r"all .*? \| later"),
    ("rollout from whole matrices, 1036 px", "methods", r"1036 \| dense rollout"),
    ("overlay", "overlay", r"visattn\.overlay.*?"),
    ("overlay of grad-cam", "overlay", r"grad-cam .*?"),
    ("CBAM, forward and backward pass", "modules", r"cbam \| \d+ \| visattn"),
    ("Grad-CAM of ResNet-50", "cams", r"visattn"),
    ("training, images/s", "training", r"visattn\.training\.train"),
    ("captions by beam search, against a loop over pictures", "captions", r"loop over pictures"),
    ("explain on a loaded model, last-layer attention, 518 px", "calls", r"explain, attention"),
    ("the command overlay, against a script by hand, 518 px", "commands", r"visattn overlay, 518 px"),
    ("the viewer's page of 518 px: a hover, until all heads are drawn", "viewer", r"518 \| hover"),
)
SHORT = 10  # tables with more rows are folded
UNNAMED = "time", "differs"  # columns of text that do not name a row

THREADS = 2  # as in bench.measuring, which imports torch
ROUNDS = {224: 60, 518: 15, 1036: 5, 1778: 1}  # side in pixels: timed rounds
ROLLOUT = {224: 1.4, 518: 1.5, 1036: 1.8, 1778: 2.2}  # bound, relative to the plain forward pass
ALLOCATORS: dict[str, dict[str, str]] = {  # settings of glibc's malloc for a process
    "keeps": {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_MAX_": "0"},
    "apart": {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
    "default": {},
}
HEADS = {224: 1.2, 518: 1.1, 1036: 1.2, 1778: 1.3}
CAPTURE = {
    "vit_small_patch16_224": 1.15,
    "swin_tiny_patch4_window7_224": 1.15,
    "cait_xxs24_224": 1.3,
}  # bounds, relative to the plain forward pass; where matrix products are faster, as on some Xeons, the fixed cost weighs more
FIRST_CAPTURE = 1.9  # bound, relative to the plain forward pass
LARGE_FIRST, LARGE_LATER = 3.0, 1.15  # bounds for models of transformers at their real width
CAPTURE_SETTINGS = (1, 2), (1, 1), (2, 1)  # (threads, batch size); only the first has a bound
PROCESSES = 3  # processes per peak at 1036 px
PEAK_RATIO = 1.3
KEPT, SPARE = 1.15, 64e6  # growth may exceed the plain forward's by 1.15 x queries and keys + 64 MB
PEAK_1778 = 3e9
METHOD_ROUNDS = {224: 5, 518: 3, 1036: 1, 1778: 1}
METHODS = {  # run: what its ratio refers to, the largest side that is run, bound in bytes at 1778 px
    "forward": (None, 1036, None),
    "forward + backward": (None, 1036, None),
    "rollout": ("forward", 1778, 4e9),
    "rollout of norms": ("forward", 1778, 4e9),
    "entropy and distance": ("forward", 1778, 4e9),
    "relevance": ("forward + backward", 1778, 10e9),
    "legrad": ("forward + backward", 1778, 10e9),
    "dense rollout": ("rollout", 1036, None),
    "torchxai-explain rollout": ("rollout", 1036, None),
    "fast-vit-rollout": ("rollout", 1036, None),
    "dense relevance": ("relevance", 518, None),
    "torchxai-explain attribution": ("relevance", 518, None),
}
DENSE_RATIO = 3.0  # bound, relative to rollout at 1036 px
OVERLAY_RATIO = 3.3  # bound, relative to the bare OpenCV calls, on Xeons; on EPYC it was 2.4
PEER_RATIO = 1.9  # bound, relative to visattn
MODULES = {"cbam": 1.0, "se": 1.0}  # bounds, relative to timm
MODULE_ROUNDS = 40, 300  # rounds of a module, and of a module with a bound
CAM_RATIO = 1.35  # bound, relative to the plain forward pass
CAM_DIFFERENCE = 1e-5  # bound, relative to the largest value
CAM_ROUNDS = 60
TRAINING = 0.95  # bound, relative to timm's images/s
TRAINING_STEPS, TRAINING_BATCH = 120, 32  # as in bench.training
LOADING, LOADING_ROUNDS = 1.3, 7  # bound on the CPU time, relative to torchvision's loop
TRAINING_PROCESSES = 5  # processes of each loop, which alternate
LOGGER = {"resnet18": 0.02, "vit_tiny_patch16_224": 0.02}  # bound on the share of time, with a figure every 100 steps
LOGGER_EVERY, LOGGER_ROUNDS = 100, 20
CAPTIONS = 4.0  # bound, relative to the loop's captions/s
CAPTION_ROUNDS = 20
CALLS = {  # run: what it is called, what it is compared with, bound of the ratio
    "attention": ("explain, attention", "forward", 1.1),
    "relevance": ("explain, relevance", "forward + backward", 1.35),
    "load_model": ("load_model", "timm", 0.8),
}
CALL_SIDE, CALL_ROUNDS = 518, 20
COMMAND = 1.0  # bound, relative to the script by hand
COMMAND_SECONDS = {"list": 0.6, "doctor": 0.6, "refused input": 0.6}  # bounds in seconds
HELP_SECONDS = 0.06  # bound, more than bare Python
COMMAND_ROUNDS = 11  # CPU times of whole processes vary by some percent
VIEWER = {  # side in pixels: bounds in MB, seconds until the page can be used, ms of a hover over all heads, ms of the 95th of 100 frames
    "224": {"megabytes": 5, "ready": 2, "hover": 50, "frame": 33},
    "518": {"megabytes": 40, "ready": 2, "hover": 120, "frame": 33},
}
VIEWER_UNITS = {"megabytes": "MB", "ready": "s until it can be used", "hover": "ms for all heads", "frame": "ms, 95 % of frames"}
VIEWER_GROWTH = 20.0  # bound in MB, over 3,000 hovers
SPACE_IMAGES = 200
SPACE = {"minutes": ("min", 10.0), "gigabytes": ("GB", 6.0), "megabytes": ("MB", 60.0)}
SPACE_FRAME = 33.0  # milliseconds
BATCH_IMAGES, BATCH_SHARE = 64, 0.9  # bound, as a share of what the stages allow
FILM_FRAMES, FILM_LEVELS = 300, 6.0  # bound of the mean difference from frames that were encoded twice
VIEWER_HOVERS = 1000
SAME_MAP = 1e-4  # bound on the difference of the two maps, relative to the largest value

_PEERS = (
    "grad-cam==1.5.7",
    "torchcam==0.5.0",
    "torchxai-explain==0.3.0",
    "fast-vit-rollout==0.1.1",
)  # installed without dependencies, which would include a second PyTorch
_THEIR_NEEDS = ("matplotlib", "scikit-learn", "ttach")  # what their imports need in addition to the shared packages


class NotMeasured(Exception):
    """A part of the benchmark could not run; the message states why and what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; return 0 if all bounds hold, 1 if one is exceeded, 2 if a part could not be measured."""
    parser = argparse.ArgumentParser(description="Measure speed and memory of visattn, and check the bounds.")
    parser.add_argument("--only", type=parts, default=list(PARTS), metavar="PART,PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="skip 1778 px (some minutes), and run fewer rounds")
    parser.add_argument("--write-docs", action="store_true", help=f"write {DOCS.relative_to(ROOT)} from this run")
    parser.add_argument(
        "--timm-train",
        type=Path,
        metavar="FILE",
        help="path of train.py from timm's repository, which the wheel does not contain",
    )
    options = parser.parse_args(arguments)
    if options.write_docs and options.quick:
        parser.error("--write-docs needs every size. Leave out --quick.")
    print("\n".join(protocol()), flush=True)
    measures: dict[str, Callable[[bool], Iterator[Row]]] = {
        "time": time_rows,
        "memory": memory_rows,
        "capture": capture_rows,
        "methods": method_rows,
        "overlay": overlay_rows,
        "modules": module_rows,
        "cams": cam_rows,
        "training": partial(training_rows, script=options.timm_train),
        "captions": caption_rows,
        "calls": call_rows,
        "commands": command_rows,
        "viewer": viewer_rows,
        "spaces": space_rows,
        "batches": batch_rows,
        "films": film_rows,
    }
    measured: dict[str, list[Row]] = {}
    missing = False
    for part in options.only:
        print(f"\n{PARTS[part]}", flush=True)
        try:
            rows = list(measures[part](options.quick))
        except (NotMeasured, VisattnError) as error:
            print(f"benchmark: error: {part}: {error}", file=sys.stderr)
            missing = True
            continue
        measured[part] = rows
        print(to_text(rows), end="", flush=True)
    entries = [entry for rows in measured.values() for entry in rows if entry["bound"]]
    over = sum(entry["verdict"] == "over" for entry in entries)
    print(f"\n{over} of {len(entries)} bounds exceeded")
    if options.write_docs and not missing:
        DOCS.parent.mkdir(exist_ok=True)
        DOCS.write_text(document(measured), encoding="utf-8")
        print(f"wrote {DOCS.relative_to(ROOT)}")
    return 2 if missing else int(bool(over))


def parts(text: str) -> list[str]:
    """Split a comma-separated list of parts, and check the names."""
    chosen = text.split(",")
    for part in chosen:
        if part not in PARTS:
            raise argparse.ArgumentTypeError(f"no part is called '{part}'. Choose from {', '.join(PARTS)}.")
    return chosen


def protocol() -> list[str]:
    """Return lines about the machine and about how each part is measured."""
    names = ("visattn", "torch", "torchvision", "timm", "opencv-python", "pillow", "numpy")
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    cpu = found[1].strip() if found else platform.machine()
    return [
        f"Machine: {cpu}, {os.cpu_count()} CPUs, PyTorch on {THREADS} threads, OpenCV on its default; {platform.system()}.",
        f"Versions: Python {platform.python_version()}, {', '.join(f'{name} {version(name)}' for name in names)}.",
        "CUDA: not measured; everything here ran on the CPU.",
        "Model: DINOv2 ViT-S/14 with its real weights, float32, inference mode, batch 1. The image is a real photo squeezed to a square.",
        "Time: one process for each size and one warm-up round, then the runs in turn (A B C A B C ...). Times are medians, and ratios "
        "come from one series.",
        'Runs: `rollout` captures every layer. `last-layer heads` captures the last, `capture(model, layers="blocks.11.*")`.',
        f"Allocator: with `keeps`, no memory returns to the system ({settings('keeps')}). This leaves out the time of allocating it "
        f"again. It is set where times are compared. With `apart` ({settings('apart')}), each large tensor returns at once. A peak then "
        "counts live tensors, not holes in the heap. It is set where peaks are compared. The plain forward pass has the same setting.",
        f"Memory: the peak of resident memory (VmHWM) of a fresh process; at 1036 px the median of {PROCESSES} processes, run in turn.",
        "Capture: random weights, 224 px, features not kept. The `first` capture traces the tokens. A `later` one is compared with it, "
        "operation by operation, and traces nothing anew. Its cost is mostly Python and does not depend on threads or batch. So the ratio "
        "is bounded with one thread, and it is larger for a short forward pass. Models of transformers run at their real width on another "
        f"image each time. In the coverage sweep {os.cpu_count()} models run beside each other.",
        "Methods: a fresh process for each method, which includes the capture, with the default allocator. There is one warm-up round at "
        "224 and 518 px; times are medians. The growth is the first round's peak minus the loaded model. Methods with a target explain "
        "feature 0 of the class token.",
        "Whole matrices and peers: they run as far as 24 GB of memory allow. Rollout at 1778 px would take 25 GB, relevance at 1036 px 26 "
        "GB. The column `differs` is the largest difference from our map over its largest value, at 224 px. The attribution of "
        "torchxai-explain, a rollout of attention weighted by its gradient, is another method. It is the nearest one in that package.",
        "Overlay: one process, 10 warm-up rounds, then 400 in turn; medians. All inputs are prepared outside the measured time.",
        "Modules: a forward pass and a backward pass to the input and all parameters, in float32 and training mode. Maps are 256 x 28 x "
        "28; the batch is in the table, smaller where all pairs of positions are weighed. Peers have the same layers and widths; some "
        "modules have no peer. A bare `gate` is only the product of the maps with an existing number for each channel.",
        f"Rounds of modules: one process, one series for each module, the allocator keeps. There are 5 warm-up rounds, then "
        f"{MODULE_ROUNDS[0]} ({MODULE_ROUNDS[1]} with a bound). Every other round runs backwards (A B C C B A ...). The column `measured` "
        "has the median of the ratios of each round, and its 95 % confidence interval. The bound applies to the median.",
        "Grad-CAM: torchvision's ResNet-50 with random weights, 224 px, batch 1, at `layer4`; ratios as for modules. The run `visattn` "
        "goes from the pixels to the map, and `explain` from the photo, each after a first run at this size. The first run traces the "
        "tokens, as for capture. Peers are given the class. Their map is compared before it is enlarged and scaled.",
        f"Training: timm's resnet18 on JPEG files of 64 x 64, batch {TRAINING_BATCH}, SGD, no augmentation, one worker, one epoch of "
        f"{TRAINING_STEPS} steps. The first steps are not counted. The recipe is the same for `visattn.training.train` and timm's "
        f"train.py (from its repository), {TRAINING_PROCESSES} processes of each in turn. Each reports its own images/s.",
        f"Reading images: the same files, one thread and no worker, with a random resized crop, a flip and color jitter; {LOADING_ROUNDS} "
        "epochs of each loop in turn after a first one.",
        "Maps in training: figures of 8 images at 64 px in a bare loop without data. The cost is the added time of a figure's step and "
        f"the next step, over {LOGGER_EVERY} steps.",
        "Captions: show, attend and tell with soft attention, 64 scenes of 64 px in one batch, beam size 5, from pixels to words. The "
        "model was trained briefly on the captions of the scenes. Ratios as for modules.",
        "Loop over pictures: the shape of the usual tutorials, with one image at a time, features copied for each hypothesis, lists of "
        "finished captions, and new attention keys at each step. The run `keys once` computes the keys once.",
        f"Calls: one process, a photo of {CALL_SIDE} x {CALL_SIDE} pixels; `explain` includes the preprocessing and the search for sinks. "
        "The backward pass goes to the pixels. Loading compares `load_model` with timm's `create_model(checkpoint_path=)`, from one local "
        "file. Ratios as for modules.",
        f"Commands: CPU time, user and system, of whole processes; medians of {COMMAND_ROUNDS} in turn after a first one, and ratios of "
        "each turn. The script is [scripts/bench/by_hand.py](../scripts/bench/by_hand.py): the same map by timm, PIL and OpenCV, "
        "with the same compression of the PNG file.",
        f"Viewer: the page of `study.save_html` in Chromium without a window and without a GPU, 1280 x 900 pixels. A hover sets the query "
        f"and draws the image and all heads; the median of {VIEWER_HOVERS}. Frames are those of a pointer that moves over the photo. "
        f"Growth is that of the JavaScript heap over {3 * VIEWER_HOVERS:,} hovers.",
        "All heads in one space: photos with random crops, and generated scenes. Minutes are those of `gather` and `save_html` with PCA; "
        "gigabytes are the peak of the process, model and PyTorch included. Layouts are those of one head of the last layer.",
        "Many images: photos of up to 640 px as JPEG files, 16 in a batch, PNG pictures and a journal, on a local disk; medians of three "
        "rounds. Each stage is also timed alone. The bound is the time without any waiting: decoding, drawing and writing spread over "
        f"{THREADS} CPUs, and the model on all of them.",
        "Films: a camera that moves over a photo, encoded as H.264 and VP9, explained 16 frames at a time and encoded again, in one "
        "process. The forward passes alone take frames that are ready. OpenCV reads the result.",
    ]


def settings(allocator: str) -> str:
    """Return an allocator's environment variables as shell assignments."""
    return " ".join(f"{name}={value}" for name, value in ALLOCATORS[allocator].items())


def row(head: Row, measured: str, value: float, bound: float, limit: str) -> Row:
    """Return a row with its bound and verdict; `limit` starts with `<=` or `>=`."""
    kept = value >= bound if limit.startswith(">=") else value <= bound
    return {**head, "measured": measured, "bound": limit, "verdict": "ok" if kept else "over"}


def unbounded(head: Row, measured: str | None = None) -> Row:
    """Return a row without a bound."""
    return {**head, "measured": measured, "bound": None, "verdict": None}


def time_rows(quick: bool) -> Iterator[Row]:
    """Measure plain forward pass, rollout and last-layer heads, at each size."""
    for side, rounds in sizes(quick).items():
        progress(f"{side} px, {rounds} rounds")
        seconds = run_json(sys.executable, "bench.timing", str(side), str(rounds), allocator="keeps")
        for name, bounds in (("plain forward", {}), ("rollout", ROLLOUT), ("last-layer heads", HEADS)):
            head: Row = {"px": side, "tokens": (side // 14) ** 2 + 1, "run": name, "ms": f"{seconds[name] * 1e3:.1f}"}
            ratio = seconds[name] / seconds["plain forward"]
            if bounds:
                yield row(head, f"{ratio:.3f} x plain", ratio, bounds[side], f"<= {bounds[side]:g} x")
            else:
                yield unbounded(head)


def memory_rows(quick: bool) -> Iterator[Row]:
    """Measure the peak memory of fresh processes, and the growth over the loaded model."""
    series: dict[str, list[dict[str, int]]] = {"plain": [], "rollout": []}
    for turn in range(PROCESSES):
        progress(f"1036 px, processes {turn + 1} of {PROCESSES}")
        for name, sizes_of in series.items():
            sizes_of.append(run_json(sys.executable, "bench.memory", name, "1036", allocator="apart"))
    (peak, growth), (peak_rollout, growth_rollout) = (
        [median(one[key] for one in series[name]) for key in ("peak", "growth")] for name in ("plain", "rollout")
    )
    ratio = peak_rollout / peak
    text = f"{megabytes(peak_rollout)} / {megabytes(peak)} MB = {ratio:.3f} x"
    yield row({"px": 1036, "what": "peak of rollout / peak of plain forward"}, text, ratio, PEAK_RATIO, f"<= {PEAK_RATIO:g} x")
    kept = series["rollout"][0]["kept"]
    bound = growth + KEPT * kept + SPARE
    limit = f"<= {megabytes(growth)} + {KEPT:g} x {megabytes(kept)} + {megabytes(SPARE)} = {megabytes(bound)} MB"
    head: Row = {"px": 1036, "what": "growth of rollout <= growth of plain + 1.15 x queries and keys + 64 MB"}
    yield row(head, f"{megabytes(growth_rollout)} MB", growth_rollout, bound, limit)
    if not quick:
        progress("1778 px")
        largest = run_json(sys.executable, "bench.memory", "rollout", "1778", allocator="apart")["peak"]
        head = {"px": 1778, "what": "peak of rollout"}
        yield row(head, f"{megabytes(largest)} MB", largest, PEAK_1778, f"<= {megabytes(PEAK_1778)} MB")


def capture_rows(quick: bool) -> Iterator[Row]:
    """Measure captures without a method, for models with large layers and with many small ones."""
    for (name, bound), (threads, batch) in product(CAPTURE.items(), CAPTURE_SETTINGS):
        progress(f"{name}, {threads} threads, batch {batch}")
        rounds = "10" if quick else "40"
        found = run_json(sys.executable, "bench.capture", name, str(threads), str(batch), rounds, allocator="keeps")
        head = {"model": name, "threads": threads, "batch": batch, "plain ms": f"{found['seconds'] * 1e3:.1f}"}
        for what, ratio, limit in (("first", found["first"], FIRST_CAPTURE), ("later", found["capture"], bound)):
            if (threads, batch) == CAPTURE_SETTINGS[0]:
                yield row(head | {"capture": what}, f"{ratio:.3f} x plain", ratio, limit, f"<= {limit:g} x")
            else:
                yield unbounded(head | {"capture": what}, f"{ratio:.3f} x plain")
    progress("models of transformers")
    for found in run_json(sys.executable, "bench.libraries", "3" if quick else "15", allocator="keeps"):
        head = {"model": found["model"], "threads": 1, "batch": found["batch"], "plain ms": f"{found['seconds'] * 1e3:.1f}"}
        for what, limit in (("first", LARGE_FIRST), ("later", LARGE_LATER)):
            ratio = found[what]
            if (1, found["batch"]) == CAPTURE_SETTINGS[0]:
                yield row(head | {"capture": what}, f"{ratio:.3f} x plain", ratio, limit, f"<= {limit:g} x")
            else:
                yield unbounded(head | {"capture": what}, f"{ratio:.3f} x plain")
    progress("every model of the coverage sweep")
    sweep = run_json(sys.executable, "bench.capture_sweep", "2" if quick else "3", allocator="keeps")
    head = {"model": f"all {len(sweep)} of the coverage sweep", "threads": 1, "batch": 2, "plain ms": ""}
    for what in ("first", "later"):
        ratios = [one[what] for one in sweep.values()]
        parts = statistics.quantiles(ratios, n=10)
        text = f"median {statistics.median(ratios):.3f}, four of five in {parts[0]:.3f} to {parts[-1]:.3f}"
        text += f", largest {max(ratios):.3f} x plain"
        yield unbounded(head | {"capture": what}, text)
    known = sum(one["remembered"] for one in sweep.values())
    yield unbounded(head | {"capture": "later, token positions reused"}, f"{known} of {len(sweep)} models")


def method_rows(quick: bool) -> Iterator[Row]:
    """Measure each method with its capture, compared with bare passes, whole matrices and other libraries."""
    for side, rounds in METHOD_ROUNDS.items():
        if quick and side == 1778:
            continue
        found: dict[str, dict[str, Any]] = {}
        for name, (base, largest, allowed) in METHODS.items():
            if side > largest:
                continue
            progress(f"{side} px, {name}")
            theirs = name.startswith(("torchxai", "fast-vit"))
            python = str(peers_python()) if theirs else sys.executable
            found[name] = run_json(python, "bench.methods", name, str(side), str(rounds))
            seconds, growth = found[name]["seconds"], found[name]["growth"]
            ratio = seconds / found[base]["seconds"] if base in found else None
            head: Row = {
                "px": side,
                "run": name,
                "s": f"{seconds:.3g}",
                "growth MB": megabytes(growth),
                "time": None if ratio is None else f"{ratio:.2f} x {base}",
                "differs": difference(found[name]["map"], found.get(base or "", {}).get("map")),
            }
            if side == 1036 and name == "dense rollout":
                yield row(head, f"{ratio:.1f} x rollout", ratio or 0, DENSE_RATIO, f">= {DENSE_RATIO:g} x")
            elif side == 1778 and allowed is not None:
                yield row(head, f"{megabytes(growth)} MB", growth, allowed, f"<= {megabytes(allowed)} MB")
            else:
                yield unbounded(head)


def difference(one: list[float] | None, other: list[float] | None) -> str | None:
    """Return the largest difference of two maps relative to the largest value, if both are known."""
    if one is None or other is None:
        return None
    return f"{max(abs(a - b) for a, b in zip(one, other, strict=True)) / max(other):.1e}"


def overlay_rows(quick: bool) -> Iterator[Row]:
    """Measure one overlay of a 37 x 37 map on a 1024 x 768 photo."""
    found = run_json(str(peers_python()), "bench.overlay")
    seconds, versions = found["seconds"], found["versions"]
    ours = seconds["visattn"]
    yield unbounded({"run": "bare OpenCV calls, array to array", "ms": f"{seconds['OpenCV'] * 1e3:.2f}"})
    ratio = ours / seconds["OpenCV"]
    head = {"run": "visattn.overlay, picture to picture", "ms": f"{ours * 1e3:.2f}"}
    yield row(head, f"{ratio:.2f} x OpenCV", ratio, OVERLAY_RATIO, f"<= {OVERLAY_RATIO:g} x")
    for name, call in (("grad-cam", "show_cam_on_image, array to array"), ("torch-cam", "overlay_mask, picture to picture")):
        ratio = seconds[name] / ours
        head = {"run": f"{name} {versions[name]} {call}", "ms": f"{seconds[name] * 1e3:.2f}"}
        yield row(head, f"{ratio:.2f} x visattn", ratio, PEER_RATIO, f">= {PEER_RATIO:g} x")


def module_rows(quick: bool) -> Iterator[Row]:
    """Measure each module of `visattn.nn.ATTENTION`, equivalent modules of other libraries, and a bare gate."""
    progress("forward and backward of each module")
    rounds = (5, 20) if quick else MODULE_ROUNDS
    found = run_json(sys.executable, "bench.modules", *map(str, rounds), ",".join(MODULES), allocator="keeps")
    for name, series in found.items():
        gate = series["seconds"].pop("gate")
        for run, seconds in series["seconds"].items():
            head: Row = {
                "module": name,
                "batch": series["batch"],
                "run": run,
                "parameters": series["parameters"][run],
                "ms": f"{seconds * 1e3:.2f}",
                "time": f"{seconds / gate:.1f} x gate",
            }
            peer = next((other for other in series["seconds"] if other.startswith("timm")), None)
            if run != "visattn" or peer is None:
                yield unbounded(head)
                continue
            measured = f"{spread(series['ratios'][peer])} x timm"
            if name in MODULES:
                yield row(head, measured, series["ratios"][peer][0], MODULES[name], f"<= {MODULES[name]:g} x")
            else:
                yield unbounded(head, measured)


def cam_rows(quick: bool) -> Iterator[Row]:
    """Measure Grad-CAM of a CNN in the first and in later calls, and the same map by other libraries."""
    progress("Grad-CAM")
    found = run_json(sys.executable, "bench.cams", "10" if quick else str(CAM_ROUNDS), allocator="keeps")
    names = {
        "plain": "plain forward",
        "first": "visattn, the first time",
        "visattn": "visattn",
        "explain": "visattn.explain, from a photo",
        "grad-cam": f"grad-cam {found['versions']['grad-cam']} GradCAM",
        "captum": f"captum {found['versions']['captum']} LayerGradCam",
    }
    for name, run in names.items():
        ratio, differs = found["ratios"].get(name), found["differs"].get(name)
        time = f"{spread(ratio)} x plain" if ratio else f"{found['first']:.3f} x plain"
        head: Row = {"run": run, "ms": f"{found['seconds'][name] * 1e3:.1f}", "time": None if name == "plain" else time}
        if name == "visattn":
            yield row(head, f"{ratio[0]:.3f} x plain", ratio[0], CAM_RATIO, f"<= {CAM_RATIO:g} x")
        elif differs is not None:
            yield row(head, f"differs by {differs:.1e}", differs, CAM_DIFFERENCE, f"<= {CAM_DIFFERENCE:g}")
        else:
            yield unbounded(head)


def training_rows(quick: bool, script: Path | None) -> Iterator[Row]:
    """Measure our training loop and timm's alternately, then the cost of figures of maps during training."""
    theirs = "timm's train.py"
    if script is None:
        progress(f"{theirs} is left out: name it with --timm-train FILE; it is in timm's repository, not in the wheel")
    steps = TRAINING_STEPS // 3 if quick else TRAINING_STEPS
    runs = {"visattn.training.train": ["ours"], theirs: ["timm", *([] if script is None else [str(script)])]}
    speeds: dict[str, list[float]] = {run: [] for run in runs}
    with tempfile.TemporaryDirectory() as folder:
        run_json(sys.executable, "bench.training", "pictures", folder, str(steps * TRAINING_BATCH))
        for turn in range(1 if quick or script is None else TRAINING_PROCESSES):
            for run, (kind, *file) in reversed(runs.items()) if turn % 2 else runs.items():
                if run == theirs and script is None:
                    continue
                progress(f"training, {run}, {turn + 1}")
                speeds[run].append(run_json(sys.executable, "bench.training", kind, folder, *file)["speed"])
        progress("reading and augmenting images")
        read = run_json(sys.executable, "bench.training", "loading", folder, "2" if quick else str(LOADING_ROUNDS))
    for run, values in speeds.items():
        head: Row = {"run": run, "images/s": f"{median(values):.1f}" if values else "left out: --timm-train FILE"}
        if run == theirs or script is None:
            yield unbounded(head)
            continue
        ratio = median(one / other for one, other in zip(values, speeds[theirs], strict=True))
        yield row(head, f"{ratio:.3f} x timm", ratio, TRAINING, f">= {TRAINING:g} x")
    head = {"run": "reading and augmenting images, CPU time", "images/s": f"{1 / read['ours']:.0f}"}
    yield row(head, f"{read['ratio']:.3f} x a loop of torchvision", read["ratio"], LOADING, f"<= {LOADING:g} x")
    for model, bound in LOGGER.items():
        progress(f"pages of maps, {model}")
        found = run_json(sys.executable, "bench.training", "logger", model, "5" if quick else str(LOGGER_ROUNDS))
        share = found["page"] / (LOGGER_EVERY * found["step"])
        head = {
            "run": f"AttentionLogger every {LOGGER_EVERY} steps, {model}",
            "images/s": f"{TRAINING_BATCH / found['step']:.1f}",
        }
        measured = f"a page of {found['page'] * 1e3:.0f} ms: {share:.2%}"
        yield row(head, measured, share, bound, f"<= {bound:.0%}")


def caption_rows(quick: bool) -> Iterator[Row]:
    """Measure batched beam search, and loops over images that find the same captions."""
    progress("captions of 64 scenes")
    found = run_json(sys.executable, "bench.captions", "3" if quick else str(CAPTION_ROUNDS), allocator="keeps")
    pictures = found["pictures"]
    runs = {"ours": "visattn search", "loop": "loop over pictures", "loop, keys once": "loop over pictures, keys once"}
    for name, run in runs.items():
        ratio = found["ratios"].get(name)
        head: Row = {"run": run, "captions/s": f"{pictures / found['seconds'][name]:.1f}"}
        if name == "loop":
            yield row(head, f"visattn is {spread(ratio)} x as fast", ratio[0], CAPTIONS, f">= {CAPTIONS:g} x")
        elif ratio:
            yield unbounded(head, f"visattn is {spread(ratio)} x as fast")
        else:
            alike = f"{found['alike']} of {pictures} captions identical in all, {found['steps']:.1f} steps each"
            yield row(head, alike, found["alike"], pictures, f">= {pictures}")


def call_rows(quick: bool) -> Iterator[Row]:
    """Measure calls of `explain` on a loaded model, and loading."""
    progress("calls")
    found = run_json(sys.executable, "bench.calls", str(CALL_SIDE), "5" if quick else str(CALL_ROUNDS))
    for name, seconds in found["seconds"].items():
        run, base, bound = CALLS.get(name, (name, None, None))
        head: Row = {"run": run, "ms": f"{seconds * 1e3:.0f}"}
        if base is None or bound is None:
            yield unbounded(head)
        else:
            ratio = found["ratios"][name]
            yield row(head, f"{spread(ratio)} x {base}", ratio[0], bound, f"<= {bound:g} x")


def command_rows(quick: bool) -> Iterator[Row]:
    """Measure whole commands, and a script that draws the same map by hand."""
    progress("commands")
    found = run_json(sys.executable, "bench.commands", "2" if quick else str(COMMAND_ROUNDS))
    python = found["seconds"]["python"]
    for name, seconds in found["seconds"].items():
        kind, _, side = name.rpartition(" ")
        run = {"overlay": f"visattn overlay, {side} px", "by hand": f"script by hand, {side} px"}.get(kind, name)
        head: dict[str, Any] = {"run": run, "CPU s": f"{seconds:.2f}"}
        if name in found["ratios"]:
            ratio, differs = found["ratios"][name], found["differs"][side]
            yield row(head, f"{ratio:.3f} x by hand", ratio, COMMAND, f"<= {COMMAND:g} x")
            yield row(head | {"run": f"map of {run}"}, f"differs by {differs:.1e}", differs, SAME_MAP, f"<= {SAME_MAP:g}")
        elif name in COMMAND_SECONDS:
            yield row(head, f"{seconds:.2f} s", seconds, COMMAND_SECONDS[name], f"<= {COMMAND_SECONDS[name]:g} s")
        elif name == "--help":
            more = seconds - python
            yield row(head, f"{more * 1e3:.0f} ms more than python", more, HELP_SECONDS, f"<= {HELP_SECONDS * 1e3:g} ms")
        else:
            yield unbounded(head)


def viewer_rows(quick: bool) -> Iterator[Row]:
    """Measure the viewer's page of DINOv2 in Chromium."""
    progress("the viewer's page")
    found = run_json(sys.executable, "bench.viewer", "100" if quick else str(VIEWER_HOVERS))
    for side, bounds in VIEWER.items():
        for what, bound in bounds.items():
            value = found[side][what]
            yield row({"px": side, "what": what}, f"{value:.3g} {VIEWER_UNITS[what]}", value, bound, f"<= {bound:g}")
        growth = found[side]["growth"]
        yield row(
            {"px": side, "what": "growth over hovers"}, f"{growth:.1f} MB", growth, VIEWER_GROWTH, f"<= {VIEWER_GROWTH:g} MB"
        )


def space_rows(quick: bool) -> Iterator[Row]:
    """Measure queries and keys of all heads of DINOv2 over many images, and their page in Chromium."""
    progress("all heads in one space")
    found = run_json(sys.executable, "bench.spaces", "12" if quick else str(SPACE_IMAGES))
    about = f"{found['images']} images of {found['tokens']} tokens, {found['heads']} heads"
    for what, (unit, bound) in SPACE.items():
        yield row({"run": about, "what": what}, f"{found[what]:.3g} {unit}", found[what], bound, f"<= {bound:g} {unit}")
    frame = {"run": f"zooming all heads, {found['points']:,} points", "what": "95th percentile of a frame"}
    yield row(frame, f"{found['frame']:.3g} ms", found["frame"], SPACE_FRAME, f"<= {SPACE_FRAME:g} ms")
    for method in ("tsne", "umap"):
        yield unbounded(
            {"run": f"{method} of one head, {found['laid out']:,} points", "what": "layout"}, f"{found[method]:.1f} s"
        )


def batch_rows(quick: bool) -> Iterator[Row]:
    """Measure a run over a folder of photos against its stages."""
    progress("a folder of photos")
    found = run_json(sys.executable, "bench.batches", "16" if quick else str(BATCH_IMAGES))
    about = f"{found['images']} photos, rollout, DINOv2 ViT-S/14 at 224 px"
    for stage, what in (("decode", "1 thread"), ("model", f"{THREADS} threads"), ("draw", "1 thread"), ("write", "1 thread")):
        yield unbounded({"run": about, "what": f"{stage}, {what}"}, f"{found['images'] / found[stage]:.1f} images/s")
    told = f"{found['share']:.2f} x {found['images'] / found['bound']:.1f} images/s"
    yield row({"run": about, "what": "whole run / bound"}, told, found["share"], BATCH_SHARE, f">= {BATCH_SHARE:g} x")


def film_rows(quick: bool) -> Iterator[Row]:
    """Measure films against the bare forward passes of their frames, and read them with OpenCV."""
    progress("films")
    count = 24 if quick else FILM_FRAMES
    for codec, found in run_json(sys.executable, "bench.films", str(count)).items():
        about = f"{count} frames, 240 x 320, {codec}, rollout, view beside"
        told = f"{found['whole'] / found['bare']:.2f} x {found['bare']:.1f} s"
        yield unbounded({"film": about, "what": "whole / forward passes alone"}, told)
        if (found["read"], found["rate"]) != (count, 30):
            raise NotMeasured(f"OpenCV reads {found['read']} frames at {found['rate']} a second, of {count} at 30")
        told = f"{found['read']} frames, {found['rate']:g} a second, {found['levels']:.1f} levels"
        head: Row = {"film": about, "what": "read by OpenCV, mean difference from the frames"}
        yield row(head, told, found["levels"], FILM_LEVELS, f"<= {FILM_LEVELS:g} levels")


def spread(ratio: Sequence[float]) -> str:
    """Format a ratio and its interval."""
    return "{:.3f} ({:.3f} to {:.3f})".format(*ratio)


def peers_python() -> Path:
    """Return the interpreter of the peers' environment; create it on first use. PyTorch, OpenCV and visattn are shared with ours.

    Raises:
        NotMeasured: If the peers cannot be installed.
    """
    python = PEERS / "bin" / "python"
    ready = PEERS / ".ready"
    wanted = "\n".join((*_PEERS, *_THEIR_NEEDS, sys.version))
    if ready.exists() and ready.read_text() == wanted:
        return python
    progress("installing the peers into .bench/peers (some 170 MB)")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1", "--timeout", "15"]
    steps = [[sys.executable, "-m", "venv", "--clear", str(PEERS)], [*pip, *_THEIR_NEEDS], [*pip, "--no-deps", *_PEERS]]
    for number, step in enumerate(steps):
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            reason = (done.stderr.strip() or done.stdout.strip() or "no reason given").splitlines()[-1]
            raise NotMeasured(
                f"the peers {' and '.join(_PEERS)} cannot be installed ({reason}). Run this once where a package index can be "
                "reached; the other parts need none: --only time, --only memory."
            )
        if number == 0:
            site = next((PEERS / "lib").glob("python*/site-packages"))
            (site / "shared.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    ready.write_text(wanted)
    return python


def run_json(python: str, part: str, *arguments: str, allocator: str = "default") -> Any:  # noqa: ANN401
    """Run a part of the benchmark in its own process and return the JSON that it prints.

    Raises:
        NotMeasured: If the process fails.
    """
    command = [python, "-m", part, *arguments]
    env = (
        os.environ
        | ALLOCATORS[allocator]
        | {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))}
    )
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=env)
    if done.returncode != 0:
        raise NotMeasured(f"{part} {' '.join(arguments)} ended with status {done.returncode}; its message is above.")
    return json.loads(done.stdout)


def document(measured: dict[str, list[Row]]) -> str:
    """Return the docs page: headlines, tables, protocol. Parts that were not measured in this run keep their tables."""
    before = DOCS.read_text(encoding="utf-8") if DOCS.exists() else ""
    standing = dict(re.findall(r"^## (.+)\n\n(?:<details>.+\n\n)?((?:\|.*\n)+)", before, re.MULTILINE))
    known = {title: to_markdown(measured[part]) if part in measured else standing.get(title) for part, title in PARTS.items()}
    tables = {title: table for title, table in known.items() if table}
    kept, over = (sum(table.count(f"| {verdict} |") for table in tables.values()) for verdict in ("ok", "over"))
    intro = (
        "Run `make bench` to measure everything anew; it fails if a bound is exceeded. In the runs below, "
        f"{over} of {kept + over} bounds are exceeded. The word `plain` stands for the model's forward pass without visattn. The page is "
        "written by `scripts/benchmark.py --write-docs`, each table from one run and with the bounds of that run: [how it was "
        "measured](#how-it-was-measured)."
    )
    sections = [f"## {title}\n\n{shortened(table)}" for title, table in tables.items()]
    how = "\n".join(["## How it was measured\n", *(f"- {line}" for line in protocol()), ""])
    broken = exceeded(tables)
    listed = ["Exceeded bounds:\n", to_markdown(broken)] if broken else []
    return "\n".join(["# Benchmarks\n", f"{intro}\n", to_markdown(headlines(tables)), *listed, *sections, how])


def headlines(tables: Mapping[str, str]) -> list[Row]:
    """Return the measured rows of `HEADLINES`, each with the last three cells of its table."""
    rows: list[Row] = []
    for name, part, start in HEADLINES:
        if found := re.search(rf"^\| {start} \|.*$", tables.get(PARTS[part], ""), re.MULTILINE):
            measured, bound, verdict = (cell.strip() for cell in found[0].strip("|").split("|")[-3:])
            if measured:  # timm's train.py is not always there to compare with
                rows.append({"what": name, "measured": measured, "bound": bound, "verdict": verdict})
    return rows


def exceeded(tables: Mapping[str, str]) -> list[Row]:
    """Return the rows whose bound is exceeded, each with its name: the cells of text before the last three, and the pixels."""
    rows: list[Row] = []
    for title, table in tables.items():
        lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        for *cells, measured, bound, verdict in lines[2:]:
            if verdict == "over":
                named = {head: cell for head, cell in zip(lines[0], cells, strict=False) if head not in UNNAMED}
                words = [f"{cell} px" if head == "px" else cell for head, cell in named.items()]
                words = [word for word in words if re.search(r"[^\d.,]", word)]
                rows.append({"what": f"{title}: {', '.join(words)}", "measured": measured, "bound": bound, "verdict": verdict})
    return rows


def shortened(table: str) -> str:
    """Return a table; a long one is put into a fold."""
    rows = table.count("\n") - 2
    return table if rows <= SHORT else folded(f"Table of {rows} rows", table)


def sizes(quick: bool) -> dict[int, int]:
    """Return the sides in pixels, and the number of rounds for each."""
    return {side: rounds for side, rounds in ROUNDS.items() if not (quick and side == 1778)}


def megabytes(count: float) -> str:
    """Format bytes as MB."""
    return f"{count / 1e6:.0f}"


def progress(text: str) -> None:
    """Print on stderr what is being measured."""
    print(f"  ... {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
