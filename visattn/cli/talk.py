"""What commands say: results on stdout, everything else on stderr."""

from __future__ import annotations

from pathlib import Path

import click

from visattn._support.checks import printable
from visattn._support.tables import to_json
from visattn.provenance import Provenance


def note(quiet: bool, *lines: str) -> None:
    """Lines on stderr."""
    if not quiet:
        for line in lines:
            click.echo(f"visattn: {printable(line)}", err=True)


def describe(quiet: bool, provenance: Provenance) -> None:
    """The choices that were made, and the reasons why a picture may mislead."""
    parameters = ", ".join(f"{name} {value}" for name, value in provenance.parameters.items())
    note(
        quiet,
        f"{provenance.image}: {provenance.method} ({parameters})",
        *(f"{provenance.image}: {text}" for text in _input(provenance)),
        *(f"{provenance.image}: {text}" for text in (*provenance.target, *_scale(provenance), *provenance.notes)),
    )
    for text in provenance.warnings:
        click.echo(f"visattn: warning: {printable(f'{provenance.image}: {text}')}", err=True)


def _input(provenance: Provenance) -> list[str]:
    """Size, mean and standard deviation of the input, and where each comes from."""
    facts = provenance.preprocessing
    if not facts:
        return []
    told = {
        name: ", ".join(f"{value:g}" for value in fact["value"]) + f" ({_SOURCES.get(fact['source'], fact['source'])})"
        for name, fact in facts.items()
    }
    return ["input: " + "; ".join(f"{name} {text}" for name, text in told.items())]


_SOURCES = {"model": "the model's own", "given": "given", "assumed": "assumed"}


def _scale(provenance: Provenance) -> list[str]:
    if provenance.value_range is None:
        return []
    low, high = provenance.value_range
    return [f"colors go from {low:.4g} to {high:.4g} ({provenance.normalization})"]


def result(as_json: bool, rows: list[tuple[Path, Provenance]]) -> None:
    """The files that were written: a path a line, or JSON with their provenance."""
    if as_json:
        click.echo(to_json([{"output": printable(str(path)), "provenance": provenance.to_dict()} for path, provenance in rows]))
    else:
        for path, _ in rows:
            click.echo(printable(str(path)))
