"""Localization of maps: lift over chance on photos with object masks, compared with a center prior and shifted copies.

`localization.py [--write-docs]` evaluates two models with published weights: attention of DINOv2 ViT-S/14, with each whole photo at the
area of 518 x 518 pixels, and class activation maps of EfficientNet-Lite0, with the model's own evaluation transform.
"""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

from pages import folded, with_files
from pointing import attention, cams
from pointing.photos import COPIES, LARGEST, ROOT, by_photo, over_photos

from visattn._support.tables import Row, to_markdown, to_text

DOCS = ROOT / "docs" / "localization.md"
SHOWN = "map", "lift", "95 % interval", "times the center prior"  # columns on the page; files have all
LEFT_OUT = "sinks dropped"  # rows that only the file has


class Found(NamedTuple):
    """Results of one model: the main result as text, a row for each map, and a row for each photo."""

    conclusion: str
    maps: list[Row]
    photos: list[Row]


def main() -> int:
    """Measure, print the page, and write it on request."""
    parser = argparse.ArgumentParser(description="Measure the lift of maps over chance on photos with object masks.")
    parser.add_argument("--write-docs", action="store_true", help=f"write {DOCS.relative_to(ROOT)} and its tables from this run")
    options = parser.parse_args()
    attended, activated = attention.measured(), cams.measured()
    found = (
        Found(attention.conclusion(attended), over_photos(attended), by_photo(attended, attention.COLUMNS)),
        Found(cams.conclusion(activated), over_photos(activated), by_photo(activated, cams.COLUMNS)),
    )
    for part in found:
        print(to_text(part.maps))
        print(to_text(part.photos))
        print(part.conclusion)
    if options.write_docs:
        DOCS.write_text(document(*found, f"{cams.apart(activated):.0e}"), encoding="utf-8")
        print(f"wrote {DOCS.relative_to(ROOT)}")
    return 0


def tables(name: str, found: Found) -> str:
    """Return the main rows of a table, and links to files with all rows and with those of each photo."""
    short: list[Row] = [{column: row[column] for column in SHOWN} for row in found.maps if LEFT_OUT not in str(row["map"])]
    files = folded("All maps and columns", to_markdown(found.maps)) + folded("Lift for each photo", to_markdown(found.photos))
    return f"{to_markdown(short)}\n{with_files(DOCS, name, files)}"


def document(attended: Found, activated: Found, apart: str) -> str:
    """Return the docs page, and write its files.

    Args:
        attended: Results of attention.
        activated: Results of class activation maps.
        apart: The largest difference between lifts of maps that are equal up to a factor.
    """
    return "\n".join(
        [
            "# Localization: attention and class activation maps on photos\n",
            "How much of a map lies on the object of a photo? *Lift* answers this: the map's share on the object, over the object's share "
            "of the area. Chance is 1. `python scripts/localization.py --write-docs` measures this page and writes it.\n",
            f"- **Attention of DINOv2.** {attended.conclusion}",
            f"- **Class activation maps of EfficientNet-Lite0.** {activated.conclusion}\n",
            "## How it is measured\n",
            f"- Photos: {len(attended.photos)} with a mask drawn by hand ([assets/objects](../assets/objects/README.md)). The object "
            f"covers at most {LARGEST:.0%}. Only the part of the photo that the model received counts.",
            "- Means over photos are geometric. Intervals are 95 % bootstrap intervals over photos (2000 resamples, seed 0). A single lift "
            "of 0 makes the mean 0; the row then says so.",
            "- Two controls ignore where the object is. *Shifted copies* are the same map, shifted circularly around the grid by "
            f"{COPIES} random steps. The *center prior* is a Gaussian around the middle, with a standard deviation of a quarter of each "
            "side.",
            "- *Object mask at the map's resolution*: the value of each cell is the object's share of the cell. A map that uses only cells "
            "entirely on the object can score higher.\n",
            "## Attention of DINOv2\n",
            "- DINOv2 ViT-S/14 with its published weights, the whole photo at the area of 518 x 518 pixels, query: the class token.",
            "- The mask chooses the best and the worst head. They show how much heads differ, not what a user gets.",
            "- `sinks dropped`: patches that attract more than 20 times the uniform share of attention get weight 0.\n",
            tables("DINOv2", attended),
            "## Class activation maps of EfficientNet-Lite0\n",
            "- EfficientNet-Lite0 with its published ImageNet weights and its own evaluation transform, which crops the middle. Target: "
            "the logit of the top class. `inside the crop` is the share of the object that is left.",
            "- The maps have 7 x 7 cells, and objects fill more of a crop. Do not compare lifts between the two models.",
            "- `gradcam`, `xgradcam`, `hirescam` and the positive part of `cam` are the same map up to a factor, because the features are "
            f"averaged next: their lifts differ by at most {apart}.",
            "- Eigen-CAM does not depend on the class.\n",
            tables("EfficientNet", activated),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
