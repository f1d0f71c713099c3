"""Folder of a run that goes on where it stopped."""

from __future__ import annotations

from pathlib import Path

from visattn._support.checks import printable
from visattn._support.files import exists, is_folder
from visattn.errors import OutputError

__all__ = ["prepared_folder"]


def prepared_folder(output: Path, name: str) -> Path:
    """Check the folder of the results, and return the journal in it.

    Args:
        output: The folder.
        name: Name of the journal.

    Raises:
        OutputError: If the folder holds other things than results of an earlier run.
    """
    journal = output / name
    if is_folder(output) and not exists(journal) and any(output.iterdir()):
        raise OutputError(f"{printable(str(output))}: holds other files; pass -o with a new folder")
    if exists(output) and not is_folder(output):
        raise OutputError(f"{printable(str(output))}: a file, not a folder; pass -o with a new folder")
    return journal
