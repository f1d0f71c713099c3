"""Overlay against its peers."""

from __future__ import annotations

from collections.abc import Iterator

from bench.parts.part import Options, Part, row, unbounded
from bench.parts.processes import peers_python, run_json
from visattn._support.tables import Row

RATIO = 1.5  # bound, relative to the bare OpenCV calls
PEER_RATIO = 2.0  # bound, relative to visattn


def rows(options: Options) -> Iterator[Row]:
    """Measure one overlay of a 37 x 37 map on a 1024 x 768 photo."""
    found = run_json(str(peers_python()), "bench.overlay")
    seconds, versions = found["seconds"], found["versions"]
    ours = seconds["visattn"]
    yield unbounded({"run": "bare OpenCV calls, array to array", "ms": f"{seconds['OpenCV'] * 1e3:.2f}"})
    ratio = ours / seconds["OpenCV"]
    head = {"run": "visattn.overlay, picture to picture", "ms": f"{ours * 1e3:.2f}"}
    yield row(head, f"{ratio:.2f} x OpenCV", ratio, RATIO, f"<= {RATIO:g} x", "limit: resize, color and blend, each once")
    for name, call in (("grad-cam", "show_cam_on_image, array to array"), ("torch-cam", "overlay_mask, picture to picture")):
        ratio = seconds[name] / ours
        head = {"run": f"{name} {versions[name]} {call}", "ms": f"{seconds[name] * 1e3:.2f}"}
        yield row(head, f"{ratio:.2f} x visattn", ratio, PEER_RATIO, f">= {PEER_RATIO:g} x", f"peer: {name}")


PART = Part(
    "Overlay",
    rows,
    protocol=(
        "One process, 10 warm-up rounds, then 400 in turn; medians. The bare calls are `cv2.resize` of the map, `cv2.LUT` to color and "
        "`cv2.addWeighted`, on 8-bit arrays. visattn starts from a picture and its map in float32, and returns a picture.",
    ),
    headlines=(
        ("overlay", r"visattn\.overlay.*?"),
        ("overlay of grad-cam", r"grad-cam .*?"),
    ),
)
