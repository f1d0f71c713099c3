"""How well a map finds a known cause on scenes of one network, beside three controls, and what follows from it for several networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from visattn._support.extras import need
from visattn._support.reprs import brief, in_pixels
from visattn._support.tables import Row
from visattn.core.maps import AttentionMap
from visattn.errors import MapError
from visattn.evaluation.baselines import center_prior, shifted_copies
from visattn.evaluation.causes.networks import Case
from visattn.evaluation.intervals import mean_interval
from visattn.evaluation.localization import auroc
from visattn.evaluation.object_masks import cells_of

Array = NDArray[np.float64]

CONTROLS = "shifted copies", "center prior", "cause without effect"
COPIES = 20  # shifted copies of each map
SURE = 0.8  # AUROC from which a cause is found
MARGIN = 0.1  # of the AUROC above that of each control: a prior that the network moves a little does not find a cause
FEWEST = 30  # scenes from which there is a verdict; intervals and tests of fewer are too sure
LEVEL = 0.05  # probability that one of all differences is called real by chance
_EXACT = 1e-12  # rounding of an AUROC
ENOUGH = 5  # networks of one kind from which a method may be trusted


@dataclass(frozen=True, eq=False)
class Findings:
    """Numbers of one method on scenes of one network.

    Attributes:
        map: Name of the method.
        cause: What the network decides by.
        kind: `cnn` or `vit`.
        network: Name of the network.
        grid: Rows and columns of its maps: with few cells, a small cause cannot be found exactly.
        auroc: `(scenes,)` probability that a pixel of the cause has a larger value than another.
        touches: `(scenes,)` whether the largest cell holds a pixel of the cause; of tied cells, the share that do.
        controls: The AUROC of maps that know nothing of the cause, by name: 20 shifted copies of the map; a Gaussian around the center; and
            `cause without effect`, the same method on a network that decides by another cause, or on the scene without the patch. It is
            missing for maps of other origin that have none.
        left_out: Why there are no numbers; empty if there are.
    """

    map: str
    cause: str
    kind: str
    network: str
    grid: tuple[int, ...] = ()
    auroc: Array = field(default_factory=lambda: np.empty(0))
    touches: Array = field(default_factory=lambda: np.empty(0))
    controls: Mapping[str, Array] = field(default_factory=dict)
    left_out: str = ""

    __repr__ = brief

    @property
    def chance(self) -> float:
        """Largest p-value of the controls: paired t-tests of an AUROC that is larger by more than `MARGIN`; 1 if one is missing."""
        if set(self.controls) != set(CONTROLS):
            return 1.0
        return max(_chance(self.auroc - control - MARGIN) for control in self.controls.values())

    @property
    def inverted(self) -> bool:
        """Whether the cause has lower values than the rest in every scene."""
        return bool((self.auroc < 0.5).all())


def _chance(differences: Array) -> float:
    """Return the one-sided p-value of a mean difference (Student's t)."""
    need("scipy", "flow", "a test of the difference")
    from scipy.stats import t

    mean, error = differences.mean(), differences.std(ddof=1) / np.sqrt(len(differences))
    if error <= _EXACT:  # the difference is the same in every scene
        return 0.0 if mean > _EXACT else 1.0
    return float(t.sf(mean / error, len(differences) - 1))


def scene_numbers(shown: AttentionMap, without: AttentionMap | None, case: Case) -> dict[str, float]:
    """Return the numbers of one scene.

    Args:
        shown: Map of the scene, with its geometry in its provenance.
        without: Map of the same method where the cause has no effect.
        case: The scene.

    Raises:
        MapError: If a map holds NaN or infinity, or has further axes.
    """
    for one in (shown, without):
        if one is not None and (one.axes or not bool(one.values.isfinite().all())):
            raise MapError(f"scene {case.number}: a map must be finite numbers (rows, columns), got axes {one.axes} or NaN.")
    numbers = {
        "auroc": float(auroc(shown, case.mask)),
        "touches": _touches(shown, case.mask),
        "shifted copies": float(np.mean(auroc(shifted_copies(shown, COPIES, case.number), case.mask))),
        "center prior": float(auroc(center_prior(shown), case.mask)),
    }
    return numbers if without is None else {**numbers, "cause without effect": float(auroc(without, case.mask))}


def _touches(shown: AttentionMap, mask: NDArray[np.bool_]) -> float:
    """Return the share of the largest cells that hold a pixel of the mask."""
    assert shown.provenance.geometry is not None  # noqa: S101 - it was placed on the input
    cells = cells_of(shown, mask, shown.provenance.geometry)
    largest = cells.values == cells.values.max()
    return float((largest & (cells.share > 0)).sum() / largest.sum())


@dataclass(frozen=True, eq=False)
class Causes:
    """Findings of methods on networks that decide by one known cause.

    Attributes:
        findings: One entry for each method and network.
    """

    findings: Sequence[Findings]

    __repr__ = brief

    def rows(self) -> list[Row]:
        """Return a row for each method and network.

        `found` means: the lower end of the 95 % interval of the AUROC is 0.8 or more, and the AUROC is above that of every control by more
        than 0.1 (paired t-tests, the largest p-value of the three, Holm's correction over all rows). With fewer than 30 scenes, `found` and
        `inverted` are None.
        """
        measured = [one for one in self.findings if not one.left_out]
        corrected = holm([one.chance for one in measured])
        return [_row(one, chance) for one, chance in zip(measured, corrected, strict=True)]

    def verdicts(self) -> list[Row]:
        """Return a row for each method, cause and kind of network: the conclusion follows from the worst network.

        A method may be trusted with a cause if it finds it in each of five networks or more; else the row tells in how many of how many.
        Beside it stand the lowest AUROC, lower end, and share of scenes whose largest cell touches the cause, each of any of the networks.
        With fewer than 30 scenes of a network there is no verdict.
        """
        groups = dict[tuple[str, str, str], list[Row]]()
        for row in self.rows():
            groups.setdefault((str(row["map"]), str(row["cause"]), str(row["kind"])), []).append(row)
        return [_verdict(key, rows) for key, rows in groups.items()]


def holm(chances: Sequence[float]) -> list[float]:
    """Return p-values after Holm's correction for their number.

    Reference:
        Holm, "A Simple Sequentially Rejective Multiple Test Procedure", Scandinavian Journal of Statistics 1979.
    """
    order = np.argsort(chances, kind="stable")
    factors = len(chances) - np.arange(len(chances))
    corrected = np.empty(len(chances))
    corrected[order] = np.minimum(np.maximum.accumulate(np.asarray(chances)[order] * factors), 1)
    return [float(chance) for chance in corrected]


def _row(one: Findings, chance: float) -> Row:
    low, high = (float(end) for end in mean_interval(one.auroc))
    return {
        "map": one.map,
        "cause": one.cause,
        "kind": one.kind,
        "network": one.network,
        "scenes": len(one.auroc),
        "cells": in_pixels(one.grid),
        "auroc": float(one.auroc.mean()),
        "low": low,
        "high": high,
        "largest cell touches": float(one.touches.mean()),
        **{name: float(one.controls[name].mean()) if name in one.controls else None for name in CONTROLS},
        "p": chance,
        "found": _yes(low >= SURE and chance < LEVEL, one),
        "inverted": _yes(one.inverted, one),
    }


def _yes(holds: bool, one: Findings) -> str | None:
    return None if len(one.auroc) < FEWEST else "yes" if holds else "no"


def _least(name: str, rows: Sequence[Row]) -> float:
    return min(float(row[name]) for row in rows)


def _verdict(key: tuple[str, str, str], rows: Sequence[Row]) -> Row:
    count, found, inverted = (len(rows), *(sum(row[name] == "yes" for row in rows) for name in ("found", "inverted")))
    text = "may be trusted" if found == count >= ENOUGH else f"found in {found} of {count}"
    if any(row["found"] is None for row in rows):
        text = f"none: fewer than {FEWEST} scenes"
    if inverted:
        text += f", inverted in {inverted}"
    values: dict[str, Any] = {
        "map": key[0],
        "cause": key[1],
        "kind": key[2],
        "networks": count,
        "found": found,
        "inverted": inverted,
    }
    return {
        **values,
        "worst auroc": _least("auroc", rows),
        "worst low": _least("low", rows),
        "least touches": _least("largest cell touches", rows),
        "verdict": text,
    }
