"""Regenerate `sinks.json`: the attention sinks of DINOv2 on the photos, by a float64 forward pass with timm's eager attention.

No capture, operator or method of visattn is used. The model is timm's, in double precision, and hooks read its attention weights where
they are computed. Run `python -m tests.golden.regenerate` (about a minute) after a change of the weights or of a photo.
"""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import timm
import torch
from PIL import Image, ImageCms
from torch import Tensor

from tests.oracles import maps as oracles
from visattn import data

PATCH, SIDE, PREFIX = 14, 518, 1
THRESHOLD = 20.0
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def in_srgb(photo: Image.Image) -> Image.Image:
    """Convert a photo to sRGB with Pillow's own interface to littleCMS."""
    profile = photo.info.get("icc_profile")
    if profile is None:
        return photo
    source, intent = ImageCms.ImageCmsProfile(io.BytesIO(profile)), ImageCms.Intent.RELATIVE_COLORIMETRIC
    found = ImageCms.profileToProfile(photo, source, ImageCms.createProfile("sRGB"), intent, outputMode="RGB")
    assert found is not None
    return found


def pixels(photo: Image.Image) -> Tensor:
    """Resize the whole photo to about 518 x 518 pixels in area, with both sides multiples of the patch size."""
    stretch = math.sqrt(SIDE * SIDE / (photo.width * photo.height))
    width, height = (round(side * stretch / PATCH) * PATCH for side in photo.size)
    resized = in_srgb(photo).convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
    values = (np.asarray(resized, dtype=np.float64) / 255 - MEAN) / DEVIATION
    return torch.from_numpy(values.transpose(2, 0, 1))[None]


def main() -> None:
    model: Any = timm.create_model(data.OFFLINE_MODEL, dynamic_img_size=True)
    model.load_state_dict(safetensors.torch.load_file(data.offline_weights()))
    model = model.eval().double()
    scores: list[list[float]] = []
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_pre_hook(
            lambda _, args: scores.append(oracles.attention_received(list(args[0][0])))
        )
    golden = {}
    for name in data.PHOTOS:
        scores.clear()
        x = pixels(Image.open(data.photo_path(name)))
        with torch.no_grad():
            model(x)
        columns = x.shape[-1] // PATCH
        found = []
        for token in range(PREFIX, len(scores[0])):
            best = max(range(len(scores)), key=lambda layer, token=token: scores[layer][token])  # type: ignore[misc]
            if scores[best][token] > THRESHOLD:
                row, column = divmod(token - PREFIX, columns)
                score = round(scores[best][token], 1)
                found.append({"row": row, "column": column, "score": score, "layer": f"blocks.{best}.attn"})
        golden[name] = sorted(found, key=lambda sink: -sink["score"])  # type: ignore[operator]
    Path(__file__).with_name("sinks.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
