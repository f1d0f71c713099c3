"""`visattn list`: names to choose from."""

from __future__ import annotations

import click

from visattn._support.checks import printable
from visattn._support.tables import to_json, to_text
from visattn.cli.options import talk_options
from visattn.errors import OptionError


@click.command("list")
@click.argument("pattern", default="*")
@click.option("--methods", "what", flag_value="methods", help="Methods instead of models.")
@click.option("--colormaps", "what", flag_value="colormaps", help="Color maps instead of models.")
@talk_options
def list_command(pattern: str, what: str | None, as_json: bool, quiet: bool, debug: bool) -> None:
    """List models whose name fits PATTERN (for example '*dinov2*'): those with published weights whose maps are known."""
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
            raise OptionError(f"no model fits '{printable(pattern)}'. Put * around a part of its name.")
    click.echo(to_json(names) if as_json else "\n".join(names))


def _first_line(function: object) -> str:
    return (function.__doc__ or "").split("\n")[0].rstrip(".")
