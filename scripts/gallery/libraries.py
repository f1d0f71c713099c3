"""Gallery picture of one model in the code of two libraries."""

from __future__ import annotations

from libraries.dinov2 import twin
from PIL import Image
from torch import nn

import visattn
from visattn import data
from visattn.drawing.pages import Cell, sheet
from visattn.pipeline.explaining import answer
from visattn.pipeline.question import ask
from visattn.pipeline.recordings import recorded

METHODS: dict[str, tuple[str, dict[str, object]]] = {  # `layer` is the last block
    "attention of the class token": ("attention", {"fusion": "mean"}),
    "norm-based attention": ("norm_attention", {}),
    "rollout": ("rollout", {}),
    "patch features": ("pca", {"layer": ""}),
    "similarity to ringed patch": ("similarity", {"query": "pixel:300,170", "layer": ""}),
}


def twins_sheet(model: nn.Module) -> Image.Image:
    """Draw maps of DINOv2 in timm's code and, with the same weights, in that of transformers.

    Args:
        model: timm's DINOv2 with its published weights.
    """
    prepared = visattn.prepare(visattn.load_image(data.photo_path("coffee")), model, img_size=(518, 518))
    rows, maps = [], []
    for one, last in ((model, "blocks.11"), (twin(model), "encoder.layer.11")):
        cells = [Cell(prepared.photo)]
        for name, parameters in METHODS.values():
            asked = parameters | ({"layer": last} if "layer" in parameters else {})
            settled, found = recorded(one, prepared, ask(name, asked))
            explanation = answer(found.recording, prepared, settled)
            cells.append(Cell(explanation.overlay()))
            maps.append(explanation.map.values)
        rows.append(cells)
    pairs = zip(maps[: len(METHODS)], maps[len(METHODS) :], strict=True)
    worst = max(float((a - b).abs().nan_to_num().max() / a.abs().nan_to_num().max()) for a, b in pairs)
    differ = f"differ by at most {worst:.1e} of the largest value" if worst else "are equal in every bit"
    notes = (f"The same weights and pixels in the code of two libraries. The maps of the two rows {differ}.",)
    return sheet(rows, panel=240, row_labels=["timm", "transformers"], column_labels=["photo", *METHODS], notes=notes)
