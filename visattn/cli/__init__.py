"""The command line. Commands are imported when they run, so that `visattn --help` needs neither torch nor a second."""

from visattn.cli.commands import main

__all__ = ["main"]
