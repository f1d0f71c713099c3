"""Figures of metrics, as SVG: curves beside those of nulls, mean ranks with their critical difference, means with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from visattn.evaluation.rank_statistics import MeanRanks

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 240, 170, 34, 22, 26  # of a panel, and its margins
_ROOM = 150  # beside the line of ranks, for names


class Interval(NamedTuple):
    """A mean with its interval, and controls, each from 0 to 1."""

    label: str
    mean: float
    ends: tuple[float, float]
    controls: Sequence[float]


def curve_panel(
    name: str, fractions: Sequence[float], scores: Sequence[float], nulls: Sequence[float], limits: tuple[float, float]
) -> str:
    """Return a panel with the mean curve of a map, and that of its nulls in gray.

    Args:
        name: Title.
        fractions: Shares of the units that are removed or inserted.
        scores: Mean scores.
        nulls: Mean scores of nulls; may be empty.
        limits: Lower and upper end of the axis of scores, which panels share.
    """
    low, high = limits
    across, down = _WIDTH - _LEFT - 8, _HEIGHT - _TOP - _BOTTOM

    def line(values: Sequence[float], kind: str) -> str:
        points = " ".join(
            f"{_LEFT + across * fraction:.1f},{_TOP + down * (high - value) / (high - low or 1):.1f}"
            for fraction, value in zip(fractions, values, strict=True)
        )
        return f'<polyline points="{points}" class="curve {kind}"/>'

    parts = [
        f'<text x="{_LEFT}" y="14">{escape(name)}</text>',
        f'<path d="M{_LEFT},{_TOP}v{down}h{across}" class="axis"/>',
        f'<text class="quiet" x="{_LEFT - 4}" y="{_TOP + 8}" text-anchor="end">{high:.2g}</text>',
        f'<text class="quiet" x="{_LEFT - 4}" y="{_TOP + down}" text-anchor="end">{low:.2g}</text>',
        f'<text class="quiet" x="{_LEFT}" y="{_HEIGHT - 10}">0</text>',
        f'<text class="quiet" x="{_LEFT + across}" y="{_HEIGHT - 10}" text-anchor="end">{fractions[-1]:g}</text>',
        f'<text class="quiet" x="{_LEFT + across / 2}" y="{_HEIGHT - 10}" text-anchor="middle">share of the pixels</text>',
        line(nulls, "null") if nulls else "",
        line(scores, "mark"),
    ]
    return _svg(_WIDTH, _HEIGHT, f"{name}: score by the share of changed parts", parts)


def ranks_figure(ranks: MeanRanks) -> str:
    """Return mean ranks on a line, the best at the left; a bar joins maps that the critical difference does not tell apart."""
    count, groups = len(ranks.maps), ranks.alike()
    left, right = _ROOM, _ROOM + 420
    top = 48 + 9 * len(groups)
    half = (count + 1) // 2
    height = top + 16 * max(half, count - half) + 14

    def at(rank: float) -> float:
        return left + (right - left) * (rank - 1) / max(count - 1, 1)

    parts = [f'<path d="M{left},40H{right}" class="scale"/>']
    for rank in range(1, count + 1):
        parts.append(f'<path d="M{at(rank):.1f},40v-5" class="scale"/>')
        if count <= 12 or rank in (1, count) or rank % 5 == 0:
            parts.append(f'<text class="quiet" x="{at(rank):.1f}" y="30" text-anchor="middle">{rank}</text>')
    width = at(1 + min(ranks.critical, count - 1)) - left
    parts.append(f'<path d="M{left},12h{width:.1f}m0,-3v6M{left},9v6" class="mark"/>')
    parts.append(f'<text class="quiet" x="{left + width + 6:.1f}" y="16">critical difference {ranks.critical:.2f}</text>')
    for row, group in enumerate(groups):
        places = [at(float(ranks.ranks[ranks.maps.index(name)])) for name in (group[0], group[-1])]
        parts.append(f'<path d="M{places[0] - 3:.1f},{48 + 9 * row}H{places[1] + 3:.1f}" class="bar"/>')
    for place, (name, rank) in enumerate(zip(ranks.maps, np.asarray(ranks.ranks).tolist(), strict=True)):
        is_left = place < half
        y = top + 16 * (place if is_left else count - 1 - place) + 8
        end, anchor, x = (left - 8, "end", left - 12) if is_left else (right + 8, "start", right + 12)
        parts.append(f'<path d="M{at(rank):.1f},40V{y}H{end}" class="null"/>')
        parts.append(f'<text x="{x}" y="{y + 4}" text-anchor="{anchor}">{escape(name[:22])} {rank:.2f}</text>')
    return _svg(right + _ROOM, height, f"mean ranks by {ranks.metric}, with the critical difference", parts)


def intervals_figure(title: str, rows: Sequence[Interval], bound: float) -> str:
    """Return a line for each row from 0 to 1: a mean with its interval, and a gray tick for each control.

    Args:
        title: What the numbers are.
        rows: The rows.
        bound: Number that a dashed line marks.
    """
    left, across, top, step = 300, 400, 34, 18
    height = top + step * len(rows) + 8

    def at(value: float) -> float:
        return left + across * value

    parts = [f'<path d="M{left},{top - 8}h{across}" class="axis"/>']
    for value in (0.0, 0.5, bound, 1.0):
        parts.append(f'<text class="quiet" x="{at(value):.1f}" y="{top - 14}" text-anchor="middle">{value:g}</text>')
        parts.append(f'<path d="M{at(value):.1f},{top - 8}V{height - 8}" class="axis{" dashed" * (value == bound)}"/>')
    for place, row in enumerate(rows):
        y = top + step * place + step / 2
        parts.append(f'<text x="{left - 12}" y="{y + 4}" text-anchor="end">{escape(row.label[:46])}</text>')
        parts += [f'<path d="M{at(control):.1f},{y - 4}v8" class="null"/>' for control in row.controls]
        low, high = map(at, row.ends)
        parts.append(f'<path d="M{low:.1f},{y}H{high:.1f}" class="bar"/>')
        parts.append(f'<circle cx="{at(row.mean):.1f}" cy="{y}" r="3.5" class="dot"/>')
    return _svg(left + across + 24, height, title, parts)


def _svg(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    named = f'role="img" aria-label="{escape(label)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {named}>' + "".join(parts) + "</svg>"
