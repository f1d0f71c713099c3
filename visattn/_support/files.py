"""Files and folders that are read: what there is at a path, and where caches are."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def is_file(path: Path) -> bool:
    """Check whether a regular file exists; return False for an invalid name, where `Path.is_file` may raise."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: Path) -> bool:
    """Check whether a folder exists; see `is_file`."""
    return os.path.isdir(path)  # noqa: PTH112


def exists(path: Path) -> bool:
    """Check whether a path exists; see `is_file`."""
    return os.path.exists(path)  # noqa: PTH110


def regular(path: Path) -> Path:
    """Return `path` itself after checking that it is a regular file; reading an open pipe could wait forever.

    Raises:
        OSError: If it is not a regular file, or cannot be accessed.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return path


KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def base_name(name: str) -> str:
    """Return the name of a file or folder without its path, which may be private; text that is not a path is returned as it is."""
    return name if os.sep not in name and name not in (".", "..") else Path(name).resolve().name or name


def cache_folder() -> Path:
    """Return the folder for downloads and caches: `$VISATTN_CACHE`, else `$XDG_CACHE_HOME/visattn`, else `~/.cache/visattn`."""
    if chosen := os.environ.get("VISATTN_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "visattn"
