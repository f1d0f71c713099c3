"""Time of one overlay by visattn and by other libraries, in one process, as JSON. It runs in the environment that `benchmark.py` creates.

Each library is called as in its documentation. Inputs are prepared outside the measured time: the peers get their float arrays and
masks for free.
"""

from __future__ import annotations

import json
from importlib import import_module
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from PIL import Image

import visattn
from bench.measuring import medians
from visattn import data
from visattn._support.opencv import cv2
from visattn.core.drawing import colormaps
from visattn.core.geometry import Box, Geometry

WIDTH, HEIGHT, GRID = 1024, 768, 37
ROUNDS, WARMUP = 400, 10  # about 20 s, so that a short burst of other work does not move a median


def attention_map() -> visattn.AttentionMap:
    """Return a smooth map of a 518-pixel input with 14-pixel patches."""
    y, x = torch.meshgrid(torch.linspace(-2, 2, GRID), torch.linspace(-2, 2, GRID), indexing="ij")
    box = Box(0, 0, 14 * GRID, 14 * GRID)
    return visattn.AttentionMap(
        torch.exp(-y * y - x * x), (), visattn.TokenLayout("tokens", ("cls",), (GRID, GRID), box), {}, "attention"
    )


def main() -> dict[str, Any]:
    """Return median seconds by name, and the versions of the other libraries."""
    show_cam_on_image = import_module("pytorch_grad_cam.utils.image").show_cam_on_image
    overlay_mask = import_module("torchcam.utils").overlay_mask
    photo = visattn.load_image(data.photo_path("coffee")).resize((WIDTH, HEIGHT))
    geometry = Geometry((HEIGHT, WIDTH), (14 * GRID, 14 * GRID), Box(0, 0, HEIGHT, WIDTH))
    heat = attention_map().to_heatmap(geometry)
    array = np.array(photo)
    grid = np.ascontiguousarray(heat.grid)
    table = np.ascontiguousarray(colormaps.table("inferno")[:, None])
    levels = cv2.merge([cv2.convertScaleAbs((grid - grid.min()) / (grid.max() - grid.min()), alpha=255)] * 3)
    scaled = np.float32(array) / 255
    mask = (heat.values - heat.values.min()) / (heat.values.max() - heat.values.min())
    picture = Image.fromarray((grid - grid.min()) / (grid.max() - grid.min()))

    def bare() -> object:
        color = cv2.LUT(cv2.resize(levels, (WIDTH, HEIGHT)), table)
        return cv2.addWeighted(color, 0.5, array, 0.5, 0)

    runs = {
        "OpenCV": bare,
        "visattn": lambda: visattn.overlay(photo, heat),
        "grad-cam": lambda: show_cam_on_image(scaled, mask, use_rgb=True),
        "torch-cam": lambda: overlay_mask(photo, picture, alpha=0.5),
    }
    return {
        "seconds": medians(runs, ROUNDS, WARMUP),
        "versions": {"grad-cam": version("grad-cam"), "torch-cam": version("torchcam"), "matplotlib": version("matplotlib")},
    }


if __name__ == "__main__":
    print(json.dumps(main()))
