"""Plots of head statistics, drawn from the rows of their tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from visattn._support.tables import Row
from visattn.core.drawing.plots import figures
from visattn.core.drawing.plots.figures import BLUE, FAINT, VERMILION
from visattn.core.provenance import Provenance

_MASSES = {
    "cls": ("class token", "#D55E00"),
    "distillation": ("distillation token", "#CC79A7"),
    "registers": ("registers", "#009E73"),
    "rest": ("other tokens", "#F0E442"),
    "self": ("query's own token", "#0072B2"),
    "to_sinks": ("sink patches", "#222222"),
    "patches": ("other patches", "#A6D5F2"),
    "padding": ("padding", "#999999"),
}
_SLIGHT = 1e-4  # smaller shares are not drawn, as they would be invisible


def distance(heads: Sequence[Row], layers: Sequence[Row], photos: int, provenance: Provenance) -> bytes | None:
    """Plot the mean attention distance of each head by layer, with uniform attention and the nearest patch for comparison.

    Args:
        heads: Rows of `Survey.heads`.
        layers: Rows of `Survey.layers`.
        photos: Number of photos in the survey.
        provenance: Provenance of the survey.

    Returns:
        A PNG with its provenance; None if no layer has distances.

    Reference:
        Dosovitskiy et al., "An Image is Worth 16x16 Words", arXiv:2010.11929, figures 7 and 11.
    """
    if not any(row.get("distance_px") is not None for row in heads):
        return None
    figure, axes = _figure("Attention distance of each head", layers, photos, provenance)
    _dots(axes, heads, layers, "distance_px")
    _steps(axes, layers, "distance_if_uniform_px", "uniform attention to all patches", VERMILION, "--")
    _steps(axes, layers, "distance_nearest_px", "nearest neighboring patch", FAINT, ":")
    axes.set_ylabel("mean attention distance (pixels of the model's input)")
    axes.set_ylim(bottom=0)
    return _png(figure, provenance)


def entropy(heads: Sequence[Row], layers: Sequence[Row], photos: int, provenance: Provenance) -> bytes:
    """Plot the effective number of keys per query of each head by layer, with the total number of keys for comparison.

    Args:
        heads: Rows of `Survey.heads`.
        layers: Rows of `Survey.layers`.
        photos: Number of photos in the survey.
        provenance: Provenance of the survey.

    Returns:
        A PNG with its provenance.
    """
    figure, axes = _figure("Effective number of keys of each head", layers, photos, provenance)
    _dots(axes, heads, layers, "effective_keys")
    _steps(axes, layers, "keys", "number of keys per query", VERMILION, "--")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylim(0.9, 1.6 * max(row["keys"] for row in layers))
    axes.set_ylabel("effective keys per query, exp(entropy)")
    return _png(figure, provenance)


def mass(layers: Sequence[Row], photos: int, provenance: Provenance) -> bytes:
    """Plot the share of attention per type of token in each layer, as a mean over heads.

    Args:
        layers: Rows of `Survey.layers`.
        photos: Number of photos in the survey.
        provenance: Provenance of the survey.

    Returns:
        A PNG with its provenance.
    """
    figure, axes = _figure("Attention by type of token", layers, photos, provenance)
    places = range(len(layers))
    shares = {name: [row.get(name) or 0.0 for row in layers] for name in _MASSES}
    shares["patches"] = [patches - sink for patches, sink in zip(shares["patches"], shares["to_sinks"], strict=True)]
    shares["rest"] = [1 - sum(known) for known in zip(*shares.values(), strict=True)]
    below = [0.0] * len(layers)
    for name, (label, color) in _MASSES.items():
        if max(shares[name]) > _SLIGHT:
            axes.bar(places, shares[name], 0.86, bottom=below, label=label, color=color)
            below = [a + b for a, b in zip(below, shares[name], strict=True)]
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_ylim(0, 1)
    axes.grid(visible=False)
    axes.set_ylabel("share of attention, mean over heads")
    return _png(figure, provenance)


def _figure(title: str, layers: Sequence[Row], photos: int, provenance: Provenance) -> tuple[Figure, Axes]:
    count = len(layers)
    facts = f"{provenance.title}, {photos} photo{'s' * (photos != 1)}"
    figure = figures.figure(title, facts, min(max(6.4, 2 + 0.55 * count), 20), 4.8)
    axes = figure.add_subplot()
    first, last = layers[0]["layer"], layers[-1]["layer"]
    axes.set_xlabel(f"layer, from 0 ({first}) to {count - 1} ({last})" if count > 1 else str(first), parse_math=False)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=30, integer=True))
    axes.set_xlim(-0.6, count - 0.4)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _dots(axes: Axes, heads: Sequence[Row], layers: Sequence[Row], name: str) -> None:
    """Plot a dot with its interval for each head, sorted by value within each layer."""
    across, up, below, above = [], [], [], []
    for place, layer in enumerate(layers):
        rows = sorted((row for row in heads if row["layer"] == layer["layer"] and row.get(name) is not None), key=_by(name))
        for i, row in enumerate(rows):
            across.append(place + 0.72 * ((i + 0.5) / len(rows) - 0.5))
            up.append(row[name])
            low, high = (row[name] if row[name + end] is None else row[name + end] for end in ("_low", "_high"))
            below.append(max(row[name] - low, 0))  # rounding can put a mean just outside its interval
            above.append(max(high - row[name], 0))
    known = any(row[f"{name}_low"] is not None for row in heads)
    label = "one head" + (", 95 % interval over photos" if known else "")
    size = 4 if len(up) < 200 else 2.5
    axes.errorbar(across, up, [below, above], fmt="o", ms=size, elinewidth=1, color=BLUE, label=label)


def _steps(axes: Axes, layers: Sequence[Row], name: str, label: str, color: str, style: Literal["--", ":"]) -> None:
    """Plot one horizontal line per layer."""
    levels = [(place, row[name]) for place, row in enumerate(layers) if row[name] is not None]
    if levels:
        places, values = zip(*levels, strict=True)
        starts, ends = [place - 0.5 for place in places], [place + 0.5 for place in places]
        axes.hlines(values, starts, ends, colors=color, linestyles=style, linewidth=1.5, label=label)


def _by(name: str) -> Callable[[Row], float]:
    return lambda row: float(row[name])


def _png(figure: Figure, provenance: Provenance) -> bytes:
    figure.axes[0].legend(loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=3, frameon=False, fontsize=8)
    return figures.png(figure, provenance)
