"""Models of Ultralytics: boxes as its own predictor keeps them, and maps beside maps by hand. Weights are random.

The package is under AGPL-3.0, so it is no dependency: if it is missing, this script alone installs it, into a folder of its own. Prints a
table; --write-docs also writes it to the file beside docs/libraries.md. Exits 1 if a row is wrong.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib import import_module, invalidate_caches
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from libraries.task_checks import gradcam
from pages import folded, write_section

import visattn
from visattn._support.tables import to_markdown, to_text
from visattn.core.families import detections
from visattn.errors import VisattnError

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".bench" / "ultralytics"
DOCS = ROOT / "docs" / "libraries.md"
PHOTO = "photo:chelsea"
PACKAGES = (
    "ultralytics",
    "ultralytics-thop",
    "ultralytics-platform",
    "polars",
    "polars-runtime-32",
    "psutil",
    "requests",
    "pyyaml",
)
DETECTORS = ("yolov5n", "yolov8n", "yolov9t", "yolov10n", "yolo11n", "yolo12n", "yolo26n", "yolo11n-seg", "yolo11n-pose")
CLASSIFIERS = ("yolov8n-cls", "yolo11n-cls")
ROTATED = ("yolo11n-obb",)
CLOSE = 1e-4  # of the largest value of a map
LEAST, OVERLAP = 0.25, 0.7  # thresholds of the predictor, see its settings conf and iou


def main() -> int:
    """Run the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write-docs", action="store_true", help=f"replace the table beside docs/{DOCS.name}")
    options = parser.parse_args()
    install()
    warnings.filterwarnings("ignore")
    rows = [of_detector(name, end_to_end=False) for name in DETECTORS]
    rows += [of_detector(name, end_to_end=True) for name in ("yolov10n", "yolo26n")]
    rows += [of_classifier(name) for name in CLASSIFIERS] + [of_rotated(name) for name in ROTATED]
    print(to_text(rows), flush=True)
    if options.write_docs:
        table = folded(f"Networks, one row each, of Ultralytics {version('ultralytics')}", to_markdown(rows))
        write_section(DOCS, "Ultralytics", table, into_files=True)
    return int(any(row["result"] not in ("works", "refused") for row in rows))


def install() -> None:
    """Install the package if it is missing, without the libraries that are here. Its settings lie beside it."""
    os.environ.setdefault("YOLO_CONFIG_DIR", str(FOLDER / "settings"))
    sys.path.append(str(FOLDER))
    if find_spec("ultralytics") is None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(FOLDER), *PACKAGES]
        subprocess.run(command, check=True)
        invalidate_caches()


def of_detector(name: str, *, end_to_end: bool) -> dict[str, Any]:
    """Explain the first box, after the boxes were compared with those of the predictor."""
    model = built(name)
    last = model.model[-1]
    if end_to_end:
        last.end2end = True
    prepared = visattn.prepare(PHOTO, model)
    rows = first_tensor(model(prepared.pixels)).detach()
    kept = import_module("ultralytics.utils.nms").non_max_suppression(rows, LEAST, OVERLAP, nc=last.nc, end2end=end_to_end)[0]
    listed = detections(model, rows)[0]
    same = len(kept) == len(listed["boxes"]) and all(
        torch.allclose(mine.float(), theirs, atol=1e-4)
        for mine, theirs in zip(
            (listed["boxes"], listed["scores"], listed["labels"]), (kept[:, :4], kept[:, 4], kept[:, 5]), strict=True
        )
    )
    box, score, of_class = kept[0, :4], kept[0, 4], int(kept[0, 5])
    explained = visattn.explain(model, PHOTO, method="gradcam", target="box:0")

    def number(output: Any) -> Any:  # noqa: ANN401
        """Return the score in the row of the output that holds the box."""
        values = first_tensor(output)[0]
        if end_to_end:
            return values[int((values[:, 4] - score).abs().argmin()), 4]
        corners = import_module("ultralytics.utils.ops").xywh2xyxy(values[:4].detach().T)
        distance = (corners - box).abs().sum(1) + (values[4 + of_class].detach() - score).abs()
        return values[4 + of_class, int(distance.argmin())]

    result = compared(model, explained, prepared, number)
    told = f"{len(kept)}, {'as the predictor' if same else 'OTHERS THAN THE PREDICTOR'}"
    result["result"] = result["result"] if same else "DIFFERENT"
    return {"model": name + ", end to end" * end_to_end, "target": "box:0", "boxes": told, **result}


def of_classifier(name: str) -> dict[str, Any]:
    """Explain the predicted class."""
    model = built(name)
    prepared = visattn.prepare(PHOTO, model)
    best = int(model(prepared.pixels)[1].argmax())
    explained = visattn.explain(model, PHOTO, method="gradcam")
    return {
        "model": name,
        "target": "class",
        "boxes": "",
        **compared(model, explained, prepared, lambda output: output[1][0, best]),
    }


def of_rotated(name: str) -> dict[str, Any]:
    """Check that a detector of rotated boxes is refused."""
    row = {"model": name, "target": "box:0", "boxes": "", "layer": "", "map": "", "result": "NOT REFUSED", "difference": ""}
    try:
        visattn.explain(built(name), PHOTO, method="gradcam", target="box:0")
    except VisattnError:
        row["result"] = "refused"
    return row


def compared(model: Any, explained: Any, prepared: Any, number: Callable[[Any], Any]) -> dict[str, Any]:  # noqa: ANN401
    """Compare a map with one by hand."""
    values = explained.map.values.double()
    by_hand = gradcam(
        model, lambda: model(prepared.pixels.clone().requires_grad_()), number, explained.map.facts.layer, values.shape, None
    )
    difference = float((values - by_hand).abs().max() / by_hand.max())
    return {
        "layer": explained.map.facts.layer,
        "map": " x ".join(map(str, values.shape)),
        "result": "works" if difference <= CLOSE else "DIFFERENT",
        "difference": f"{difference:.0e}",
    }


def built(name: str) -> Any:  # noqa: ANN401
    """Return a network with random weights whose batch normalizations fit the photo, so that activations stay at one size."""
    torch.manual_seed(0)
    model: Any = import_module("ultralytics").YOLO(f"{name}.yaml", verbose=False).model
    for parameter in model.parameters():
        if parameter.ndim > 1 and parameter.requires_grad:  # but the distances of the box head, which are fixed
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
    pixels = visattn.prepare(PHOTO, model.eval()).pixels
    with torch.no_grad():
        model.train()(torch.cat([pixels, pixels.flip(3)]))
    last = model.model[-1]
    for branch in (*(getattr(last, "cv3", None) or ()), *(getattr(last, "one2one_cv3", None) or ())):
        torch.nn.init.zeros_(branch[-1].bias)  # else no score is above the threshold
        torch.nn.init.normal_(branch[-1].weight, std=0.2 * branch[-1].weight[0].numel() ** -0.5)
    return model.eval()


def first_tensor(output: Any) -> Any:  # noqa: ANN401
    """Return the first tensor of a nested output."""
    return output if isinstance(output, torch.Tensor) else first_tensor(output[0])


if __name__ == "__main__":
    sys.exit(main())
