"""Command `visattn list`: names of models, methods and color maps."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path

import click

from visattn._support.checks import printable
from visattn._support.files import cache_folder
from visattn._support.tables import to_json, to_text
from visattn._support.whole_files import write_whole
from visattn.core.command_line.late import Command
from visattn.core.command_line.shared_options import talk_options
from visattn.errors import OptionError, VisattnError


@click.command("list", cls=Command)
@click.argument("pattern", default="*")
@click.option("--methods", "what", flag_value="methods", help="List methods instead of models.")
@click.option("--colormaps", "what", flag_value="colormaps", help="List color maps instead of models.")
@talk_options
def list_command(pattern: str, what: str | None, as_json: bool, quiet: bool, debug: bool) -> None:
    """List models with attention over the image and published weights, whose names match or contain PATTERN, for example dinov2."""
    if what == "methods":
        from visattn.core.methods import METHODS

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
        from visattn.core.drawing import colormaps

        names = list(colormaps.NAMES)
    else:
        every = _every_model()
        names = [name for name in every if _fits(name, pattern)] or [name for name in every if _fits(name, f"*{pattern}*")]
        if not names:
            raise OptionError(
                f"no model with attention over the image matches '{printable(pattern)}'. CNNs are not listed: any of timm or torchvision "
                "works with class activation maps."
            )
    click.echo(to_json(names) if as_json else "\n".join(names))


def _every_model() -> list[str]:
    """Return the names of all models.

    They are stored in the cache on the first call, because importing timm to collect them takes seconds. The name of the file has the
    versions of the libraries and the digest of the modules that choose the names.
    """
    from visattn._support.json_files import decoded
    from visattn.core import loading

    chosen = [
        Path(place, name).read_bytes()
        for place in loading.__path__
        for name in ("timm_models.py", "torchvision_models.py", "models.py")
    ]
    parts = [metadata.version(name) for name in ("timm", "torchvision")]
    file = cache_folder() / f"models-{'-'.join(parts)}-{hashlib.sha256(b''.join(chosen)).hexdigest()[:12]}.json"
    with suppress(OSError, ValueError):
        return decoded(file.read_bytes(), list[str])
    every: list[str] = loading.list_models()
    with suppress(OSError, VisattnError):  # without a cache, each call takes seconds
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(every).encode())
    return every


def _fits(name: str, pattern: str) -> bool:
    """Check whether a name matches a pattern as in `list_models`: also without its tag, or without `tv:`."""
    return any(fnmatchcase(name.removeprefix(prefix), one) for one in (pattern, f"{pattern}.*") for prefix in ("", "tv:"))


def _first_line(function: object) -> str:
    return (function.__doc__ or "").split("\n")[0].rstrip(".")
