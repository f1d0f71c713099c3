"""Crops of four real photos with captions in COCO's format; each caption names the photo, or the side of the crop."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

PHOTOS = Path(__file__).parents[2] / "visattn" / "core" / "shipped" / "photos"
NAMES = {
    "astronaut.png": "an astronaut in an orange suit",
    "chelsea.png": "a striped cat",
    "coffee.png": "a cup of coffee",
    "rocket.jpg": "a rocket",
}


def coco(folder: Path, train: int = 200, test: int = 40, side: int = 96) -> Path:
    """Write `annotations/captions_train2017.json`, `train2017/`, and the same for `val2017`, with two captions per photo."""
    random = np.random.RandomState(0)
    photos = {name: Image.open(PHOTOS / name).convert("RGB") for name in NAMES}
    (folder / "annotations").mkdir(parents=True)
    for split, count in (("train2017", train), ("val2017", test)):
        (folder / split).mkdir()
        images: list[dict[str, object]] = []
        annotations: list[dict[str, object]] = []
        for number in range(count):
            name = list(NAMES)[number % len(NAMES)]
            photo, left = photos[name], bool(random.randint(2))
            size = min(photo.size) // 2
            x = random.randint(photo.width // 2 - size // 2) + (0 if left else (photo.width - size) // 2)
            y = random.randint(photo.height - size)
            file = f"{number:012d}.jpg"
            photo.crop((x, y, x + size, y + size)).resize((side, side - 16 * (number % 2))).save(folder / split / file)
            images.append({"id": number, "file_name": file, "width": side, "height": side})
            for text in (f"{NAMES[name].capitalize()}.", f"The photo shows {NAMES[name]}."):
                annotations.append({"image_id": number, "id": len(annotations), "caption": text})
        content = {"info": {}, "licenses": [], "images": images, "annotations": annotations}
        (folder / "annotations" / f"captions_{split}.json").write_text(json.dumps(content))
    return folder
