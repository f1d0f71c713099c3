"""Error lines of commands: internal errors, and a full or failing disk."""

from __future__ import annotations

import errno

import click

from visattn._support.checks import printable

__all__ = ["FULL", "complain", "fault", "no_room", "one_line"]

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


def fault(error: Exception) -> str:
    """Return the message of an internal error, or of a package that is missing."""
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("visattn"):
        return f"the module '{error.name}' is not installed. visattn doctor checks the installation."
    what = str(error).strip().split("\n")[0]
    return f"internal error of visattn ({type(error).__name__}: {what}). Please report it with the output of --debug."


def no_room(error: OSError) -> str:
    """Return the message about a full or failing disk."""
    cause = (error.strerror or str(error)).lower()
    return f"{error.filename or 'a temporary file'}: {cause}; free disk space, here or in TMPDIR"


def complain(message: str) -> None:
    """Print an error as one line on stderr."""
    click.echo(f"visattn: error: {one_line(message)}", err=True)


def one_line(message: str) -> str:
    """Return a message as one printable line."""
    return printable(" ".join(message.split("\n")))
