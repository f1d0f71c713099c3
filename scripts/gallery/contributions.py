"""Gallery pictures of direct contributions, and of patching with another photo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image

import visattn
from visattn.core.drawing.head_tables import head_table
from visattn.core.drawing.pages import Cell, sheet
from visattn.data.scenes.causes import CausedScenes
from visattn.evaluation import head_effects, patched_heads

CAUSES = Path(__file__).parents[2] / "models" / "causes"
MODEL, SCENE, DONOR = "scenes_vit", "scene:7", "scene:3"
CAUSE, SEED, NUMBER = "color", 2, 3  # of a network that decides by one cause, and of a scene
PANEL = 224


def contribution_pictures() -> dict[str, Image.Image]:
    """Return the pictures by name."""
    return {
        "contributions": _contributions(),
        "contributing_heads": _heads(),
        "patching": _patching(),
        "patched_heads": _patched_heads(),
    }


def _contributions() -> Image.Image:
    """Draw the map of all heads, and those of the heads that raise and lower the score most, for two networks."""
    caused = Image.fromarray(CausedScenes(CAUSE, NUMBER + 1, seed=SEED).scene(NUMBER).image)  # type: ignore[arg-type]
    rows = [_row(MODEL, SCENE, MODEL), _row(str(CAUSES / f"{CAUSE}_vit_0"), caused, f"it decides by {CAUSE}")]
    notes = (
        "Red raises the logit of the predicted class, blue lowers it. Each panel has its own scale; its caption is what all patches add.",
    )
    return sheet(rows, panel=PANEL, title="Direct contributions of patches", notes=notes)


def _row(model: str, scene: Any, name: str) -> list[Cell | None]:  # noqa: ANN401 - a photo
    whole = visattn.explain(model, scene, method="contributions")
    found = head_effects(model, [scene])
    direct = found.direct[0]
    cells: list[Cell | None] = [
        Cell(_large(whole.photo), f"predicted: class {whole.provenance.scores[0]['name']}", name),
        Cell(_large(whole.overlay()), f"{float(whole.map.values.sum()):+.2f}", "all heads"),
    ]
    for number in (int(direct.argmax()), int(direct.argmin())):
        layer, head = found.heads[number]
        one = visattn.explain(model, scene, method="contributions", layer=layer, head=head)
        cells.append(Cell(_large(one.overlay()), f"{float(one.map.values.sum()):+.2f}", f"{layer}, head {head}"))
    return cells


def _large(picture: Image.Image) -> Image.Image:
    return picture.resize((PANEL, PANEL), Image.Resampling.NEAREST if picture.width < PANEL else Image.Resampling.LANCZOS)


def _heads() -> Image.Image:
    found = head_effects(MODEL, [SCENE])
    rows = [row for row in found.rows() if row["head"] is not None]
    numbers = {(str(row["layer"]), int(row["head"])): float(row["direct"]) for row in rows}
    marked = [key for key, row in zip(numbers, rows, strict=True) if row["opposite"]]
    notes = ("*: without this head the score changes the other way.",)
    return head_table(numbers, meaning="direct contribution", title=f"Heads of {MODEL} on {SCENE}", notes=notes, marked=marked)


def _patching() -> Image.Image:
    found = visattn.explain(MODEL, SCENE, method="patching", donor=DONOR)
    return found.contact_sheet(columns="layer", title=f"{SCENE}: patches that take what attention gave for {DONOR}")


def _patched_heads() -> Image.Image:
    found = patched_heads(MODEL, SCENE, DONOR)
    notes = (f"The score of {SCENE} is {found.score:.3g}, that of {DONOR} {found.of_donor:.3g}.",)
    return head_table(found.shares, meaning="recovered share", title=f"Heads of {DONOR} put into {SCENE}", notes=notes)
