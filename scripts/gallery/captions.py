"""Gallery pictures: filmstrips of captioners, and glimpses of the recurrent attention model."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image

import visattn
from visattn import data
from visattn._support.whole_files import write_whole
from visattn.captioning import load_captioner
from visattn.core.drawing.pages import Cell, sheet
from visattn.core.drawing.pictures import to_png
from visattn.core.provenance import Provenance
from visattn.data.captions.captioned_images import CaptionSceneDataset
from visattn.errors import VisattnError

CHECKPOINTS = Path(__file__).parents[2] / "models"
CAPTIONERS = "soft", "hard", "local"
TESTS, THINGS = 100, 3  # scenes to choose from, and the number of objects of the chosen one
RAM = CHECKPOINTS / "ram_fashion_mnist"
SHOWN = 6  # classes, the first test picture of each
PANEL = 224


def caption_pictures(folder: Path) -> None:
    """Write the filmstrips of captioners for a scene with a new color-shape pair, and glimpses of the recurrent attention model."""
    pictures = CaptionSceneDataset("scenes-new", "test", TESTS, (64, 64), 0)
    index = next(i for i in range(TESTS) if len(pictures.scenes.scene(i).things) == THINGS)
    photo, (truth,) = pictures[index]
    for name in CAPTIONERS:
        (caption,) = load_captioner(CHECKPOINTS / f"captions_{name}").generate([photo])
        said = f"{name} attention captioner on test scene {index} of scenes-new; ground truth: {truth}"
        _write(folder / f"filmstrip_{name}.png", caption.filmstrip(panel=144, notes=(said,)), caption.map.provenance)
    try:
        _write(folder / "glimpses.png", *_glimpses())
    except VisattnError as error:
        print(f"glimpses.png: skipped: {error}")


def _glimpses() -> tuple[Image.Image, Provenance]:
    """Draw the glimpse path over the first test image of some classes, enlarged, with the network's predictions."""
    model = visattn.load_model(str(RAM))
    tests = data.load_labeled("fashion-mnist", "test")
    cells = []
    for label in range(SHOWN):
        picture = next(picture for picture, one in map(tests.__getitem__, range(len(tests))) if one == label)
        large = picture.convert("RGB").resize((PANEL, PANEL), Image.Resampling.NEAREST)
        explanation = visattn.explain(model, large, method="glimpses")
        with torch.inference_mode():
            answer = tests.classes[int(model(visattn.prepare(large, model).pixels).logits.argmax())]
        cells.append(Cell(explanation.overlay(opacity=0), answer, tests.classes[label]))
    notes = (
        "First test image of each of the first classes: true class above, predicted class below. Boxes: the glimpses, in the "
        "order of the numbers.",
    )
    return sheet([cells], panel=PANEL, notes=notes), explanation.provenance


def _write(path: Path, picture: Image.Image, provenance: Provenance) -> None:
    print(write_whole(path, to_png(picture, provenance)))
