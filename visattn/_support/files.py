"""Outputs are whole or absent: written to a temporary file beside the target, flushed to disk, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from visattn._support.checks import printable
from visattn.errors import OptionError, OutputError, ResourceError, VisattnError

_REPLACE = "pass overwrite=True (--overwrite) to replace it or choose another name (-o/--output)"


def check_output(path: Path, *, overwrite: bool = False, inputs: Iterable[Path] = ()) -> Path:
    """Refuse an output that cannot or may not be written, before any work is done; create its folder.

    Args:
        path: The file to be written.
        overwrite: Whether an existing file may be replaced.
        inputs: Files that are read and must never be replaced.

    Returns:
        `path` itself.

    Raises:
        OutputError: If `path` is an input, a folder, exists without `overwrite`, or its folder cannot be made.
    """
    name = printable(str(path))
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.lstat()  # exists() would take a name that cannot be for one that is not there
        for source in inputs:
            if path == source or (path.exists() and source.exists() and path.samefile(source)):
                raise OutputError(f"{name}: the output is the input itself; choose another name (-o/--output)")
        if path.is_dir():
            raise OutputError(f"{name}: is a folder; name a file in it, for example {name}/out.png")
        if path.exists() and not overwrite:
            raise OutputError(f"{name}: exists already; {_REPLACE}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".visattn-"):
            pass
    except OutputError:
        raise
    except (FileExistsError, NotADirectoryError) as error:
        raise OutputError(f"{name}: {printable(str(path.parent))} is a file, not a folder; choose another folder") from error
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        refused = refusal(error, path)
        raise refused from error
    return path


def check_png(path: Path) -> Path:
    """Return `path` itself, if a picture may be written to it.

    Raises:
        OptionError: If its name is not one of a PNG.
    """
    if path.suffix.lower() != ".png":
        raise OptionError(f"{printable(path.name)}: pictures are written as PNG. Choose a name that ends in .png.")
    return path


def check_outputs(paths: Sequence[Path], *, overwrite: bool = False, inputs: Iterable[Path] = ()) -> None:
    """`check_output` of several, of which no two may be one file.

    Raises:
        OutputError: As there; or if two results would have one name.
    """
    seen: set[str] = set()
    for path in paths:
        whole = str(check_output(path, overwrite=overwrite, inputs=inputs).resolve()).casefold()  # A is a to some file systems
        if whole in seen:
            raise OutputError(f"{printable(str(path))}: two results would be written there; choose another name for one")
        seen.add(whole)


def is_file(path: Path) -> bool:
    """Return whether a regular file is there; of a name that cannot be, no: `Path.is_file` raises for one that is too long."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: Path) -> bool:
    """Return whether a folder is there; see `is_file`."""
    return os.path.isdir(path)  # noqa: PTH112


def exists(path: Path) -> bool:
    """Return whether anything is there; see `is_file`."""
    return os.path.exists(path)  # noqa: PTH110


def regular(path: Path) -> Path:
    """`path` itself; reading a pipe that nobody writes to would wait for ever.

    Raises:
        OSError: If it is no regular file, or cannot be looked at.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return path


_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_own(folder: Path, files: Collection[str], folders: Collection[str] = ()) -> None:
    """Refuse a folder that may come from elsewhere if a name in it leads out of it, before anything in it is read or written.

    Args:
        folder: The folder; it may be missing.
        files: Patterns of names that must be files, each with no second name elsewhere.
        folders: Patterns of names that must be folders, with nothing but files and folders in them.

    Raises:
        OutputError: If one is a link, a pipe or another special file, or a file in the place of a folder; the message names it.
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
                raise OutputError(f"{printable(str(item))}: has a second name, whose content would change too; copy the folder")
        elif any(item.match(pattern) for pattern in folders):
            _must_be(item, stat.S_IFDIR)
            for place, inner, names in os.walk(item):
                for name in (*inner, *names):
                    _must_be(Path(place, name), stat.S_IFREG, stat.S_IFDIR)


def _must_be(path: Path, *kinds: int) -> os.stat_result:
    """The facts of a file or folder, which is of one of these kinds.

    Raises:
        OutputError: If it is of another.
    """
    facts = path.lstat()
    if stat.S_IFMT(facts.st_mode) not in kinds:
        wanted, got = " or ".join(_KINDS[kind] for kind in kinds), _KINDS.get(stat.S_IFMT(facts.st_mode), "something else")
        raise OutputError(
            f"{printable(str(path))}: must be {wanted}, got {got}; remove it, or choose another folder (-o/--output)"
        )
    return facts


def open_own(path: Path, flags: int) -> int:
    """Open a file of a folder that may come from elsewhere: no link is followed, and no pipe is waited for.

    Args:
        path: The file.
        flags: Those of `os.open`.

    Returns:
        A descriptor.

    Raises:
        OSError: If it is a link or no regular file, or cannot be opened.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return descriptor


def read_own(path: Path) -> bytes:
    """Read a file of a folder that may come from elsewhere; see `open_own`."""
    with os.fdopen(open_own(path, os.O_RDONLY), "rb") as stream:
        return stream.read()


def discard(path: Path) -> None:
    """Remove a file, a link (never what it leads to) or a folder with what is in it, if it is there.

    Raises:
        OutputError: If the system does not let it be removed.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        refused = refusal(error, path)
        raise refused from error


def base_name(name: str) -> str:
    """Return a file's or folder's own name without where it lies, which may tell whose it is; what is no path stays as it is."""
    return name if os.sep not in name and name not in (".", "..") else Path(name).resolve().name or name


def result_names(inputs: Sequence[Path]) -> list[str]:
    """A name for the result of each input, no two alike: its stem, where that is not enough its name, and then with its number."""
    stems = [path.stem.casefold() for path in inputs]
    names = [path.stem if stems.count(path.stem.casefold()) == 1 else path.name for path in inputs]
    if len({name.casefold() for name in names}) < len(names):
        names = [f"{number}.{path.name}" for number, path in enumerate(inputs, start=1)]
    return names


def write_whole(path: Path, data: bytes) -> Path:
    """Write `data` to `path` so that `path` is either the whole new content or what it was before.

    Args:
        path: The file to write; its folder must exist.
        data: The content.

    Returns:
        `path` itself.

    Raises:
        OutputError: If the folder cannot be written.
        ResourceError: If the disk is full.
    """
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".visattn-", delete=False) as stream:
            temporary = stream.name
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        _publish(Path(temporary), 0o666)
        os.replace(temporary, path)
        temporary = None
        _flush(path.parent)
    except OSError as error:
        refused = refusal(error, path)
        raise refused from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
    return path


def check_folder(path: Path, known: Collection[str], *, overwrite: bool = False) -> Path:
    """Refuse an output folder that cannot or may not be written, before any work is done; create the folder around it.

    Args:
        path: The folder to be written as a whole.
        known: Names of the files that it may hold; one that holds anything else is never replaced.
        overwrite: Whether an existing folder may be replaced.

    Returns:
        `path` itself.

    Raises:
        OutputError: If `path` is a file, exists without `overwrite`, holds other files, or cannot be made.
    """
    name, place = printable(str(path)), path.resolve()
    if not is_folder(place):
        if exists(place):
            raise OutputError(f"{name}: is a file, not a folder; choose another name (-o/--output)")
        return check_output(path)
    if not overwrite:
        raise OutputError(f"{name}: exists already; {_REPLACE}")
    if place == Path.cwd():
        raise OutputError(f"{name}: is the current folder, which cannot be replaced; name a folder in it, for example {name}/out")
    strange = sorted(
        printable(item.name) for item in place.iterdir() if item.name not in known or not stat.S_ISREG(item.lstat().st_mode)
    )
    if strange:
        raise OutputError(f"{name}: holds {strange[0]}, which would be lost; choose another folder (-o/--output)")
    return path


def write_folder_whole(path: Path, files: Mapping[str, bytes], known: Collection[str]) -> list[Path]:
    """Write a folder so that `path` is either the whole new folder or what it was before.

    Args:
        path: The folder; one that exists and holds nothing but `known` is replaced.
        files: Content by name.
        known: See `check_folder`.

    Returns:
        The files, in the order given.

    Raises:
        OutputError: If the folder cannot be written.
        ResourceError: If the disk is full.
    """
    place, temporary, former = path.resolve(), None, None
    try:
        temporary = Path(tempfile.mkdtemp(dir=place.parent, prefix=".visattn-"))
        for name, data in files.items():
            write_whole(temporary / name, data)
        _publish(temporary, 0o777)
        if place.exists():
            check_folder(path, known, overwrite=True)  # what came meanwhile must not go either
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
        for rest in (temporary, former):
            if rest is not None:
                shutil.rmtree(rest, ignore_errors=True)
    return [path / name for name in files]


@contextlib.contextmanager
def building_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path` that becomes `path` when the body ends well, and is gone when it does not.

    Each file is flushed to disk before the folder gets its name.

    Args:
        path: The folder to be; it must not exist.

    Yields:
        The temporary folder.

    Raises:
        OutputError: If `path` exists or cannot be written.
        ResourceError: If the disk is full.
    """
    check_folder(path, ())
    temporary = None
    try:
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=".visattn-"))
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
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _publish(path: Path, mode: int) -> None:
    """Temporary files and folders are private; a result follows the user's umask."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(mode & ~mask)


def _flush(path: Path) -> None:
    """Have the system write a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refusal(error: OSError | ValueError, path: Path) -> VisattnError:
    """Return what to raise where the system does not let a file or folder be written."""
    name = printable(str(path))
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(f"{name}: disk full; free some space or choose another place (-o/--output)")
    cause = (getattr(error, "strerror", None) or str(error)).lower()
    return OutputError(f"{name}: cannot be written ({cause}); choose a folder that can be written")


def cache_folder() -> Path:
    """Where downloads and conversions are kept: `$VISATTN_CACHE`, else `$XDG_CACHE_HOME/visattn`, else `~/.cache/visattn`."""
    if chosen := os.environ.get("VISATTN_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "visattn"
