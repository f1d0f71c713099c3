"""Command `visattn list`: names of models, methods and color maps."""

from __future__ import annotations

import click

from visattn._support.checks import printable
from visattn._support.tables import to_json, to_text
from visattn.cli.options import talk_options
from visattn.errors import OptionError


@click.command("list")
@click.argument("pattern", default="*")
@click.option("--methods", "what", flag_value="methods", help="List methods instead of models.")
@click.option("--colormaps", "what", flag_value="colormaps", help="List color maps instead of models.")
@talk_options
def list_command(pattern: str, what: str | None, as_json: bool, quiet: bool, debug: bool) -> None:
    """List models whose names match PATTERN, for example '*dinov2*'. Listed are supported models with published weights."""
    if what == "methods":
        from visattn.methods import METHODS

        rows = [
            {
                "method": name,
                "needs": ", ".join(sorted(method.needs)),
                "also": ", ".join(method.aliases),
                "what": _first_line(method.function),
            }
            for name, method in METHODS.items()
        ]
        click.echo(to_json(rows) if as_json else to_text(rows).rstrip())
        return
    if what == "colormaps":
        from visattn.drawing import colormaps

        names = list(colormaps.NAMES)
    else:
        from visattn.loading import list_models

        if not (names := list_models(pattern)):
            raise OptionError(f"no model name matches '{printable(pattern)}'. Put * before and after a part of the name.")
    click.echo(to_json(names) if as_json else "\n".join(names))


def _first_line(function: object) -> str:
    return (function.__doc__ or "").split("\n")[0].rstrip(".")
