"""Every architecture that open_clip lists, at reduced depth, with an image and words that fit it."""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import open_clip
import timm
import torch
from open_clip import timm_model
from torch import nn

LIBRARY, VERSION = "open_clip", open_clip.__version__
LAYERS = 2
SIDE = 224  # largest side of an image
MLP_RATIO = 1  # width of the MLPs, in widths of the model
BATCH = 2
VOCABULARY = 1000
LARGE = 1000  # no initial value is larger
END = 2  # token of the end of a text
LEFT_OUT: dict[str, str] = {}
# in place of a text tower that open_clip takes from transformers, whose configuration lies on the hub
_PLAIN_TEXT = {"context_length": 77, "width": 512, "heads": 8}


def names() -> dict[str, str]:
    """Return all architectures, with the kind of each."""
    return {name: _kind(_config(name)) for name in open_clip.list_models() if name != _NAME}


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model in evaluation mode whose towers have at most two layers, and its inputs."""
    torch.manual_seed(0)
    config = _config(name)
    vision, text = config["vision_cfg"], config["text_cfg"]
    blocks = vision.get("layers", 12)
    vision["layers"] = [min(count, LAYERS) for count in blocks] if isinstance(blocks, list) else LAYERS  # a list: of a ResNet
    vision["mlp_ratio"] = MLP_RATIO
    free = vision.get("timm_model_name", "convnext").startswith(_ANY_SIZE)
    if free and isinstance(vision.get("image_size", SIDE), int):
        vision["image_size"] = min(vision.get("image_size", SIDE), SIDE)
    if "hf_model_name" in text:
        decoder = config.get("multimodal_cfg", {})
        caption = {"embed_cls": True, "output_tokens": True} if decoder else {}
        text = config["text_cfg"] = _PLAIN_TEXT | caption | {key: decoder[key] for key in ("width", "heads") if key in decoder}
    text |= {"layers": LAYERS, "vocab_size": VOCABULARY, "mlp_ratio": MLP_RATIO}
    if "multimodal_cfg" in config:
        config["multimodal_cfg"] |= {"layers": LAYERS, "vocab_size": VOCABULARY}
    with tempfile.TemporaryDirectory() as folder, patch.object(timm_model.timm, "create_model", _shallow):
        (Path(folder) / f"{_NAME}.json").write_text(json.dumps(config))
        open_clip.add_model_config(folder)
        logging.disable(logging.WARNING)  # that it has no weights
        try:
            model = open_clip.create_model(_NAME, pretrained=None).eval()
        finally:
            logging.disable(logging.NOTSET)
    for parameter in model.parameters():  # some are not initialized
        if not float(parameter.detach().abs().max()) < LARGE:
            nn.init.normal_(parameter, std=0.02)
    size = vision.get("image_size", 224)
    side = (size, size) if isinstance(size, int) else size
    words = torch.randint(3, VOCABULARY, (BATCH, text.get("context_length", 77)), generator=torch.Generator().manual_seed(2))
    words[:, 5] = END
    return model, {"image": torch.randn(BATCH, 3, *side, generator=torch.Generator().manual_seed(1)), "text": words}


_NAME = "shallow"
_ANY_SIZE = "convnext", "eva", "vit"  # models of timm
_SMALL: tuple[dict[str, Any], ...] = (  # of one stack of blocks, which takes an image of any size or one, or of stages
    {"depth": LAYERS, "img_size": SIDE, "mlp_ratio": MLP_RATIO},
    {"depth": LAYERS},
    {"depths": (LAYERS,) * 4},
    {"layers": (LAYERS,) * 5},
    {"layers": (LAYERS,) * 4},
)
_create = timm.create_model


def _shallow(name: str, **given: Any) -> Any:  # noqa: ANN401 - a model of timm
    for small in _SMALL:
        try:
            return _create(name, **small, **given)
        except (TypeError, IndexError):
            continue
    return _create(name, **given)


def _config(name: str) -> dict[str, Any]:
    config: dict[str, Any] | None = open_clip.get_model_config(name)
    assert config is not None, name  # noqa: S101
    return config


def _kind(config: dict[str, Any]) -> str:
    vision = config["vision_cfg"]
    if "timm_model_name" in vision:
        return f"timm {vision['timm_model_name']}"
    tower = "ResNet" if isinstance(vision.get("layers", 12), list) else "ViT"
    return f"CoCa, {tower}" if "multimodal_cfg" in config else tower
