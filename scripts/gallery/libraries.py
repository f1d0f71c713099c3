"""Gallery pictures of models of other libraries: one model in the code of two, and the points that object queries sample."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from libraries.dinov2 import twin
from PIL import Image
from torch import nn

import visattn
from visattn import data
from visattn.core.drawing.pages import Cell, sheet
from visattn.core.pipeline.answering import answer
from visattn.core.pipeline.question import ask
from visattn.core.pipeline.recordings import recorded

QUERIES = 3, 11, 40, 77  # object queries that are drawn
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


def sampled_sheet() -> Image.Image:
    """Draw the points that object queries of Deformable DETR sample before it is trained; it has no encoder, which reads elsewhere."""
    torch.manual_seed(0)
    small: dict[str, Any] = {"depths": [1, 1, 1, 1], "layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"]}
    given: dict[str, Any] = {"backbone": None, "use_timm_backbone": False, "use_pretrained_backbone": False}
    given |= {"backbone_config": transformers.ResNetConfig(**small), "num_feature_levels": 3, "encoder_layers": 0}
    model: nn.Module = transformers.DeformableDetrForObjectDetection(transformers.DeformableDetrConfig(**given))
    model.eval()
    cells = []
    for number in QUERIES:
        found = visattn.explain(
            model, data.photo_path("astronaut"), method="attention", query=f"object:{number}", fusion="mean", img_size=(512, 512)
        )
        cells.append(Cell(found.overlay()))
    notes = ("Random weights: each head samples in one direction, as the authors initialize it. The box is the model's output.",)
    return sheet([cells], panel=300, column_labels=[f"object query {number}" for number in QUERIES], notes=notes)
