"""Images on the file systems of fsspec, such as `s3://bucket/photos`, `gs://`, `hf://` or `zip://`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from visattn._support.checks import first_line, printable
from visattn._support.files import regular
from visattn._support.outside import fault_of, relative
from visattn.batch.items import Named, refused
from visattn.core.images.loading import too_large
from visattn.errors import ImageError

WILD = "*?["
LOCAL = "file", "local"
STORES = (  # others keep copies on this machine, or evaluate what they read: `reference` runs the templates of its file
    *("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss", "hf", "hdfs", "webhdfs", "ftp", "sftp", "ssh", "smb"),
    *("github", "http", "https", "memory", "zip", *LOCAL),  # `tar` only on this machine, see `local_archive`
)


def is_remote(source: str) -> bool:
    """Check whether a source is an address that fsspec reads; `load_image` itself reads those of the web."""
    scheme, mark, _ = source.partition("://")
    return bool(mark) and ("::" in source or scheme.lower() not in ("http", "https"))


def local_path(source: str) -> Path | None:
    """Return the path of `file://PATH`, which is read as every file, or None."""
    scheme, mark, path = source.partition("://")
    return Path(path) if mark and scheme.lower() in LOCAL and "::" not in source else None


def local_archive(address: str) -> tuple[Path, Callable[[str], bool]] | None:
    """Return the archive on this machine that an address such as `zip://PATTERN::FILE` names, and which members it asks for, or None."""
    scheme, _, rest = address.partition("://")
    inner, chained, place = rest.partition("::")
    if not chained or "::" in place or scheme.lower() not in ("zip", "tar"):
        return None
    path = Path(place) if "://" not in place else local_path(place)
    if path is None or any(letter in str(path) for letter in WILD):
        return None
    inner = inner.strip("/")
    if any(letter in inner for letter in WILD):
        from fsspec.utils import glob_translate

        pattern = re.compile(glob_translate(inner))
        return path, lambda name: pattern.match(name) is not None
    return path, lambda name: not inner or name == inner or name.startswith(f"{inner}/")


def remote_files(address: str, endings: Collection[str]) -> list[Named]:
    """List the images of a file, a folder with all its subfolders, or a pattern.

    Returns:
        The images, sorted by address.

    Raises:
        ImageError: If there are none, or the file system cannot be read.
    """
    files, path = _opened(address)
    shown = printable(address)
    try:
        if any(letter in path for letter in WILD) and not files.exists(path):
            names = {file: PurePosixPath(file).name for file in files.glob(path) if _is_image(file, endings)}
        elif files.isdir(path):
            root = files._strip_protocol(path).strip("/")
            every = [file for file in files.find(path) if _is_image(file, endings)]
            names = {
                file: file.strip("/")[len(root) :].lstrip("/") if file.strip("/").startswith(root) else file for file in every
            }
        else:
            return [remote_file(address)]
    except Exception as error:  # each file system raises its own
        raise ImageError(f"{shown}: cannot be read ({type(error).__name__}: {first_line(error)}). Check the address.") from error
    if not names:
        raise ImageError(f"{shown}: no visible photos ({', '.join(sorted(endings))}) there. Check the address.")
    return [_named(files.unstrip_protocol(file), names[file], partial(_content, files, file)) for file in sorted(names)]


def remote_file(address: str) -> Named:
    """Return one file, which is not looked at yet."""
    paths = (link.partition("://")[2] for link in address.split("::"))
    name = next((PurePosixPath(path).name for path in paths if path), "image")
    return _named(address, name, partial(_content_at, address))


def _named(address: str, name: str, content: Any) -> Named:  # noqa: ANN401 - a partial
    if fault := fault_of(name):
        error = ImageError(f"{printable(address)}: its name {fault}. Rename it.")
        return refused(address, error)
    return Named(address, Path(relative(name)), content)


def _is_image(file: str, endings: Collection[str]) -> bool:
    return PurePosixPath(file).suffix.lower() in endings and not PurePosixPath(file).name.startswith(".")


def _opened(address: str) -> tuple[Any, str]:
    """Open the file system of an address.

    Raises:
        ImageError: If it is none of those that are read, or cannot be opened.
    """
    import fsspec

    for link in address.split("::"):
        scheme, mark, path = link.partition("://")
        if not mark and link != address and link.isidentifier():
            scheme, mark = link, "://"
        if mark and scheme.lower() not in STORES:
            raise ImageError(
                f"{printable(address)}: '{printable(scheme)}' is not a file system that is read here. Known: {', '.join(STORES)}, and "
                "tar://NAME::FILE for a local file."
            )
        if link != address and (not mark or scheme.lower() in LOCAL):
            _check_local(Path(path if mark else link), address)
    try:
        files, path = fsspec.core.url_to_fs(address)
    except ImportError as error:
        cause = first_line(error)
        how = ", for example with pip" if "install" in cause.lower() else ""
        raise ImageError(f"{printable(address)}: {cause}{how}.") from error
    except Exception as error:  # each file system raises its own
        cause = first_line(error) or type(error).__name__
        raise ImageError(
            f"{printable(address)}: cannot be opened ({cause}). Check the address, and that fsspec alone opens it."
        ) from error
    return files, path


def _check_local(path: Path, address: str) -> None:
    try:
        regular(path)  # opening a pipe could wait forever
    except (OSError, ValueError) as error:
        cause = (getattr(error, "strerror", None) or str(error)).lower()
        raise ImageError(f"{printable(address)}: {printable(str(path))} cannot be read ({cause}). Check the address.") from error


def _content_at(address: str, max_bytes: int) -> bytes:
    return _content(*_opened(address), max_bytes)


def _content(files: Any, path: str, max_bytes: int) -> bytes:  # noqa: ANN401 - a file system of fsspec
    try:
        content: bytes = files.cat_file(path, start=0, end=max_bytes + 1)
    except Exception as error:  # each file system raises its own
        raise ImageError(
            f"{printable(files.unstrip_protocol(path))}: cannot be read ({type(error).__name__}: {first_line(error)})."
        ) from error
    if len(content) > max_bytes:
        raise too_large(printable(files.unstrip_protocol(path)), max_bytes)
    return content
