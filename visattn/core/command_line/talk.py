"""Output of commands: results on stdout, everything else on stderr."""

from __future__ import annotations

from pathlib import Path

import click

from visattn._support.checks import printable
from visattn._support.reprs import in_runs
from visattn._support.tables import to_json
from visattn.core.provenance import Provenance

__all__ = ["describe", "note", "result"]


def note(quiet: bool, *lines: str) -> None:
    """Print lines on stderr, unless `quiet`."""
    if not quiet:
        for line in lines:
            click.echo(f"visattn: {printable(line)}", err=True)


def describe(quiet: bool, provenance: Provenance) -> None:
    """Print the method, its parameters, the preprocessing, notes and warnings of a result on stderr."""
    given = provenance.parameters
    given = given | {"query": in_runs(given["query"].split("+"), "+")} if "+" in str(given.get("query")) else given
    parameters = ", ".join(f"{name} {value}" for name, value in given.items())
    note(
        quiet,
        f"{provenance.image}: {provenance.method} ({parameters})",
        *(f"{provenance.image}: {text}" for text in _input(provenance)),
        *(
            f"{provenance.image}: {text}"
            for text in (*provenance.target, *_scale(provenance), *_box(provenance), *provenance.notes)
        ),
    )
    for text in provenance.warnings:
        click.echo(f"visattn: warning: {printable(f'{provenance.image}: {text}')}", err=True)


def _input(provenance: Provenance) -> list[str]:
    """Return those of size, mean and standard deviation of the input that the model does not state, and the source of each."""
    facts = {name: fact for name, fact in provenance.preprocessing.items() if fact["source"] != "model"}
    if not facts:
        return []
    told = {name: ", ".join(f"{value:g}" for value in fact["value"]) + f" ({fact['source']})" for name, fact in facts.items()}
    return ["input: " + "; ".join(f"{name} {text}" for name, text in told.items())]


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
