"""The work of `visattn overlay`, written by hand: `by_hand.py PHOTO WEIGHTS SIDE OUT.png MAP.npy`. The benchmark compares both.

The map is the attention of the class token in the last layer of DINOv2 ViT-S/14, averaged over heads.
"""

import sys

import cv2  # noqa: TID251 - this script uses nothing of visattn
import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from timm.data import create_transform, resolve_data_config

PATCH = 14


def main(source: str, weights: str, size: str, out: str, values: str) -> None:
    """Draw the map over the part of the photo that the model receives."""
    torch.set_num_threads(2)
    side = int(size)
    model = timm.create_model("vit_small_patch14_dinov2", pretrained=False, dynamic_img_size=True)
    model.load_state_dict(load_file(weights))
    model.eval()
    photo = Image.open(source).convert("RGB")
    config = resolve_data_config({"input_size": (3, side, side)}, model=model)
    pixels = create_transform(**config)(photo)[None]

    attention = model.blocks[-1].attn
    seen = []
    handle = attention.qkv.register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.inference_mode():
        model(pixels)
        query, key, _ = seen[0].unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
        row = (query[:, :, :1] * attention.scale @ key.mT).softmax(-1).mean(1)[0, 0]
    handle.remove()
    grid = row[model.num_prefix_tokens :].reshape(side // PATCH, side // PATCH).numpy()
    np.save(values, grid)

    window = round(min(photo.size) * config["crop_pct"])  # side of what the model receives, in pixels of the photo
    left, top = (photo.width - window) // 2, (photo.height - window) // 2
    array = np.asarray(photo).copy()
    part = array[max(top, 0) : top + window, max(left, 0) : left + window]
    heat = cv2.resize(grid, (part.shape[1], part.shape[0]), interpolation=cv2.INTER_CUBIC)
    heat = (heat - grid.min()) / (grid.max() - grid.min())
    color = cv2.applyColorMap(np.uint8(255 * heat.clip(0, 1)), cv2.COLORMAP_INFERNO)[..., ::-1]
    part[:] = cv2.addWeighted(part, 0.5, np.ascontiguousarray(color), 0.5, 0)
    Image.fromarray(array).save(out, compress_level=3)


if __name__ == "__main__":
    main(*sys.argv[1:])
