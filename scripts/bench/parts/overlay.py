"""Overlay against its peers."""

from __future__ import annotations

from collections.abc import Iterator

from bench.parts.part import Options, Part, row, unbounded
from bench.parts.processes import peers_python, run_json
from visattn._support.tables import Row

RATIO = 3.3  # bound, relative to the bare OpenCV calls, on Xeons; on EPYC it was 2.4
PEER_RATIO = 1.9  # bound, relative to visattn


def rows(options: Options) -> Iterator[Row]:
    """Measure one overlay of a 37 x 37 map on a 1024 x 768 photo."""
    found = run_json(str(peers_python()), "bench.overlay")
    seconds, versions = found["seconds"], found["versions"]
    ours = seconds["visattn"]
    yield unbounded({"run": "bare OpenCV calls, array to array", "ms": f"{seconds['OpenCV'] * 1e3:.2f}"})
    ratio = ours / seconds["OpenCV"]
    head = {"run": "visattn.overlay, picture to picture", "ms": f"{ours * 1e3:.2f}"}
    yield row(head, f"{ratio:.2f} x OpenCV", ratio, RATIO, f"<= {RATIO:g} x")
    for name, call in (("grad-cam", "show_cam_on_image, array to array"), ("torch-cam", "overlay_mask, picture to picture")):
        ratio = seconds[name] / ours
        head = {"run": f"{name} {versions[name]} {call}", "ms": f"{seconds[name] * 1e3:.2f}"}
        yield row(head, f"{ratio:.2f} x visattn", ratio, PEER_RATIO, f">= {PEER_RATIO:g} x")


PART = Part(
    "Overlay against its peers",
    rows,
    protocol=(
        "Overlay: one process, 10 warm-up rounds, then 400 in turn; medians. All inputs are prepared outside the measured time.",
    ),
    headlines=(
        ("overlay", r"visattn\.overlay.*?"),
        ("overlay of grad-cam", r"grad-cam .*?"),
    ),
)
