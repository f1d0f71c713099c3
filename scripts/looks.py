"""Looks of overlays on 15 photos, measured: `looks.py [--write-docs]`. The first row of the table is the default.

For each look, three methods and 15 photos, two numbers in CIELab units. A pixel is covered if its value is among the highest tenth of the
map, and uncovered if it is among the lower half.

- `light kept`: 100 minus the mean change of lightness of uncovered pixels.
- `color difference`: how far the color of a covered pixel is from those of the uncovered pixels of the same lightness (in steps of five):
  from the nearest twentieth of them, as a glow is lost where the photo itself has its color. The mean over covered pixels, and over the
  tenth of the pictures in which it is smallest.

--write-docs writes the table to docs/overlays.md, and the picture to assets/gallery/looks.jpg.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

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
BEFORE, NOW = "inferno 0.7 over the photo (before)", "inferno 0.8 over gray (default)"
LOOKS: dict[str, StyleOptions] = {
    NOW: {},
    BEFORE: {"ground": "photo", "opacity": 0.7},
    "inferno 0.7 over gray": {"opacity": 0.7},
    "inferno 0.9 over gray": {"opacity": 0.9},
    "plasma 0.8 over gray": {"colormap": "plasma"},
    "viridis 0.8 over gray": {"colormap": "viridis"},
    "magma 0.8 over gray": {"colormap": "magma"},
    "turbo 0.8 over gray": {"colormap": "turbo"},
    "turbo 0.8 over the photo": {"colormap": "turbo", "ground": "photo"},
    "viridis 0.8 over the photo": {"colormap": "viridis", "ground": "photo"},
    "jet 0.5 everywhere, over the photo": {"colormap": "jet", "opacity": 0.5, "blend": "constant"},
}
METHODS = {
    "last-layer attention": (data.OFFLINE_MODEL, "attention"),
    "rollout": (data.OFFLINE_MODEL, "rollout"),
    "Grad-CAM": ("tf_efficientnet_lite0", "gradcam"),
}
SHOWN = "astronaut", "coffee", "chelsea", "macaw"
STEP, FEWEST, DRAWN, NEAREST = 5, 20, 500, 0.05


class Judged(NamedTuple):
    """Numbers of one picture; the difference is NaN if no lightness has covered and uncovered pixels."""

    light_kept: float
    difference: float


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--write-docs", action="store_true", help=f"write {DOCS.relative_to(ROOT)} and {PICTURE.relative_to(ROOT)}"
    )
    write = parser.parse_args().write_docs
    models = {name: visattn.load_model(name, weights=data.offline_weights(name)) for name, _ in METHODS.values()}
    found = {
        (name, title): visattn.explain(models[model], source, method=method)
        for name, source in photos().items()
        for title, (model, method) in METHODS.items()
    }
    rows = [row(look, [judged(one, style) for one in found.values()]) for look, style in LOOKS.items()]
    print(to_text(rows))
    if write:
        write_section(DOCS, "looks", to_markdown(rows))
        cells = [
            [Cell(found[name, title].overlay(**LOOKS[look])) for title in METHODS for look in (BEFORE, NOW)] for name in SHOWN
        ]
        labels = [f"{title}, {ground}" for title in METHODS for ground in ("over the photo", "over gray")]
        sheet(cells, panel=240, column_labels=labels).save(PICTURE, quality=88)


def photos() -> dict[str, str]:
    """Return the photos in the public domain that come with the project."""
    others = sorted(path for path in (ROOT / "assets" / "objects").iterdir() if path.suffix in (".jpg", ".png"))
    return {name: f"photo:{name}" for name in data.PHOTOS} | {path.stem: str(path) for path in others}


def row(look: str, pictures: list[Judged]) -> dict[str, str]:
    """Return a row of the table."""
    differences = np.sort([one.difference for one in pictures if not np.isnan(one.difference)])
    return {
        "look": look,
        "light kept": f"{np.mean([one.light_kept for one in pictures]):.1f}",
        "color difference": f"{differences.mean():.1f}",
        "in the tenth where it is smallest": f"{differences[: max(1, len(differences) // 10)].mean():.1f}",
    }


def judged(found: visattn.Explanation, style: StyleOptions) -> Judged:
    """Measure one picture, over what the model received."""
    heat = found.heatmap()
    top, left, bottom, right = (int(side) for side in heat.seen)
    before, after = (lab(picture)[top:bottom, left:right] for picture in (found.photo, found.overlay(**style | {"marks": False})))
    values = heat.values[top:bottom, left:right]
    covered, uncovered = values >= np.quantile(values, 0.9), values <= np.quantile(values, 0.5)
    kept = 100 - float(np.abs(after - before)[..., 0][uncovered].mean())
    random, differences = np.random.default_rng(0), []
    for low in range(0, 100, STEP):
        alike = (after[..., 0] >= low) & (after[..., 0] < low + STEP)
        high, rest = after[alike & covered][:, 1:], after[alike & uncovered][:, 1:]
        if min(len(high), len(rest)) < FEWEST:
            continue
        drawn = high[random.integers(0, len(high), max(1, len(high) // 50))]  # in proportion to the pixels of this lightness
        far = np.linalg.norm(drawn[:, None] - rest[random.integers(0, len(rest), DRAWN)], axis=-1)
        differences.append(np.quantile(far, NEAREST, axis=1))
    return Judged(kept, float(np.concatenate(differences).mean()) if differences else float("nan"))


def lab(picture: Image.Image) -> np.ndarray:
    """Convert a picture to CIELab, with lightness from 0 to 100."""
    array: np.ndarray = cv2.cvtColor(np.asarray(picture, np.float32) / 255, cv2.COLOR_RGB2LAB)
    return array


if __name__ == "__main__":
    main()
