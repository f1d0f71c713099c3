"""Gallery pictures of what is taken out of maps: a mask and its box, and the mean maps of classes."""

from __future__ import annotations

from PIL import Image

import visattn
from visattn.core.drawing.marks import spotlight
from visattn.core.drawing.pages import Cell, sheet

_SCENES = range(60)


def regions_sheet() -> Image.Image:
    """Draw a Grad-CAM, the mask of half its sum, and the box of the mask's largest part."""
    found = visattn.explain("tf_efficientnet_lite0", "photo:chelsea", method="gradcam")
    cells = [Cell(found.overlay()), Cell(spotlight(found.photo, found.map.mask(mass=0.5))), Cell(found.overlay(box="mass:0.5"))]
    return sheet([cells], panel=300, column_labels=["Grad-CAM", "map.mask(mass=0.5)", 'overlay(box="mass:0.5")'])


def means_sheet() -> Image.Image:
    """Draw the mean Grad-CAM of each class that a network predicts for generated scenes."""
    groups: dict[str, list[visattn.AttentionMap]] = {}
    scenes = [f"scene:{number}" for number in _SCENES]
    for one in visattn.explain_batch("scenes_cnn", scenes, method="gradcam"):
        groups.setdefault(str(one.provenance.scores[0]["name"]), []).append(one.map)
    means = [visattn.maps.mean_map(groups[name]) for name in sorted(groups)]
    labels = [f"{name}: {len(groups[name])} images" for name in sorted(groups)]
    title = f"mean Grad-CAM of {len(scenes)} scenes by predicted class"
    return visattn.comparison_page(means, labels, panel=200, title=title, opacity=1)
