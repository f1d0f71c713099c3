"""Published numbers of attention maps beside ours, where the data are on this machine.

`published.py segmentation gtsegs_ijcv.mat` (ImageNet-Segmentation), `published.py jaccard VOC2012`, `published.py perturbation
IMAGENET/val` (folders of classes). `--limit N` takes the first photos, `--model` another model, `--methods` others. Published numbers are
those of Chefer et al., CVPR 2021, tables 1 and 2 (ViT-B/16), and Caron et al., ICCV 2021, figure 4 (ViT-S/16). Weights come from the
hub, and are not always the papers' own.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm

import visattn
from visattn._support.tables import Row, to_text
from visattn.core.images.image_folders import photos_in
from visattn.core.pipeline.again import scoring
from visattn.core.pipeline.targets import Target
from visattn.data import load_segmented
from visattn.evaluation import Segmentation, best_head_jaccard, perturbation

MODELS = {
    "segmentation": "vit_base_patch16_224.orig_in21k_ft_in1k",
    "perturbation": "vit_base_patch16_224.orig_in21k_ft_in1k",
    "jaccard": "vit_small_patch16_224.dino",
}
METHODS: dict[str, dict[str, Any]] = {
    "rollout": {"method": "rollout", "start_layer": 1},
    "attention": {"method": "attention"},
    "gradcam": {"method": "gradcam"},
    "relevance": {"method": "relevance"},
}
EXPECTED: dict[str, dict[str, dict[str, float]]] = {  # in percent
    "segmentation": {
        "rollout": {"pixel_accuracy": 73.54, "mean_ap": 84.76, "mean_iou": 55.42},
        "attention": {"pixel_accuracy": 67.84, "mean_ap": 80.24, "mean_iou": 46.37},
        "gradcam": {"pixel_accuracy": 64.44, "mean_ap": 71.60, "mean_iou": 40.82},
    },
    "perturbation": {
        "rollout": {"negative": 53.10, "positive": 20.05},
        "attention": {"negative": 45.55, "positive": 23.99},
        "gradcam": {"negative": 41.52, "positive": 34.06},
    },
    "jaccard": {"attention": {"jaccard": 45.9}},
}
SIDE, LARGE = 224, 480  # of the input: that of Chefer's tables, and that of DINO's figure


def main() -> int:
    """Measure, and print both numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=list(EXPECTED))
    parser.add_argument("data", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--methods", type=lambda text: text.split(","))
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    names = options.methods or list(EXPECTED[options.table])
    if not set(names) <= set(METHODS):
        parser.error(f"methods are {', '.join(METHODS)}.")
    size = LARGE if options.table == "jaccard" and options.model is None else None
    model = visattn.load_model(options.model or MODELS[options.table], img_size=size)
    measure = {"segmentation": segmentation, "perturbation": perturbations, "jaccard": jaccard}[options.table]
    found = measure(model, options.data, names, options.limit)
    rows: list[Row] = [
        {
            "method": name,
            "number": number,
            "ours": f"{100 * value:.2f}",
            "published": EXPECTED[options.table].get(name, {}).get(number),
        }
        for name, numbers in found.items()
        for number, value in numbers.items()
    ]
    print(to_text(rows))
    return 0


def squeezed(image: Image.Image, model: nn.Module) -> Image.Image:
    """Return a photo squeezed onto the model's input, as in both papers."""
    height, width = visattn.prepare(image, model, resize="fit").spec.size  # type: ignore[union-attr]
    return image.resize((width, height), Image.Resampling.BILINEAR)


def segmentation(model: nn.Module, data: Path, names: list[str], limit: int | None) -> dict[str, dict[str, float]]:
    """Return the scores of each method on photos with segmentations."""
    scores = {name: Segmentation() for name in names}
    photos = load_segmented(data)
    for number in tqdm(range(min(len(photos), limit or len(photos)))):
        photo = photos[number]
        image = squeezed(photo.image, model)
        labels = np.asarray(Image.fromarray(photo.labels.astype(np.int32)).resize(image.size, Image.Resampling.NEAREST))
        for name in names:
            scores[name].add(visattn.explain(model, image, resize="fit", **METHODS[name]).panel, labels)
    return {
        name: {number: value for number, value in vars(one.scores).items() if number != "photos"} for name, one in scores.items()
    }


def jaccard(model: nn.Module, data: Path, names: list[str], limit: int | None) -> dict[str, dict[str, float]]:
    """Return the mean Jaccard of the best heads of the last layer on objects of VOC."""
    photos, found = load_segmented(data), defaultdict[str, list[float]](list)
    for number in tqdm(range(min(len(photos), limit or len(photos)))):
        photo = photos[number]
        image = squeezed(photo.image, model)
        resized = [
            Image.fromarray(mask).resize(image.size, Image.Resampling.NEAREST)
            for mask in (() if photo.objects is None else photo.objects)
        ]
        void = Image.fromarray(photo.labels < 0).resize(image.size, Image.Resampling.NEAREST)
        if not resized:
            continue
        for name in names:
            shown = visattn.explain(model, image, resize="fit", **METHODS[name]).map
            found[name].append(best_head_jaccard(shown, np.stack([np.asarray(mask) for mask in resized]), void=np.asarray(void)))
    return {name: {"jaccard": float(np.mean(values))} for name, values in found.items()}


def perturbations(model: nn.Module, data: Path, names: list[str], limit: int | None) -> dict[str, dict[str, float]]:
    """Return the mean areas of accuracy while black replaces the first, or the last pixels; the class is the predicted one."""
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in names}
    for path in tqdm(list(_photos(data, limit))):
        image = visattn.load_image(path)
        prepared = visattn.prepare(image, model)
        with scoring(model, prepared, Target()) as (_, images), torch.no_grad():
            label = int(model(images.pixels).argmax())

            def is_right(inputs: Tensor, label: int = label) -> Tensor:
                right: Tensor = (model(inputs).argmax(1) == label).float()
                return right

            for name in names:
                shown = visattn.explain(model, image, **METHODS[name]).panel
                for sign in ("negative", "positive"):
                    curve = perturbation(is_right, images.pixels, shown, sign=sign, baseline=images.baseline("black"))
                    found[name][sign].append(curve.area)
    return {name: {sign: float(np.mean(areas)) for sign, areas in signs.items()} for name, signs in found.items()}


def _photos(data: Path, limit: int | None) -> Iterator[Path]:
    paths, _ = photos_in(data, data / "none")
    yield from paths[:limit]


if __name__ == "__main__":
    sys.exit(main())
