"""Plots of training: learning curves of one run, and comparisons of network variants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, MaxNLocator

from visattn._support.tables import Row
from visattn.core.drawing.plots import figures
from visattn.core.drawing.plots.figures import BLUE, FAINT, VERMILION
from visattn.core.provenance import Provenance
from visattn.errors import OptionError

_SMOOTHED = 40  # points left after averaging a noisy curve, so that its trend is visible
_HELD = "of validation images"  # marks rows
_COLORS = {"gain": BLUE, "loss": VERMILION}

Points = tuple[list[float], list[float]]


def curves(log: Sequence[Row], title: str, provenance: Provenance) -> bytes:
    """Plot loss, test accuracy and learning rate over the steps of a training run.

    Args:
        log: Rows with `step` and any of `loss` (training), `test_loss`, `accuracy` (test, from 0 to 1) and `lr`. Values that are
            missing, None or not finite are left out. Rows with `validation_loss` and `validation_accuracy` are drawn in place of the test.
        title: Title of the figure.
        provenance: Provenance of the training run.

    Returns:
        A PNG with its provenance; it has one panel for each of the three that the log contains.

    Raises:
        OptionError: If the log has none of them.
    """
    if any("validation_accuracy" in row for row in log):
        log = [_of_validation(row) for row in log]
    loss, test, accuracy, rate = (_points(log, key) for key in ("loss", "test_loss", "accuracy", "lr"))
    panels = [draw for draw, known in ((_losses, loss or test), (_accuracy, accuracy), (_rate, rate)) if known]
    if not panels:
        raise OptionError(
            "learning curves need rows with a step and a loss, an accuracy or a learning rate, got none. Train for a step first."
        )
    heights = {_losses: 2.4, _accuracy: 2.0, _rate: 1.1}
    figure = figures.figure(title, _facts(log), 7.2, 0.9 + sum(heights[panel] for panel in panels))
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=[heights[panel] for panel in panels])[:, 0]
    for panel, draw in zip(axes, panels, strict=True):
        _bare(panel)
        draw(panel, log)
    axes[-1].set_xlabel("optimizer step")
    axes[-1].xaxis.set_major_formatter(EngFormatter(sep=""))
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[-1].set_xlim(left=0)
    figure.align_ylabels()
    return figures.png(figure, provenance)


def comparison(rows: Sequence[Row], runs: Sequence[Row], title: str, provenance: Provenance) -> bytes:
    """Plot each variant's test accuracy and its difference from the plain network: a dot per run, and intervals over seeds.

    Args:
        rows: Rows of a comparison by `visattn.training`: `attention`, `accuracy` (percent) and `difference` (percentage points) with
            the ends of their intervals, and `verdict`. The first row is the plain network.
        runs: `attention`, `seed` and `accuracy` (from 0 to 1) of each run.
        title: Title of the figure.
        provenance: Provenance of the comparison.

    Returns:
        A PNG with its provenance.
    """
    seeds = rows[0]["seeds"]
    facts = (
        "one seed each, so no intervals"
        if seeds == 1
        else f"{seeds} seeds each: runs (small dots), mean, and 95 % interval of the mean"
    )
    figure = figures.figure(title, facts, 9.6, 1.5 + 0.42 * len(rows))
    left, right = figure.subplots(1, 2, sharey=True)
    reached = {(run["attention"], run["seed"]): 100 * run["accuracy"] for run in runs}
    plain = rows[0]["attention"]
    for place, row in enumerate(rows):
        own = {seed: value for (name, seed), value in reached.items() if name == row["attention"]}
        color = _COLORS.get(row["verdict"], "black" if row["difference"] is None else FAINT)
        _dots(left, place, list(own.values()), row, "accuracy", color)
        if row["difference"] is not None:
            gaps = [value - reached[plain, seed] for seed, value in own.items() if (plain, seed) in reached]
            _dots(right, place, gaps, row, "difference", color)
            text = f"{row['difference']:+.2f}  {row['verdict']}"
            right.text(1.02, place, text, transform=right.get_yaxis_transform(), color=color, va="center", fontsize=9)
    right.axvline(0, color="black", linewidth=0.8)
    right.set_xlabel(f"difference from {plain} (percentage points), paired by seed", parse_math=False)
    left.set_xlabel("test accuracy (%)")
    left.set_yticks(range(len(rows)), [row["attention"] for row in rows], parse_math=False)
    left.set_ylim(len(rows) - 0.5, -0.5)
    for axes in (left, right):
        _bare(axes, "x")
        axes.tick_params(axis="y", length=0)
        axes.xaxis.set_major_locator(MaxNLocator(5))
    right.spines["left"].set_visible(False)
    return figures.png(figure, provenance)


def _of_validation(row: Row) -> Row:
    """Return a row in which the values of the validation images stand in place of those of the test images."""
    names = {"validation_loss": "test_loss", "validation_accuracy": "accuracy"}
    return {names.get(key, key): value for key, value in row.items() if key not in names.values()} | {_HELD: True}


def _tested_on(log: Sequence[Row]) -> str:
    return "validation" if any(_HELD in row for row in log) else "test"


def _losses(axes: Axes, log: Sequence[Row]) -> None:
    train, test = _points(log, "loss"), _points(log, "test_loss")
    above = not (train and test) or train[1][-1] >= test[1][-1]
    if train:
        width, text = -(-len(train[0]) // _SMOOTHED), "training"
        if width > 1:
            axes.plot(*train, color=BLUE, linewidth=0.6, alpha=0.3)
            train, text = _averaged(train, width), f"training\n(mean of {width} rows)"
        axes.plot(*train, color=BLUE, linewidth=1.5)
        _name(axes, train, text, BLUE, above=above)
    if test:
        axes.plot(*test, "o-", color=VERMILION, linewidth=1.5, markersize=3)
        _name(axes, test, _tested_on(log), VERMILION, above=not above or not train)
    axes.set_ylabel("loss (nats)")
    axes.margins(y=0.15)  # room for the curve labels


def _accuracy(axes: Axes, log: Sequence[Row]) -> None:
    steps, shares = _points(log, "accuracy") or ([], [])
    points = steps, [100 * share for share in shares]
    axes.plot(*points, "o-", color=VERMILION, linewidth=1.5, markersize=3)
    _name(axes, points, f"{points[1][-1]:.2f} %", VERMILION)
    axes.set_ylabel(f"{_tested_on(log)} accuracy (%)")


def _rate(axes: Axes, log: Sequence[Row]) -> None:
    axes.plot(*(_points(log, "lr") or ([], [])), color=FAINT, linewidth=1.5)
    axes.set_ylabel("learning rate")
    axes.set_ylim(bottom=0)


def _dots(axes: Axes, place: int, values: list[float], row: Row, name: str, color: str) -> None:
    """Plot each run as a faint dot below the mean and its interval; a single run gets only the mean."""
    if row[f"{name}_low"] is not None:
        axes.plot(values, [place + 0.2] * len(values), "o", color=color, alpha=0.45, markersize=3, markeredgewidth=0)
        axes.hlines(place, row[f"{name}_low"], row[f"{name}_high"], color=color, linewidth=2)
    axes.plot(row[name], place, "o", color=color, markersize=6)


def _points(log: Sequence[Row], key: str) -> Points | None:
    """Return steps and values of the rows that have a value."""
    found = [(row["step"], row[key]) for row in log if row.get(key) is not None and math.isfinite(row[key])]
    return ([float(step) for step, _ in found], [float(value) for _, value in found]) if found else None


def _averaged(points: Points, width: int) -> Points:
    """Average groups of `width` consecutive points; the last group may be smaller."""
    starts = range(0, len(points[0]), width)
    return (
        [float(np.mean(points[0][start : start + width])) for start in starts],
        [float(np.mean(points[1][start : start + width])) for start in starts],
    )


def _name(axes: Axes, points: Points, text: str, color: str, *, above: bool = True) -> None:
    """Label a curve at its end, in its color; `above` separates the labels of two curves with nearby ends."""
    side: Literal["bottom", "top"] = "bottom" if above else "top"
    end = points[0][-1], points[1][-1]
    axes.annotate(text, end, (6, 1 if above else -1), textcoords="offset points", color=color, fontsize=9, va=side)


def _facts(log: Sequence[Row]) -> str:
    epochs = [row["epoch"] for row in log if row.get("epoch") is not None]
    seen = f", {max(epochs):.3g} epoch{'s' * (max(epochs) != 1)}" if epochs else ""
    return f"{max(row['step'] for row in log):,} steps{seen}"


def _bare(axes: Axes, grid: Literal["x", "y"] = "y") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
