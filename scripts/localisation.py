"""How much of a map lies on the object: lift over chance on photos with masks, beside a centre prior and shifted copies.

`localisation.py [--write-docs]`. The model is DINOv2 ViT-S/14 with its real weights, each photo whole at the area of 518 x 518 pixels.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import visattn
from visattn import data, evaluation, methods
from visattn._bootstrap import mean_interval
from visattn._look import look
from visattn._tables import Row, to_markdown, to_text
from visattn.geometry import Geometry
from visattn.maps import AttentionMap
from visattn.records import Recording

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "localisation.md"
FOLDERS = ROOT / "assets" / "photos", ROOT / "assets" / "objects"
MASKS = ROOT / "assets" / "objects" / "masks"
LARGEST = 0.5  # photos that one object fills leave nothing to be found
COPIES = 20


def main() -> int:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(description="Lift of maps over chance on photos with masks.")
    parser.add_argument("--write-docs", action="store_true", help=f"write {DOCS.relative_to(ROOT)} from this run")
    options = parser.parse_args()
    lifts = measured()
    photos, summary = by_photo(lifts), over_photos(lifts)
    print(to_text(summary))
    print(to_text(photos), end="")
    if options.write_docs:
        DOCS.write_text(document(summary, photos), encoding="utf-8")
        print(f"wrote {DOCS.relative_to(ROOT)}")
    return 0


def measured() -> dict[str, dict[str, float]]:
    """Lift by photo and by what was drawn."""
    model = visattn.load_model(data.OFFLINE_MODEL, weights=data.offline_weights())
    found: dict[str, dict[str, float]] = {}
    for file in sorted((path for folder in FOLDERS for path in folder.iterdir()), key=lambda path: path.stem):
        place = MASKS / f"{file.stem}.png"
        if not place.exists() or file.is_dir():
            continue
        with Image.open(place) as picture:
            mask = np.asarray(picture) > 0
        if mask.mean() > LARGEST:
            print(f"{file.stem} is left out: the object covers {mask.mean():.0%}", file=sys.stderr)
            continue
        prepared = visattn.prepare(visattn.load_image(file), model, resize="fit")
        recording = look(model, prepared, values=True)
        found[file.stem] = {
            "(area of the object)": float(mask.mean()),
            "(sinks)": len(methods.diagnostics.sinks(recording)[0]),
        } | dict(lifts_of(recording, mask, prepared.geometry))
        print(f"  ... {file.stem}", file=sys.stderr, flush=True)
    return found


def lifts_of(recording: Recording, mask: NDArray[np.bool_], geometry: Geometry) -> Iterator[tuple[str, float]]:
    """Everything that is compared, of one photo."""

    def on(shown: AttentionMap) -> NDArray[np.float64]:
        return evaluation.lift(shown, mask, geometry)

    layers = len(recording.layers)
    for sinks in ("keep", "drop"):
        name = {"keep": "", "drop": ", sinks dropped"}[sinks]
        heads = on(methods.attention(recording, sinks=sinks).at(batch=0))
        mean = methods.attention(recording, fusion="mean", sinks=sinks).at(batch=0)
        yield f"last layer, mean of heads{name}", float(on(mean))
        yield f"last layer, best head by the mask{name}", float(heads.max())
        yield f"last layer, worst head by the mask{name}", float(heads.min())
        for start in (0, layers // 2, layers - 2):
            rolled = methods.rollout(recording, start_layer=start, sinks=sinks).at(batch=0)
            yield f"rollout from layer {start}{name}", float(on(rolled))
            if start == 0 and sinks == "keep":
                yield "20 shifted copies of rollout", float(on(evaluation.shifted_copies(rolled, COPIES)).mean())
        if sinks == "keep":
            yield "20 shifted copies of the mean of heads", float(on(evaluation.shifted_copies(mean, COPIES)).mean())
    yield "norm attention of the last layer", float(on(methods.norm_attention(recording).at(batch=0)))
    yield "rollout, weights by norm", float(on(methods.rollout(recording, weights_by="norm").at(batch=0)))
    yield "rollout, residual measured", float(on(methods.rollout(recording, residual="measured").at(batch=0)))
    yield "centre prior", float(on(evaluation.centre_prior(mean)))


def over_photos(lifts: dict[str, dict[str, float]]) -> list[Row]:
    """Geometric means with their bootstrap intervals over photos, the highest first."""
    names = [name for name in next(iter(lifts.values())) if not name.startswith("(")]
    logarithms = np.log([[photo[name] for name in names] for photo in lifts.values()])
    low, high = np.exp(mean_interval(logarithms))
    means, above = np.exp(logarithms.mean(0)), (logarithms > 0).sum(0)
    prior = logarithms[:, names.index("centre prior")]
    rows: list[Row] = [
        {
            "map": name,
            "lift": f"{means[i]:.2f}",
            "95 % interval": f"{low[i]:.2f} to {high[i]:.2f}",
            "photos above chance": f"{above[i]} of {len(lifts)}",
            "above the centre prior": None if name == "centre prior" else f"{(logarithms[:, i] > prior).sum()} of {len(lifts)}",
        }
        for i, name in enumerate(names)
    ]
    return [rows[i] for i in np.argsort(-means)]


def by_photo(lifts: dict[str, dict[str, float]]) -> list[Row]:
    """A row for each photo, of the maps that people draw first."""
    shown = {
        "heads, mean": "last layer, mean of heads",
        "best head": "last layer, best head by the mask",
        "worst head": "last layer, worst head by the mask",
        "rollout": "rollout from layer 0",
        "sinks dropped": "rollout from layer 0, sinks dropped",
        "centre prior": "centre prior",
    }
    return [
        {
            "photo": name,
            "object": f"{photo['(area of the object)']:.1%}",
            "sinks": int(photo["(sinks)"]),
            **{title: f"{photo[key]:.2f}" for title, key in shown.items()},
        }
        for name, photo in lifts.items()
    ]


def document(summary: list[Row], photos: list[Row]) -> str:
    """The page of the docs."""
    return "\n".join(
        [
            "# Is the object where the map is?\n",
            "Written by `scripts/localisation.py --write-docs`.\n",
            "- Model: DINOv2 ViT-S/14 with its real weights; each photo whole, at the area of 518 x 518 pixels; query: the class token.",
            f"- Photos: {len(photos)} with a mask drawn by hand ([assets/objects](../assets/objects/README.md)); those that one object "
            f"fills by more than {LARGEST:.0%} are left out.",
            "- Lift: the share of the map's sum that lies on the object, over the object's share of the area. 1 is chance.",
            "- Means are geometric, over photos; intervals are 95 % bootstrap over photos (2000 resamples, seed 0).",
            "- The best and the worst head are chosen with the mask in hand: they tell how far heads differ, not what a user gets.",
            f"- Shifted copies: the same map moved round the grid by {COPIES} random steps. Centre prior: a Gaussian about the middle with "
            "a quarter of each side as its deviation, whatever the photo shows.",
            "- `sinks dropped`: patches that draw over 20 times the uniform share of attention get nothing.\n",
            "## Over photos\n",
            to_markdown(summary),
            "## By photo\n",
            to_markdown(photos),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
