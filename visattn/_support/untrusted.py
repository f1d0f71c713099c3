"""Folders and files that somebody else may have prepared: links, pipes and devices in them are neither followed nor replaced."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection
from pathlib import Path

from visattn._support.checks import printable
from visattn._support.files import KINDS
from visattn._support.language import flag
from visattn._support.whole_files import refusal
from visattn.errors import OutputError


def check_own(folder: Path, files: Collection[str], folders: Collection[str] = ()) -> None:
    """Check, before reading or writing in an untrusted folder, that no name in it leads outside.

    Args:
        folder: The folder; it may be missing.
        files: Patterns of names that must be regular files without further hard links.
        folders: Patterns of names that must be folders which contain only files and folders.

    Raises:
        OutputError: If one is a link, a pipe or another special file, has the wrong type or a second hard link; the message names it.
    """
    try:
        items = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:
        refused = refusal(error, folder)
        raise refused from error
    for item in items:
        if any(item.match(pattern) for pattern in files):
            if _must_be(item, stat.S_IFREG).st_nlink > 1:
                raise OutputError(f"{printable(str(item))}: is hard-linked, so another file would change too; copy the folder")
        elif any(item.match(pattern) for pattern in folders):
            check_own_folder(item)


def check_own_folder(folder: Path) -> None:
    """Check, before writing in a folder of ours that may be there already, that it is a folder with nothing but files and folders.

    Raises:
        OutputError: If it or something in it is a link, a pipe or another special file.
    """
    if not os.path.lexists(folder):
        return
    _must_be(folder, stat.S_IFDIR)
    for place, inner, names in os.walk(folder):
        for name in (*inner, *names):
            _must_be(Path(place, name), stat.S_IFREG, stat.S_IFDIR)


def _must_be(path: Path, *kinds: int) -> os.stat_result:
    """Return the status of a file or folder after checking that it is of one of these kinds.

    Raises:
        OutputError: If it is of another kind.
    """
    facts = path.lstat()
    if stat.S_IFMT(facts.st_mode) not in kinds:
        wanted, got = " or ".join(KINDS[kind] for kind in kinds), KINDS.get(stat.S_IFMT(facts.st_mode), "something else")
        raise OutputError(
            f"{printable(str(path))}: must be {wanted}, got {got}; remove it, or choose another folder{flag('output')}"
        )
    return facts


def inside(folder: Path, name: str) -> Path:
    """Return the path of a file in an output folder, after checking that no part of it leads elsewhere.

    The name is checked when it is read (see `outside`), and the path here, right before it is written.

    Args:
        folder: The folder, which may itself be reached through a link.
        name: Name of the file, relative to the folder.

    Raises:
        OutputError: If the name leads out of the folder, a folder on the way is a link, or something else than a file has the name.
    """
    path = Path(folder, name)
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise OutputError(f"{printable(str(path))}: leads out of the output folder; rename the image")
    for place in (*list(path.parents)[: len(Path(name).parts) - 1][::-1], path):
        try:
            mode = stat.S_IFMT(place.lstat().st_mode)
        except (FileNotFoundError, NotADirectoryError):  # told when it is written
            return path
        except (OSError, ValueError) as error:
            refused = refusal(error, path)
            raise refused from error
        if mode == stat.S_IFLNK or (place == path and mode != stat.S_IFREG):
            raise OutputError(
                f"{printable(str(place))}: is {KINDS.get(mode, 'something else')}, which is not replaced; remove it"
            )
    return path


def open_own(path: Path, flags: int) -> int:
    """Open a file of an untrusted folder, without following a link or waiting for a pipe.

    Args:
        path: The file.
        flags: Flags of `os.open`.

    Returns:
        A file descriptor.

    Raises:
        OSError: If it is a link or not a regular file, or cannot be opened.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return descriptor


def read_own(path: Path) -> bytes:
    """Read a file of an untrusted folder; see `open_own`."""
    with os.fdopen(open_own(path, os.O_RDONLY), "rb") as stream:
        return stream.read()
