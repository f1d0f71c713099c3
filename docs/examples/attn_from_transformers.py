"""Write the attention that a model of transformers returns as an .attn file, without visattn.

    python attn_from_transformers.py photo.jpg attention.attn [FOLDER]

FOLDER holds a ViT saved by `save_pretrained`; without it, a small ViT with random weights is used. visattn opens the file:
`visattn.load_study("attention.attn")`.
"""

import io
import json
import sys

import numpy as np
import safetensors.torch
import torch
import transformers
from PIL import Image, ImageOps


def main(photo_file: str, target: str, folder: str | None = None) -> None:
    """Run the model on a photo, and write its attention."""
    if folder is None:
        torch.manual_seed(0)
        config = transformers.ViTConfig(num_hidden_layers=4, num_attention_heads=4, hidden_size=64)
        model = transformers.ViTModel(config, add_pooling_layer=False)
    else:
        model = transformers.ViTModel.from_pretrained(folder, add_pooling_layer=False)
    model.eval().set_attn_implementation("eager")  # the only one that returns its weights
    photo = ImageOps.exif_transpose(Image.open(photo_file)).convert("RGB")
    side, patch = model.config.image_size, model.config.patch_size
    pixels = torch.from_numpy(np.array(photo.resize((side, side)))).permute(2, 0, 1) / 127.5 - 1
    with torch.no_grad():
        attentions = model(pixels[None], output_attentions=True).attentions  # one (1, heads, tokens, tokens) for each layer

    stream = io.BytesIO()
    photo.save(stream, "PNG")
    tensors = {"photo": torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)}
    tensors |= {f"layer.{number}": weights[0] for number, weights in enumerate(attentions)}
    grid = side // patch
    view = {
        "photo": "photo",
        "geometry": {
            "photo": [photo.height, photo.width],
            "input": [side, side],
            "window": [0, 0, photo.height, photo.width],  # top, left, bottom, right in pixels of the photo
            "rule": "the whole photo, squashed to a square",
        },
        "provenance": {"model": model.config.model_type, "random": folder is None},
        "layouts": [{"space": "tokens", "prefix": ["cls"], "grid": [grid, grid], "box": [0, 0, grid * patch, grid * patch]}],
        "records": [
            {
                "layer": f"encoder.layer.{number}",
                "kind": "self",
                "queries": 0,
                "keys": 0,
                "operator": {"kind": "weights", "weights": f"layer.{number}"},
            }
            for number in range(len(attentions))
        ],
        "readout": "cls",
    }
    said = {"format": "attn", "version": "1", "study": json.dumps({"views": [view]})}
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target, said)


if __name__ == "__main__":
    main(*sys.argv[1:])
