"""Rebuild the pictures of README and docs in `assets/gallery/`, from the photos and weights of the demo."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

import visattn
from visattn import data
from visattn._pipeline import Explanation, answer, look
from visattn._sheets import Cell, contact_sheet, matrix_figure, sheet
from visattn.cli._demo import PROBES, demo_page
from visattn.render import ring, spotlight

FOLDER = Path(__file__).parents[1] / "assets" / "gallery"
HEADS = {"astronaut": 4, "coffee": 1, "rocket": 5}  # the head that the strip shows, chosen by eye


def main() -> None:
    """Write every picture and print its path."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    model = visattn.load_model(data.OFFLINE_MODEL, weights=data.offline_weights())
    rows = []
    for name, head in HEADS.items():
        prepared = visattn.prepare(visattn.load_image(data.photo_path(name)), model)
        recording = look(model, prepared)
        heads = answer(recording, prepared, "attention", {})
        x, y = PROBES[name]
        alike = answer(recording, prepared, "similarity", {"query": f"pixel:{x},{y}"}).overlay()
        rows.append(
            [
                Cell(_landscape(picture))
                for picture in (
                    prepared.photo,
                    heads.at(head=head).overlay(marks=False, opacity=0.6),
                    _mask(heads, head),
                    answer(recording, prepared, "pca", {}).overlay(),
                    ring(alike, [(y, x)]),
                    answer(recording, prepared, "rollout", {}).overlay(opacity=0.6),
                )
            ]
        )
        if name == "coffee":
            wall = answer(recording, prepared, "attention", {"layer": "all"})
            _save("wall", contact_sheet(prepared.photo, wall.map, prepared.geometry, rows="layer", columns="head", panel=150))
            record = recording.select(kind="self", layer=5)[0]
            weights = record.operator.dense()[0, 2].numpy()
            _save("matrix", matrix_figure(weights, record.keys.prefix, title="coffee.png, blocks.5.attn, head 2"))
            query = answer(recording, prepared, "attention", {"layer": "all", "query": f"pixel:{x},{y}"})
            layers = query.map.mean("head")
            _save(
                "layers",
                contact_sheet(prepared.photo, layers, prepared.geometry, points=[(y, x)], title="one patch through 12 layers"),
            )
    titles = ["photo", "one head", "60% of its mass", "patch features", "like the ringed patch", "rollout, sinks ringed"]
    _save("strip", sheet(rows, panel=240, column_labels=titles))
    for name in data.PHOTOS:
        _save(f"demo_{name}", demo_page(model, data.photo_path(name), PROBES[name])[0])


def _mask(heads: Explanation, head: int) -> Image.Image:
    one = heads.at(head=head)
    return spotlight(one.photo, one.map.mass(0.6).to_heatmap(one.geometry, "nearest"))


def _landscape(picture: Image.Image) -> Image.Image:
    """The top of a picture at 3:2, so that the strip's rows are of one height."""
    return picture.crop((0, 0, picture.width, min(picture.height, picture.width * 2 // 3)))


def _save(name: str, picture: Image.Image) -> None:
    path = FOLDER / f"{name}.jpg"
    picture.save(path, quality=88)
    print(path)


if __name__ == "__main__":
    main()
