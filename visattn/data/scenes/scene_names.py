"""Names of the datasets of scenes, and what decides the label in each."""

from __future__ import annotations

from visattn.data.scenes.causes import CAUSES, Cause
from visattn.data.scenes.generator import Mark

GROUND_ALONE = "scenes-ground"  # background only: nothing in the image reveals the label
MARKS: dict[str, Mark] = {"scenes": "none", "scenes-shortcut": "label", "scenes-conflict": "random", GROUND_ALONE: "none"}
CAUSE_OF: dict[str, Cause] = {f"scenes-by-{cause}": cause for cause in CAUSES}  # one known thing decides the label
DRAWN = (*MARKS, *CAUSE_OF)
