"""Localization of maps: lift over chance on photos with object masks, compared with a center prior and shifted copies.

`localization.py [--write-docs]` evaluates two models with published weights: attention of DINOv2 ViT-S/14, with each whole photo at the
area of 518 x 518 pixels, and class activation maps of EfficientNet-Lite0, with the model's own evaluation transform.
"""

from __future__ import annotations

import argparse
import sys

from pages import folded
from pointing import attention, cams
from pointing.photos import COPIES, LARGEST, ROOT, Part, by_photo, over_photos

from visattn._support.tables import to_markdown, to_text

DOCS = ROOT / "docs" / "localization.md"


def main() -> int:
    """Measure, print the page, and write it on request."""
    parser = argparse.ArgumentParser(description="Measure the lift of maps over chance on photos with object masks.")
    parser.add_argument("--write-docs", action="store_true", help=f"write {DOCS.relative_to(ROOT)} from this run")
    options = parser.parse_args()
    parts = attention.measured(), cams.measured()
    for part, columns in zip(parts, (attention.COLUMNS, cams.COLUMNS), strict=True):
        print(to_text(over_photos(part)))
        print(to_text(by_photo(part, columns)))
    print(cams.conclusion(parts[1]))
    if options.write_docs:
        DOCS.write_text(document(*parts), encoding="utf-8")
        print(f"wrote {DOCS.relative_to(ROOT)}")
    return 0


def document(attended: Part, activated: Part) -> str:
    """Return the docs page."""
    return "\n".join(
        [
            "# Localization: attention and class activation maps on photos\n",
            "`python scripts/localization.py --write-docs` measures this page and writes it.\n",
            "How much of a map lies on the object of a photo? *Lift* answers this: the map's share on the object, over the object's share "
            "of the area. Chance is 1. Two controls ignore where the object is: the *center prior* is a Gaussian around the middle of "
            "every photo, and *shifted copies* are the same map moved around the grid.\n",
            f"- **Attention of DINOv2.** {attention.conclusion(attended)}",
            f"- **Class activation maps of EfficientNet-Lite0.** {cams.conclusion(activated)}\n",
            "## How it is measured\n",
            f"- Photos: {len(attended)} with a mask drawn by hand ([assets/objects](../assets/objects/README.md)). Photos in which the "
            f"object covers more than {LARGEST:.0%} are left out.",
            "- Only the part of the photo that the model received counts.",
            "- Means over photos are geometric. Intervals are 95 % bootstrap intervals over photos (2000 resamples, seed 0). A single lift "
            "of 0 makes the mean 0; the row then says so.",
            f"- *Shifted copies*: the same map, shifted circularly around the grid by {COPIES} random steps.",
            "- *Center prior*: a Gaussian around the middle, with a standard deviation of a quarter of each side, for every photo.",
            "- *Object mask at the map's resolution*: a map whose value in each cell is the object's share of the cell. A map that uses "
            "only cells entirely on the object can score higher.\n",
            "## Attention of DINOv2\n",
            "- Model: DINOv2 ViT-S/14 with its published weights. Input: the whole photo, at the area of 518 x 518 pixels. Query: the "
            "class token.",
            "- The mask chooses the best and the worst head. They show how much heads differ, not what a user gets.",
            "- `sinks dropped`: patches that attract more than 20 times the uniform share of attention get weight 0.\n",
            folded("Lift over photos, for each map", to_markdown(over_photos(attended))),
            folded("Lift for each photo", to_markdown(by_photo(attended, attention.COLUMNS))),
            "## Class activation maps of EfficientNet-Lite0\n",
            "- Model: EfficientNet-Lite0 with its published ImageNet weights. Target: the logit of the top class.",
            "- Input: the model's own evaluation transform, which crops the middle. `inside the crop` is the share of the object that is "
            "left.",
            "- The maps have 7 x 7 cells, and objects fill more of a crop, so high lifts are harder to reach. Do not compare lifts between "
            "the two models.",
            "- `gradcam`, `xgradcam`, `hirescam` and the positive part of `cam` are the same map up to a factor, because the features are "
            f"averaged next. Their four rows are one result: the lifts differ by at most {cams.apart(activated):.0e}.",
            "- Eigen-CAM does not depend on the class.\n",
            folded("Lift over photos, for each method", to_markdown(over_photos(activated))),
            folded("Lift for each photo", to_markdown(by_photo(activated, cams.COLUMNS))),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
