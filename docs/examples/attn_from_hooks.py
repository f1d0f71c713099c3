"""Write queries and keys that plain hooks read from a timm ViT as an .attn file, without visattn.

    python attn_from_hooks.py photo.jpg attention.attn [WEIGHTS]

WEIGHTS is a checkpoint of the model below; without it, its weights are random. A file with queries and keys is much smaller than one with
all weights: a reader computes `softmax(scale * Q K^T)`.
"""

import io
import json
import sys
from collections.abc import Callable

import numpy as np
import safetensors.torch
import timm
import torch
from PIL import Image, ImageOps

MODEL = "vit_tiny_patch16_224"


def main(photo_file: str, target: str, weights: str | None = None) -> None:
    """Run the model on a photo, and write queries and keys of each layer."""
    torch.manual_seed(0)
    model = timm.create_model(MODEL, checkpoint_path=weights or "").eval()
    photo = ImageOps.exif_transpose(Image.open(photo_file)).convert("RGB")
    side, patch = 224, 16
    pixels = torch.from_numpy(np.array(photo.resize((side, side)))).permute(2, 0, 1) / 127.5 - 1
    tensors: dict[str, torch.Tensor] = {}

    def keep(number: int, heads: int) -> Callable[..., None]:
        def hook(_module: torch.nn.Module, _args: tuple, joint: torch.Tensor) -> None:
            query, key, _ = joint[0].view(joint.shape[1], 3, heads, -1).permute(1, 2, 0, 3)  # each (heads, tokens, channels)
            tensors[f"{number}.query"], tensors[f"{number}.key"] = query.contiguous(), key.contiguous()

        return hook

    for number, block in enumerate(model.blocks):
        block.attn.qkv.register_forward_hook(keep(number, block.attn.num_heads))
    with torch.no_grad():
        model(pixels[None])

    stream = io.BytesIO()
    photo.save(stream, "PNG")
    tensors["photo"] = torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)
    grid = side // patch
    view = {
        "photo": "photo",
        "geometry": {
            "photo": [photo.height, photo.width],
            "input": [side, side],
            "window": [0, 0, photo.height, photo.width],
            "rule": "the whole photo, squashed to a square",
        },
        "provenance": {"model": MODEL, "weights": weights or "random", "random": weights is None},
        "layouts": [{"space": "tokens", "prefix": ["cls"], "grid": [grid, grid], "box": [0, 0, side, side]}],
        "records": [
            {
                "layer": f"blocks.{number}.attn",
                "kind": "self",
                "queries": 0,
                "keys": 0,
                "operator": {
                    "kind": "softmax",
                    "query": f"{number}.query",
                    "key": f"{number}.key",
                    "scale": block.attn.scale,
                },
            }
            for number, block in enumerate(model.blocks)
        ],
        "readout": "cls",
    }
    said = {"format": "attn", "version": "1", "study": json.dumps({"views": [view]})}
    safetensors.torch.save_file(tensors, target, said)


if __name__ == "__main__":
    main(*sys.argv[1:])
