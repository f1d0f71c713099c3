"""How much of a map lies on the object: lift over chance on photos with masks, beside a center prior and shifted copies.

`localization.py [--write-docs]`. Two models with their real weights: attention of DINOv2 ViT-S/14, each photo whole at the area of
518 x 518 pixels, and class activation maps of EfficientNet-Lite0, each photo through the model's own evaluation transform.
"""

from __future__ import annotations

import argparse
import sys

from pointing import attention, cams
from pointing.photos import COPIES, LARGEST, ROOT, Part, by_photo, over_photos

from visattn._support.tables import to_markdown, to_text

DOCS = ROOT / "docs" / "localization.md"


def main() -> int:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(description="Lift of maps over chance on photos with masks.")
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
    """The page of the docs."""
    return "\n".join(
        [
            "# Is the object where the map is?\n",
            "Written by `scripts/localization.py --write-docs`.\n",
            f"- Photos: {len(attended)} with a mask drawn by hand ([assets/objects](../assets/objects/README.md)); those that one object "
            f"fills by more than {LARGEST:.0%} are left out.",
            "- Lift: the share of the map's sum that lies on the object, over the object's share of the area. 1 is chance. What the model "
            "did not see does not count.",
            "- Means are geometric, over photos; intervals are 95 % bootstrap over photos (2000 resamples, seed 0). One lift of 0 would "
            "make a mean 0, and the row would tell.",
            f"- Shifted copies: the same map moved round the grid by {COPIES} random steps. Center prior: a Gaussian about the middle with "
            "a quarter of each side as its deviation, whatever the photo shows.",
            "- The mask itself: a map whose value in each cell is the object's share of it. No bound: a map that keeps to whole cells of "
            "the object lies above.\n",
            "## Attention of DINOv2\n",
            "- Model: DINOv2 ViT-S/14 with its real weights; each photo whole, at the area of 518 x 518 pixels; query: the class token.",
            "- The best and the worst head are chosen with the mask in hand: they tell how far heads differ, not what a user gets.",
            "- `sinks dropped`: patches that draw over 20 times the uniform share of attention get nothing.\n",
            "### Over photos\n",
            to_markdown(over_photos(attended)),
            "### By photo\n",
            to_markdown(by_photo(attended, attention.COLUMNS)),
            "## Class activation maps of EfficientNet-Lite0\n",
            cams.conclusion(activated) + "\n",
            "- Model: EfficientNet-Lite0 with real ImageNet weights; each photo through its own evaluation transform, which keeps "
            "the middle (`of it seen`: the share of the object that is left); target: the logit of the first class.",
            "- The maps have 7 x 7 cells. Objects fill more of a crop, so there is less to gain than above: lifts of the two parts are not "
            "to be compared.",
            "- Behind an average `gradcam`, `xgradcam`, `hirescam` and the positive part of `cam` are one map up to a factor, so four rows "
            f"are one result: their lifts differ by at most {cams.apart(activated):.0e}.",
            "- Eigen-CAM depends on no class.\n",
            "### Over photos\n",
            to_markdown(over_photos(activated)),
            "### By photo\n",
            to_markdown(by_photo(activated, cams.COLUMNS)),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
