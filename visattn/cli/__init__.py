"""Command line. Each command is imported when it runs, so that `visattn --help` is fast and does not import torch."""

from visattn.cli.commands import main

__all__ = ["main"]
