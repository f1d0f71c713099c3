"""Command line. Each command is imported when it runs, so that `visattn --help` is fast and does not import torch."""

from __future__ import annotations

import sys
from pathlib import Path

from visattn.cli.help import page
from visattn.cli.without_command import tour

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its exit code.

    Args:
        arguments: The words after `visattn`; by default those of the process.
    """
    if arguments is None and sys.argv[1:] in (["--help"], ["-h"], []) and sys.stdout is not None:
        try:
            sys.stdout.write(f"{page() if sys.argv[1:] else tour(Path.cwd())}\n")
            sys.stdout.flush()
            return
        except OSError:  # a closed pipe or a full disk, which the other way reports
            pass
    from visattn.cli.commands import main as run

    run(arguments)
