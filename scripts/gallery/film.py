"""Gallery pictures of films: a camera that moves over a photo, and a query that walks over it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from PIL import Image
from torch import nn

import visattn

_SIDE, _FRAMES = (240, 180), 24
_START, _END = (0, 30, 300, 255), (120, 0, 440, 240)  # the part of the photo that is shown first, and last


def film_picture(model: nn.Module, file: Path) -> None:
    """Write an animation of frames and their maps."""
    photo = visattn.load_image("photo:chelsea")
    frames = []
    for number in range(_FRAMES):
        share = number / (_FRAMES - 1)
        box = tuple(start + (end - start) * share for start, end in zip(_START, _END, strict=True))
        frames.append(photo.transform(_SIDE, Image.Transform.EXTENT, box, Image.Resampling.BICUBIC))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "camera.webp"
        frames[0].save(source, save_all=True, append_images=frames[1:], duration=120, lossless=True)
        visattn.explain_video(model, source, file, method="attention", view="beside")


def walk_picture(model: nn.Module, file: Path) -> None:
    """Write an animation of one photo with many queries."""
    photo = visattn.load_image("photo:coffee")
    photo.thumbnail((360, 360))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "coffee.png"
        photo.save(source)
        visattn.explain_video(model, source, file, method="attention", walk=48, img_size=518)
