"""Default look of overlays against the look with one opacity everywhere, on the shipped photos: `looks.py [--write-docs]`.

Prints for each way to mix colors and photo two numbers, averaged over photos, in CIELab units. `light kept`: 100 minus the mean change of
lightness in the nine tenths of the pixels with the lowest values. `contrast`: how much more the highest tenth changes its color than the
rest. --write-docs also writes the table to docs/overlays.md and the picture to assets/gallery/looks.jpg.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean

import numpy as np
from pages import write_section
from PIL import Image

import visattn
from visattn import data
from visattn._support.opencv import cv2
from visattn._support.tables import to_markdown, to_text
from visattn.core.drawing.pages import Cell, sheet
from visattn.core.drawing.style_options import StyleOptions

ROOT = Path(__file__).parents[1]
DOCS, PICTURE = ROOT / "docs" / "overlays.md", ROOT / "assets" / "gallery" / "looks.jpg"
BEFORE, AFTER = "constant 0.5, min-max", "by value 0.7, auto"
LOOKS: dict[str, StyleOptions] = {
    BEFORE: {"blend": "constant", "opacity": 0.5, "normalize": "minmax"},
    "by value 0.5, min-max": {"blend": "value", "opacity": 0.5, "normalize": "minmax"},
    "by value 0.7, min-max": {"blend": "value", "opacity": 0.7, "normalize": "minmax"},
    "by value 0.5, auto": {"blend": "value", "opacity": 0.5},
    AFTER: {},  # the default
    "by value 0.9, auto": {"blend": "value", "opacity": 0.9},
}
METHODS = {
    "last-layer attention": (data.OFFLINE_MODEL, "attention"),
    "rollout": (data.OFFLINE_MODEL, "rollout"),
    "Grad-CAM": ("tf_efficientnet_lite0", "gradcam"),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--write-docs", action="store_true", help=f"write {DOCS.relative_to(ROOT)} and {PICTURE.relative_to(ROOT)}"
    )
    write = parser.parse_args().write_docs
    models = {name: visattn.load_model(name, weights=data.offline_weights(name)) for name, _ in METHODS.values()}
    found = {
        (photo, title): visattn.explain(models[name], f"photo:{photo}", method=method)
        for photo in data.PHOTOS
        for title, (name, method) in METHODS.items()
    }
    rows = []
    for look, style in LOOKS.items():
        row = {"look": look}
        for title in METHODS:
            kept, contrast = zip(*(judged(found[photo, title], style) for photo in data.PHOTOS), strict=True)
            row[title] = f"{mean(kept):.1f}, {mean(contrast):.1f}"
        rows.append(row)
    print(to_text(rows))
    if write:
        write_section(DOCS, "looks", to_markdown(rows))
        cells = [
            [Cell(found[photo, title].overlay(**LOOKS[look])) for title in METHODS for look in (BEFORE, AFTER)]
            for photo in data.PHOTOS
        ]
        labels = [f"{title}, {when}" for title in METHODS for when in ("before", "now")]
        sheet(cells, panel=240, column_labels=labels).save(PICTURE, quality=88)


def judged(found: visattn.Explanation, style: StyleOptions) -> tuple[float, float]:
    """Return the light kept and the contrast of one picture, over what the model received."""
    heat = found.heatmap()
    top, left, bottom, right = (int(side) for side in heat.seen)
    before, after = (lab(picture)[top:bottom, left:right] for picture in (found.photo, found.overlay(**style | {"marks": False})))
    values = heat.values[top:bottom, left:right]
    high = values >= np.quantile(values, 0.9)
    changed = np.linalg.norm(after - before, axis=-1)
    light = np.abs(after - before)[..., 0]
    return 100 - float(light[~high].mean()), float(changed[high].mean() - changed[~high].mean())


def lab(picture: Image.Image) -> np.ndarray:
    """Convert a picture to CIELab, with lightness from 0 to 100."""
    array: np.ndarray = cv2.cvtColor(np.asarray(picture, np.float32) / 255, cv2.COLOR_RGB2LAB)
    return array


if __name__ == "__main__":
    main()
