"""Grad-CAM against its peers and the plain forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.parts.part import Options, Part, megabytes, row, spread, unbounded
from bench.parts.processes import peers_python, progress, run_json
from visattn._support.tables import Row

MODELS = {"resnet50": "layer4", "densenet121": "features.denseblock4", "efficientnet_b0": "features.8"}  # name: layer
RATIO = 1.05  # bound, relative to captum
PEER_RATIO = 1.0  # bound of other libraries, relative to visattn
PEAK = 1.1  # bound, relative to captum
DIFFERENCE = 1e-5  # bound, relative to the largest value
ROUNDS = 60
PEERS = {"grad-cam": "GradCAM", "torch-cam": "GradCAM", "captum": "LayerGradCam"}


def rows(options: Options) -> Iterator[Row]:
    """Measure Grad-CAM of three CNNs, and the same maps by other libraries."""
    python = str(peers_python())
    for name, layer in MODELS.items():
        progress(f"Grad-CAM of {name}")
        found = run_json(python, "bench.cams", name, layer, "10" if options.quick else str(ROUNDS), allocator="keeps")
        yield from _of_model(name, found)
    name, layer = next(iter(MODELS.items()))
    progress(f"peaks of {name}")
    peaks = {
        run: run_json(python, "bench.cams", name, layer, "peak", run, allocator="apart") for run in ("plain", "visattn", "captum")
    }
    told = ", ".join(f"{run} {megabytes(peak)}" for run, peak in peaks.items())
    head = _head(name, "peak memory of a first call")
    yield row(head, f"{told} MB", peaks["visattn"] / peaks["captum"], PEAK, f"<= {PEAK:g} x captum", "peer: captum")


def _of_model(name: str, found: dict[str, Any]) -> Iterator[Row]:
    seconds, to_plain = found["seconds"], {run: f"{spread(ratio)} x plain" for run, ratio in found["plain"].items()}
    yield unbounded(_head(name, "plain forward", seconds["plain"]))
    yield unbounded(_head(name, "visattn, the first time", seconds["first"], f"{found['first']:.3f} x plain"))
    ratio = found["captum"]
    head = _head(name, "visattn", seconds["visattn"], to_plain["visattn"])
    yield row(head, f"{spread(ratio)} x captum", ratio[0], RATIO, f"<= {RATIO:g} x", "peer: captum")
    yield unbounded(_head(name, "visattn.explain, from a photo", seconds["explain"], to_plain["explain"]))
    for peer, call in PEERS.items():
        ratio, differs = found["visattn"][peer], found["differs"][peer]
        run = f"{peer} {found['versions'][peer]} {call}"
        head = _head(name, run, seconds[peer], to_plain[peer])
        measured = f"{spread(ratio)} x visattn"
        if peer == "captum":
            yield unbounded(head, measured)
        else:
            yield row(head, measured, ratio[0], PEER_RATIO, f">= {PEER_RATIO:g} x", f"peer: {peer}")
        yield row(
            _head(name, f"map of {run}"), f"differs by {differs:.1e}", differs, DIFFERENCE, f"<= {DIFFERENCE:g}", f"peer: {peer}"
        )


def _head(name: str, run: str, seconds: float | None = None, time: str | None = None) -> Row:
    return {"model": name, "run": run, "ms": None if seconds is None else f"{seconds * 1e3:.1f}", "time": time}


PART = Part(
    "Grad-CAM",
    rows,
    protocol=(
        "CNNs of torchvision with random weights, 224 px, batch 1, one thread, at their last feature map. `visattn` goes from the pixels "
        "to the map, and `explain` from the photo, each after a first run, which traces the tokens. Peers are given the class; their map "
        "is compared before it is enlarged and scaled. captum checks nothing: beyond it, visattn compares each call with the tape, and "
        "reads the kernels of convolutions to prove that no cell is displaced.",
    ),
    headlines=(
        ("Grad-CAM of ResNet-50", r"resnet50 \| visattn"),
        ("Grad-CAM of ResNet-50 by grad-cam", r"resnet50 \| grad-cam .*?"),
        ("Grad-CAM of ResNet-50 by torch-cam", r"resnet50 \| torch-cam .*?"),
    ),
)
