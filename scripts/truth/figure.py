"""Picture of two questions: does a map find the object that decides, and does it find the mark that decides instead?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from visattn.core.drawing.plots import figures
from visattn.core.provenance import Provenance
from visattn.evaluation.intervals import mean_interval

_TITLES = {
    "object": "networks that learned shapes:\ndoes the map find the object?",
    "mark": "networks that learned a mark:\ndoes the map find the mark?",
}
_KINDS = {"CNN": ("o", figures.VERMILION, -0.15), "ViT": ("s", figures.BLUE, 0.15)}  # marker, color, offset


class Compared(NamedTuple):
    """AUROC of a method's maps, one number per scene, and of its two controls; and whether it is above both."""

    own: NDArray[np.float64]
    controls: tuple[NDArray[np.float64], NDArray[np.float64]]
    above: bool


def two_questions(found: Mapping[str, Mapping[str, Compared | None]]) -> bytes:
    """Plot the mean AUROC of each method with its interval, and the better of its two controls.

    Args:
        found: By `object, CNN`, `object, ViT`, `mark, CNN` and `mark, ViT`: the methods and what was measured.

    Returns:
        A PNG.
    """
    methods = list(next(iter(found.values())))
    title = "Where maps point, in scenes whose evidence is known"
    facts = "AUROC of the pixels of the evidence, mean over scenes with 95 % interval; gray: the better of two controls; filled: above both"
    figure = figures.figure(title, facts, 9.6, 5.2)
    for axes, (truth, name) in zip(figure.subplots(1, 2, sharey=True), _TITLES.items(), strict=True):
        for kind, (marker, color, offset) in _KINDS.items():
            for row, one in enumerate(found[f"{truth}, {kind}"][method] for method in methods):
                if one is None:
                    continue
                mean, (low, high) = float(one.own.mean()), (float(end) for end in mean_interval(one.own))
                control = max(float(values.mean()) for values in one.controls)
                axes.plot([control] * 2, [row + offset - 0.12, row + offset + 0.12], color="#9a9a9a", lw=3)
                axes.plot([low, high], [row + offset] * 2, color=color, lw=1.5)
                axes.plot(mean, row + offset, marker, color=color, mfc=color if one.above else "white", ms=7)
            axes.plot([], [], marker, color=color, label=kind)
        axes.axvline(0.5, color="#c8c8c8", lw=1, zorder=0)
        axes.set_title(name, fontsize=10)
        axes.set_xlim(0.15, 1.02)
        axes.set_yticks(range(len(methods)), methods, fontsize=9)
        axes.set_ylim(len(methods) - 0.5, -0.5)
        axes.set_xlabel("AUROC (chance: 0.5)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#eeeeee")
        axes.set_axisbelow(True)
    axes.legend(loc="lower left", frameon=False)
    return figures.png(figure, Provenance(method="AUROC on scenes"))
