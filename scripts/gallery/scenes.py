"""Gallery pictures of scenes with synthetic ground truth, and of the maps of networks trained on them."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import visattn
from visattn.core.drawing.pages import Cell, sheet
from visattn.data.scenes import CLASSES, Mark, Scene, Scenes
from visattn.data.scenes.causes import CAUSES, VALUES, CausedScenes
from visattn.training import Config, train

TEST = 2  # seed of the test scenes; no network was trained on them
PANEL = 192
_CAUSE, _REST = (240, 140, 30), (45, 50, 55)  # colors of pixels of a cause, and of others
COLUMNS: dict[str, tuple[str, str, Mark]] = {  # folder, method, mark
    "ViT, relevance": ("scenes_vit", "relevance", "none"),
    "CNN, Grad-CAM": ("scenes_cnn", "gradcam", "none"),
    "CNN, gates of CBAM": ("scenes_cnn", "gates", "none"),
    "marks: ViT, relevance": ("scenes_vit_shortcut", "relevance", "label"),
    "marks: CNN, Grad-CAM": ("scenes_cnn_shortcut", "gradcam", "label"),
}


def scenes_sheet(count: int = 6) -> Image.Image:
    """Draw scenes, their twins with a watermark that reveals the label, and the masks of their objects."""
    rows: list[list[Cell | None]] = []
    kinds: dict[str, Mark] = {"scene": "none", "shortcut": "label"}
    for mark in kinds.values():
        drawn = [Scenes(count, (96, 96), seed=TEST, watermark=mark).scene(i) for i in range(count)]
        rows.append([Cell(_large(scene.image), CLASSES[scene.label]) for scene in drawn])
    rows.append([Cell(_large(_colored(scene))) for scene in drawn])
    notes = (
        "One object has a label shape, three to six others do not; color, texture, size and position carry no information. In the "
        "shortcut twin a mark in a corner also reveals the label. Masks: label object white, others gray, mark or its position orange.",
    )
    return sheet(rows, panel=PANEL, row_labels=[*kinds, "masks"], notes=notes)


def causes_sheet() -> Image.Image:
    """Draw a scene with each value of each cause, and the pixels of the cause in the last one."""
    rows: list[list[Cell | None]] = []
    for cause in CAUSES:
        drawn = CausedScenes(cause, 40, (96, 96), seed=TEST)
        found = {scene.label: scene for scene in map(drawn.scene, reversed(range(len(drawn))))}
        cells: list[Cell | None] = [Cell(_large(found[label].image), f"label {label}") for label in range(VALUES)]
        rows.append(
            [*cells, Cell(_large(np.where(found[VALUES - 1].masks[0][..., None], np.uint8(255), np.uint8(0)).repeat(3, 2)))]
        )
    notes = ("In each row one thing takes four values, and the label is that value. All else is drawn at random.",)
    return sheet(rows, panel=PANEL, row_labels=list(CAUSES), column_labels=["", "", "", "", "pixels of the cause"], notes=notes)


def known_truth_sheet(indices: tuple[int, ...] = (1, 2, 3, 5)) -> Image.Image:
    """Draw maps of four networks: two that learned shapes, and two that learned a mark that also reveals the class."""
    marks: tuple[Mark, ...] = ("none", "label")
    drawn = {mark: Scenes(max(indices) + 1, (64, 64), seed=TEST, watermark=mark) for mark in marks}
    models = {folder: visattn.load_model(folder) for folder, _, _ in COLUMNS.values()}
    rows: list[list[Cell | None]] = []
    for index in indices:
        scene = drawn["none"].scene(index)
        cells: list[Cell | None] = [Cell(_large(scene.image), CLASSES[scene.label])]
        for folder, method, mark in COLUMNS.values():
            photo = Image.fromarray(drawn[mark].scene(index).image)
            explanation = visattn.explain(models[folder], photo, method=method)
            answer = (explanation.provenance.target or ("",))[0].partition(" (")[0].removeprefix("logit of ")
            cells.append(Cell(_enlarged(explanation, photo), answer))
        rows.append(cells)
    notes = (
        "Below a scene: its class. Below a map: the predicted class, which the map explains. The last two networks learned the mark.",
    )
    return sheet(rows, panel=PANEL, column_labels=["scene", *COLUMNS], notes=notes)


def training_pictures(folder: Path) -> None:
    """Write learning curves and the last maps of the first training run in docs/training.md."""
    recipe = Config(
        data="scenes",
        train_count=4000,
        test_count=500,
        model="visattn_resnet14",
        attention="cbam",
        opt="adamw",
        lr=0.002,
        weight_decay=0.05,
        batch_size=64,
        augment="turn",
        label_smoothing=0.0,
        epochs=8.0,
        maps_every=100,
    )
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "first"
        train(recipe, run, quiet=False)
        shutil.copy(run / "curves.png", folder / "training_curves.png")
        shutil.copy(max((run / "maps").iterdir()), folder / "training_maps.png")


def _enlarged(explanation: visattn.Explanation, photo: Image.Image) -> Image.Image:
    """Draw the map over the enlarged scene, so that it is not limited to 64 pixels."""
    heat = explanation.panel.to_heatmap(explanation.geometry.resized((PANEL, PANEL)))
    return visattn.overlay(photo.resize((PANEL, PANEL), Image.Resampling.NEAREST), heat)


def _large(pixels: NDArray[np.uint8]) -> Image.Image:
    return Image.fromarray(pixels).resize((PANEL, PANEL), Image.Resampling.NEAREST)


def _colored(scene: Scene) -> NDArray[np.uint8]:
    """Draw the masks of a scene in colors."""
    picture = np.zeros((*scene.watermark.shape, 3), np.uint8)
    picture[scene.masks[1:].any(0)] = 110
    picture[scene.masks[0]] = 255
    picture[scene.watermark] = (240, 140, 30)
    return picture
