"""Images on the file systems of fsspec, such as `s3://bucket/photos`, `gs://`, `hf://` or `zip://`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from visattn._support.checks import first_line, printable
from visattn.errors import ImageError

WILD = "*?["

Found = tuple[str, Path, Callable[[], bytes]]


def is_remote(source: str) -> bool:
    """Check whether a source is an address that fsspec reads; `load_image` itself reads those of the web."""
    scheme, mark, _ = source.partition("://")
    return bool(mark) and scheme.lower() not in ("http", "https")


def remote_files(address: str, endings: Collection[str]) -> list[Found]:
    """List the images of a file, a folder with all its subfolders, or a pattern.

    Returns:
        Address, name and a function that returns the content of each, sorted.

    Raises:
        ImageError: If there are none, or the file system cannot be read.
    """
    files, path = _opened(address)
    shown = printable(address)
    try:
        if any(letter in path for letter in WILD) and not files.exists(path):
            found = [(file, PurePosixPath(file).name) for file in files.glob(path) if _is_image(file, endings)]
        elif files.isdir(path):
            every = (file for file in files.find(path) if _is_image(file, endings))
            found = [(file, str(PurePosixPath(file).relative_to(files._strip_protocol(path) or "."))) for file in every]
        else:
            return [remote_file(address)]
    except Exception as error:  # each file system raises its own
        raise ImageError(f"{shown}: cannot be read ({type(error).__name__}: {first_line(error)}). Check the address.") from error
    if not found:
        raise ImageError(f"{shown}: no photos ({', '.join(sorted(endings))}) there. Check the address.")
    return [(files.unstrip_protocol(file), Path(name), partial(_content, files, file)) for file, name in sorted(found)]


def remote_file(address: str) -> Found:
    """Return address, name and content of one file, which is not looked at yet.

    Raises:
        ImageError: If there is no such file system.
    """
    files, path = _opened(address)
    return address, Path(PurePosixPath(path).name), partial(_content, files, path)


def _is_image(file: str, endings: Collection[str]) -> bool:
    return PurePosixPath(file).suffix.lower() in endings and not PurePosixPath(file).name.startswith(".")


def _opened(address: str) -> tuple[Any, str]:
    import fsspec

    try:
        files, path = fsspec.core.url_to_fs(address)
    except ImportError as error:
        raise ImageError(f"{printable(address)}: {first_line(error)}, for example with pip.") from error
    except ValueError as error:
        raise ImageError(f"{printable(address)}: {first_line(error)}. Check the address.") from error
    return files, path


def _content(files: Any, path: str) -> bytes:  # noqa: ANN401 - a file system of fsspec
    try:
        content: bytes = files.cat_file(path)
    except Exception as error:  # each file system raises its own
        raise ImageError(
            f"{printable(files.unstrip_protocol(path))}: cannot be read ({type(error).__name__}: {first_line(error)})."
        ) from error
    return content
