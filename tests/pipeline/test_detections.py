"""Boxes of detectors on the map of an object query."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor, nn

import visattn
from visattn.core.geometry import Box
from visattn.core.pipeline.detections import Detections, best_class

BOX = 0.5, 0.25, 0.4, 0.3  # center x, center y, width, height


class Detector(nn.Module):
    """DETR with random weights, whose boxes are known."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "num_queries": 6, "num_labels": 4}
        heads: dict[str, Any] = {
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
        }
        small: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "out_features": ["stage2"]}
        given: dict[str, Any] = {"backbone": None, "use_timm_backbone": False, "use_pretrained_backbone": False}
        config = transformers.DetrConfig(backbone_config=transformers.ResNetConfig(**small), **given, **sizes, **heads)
        self.detr = transformers.DetrForObjectDetection(config)

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        """Return logits whose best class is 3, and the same box for each query."""
        out = self.detr(pixel_values=pixels)
        logits = torch.zeros_like(out.logits) + 0 * out.logits
        logits[..., 3] = 5
        return {"logits": logits, "pred_boxes": torch.tensor(BOX).expand(*out.logits.shape[:2], 4)}


@pytest.fixture(scope="module")
def photo() -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 255, (96, 160, 3), np.uint8)
    return Image.fromarray(noise)


def explained(photo: Image.Image, **options: Any) -> visattn.Explanation:
    model = Detector().eval()
    shown: dict[str, Any] = {"img_size": (96, 160), "mean": 0.5, "std": 0.5, "resize": "fit", "method": "attention"}
    return visattn.explain(model, photo, **shown | options)


def test_the_box_of_an_object_query_is_in_map_picture_and_notes(photo: Image.Image, tmp_path: Path) -> None:
    found = explained(photo, query="object:2", labels=["a", "b", "c", "lynx, cat"])
    (detection,) = found.map.facts.detections
    assert detection.label == "lynx"
    np.testing.assert_allclose(detection.box, Box(9.6, 48, 38.4, 112), atol=1e-4)
    assert "box 2 of the model's output: lynx, x 48 to 112, y 10 to 38" in found.provenance.notes
    drawn, plain = (np.asarray(one.overlay(normalize="minmax")) for one in (found, explained(photo, query="mean")))
    assert (drawn[10:38, 111] == 255).mean() > 0.9  # the right edge is white
    assert not (plain[10:38, 111] == 255).all(1).any()
    kept, _ = visattn.load_map(found.save_map(tmp_path / "map.npz"))
    assert kept.facts.detections == found.map.facts.detections


@pytest.mark.parametrize("query", ["mean", "query:1+query:2"])
def test_other_queries_have_no_box(query: str, photo: Image.Image) -> None:
    assert explained(photo, query=query).map.facts.detections == ()


def test_outputs_without_one_box_per_query_have_none() -> None:
    boxes, logits = torch.rand(1, 5, 4), torch.rand(1, 5, 3)
    assert Detections.of({"logits": logits, "pred_boxes": boxes}, {}) is not None
    assert Detections.of({"logits": logits, "pred_boxes": boxes * 300}, {}) is None  # pixels, not shares
    assert Detections.of({"logits": logits[:, :4], "pred_boxes": boxes}, {}) is None
    assert Detections.of({"logits": logits}, {}) is None
    mask = torch.ones(1, 8, 8)
    mask[:, 6:] = 0
    assert Detections.of({"logits": logits, "pred_boxes": boxes}, {"pixel_mask": mask}) is None


def test_the_class_beyond_the_names_is_no_object() -> None:
    assert best_class(torch.tensor([0.0, 1, 2]), ["a", "b"]) == "no object"
    assert best_class(torch.tensor([0.0, 3, 2]), ["a", "b"]) == "b"
    assert best_class(torch.tensor([0.0, 3, 2]), None) == "class 1"
