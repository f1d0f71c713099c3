"""Gallery pictures of networks that show one mechanism each, and of what an adversarial patch does to two others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from adversarial_patch import FOLDER as PATCHES, TARGET, put, scenes, seen
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor, to_pil_image
from train_draw import SHOWN, binary, load, strip

import visattn
from visattn import data
from visattn.core.drawing.marks import draw_window
from visattn.core.drawing.pages import Cell, sheet
from visattn.core.geometry import affine_corners
from visattn.core.pipeline.passes import look
from visattn.data.scenes import CLASSES

CHECKPOINTS = Path(__file__).parents[2] / "models"
SCENE, QUERY = "scene:7", "patch:5,9"  # where the windows lie
PANEL = 224
SHOWN_CLASSES = 6  # of Fashion-MNIST, the first test picture of each
WINDOWED = {"scenes_sliding_vit": "windows around the patch", "scenes_predictive_vit": "windows that it predicts"}
CLASSLESS = "eigencam", "rollout"
PATCHED = {"scenes_cnn": ("eigencam", "gradcam"), "scenes_vit": ("rollout", "relevance")}


def network_pictures() -> dict[str, Image.Image]:
    """Return the pictures by name."""
    return {"draw": _draw(), "transformer": _transformer(), "sliding": _sliding(), "patch": _patch()}


def _draw() -> Image.Image:
    return strip(load(CHECKPOINTS / "draw_fashion_mnist"), binary("test", None, None)[:SHOWN])


@torch.no_grad()
def _transformer() -> Image.Image:
    """Draw the window that the spatial transformer predicts for some test images, and below what the classifier receives."""
    model = visattn.load_model(str(CHECKPOINTS / "stn_fashion_mnist"))
    tests = data.load_labeled("fashion-mnist-turned", "test")
    above, below = list[Cell | None](), list[Cell | None]()
    for label in range(SHOWN_CLASSES):
        picture = next(picture for picture, one in map(tests.__getitem__, range(len(tests))) if one == label)
        side = picture.width * (PANEL // picture.width)
        large = picture.convert("RGB").resize((side, side), Image.Resampling.NEAREST)
        prepared = visattn.prepare(large, model)
        (window,) = (feature for feature in look(model, prepared).features if feature.role == "transform")
        theta = window.value.float()
        corners = [(y * side, x * side) for y, x in affine_corners(theta[0].tolist())]
        answer = tests.classes[int(model(prepared.pixels).argmax())]
        above.append(Cell(draw_window(large, corners), answer, tests.classes[label]))
        pixels = (prepared.pixels - prepared.pixels.min()) / (prepared.pixels.max() - prepared.pixels.min())
        sampled = F.grid_sample(pixels, F.affine_grid(theta, [1, 1, 28, 28], align_corners=False), align_corners=False)
        below.append(Cell(to_pil_image(sampled[0]).convert("RGB").resize((side, side), Image.Resampling.NEAREST)))
    notes = (
        "First test image of each of the first classes: true class above, predicted class below.",
        "Upper row: the window, with a dot at its top-left corner. Lower row: what the classifier receives.",
    )
    return sheet([above, below], panel=side, title="Spatial transformer on turned and cluttered Fashion-MNIST", notes=notes)


def _sliding() -> Image.Image:
    """Draw the attention of one patch in each block of two networks with local attention."""
    rows = list[list[Cell | None]]()
    for name in WINDOWED:
        model: Any = visattn.load_model(name)
        row = list[Cell | None]()
        for number, block in enumerate(model.blocks):
            found = visattn.explain(model, SCENE, method="attention", layer=number, query=QUERY, fusion="mean")
            side = 2 * next(part.radius for part in block.attn.modules() if hasattr(part, "radius")) + 1
            row.append(Cell(found.overlay(), f"block {number}", f"{side} x {side} cells"))
        rows.append(row)
    notes = (
        "White ring: the patch that attends. Above, its window grows from block to block; below, it predicts where its window lies (box).",
        "Blue rings: sinks.",
    )
    return sheet(rows, panel=PANEL, title="Attention of one patch in windows", notes=notes, row_labels=list(WINDOWED.values()))


@torch.no_grad()
def _patch() -> Image.Image:
    """Draw a scene that a patch turns, before and after, and maps for the class of the patch, for two networks."""
    rows = list[list[Cell | None]]()
    for name, methods in PATCHED.items():
        model = visattn.load_model(name)
        patch = pil_to_tensor(Image.open(PATCHES / f"{name}.png").convert("RGB")).float() / 255
        images, labels = scenes(20, 2)
        images = images[labels != TARGET]
        covered, _ = put(images, patch, torch.Generator().manual_seed(0))
        before, after = (seen(model)(pixels).argmax(1) for pixels in (images, covered))
        number = int(((after == TARGET) & (before != TARGET)).nonzero()[0])
        photos = [to_pil_image(pixels[number]) for pixels in (images, covered)]
        cells: list[Cell | None] = [
            Cell(photo.resize((PANEL, PANEL), Image.Resampling.NEAREST), CLASSES[int(answer[number])], name if not place else "")
            for place, (photo, answer) in enumerate(zip(photos, (before, after), strict=True))
        ]
        for method in methods:
            with torch.enable_grad():
                found = visattn.explain(model, photos[1], method=method, target=None if method in CLASSLESS else TARGET)
            cells.append(Cell(found.overlay().resize((PANEL, PANEL)), method))
        rows.append(cells)
    notes = (f"Left: the scene and its class; then with the patch. Maps: for the class {CLASSES[TARGET]}.",)
    return sheet(rows, panel=PANEL, title="An adversarial patch, and where maps look", notes=notes)
