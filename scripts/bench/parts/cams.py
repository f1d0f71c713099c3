"""Grad-CAM against the plain forward pass and its peers."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from bench.parts.part import Options, Part, row, spread, unbounded
from bench.parts.processes import progress, run_json
from visattn._support.tables import Row

RATIO = 1.35  # bound, relative to the plain forward pass
DIFFERENCE = 1e-5  # bound, relative to the largest value
ROUNDS = 60


def rows(options: Options) -> Iterator[Row]:
    """Measure Grad-CAM of a CNN in the first and in later calls, and the same map by other libraries."""
    progress("Grad-CAM")
    found = run_json(sys.executable, "bench.cams", "10" if options.quick else str(ROUNDS), allocator="keeps")
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
            yield row(head, f"{ratio[0]:.3f} x plain", ratio[0], RATIO, f"<= {RATIO:g} x")
        elif differs is not None:
            yield row(head, f"differs by {differs:.1e}", differs, DIFFERENCE, f"<= {DIFFERENCE:g}")
        else:
            yield unbounded(head)


PART = Part(
    "Grad-CAM against the plain forward pass and its peers",
    rows,
    protocol=(
        "Grad-CAM: torchvision's ResNet-50 with random weights, 224 px, batch 1, at `layer4`; ratios as for modules. The run `visattn` "
        "goes from the pixels to the map, and `explain` from the photo, each after a first run at this size. The first run traces the "
        "tokens, as for capture. Peers are given the class. Their map is compared before it is enlarged and scaled.",
    ),
    headlines=(("Grad-CAM of ResNet-50", r"visattn"),),
)
