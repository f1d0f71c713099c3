"""Output of commands: results on stdout, everything else on stderr."""

from __future__ import annotations

from itertools import filterfalse
from pathlib import Path

import click

from visattn._support.checks import printable
from visattn._support.reprs import in_pixels, in_runs
from visattn._support.tables import to_json
from visattn.core.provenance import Provenance

__all__ = ["describe", "note", "result"]

_OF_PICTURE = ("interpolation",)  # parameters that say nothing about the map


def note(quiet: bool, *lines: str) -> None:
    """Print lines on stderr, unless `quiet`."""
    if not quiet:
        for line in lines:
            click.echo(f"visattn: {printable(line)}", err=True)


def describe(quiet: bool, provenance: Provenance, told: set[str] | None = None) -> None:
    """Print the method, its parameters, the preprocessing, notes and warnings of a result on stderr.

    Args:
        quiet: Whether to print the warnings only.
        provenance: Record of the result.
        told: Notes and warnings of earlier results of the run, which are not repeated; those of this one are added.
    """
    told = set() if told is None else told
    given = {name: value for name, value in provenance.parameters.items() if name not in _OF_PICTURE}
    given = given | {"query": in_runs(given["query"].split("+"), "+")} if "+" in str(given.get("query")) else given
    parameters = ", ".join(name if value is True else f"{name} {value}" for name, value in given.items())
    about = (*_input(provenance), *provenance.notes)
    details = (*provenance.target, *_scale(provenance), *_box(provenance), *filterfalse(told.__contains__, about))
    shown = provenance.image or provenance.title  # a picture of parameters shows no image
    note(quiet, f"{shown}: {provenance.method} ({parameters})", *(f"  {text}" for text in details))
    fresh = list(filterfalse(told.__contains__, provenance.warnings))
    again = len(provenance.warnings) - len(fresh)
    for text in [*fresh, *[f"{again} warning{'s' * (again > 1)} as above"] * bool(again)]:
        click.echo(f"visattn: warning: {printable(f'{shown}: {text}')}", err=True)
    told.update(about, provenance.warnings)


def _input(provenance: Provenance) -> list[str]:
    """Return those of size, mean and standard deviation of the input that the model does not state, and the source of each."""
    facts = {name: fact for name, fact in provenance.preprocessing.items() if fact["source"] != "model"}
    if not facts:
        return []
    parts = []
    for name, fact in facts.items():
        value = in_pixels(fact["value"]) if name == "size" else ", ".join(map("{:g}".format, fact["value"]))
        source = "for --img-size" if name == "size" and fact["source"] == "given" else fact["source"]
        parts.append(f"{name} {value} ({source})")
    return ["input: " + "; ".join(parts)]


def _scale(provenance: Provenance) -> list[str]:
    if provenance.value_range is None or "uncolored" in provenance.drawing:
        return []
    low, high = provenance.value_range
    return [f"color scale {low:.2g} to {high:.2g} ({provenance.normalization})"]


def _box(provenance: Provenance) -> list[str]:
    box = provenance.drawing.get("box")
    return [box["words"]] if box else []


def result(as_json: bool, rows: list[tuple[Path, Provenance]]) -> None:
    """Print the written files: one path per line, or JSON with their provenance."""
    if as_json:
        click.echo(to_json([{"output": printable(str(path)), "provenance": provenance.to_dict()} for path, provenance in rows]))
    else:
        for path, _ in rows:
            click.echo(printable(str(path)))
