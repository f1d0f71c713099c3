"""Atomic output: files and folders are written under a temporary name, flushed to disk, then renamed, so they are complete or absent."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock

from visattn._support.checks import first_line, printable
from visattn._support.files import KINDS, exists, is_folder
from visattn._support.language import flag, option
from visattn._support.outside import folded
from visattn.errors import OptionError, OutputError, ResourceError, VisattnError

_UMASK = Lock()  # it can be read only by setting it


def check_output(path: Path, *, overwrite: bool = False, inputs: Iterable[Path] = ()) -> Path:
    """Check, before any work is done, that an output file can and may be written; create its folder.

    Args:
        path: File to write.
        overwrite: Whether an existing file may be replaced.
        inputs: Input files, which must never be replaced.

    Returns:
        `path` itself.

    Raises:
        OutputError: If `path` is an input or a folder, exists without `overwrite`, or its folder cannot be created.
    """
    return _checked(path, overwrite, _places(inputs))


def _places(paths: Iterable[Path]) -> frozenset[object]:
    """Return the paths of files and, of those that exist, their places on the disk."""
    listed = list(paths)
    return frozenset([*listed, *(place for place in map(_place, listed) if place)])


def _place(path: Path) -> tuple[int, int] | None:
    try:
        facts = path.stat()
    except (OSError, ValueError):
        return None
    return facts.st_dev, facts.st_ino


def _checked(path: Path, overwrite: bool, inputs: frozenset[object]) -> Path:
    name = printable(str(path))
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.lstat()  # raises for an invalid name, for which exists() only returns False
        if path in inputs or _place(path) in inputs:
            raise OutputError(f"{name}: the output is the input itself; choose another name{flag('output')}")
        if path.is_dir():
            raise OutputError(f"{name}: is a folder; name a file in it, for example {name}/out.png")
        check_replaceable(path)
        if path.exists() and not overwrite:
            raise OutputError(f"{name}: exists already; {_replace()}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with _temporary(path.parent) as place:
            _touch(place)
    except OutputError:
        raise
    except (FileExistsError, NotADirectoryError) as error:
        raise OutputError(f"{name}: {printable(str(path.parent))} is a file, not a folder; choose another folder") from error
    except (OSError, ValueError) as error:  # ValueError: the path contains a null byte
        refused = refusal(error, path)
        raise refused from error
    return path


def check_replaceable(path: Path) -> None:
    """Check that a path is free, a regular file, or a link, which would itself be replaced.

    Raises:
        OutputError: If it is a device, a pipe or a socket.
    """
    try:
        mode = stat.S_IFMT(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return
    if mode not in (stat.S_IFREG, stat.S_IFLNK):
        raise OutputError(f"{printable(str(path))}: is {KINDS.get(mode, 'no file')}, not a regular file; choose another name")


def check_png(path: Path) -> Path:
    """Return `path` itself after checking that its name ends in `.png`.

    Raises:
        OptionError: If it has another ending.
    """
    if path.suffix.lower() != ".png":
        raise OptionError(f"{printable(path.name)}: figures are written as PNG. Choose a name that ends in .png.")
    return path


def check_outputs(paths: Sequence[Path], *, overwrite: bool = False, inputs: Iterable[Path] = ()) -> None:
    """Check several output files with `check_output`, and that no two are the same file.

    Raises:
        OutputError: If `check_output` raises it, or two outputs have the same name.
    """
    seen: set[str] = set()
    places = _places(inputs)
    for path in paths:
        whole = folded(str(_checked(path, overwrite, places).resolve()))
        if whole in seen:
            raise OutputError(
                f"{printable(str(path))}: two results would be written to this file; choose another name for one of them"
            )
        seen.add(whole)


def discard(path: Path) -> None:
    """Remove a file, a link (never its target) or a folder with its content, if it exists.

    Raises:
        OutputError: If it cannot be removed.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        refused = refusal(error, path)
        raise refused from error


def result_names(inputs: Sequence[Path]) -> list[str]:
    """Return a unique name for the result of each input: its stem; if that is not unique, its name; else its name with a number."""
    stems = Counter(folded(path.stem) for path in inputs)
    names = [path.stem if stems[folded(path.stem)] == 1 else path.name for path in inputs]
    if len(set(map(folded, names))) < len(names):
        names = [f"{number}.{path.name}" for number, path in enumerate(inputs, start=1)]
    return names


def write_whole(path: Path, data: bytes) -> Path:
    """Write `data` to `path` atomically: the file has either its old or its complete new content.

    Args:
        path: File to write; its folder must exist.
        data: The content.

    Returns:
        `path` itself.

    Raises:
        OutputError: If the folder cannot be written.
        ResourceError: If the disk is full.
    """
    with building_file(path) as temporary:
        temporary.write_bytes(data)
    return path


def check_folder(path: Path, known: Collection[str], *, overwrite: bool = False) -> Path:
    """Check, before any work is done, that an output folder can and may be written; create its parent folder.

    Args:
        path: Folder to write.
        known: Names of the files that it may hold; a folder that holds anything else is never replaced.
        overwrite: Whether an existing folder may be replaced.

    Returns:
        `path` itself.

    Raises:
        OutputError: If `path` is a file, exists without `overwrite`, holds other files, or cannot be created.
    """
    name = printable(str(path))
    try:
        place = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, or an invalid name
        raise OutputError(f"{name}: cannot be a folder ({first_line(error)}); choose another name{flag('output')}") from error
    if not is_folder(place):
        if exists(place):
            raise OutputError(f"{name}: is a file, not a folder; choose another name{flag('output')}")
        return check_output(path)
    if not overwrite:
        raise OutputError(f"{name}: exists already; {_replace()}")
    if place == Path.cwd():
        raise OutputError(f"{name}: is the current folder, which cannot be replaced; name a folder in it, for example {name}/out")
    strange = sorted(
        printable(item.name) for item in place.iterdir() if item.name not in known or not stat.S_ISREG(item.lstat().st_mode)
    )
    if strange:
        raise OutputError(f"{name}: holds {strange[0]}, which would be lost; choose another folder{flag('output')}")
    return path


def write_folder_whole(path: Path, files: Mapping[str, bytes], known: Collection[str]) -> list[Path]:
    """Write a folder atomically: `path` is either the complete new folder or unchanged.

    Args:
        path: Folder to write; an existing folder is replaced if it holds only files in `known`.
        files: Content of each file by name.
        known: See `check_folder`.

    Returns:
        The files, in the order given.

    Raises:
        OutputError: If the folder cannot be written.
        ResourceError: If the disk is full.
    """
    place, former = path.resolve(), None
    try:
        with _temporary(place.parent) as temporary:
            temporary.mkdir(0o700)
            for name, data in files.items():
                write_whole(temporary / name, data)
            _publish(temporary, 0o777)
            if place.exists():
                check_folder(path, known, overwrite=True)  # check again: files added meanwhile must not be lost
                former = temporary.with_suffix(".former")
                place.rename(former)
            temporary.rename(place)
    except (OutputError, ResourceError):
        raise
    except OSError as error:
        refused = refusal(error, path)
        raise refused from error
    finally:
        if former is not None and former.exists() and not place.exists():
            former.rename(place)
        if former is not None:
            shutil.rmtree(former, ignore_errors=True)
    return [path / name for name in files]


@contextlib.contextmanager
def building_folder(path: Path) -> Iterator[Path]:
    """Create a temporary folder that is renamed to `path` if the `with` block succeeds, and removed if it fails.

    Each file is flushed to disk before the folder is renamed.

    Args:
        path: Folder to create; it must not exist.

    Yields:
        The temporary folder.

    Raises:
        OutputError: If `path` exists or cannot be written.
        ResourceError: If the disk is full.
    """
    check_folder(path, ())
    try:
        with _temporary(path.parent) as temporary:
            temporary.mkdir(0o700)
            yield temporary
            for place, _folders, files in os.walk(temporary):
                for item in (*(Path(place, name) for name in files), Path(place)):
                    _flush(item)
            _publish(temporary, 0o777)
            temporary.rename(path)
        _flush(path.parent)
    except (OutputError, ResourceError):
        raise
    except OSError as error:
        refused = refusal(error, path)
        raise refused from error


@contextlib.contextmanager
def building_file(path: Path) -> Iterator[Path]:
    """Create a temporary file that is renamed to `path` if the `with` block succeeds, and removed if it fails.

    Args:
        path: File to write; its folder must exist.

    Yields:
        The temporary file, which is empty.

    Raises:
        OutputError: If it cannot be written.
        ResourceError: If the disk is full.
    """
    try:
        with _temporary(path.parent) as temporary:
            _touch(temporary)
            yield temporary
            _flush(temporary)
            _publish(temporary, 0o666)
            check_replaceable(path)
            temporary.replace(path)
        _flush(path.parent)
    except (OutputError, ResourceError):
        raise
    except OSError as error:
        refused = refusal(error, path)
        raise refused from error


_unfinished: dict[Path, int] = {}  # temporary files and folders that may exist, and the process that makes them


@contextlib.contextmanager
def _temporary(parent: Path) -> Iterator[Path]:
    """Choose a new name in a folder; what has that name after the `with` block is removed."""
    place = parent / f".visattn-{secrets.token_hex(8)}"
    _unfinished[place] = os.getpid()
    try:
        yield place
    finally:
        _remove(place)


@atexit.register
def remove_unfinished() -> None:
    """Remove what a signal has left, at the moment between two steps, of the temporary files and folders of this process."""
    for place, process in list(_unfinished.items()):
        if process == os.getpid():
            _remove(place)


def _remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            place.unlink(missing_ok=True)
    _unfinished.pop(place, None)


def _touch(place: Path) -> None:
    """Create an empty private file."""
    os.close(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))


def _publish(path: Path, mode: int) -> None:
    """Set the permissions of a result by the user's umask; temporary files and folders are private."""
    with _UMASK:
        mask = os.umask(0)
        os.umask(mask)
    path.chmod(mode & ~mask)


def _flush(path: Path) -> None:
    """Flush a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refusal(error: OSError | ValueError, path: Path) -> VisattnError:
    """Build the error for a file or folder that cannot be written."""
    name = printable(str(path))
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(f"{name}: disk full; free some space or choose another folder{flag('output')}")
    cause = (getattr(error, "strerror", None) or str(error)).lower()
    return OutputError(f"{name}: cannot be written ({cause}); choose a writable folder")


def _replace() -> str:
    return f"pass {option('overwrite', True)} to replace it or choose another name{flag('output')}"
