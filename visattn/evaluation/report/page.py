"""A page of tables and figures, in one HTML file without scripts that refers to nothing outside of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from visattn._support.tables import Row

_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; color: light-dark(#1c1e21, #e6e8eb); background: light-dark(#fff, #16181c);
  max-width: 76rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; margin: 0 0 .5rem } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem } p { max-width: 46rem }
.quiet { color: light-dark(#5d636b, #a3a9b2); font-size: 13px }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .25rem .7rem .25rem 0; border-bottom: 1px solid light-dark(#d9dce1, #3a3f47); white-space: nowrap }
th { font-weight: 600; vertical-align: bottom } td.number, th.number { text-align: right }
details { margin: .7rem 0 } summary { cursor: pointer }
.panels { display: flex; flex-wrap: wrap; gap: .7rem } figure { margin: 0 } svg { display: block; max-width: 100%; height: auto }
.axis, .scale, .mark, .null, .bar { fill: none } .axis { stroke: light-dark(#d9dce1, #3a3f47) } .scale { stroke: currentColor }
.mark, .bar { stroke: light-dark(#1f6fb2, #6cb2f0) } .bar { stroke-width: 3; opacity: .55 }
.dot { fill: light-dark(#1f6fb2, #6cb2f0) } .dashed { stroke: currentColor; stroke-dasharray: 3 3 }
.null { stroke: light-dark(#9aa1ab, #767d88) } .curve { stroke-width: 1.8 } .curve.null { stroke-dasharray: 4 3 }
svg text { fill: currentColor; font: 11px system-ui, sans-serif }
""".strip()


@dataclass(frozen=True)
class Section:
    """Part of a page.

    Attributes:
        title: Heading.
        text: Paragraphs.
        figures: Figures, SVG.
        rows: Table below the figures.
        folded: Text of the fold that hides the table; empty: it is shown.
    """

    title: str
    text: Sequence[str] = ()
    figures: Sequence[str] = ()
    rows: Sequence[Row] = ()
    folded: str = ""


def html_page(title: str, lead: Sequence[str], sections: Sequence[Section], foot: Sequence[str]) -> str:
    """Return a page.

    Args:
        title: Heading, and title of the window.
        lead: Paragraphs below the heading.
        sections: Parts.
        foot: Lines at the end, such as what the numbers were made by.
    """
    body = [f"<h1>{escape(title)}</h1>", *map(_paragraph, lead), *map(_section, sections)]
    end = "<br>".join(map(escape, foot))
    body.append(f'<p class="quiet">{end}</p>')
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    whole = "\n".join(body)
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body>\n{whole}\n</body></html>\n'


def _section(section: Section) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>", *map(_paragraph, section.text)]
    if section.figures:
        figures = "".join(f"<figure>{figure}</figure>" for figure in section.figures)
        parts.append(f'<div class="panels">{figures}</div>')
    if section.rows:
        shown = f'<div class="scroll">{_table(section.rows)}</div>'
        folded = f"<details><summary>{escape(section.folded)}</summary>{shown}</details>"
        parts.append(folded if section.folded else shown)
    return "\n".join(parts)


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _table(rows: Sequence[Row]) -> str:
    names = list(rows[0])
    numeric = {name for name in names if all(isinstance(row[name], (int, float)) or row[name] is None for row in rows)}

    def line(cells: Sequence[Any], tag: str) -> str:
        marks = [' class="number"' if name in numeric else "" for name in names]
        return "".join(f"<{tag}{mark}>{escape(_cell(cell))}</{tag}>" for mark, cell in zip(marks, cells, strict=True))

    lines = [line(names, "th"), *(line(list(row.values()), "td") for row in rows)]
    return f"<table>{''.join(f'<tr>{cells}</tr>' for cells in lines)}</table>"


def _cell(value: Any) -> str:  # noqa: ANN401 - of a table
    return "" if value is None else f"{value:#.3g}".rstrip(".") if isinstance(value, float) else str(value)
