"""Images in tar and zip files. The libraries of Python read them; names and sizes of members are checked."""

from __future__ import annotations

import os
import stat
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath

from visattn._support.checks import first_line, printable, unreadable
from visattn._support.files import regular
from visattn._support.outside import LONGEST, fault_of, relative
from visattn.batch.items import Content, Named, refused
from visattn.core.images import FORMATS
from visattn.core.images.image_folders import endings_of_photos
from visattn.core.images.loading import bounded, too_large
from visattn.errors import ImageError

PACKED = ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst"
ARCHIVES = ".tar", ".zip"
_OPEN = 8  # zip files that stay open
_ENCRYPTED = 0x1
_UNIX = 16  # bits before the mode in a zip file


def in_archive(file: Path, wanted: Callable[[str], bool] = lambda name: True, kind: str = "") -> list[Named]:
    """List the images of a tar or zip file, in its order. A member that cannot be read is one image that fails.

    Args:
        file: The archive.
        wanted: Which members are meant, by their names.
        kind: `tar` or `zip`; by default what the ending says.

    Returns:
        The images. Those that share one name are refused, as a program that unpacks the archive keeps only one of them.

    Raises:
        ImageError: If there are none, or the file cannot be opened.
    """
    _facts(file)
    members = _Members(file, wanted)
    images = list(_of_tar(file, members) if (kind or file.suffix[1:].lower()) == "tar" else _of_zip(file, members))
    if not images and members.left_out:
        raise ImageError(f"{printable(str(file))}: no photo in it fits the address. Check the address.")
    if not images:
        raise ImageError(f"{printable(str(file))}: no visible photos ({', '.join(FORMATS)}) in this archive. Pass another.")
    counts = Counter(image.source for image in images)
    return [
        image
        if counts[image.source] == 1
        else refused(image.source, _remade(image.source, f"is in the archive {counts[image.source]} times", "with it once"))
        for image in images
    ]


def _facts(file: Path) -> os.stat_result:
    try:
        return regular(file).stat()
    except (OSError, ValueError) as error:
        raise ImageError(unreadable(error, file)) from error


def _remade(source: str, fault: str, how: str = "without it") -> ImageError:
    return ImageError(f"{printable(source)}: {fault}. Make the archive again {how}.")


class _Members:
    """Members that are photos and are wanted.

    Attributes:
        count: Their number so far.
        left_out: Whether any photo so far is not wanted.
    """

    def __init__(self, file: Path, wanted: Callable[[str], bool]) -> None:
        self._file, self._wanted, self._endings = file, wanted, endings_of_photos()
        self.count, self.left_out = 0, False

    def holds(self, name: str) -> bool:
        path = PurePosixPath(name[-LONGEST:])
        is_photo = path.suffix.lower() in self._endings and not path.name.startswith(".")
        is_wanted = is_photo and self._wanted(name)
        self.left_out |= is_photo and not is_wanted
        return is_wanted

    def admitted(self, name: str, fault: str | None) -> tuple[str, Path, ImageError | None]:
        """Return source and name of a member, and the error if it is refused."""
        fault = fault or (f"its name {why}" if (why := fault_of(name)) else None)
        self.count += 1
        source = _source(self._file, name)
        if fault is None:
            return source, Path(self._file.stem, *relative(name).parts), None
        return source, Path(), _remade(source, fault)


def _source(file: Path, name: str) -> str:
    """Return the source of a member; a name that is cut here is too long to be read."""
    return f"{file}/{name if len(name) <= LONGEST else f'...{name[-LONGEST:]}'}"


def _of_tar(file: Path, members: _Members) -> Iterator[Named]:
    places: dict[str, int] = {}
    links: dict[str, str] = {}  # names of hard links, and the members that they name, also along a chain
    position = None
    try:
        with tarfile.open(regular(file), "r:") as archive:
            for member in archive:
                if archive.offset <= member.offset:  # of a negative size: `tarfile` would read it again and again
                    raise tarfile.ReadError("a header is damaged")
                position = archive.offset
                if member.isreg():
                    places[member.name] = member.offset
                if member.isdir() or not members.holds(member.name):
                    continue
                target = member.linkname if member.islnk() else member.name
                target = links.get(target, target)
                if member.islnk() and target in places:
                    links[member.name] = target
                lost = "is a link to a member that is not there" if member.islnk() else "is a link or a special file"
                source, name, why = members.admitted(member.name, None if target in places else lost)
                yield (refused(source, why) if why else Named(source, name, partial(_tar_member, file, places[target], target)))
            position = archive.offset
        whole = _ends(file, position)
    except Exception as error:  # tarfile raises many types for damaged headers
        if position is None and not members.count:
            unlisted = _unlisted(file, "tar", error)
            raise unlisted from error
        whole = False
    if not whole:  # tarfile itself takes a damaged header for the end
        shown = printable(str(file))
        damaged = ImageError(f"{shown}: is damaged, or cut off, after {members.count} images. Make it again.")
        yield refused(str(file), damaged)


def _unlisted(file: Path, kind: str, error: Exception) -> ImageError:
    if isinstance(error, OSError) and error.errno is not None:
        return ImageError(unreadable(error, file))
    return ImageError(f"{printable(str(file))}: is no {kind} file, or damaged ({first_line(error)}). Make it again.")


def _ends(file: Path, position: int) -> bool:
    with file.open("rb") as stream:
        stream.seek(position)
        return stream.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE)


def _tar_member(file: Path, offset: int, name: str, max_bytes: int) -> bytes:
    """Read the member whose header lies at an offset. Any thread and any process can do so."""
    shown = f"{printable(str(file))}/{printable(name)}"
    try:
        with regular(file).open("rb") as stream:
            stream.seek(offset)
            with tarfile.open(fileobj=stream, mode="r:") as archive:
                member = archive.next()
                content = None if member is None or member.name != name else archive.extractfile(member)
                if member is None or content is None:
                    raise ImageError(f"{shown}: is not there any more. Run the command again.")
                if member.size > max_bytes:
                    raise too_large(shown, max_bytes)
                return bounded(content, max_bytes, shown)
    except ImageError:
        raise
    except Exception as error:
        raise _unread(shown, error) from error


def _of_zip(file: Path, members: _Members) -> Iterator[Named]:
    try:
        infos = _opened(file).infolist()
    except Exception as error:
        unlisted = _unlisted(file, "zip", error)
        raise unlisted from error
    for number, info in enumerate(infos):
        if info.is_dir() or not members.holds(info.orig_filename):
            continue
        fault = _fault_of_member(info)
        source, name, why = members.admitted(info.orig_filename, fault)
        yield refused(source, why) if why else Named(source, name, partial(_zip_member, file, number, info.filename))


def _fault_of_member(info: zipfile.ZipInfo) -> str | None:
    if info.flag_bits & _ENCRYPTED:
        return "is encrypted"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others are unpacked without a bound
        return "is packed by a method that is not read; pack it by deflate"
    if stat.S_IFMT(info.external_attr >> _UNIX) not in (0, stat.S_IFREG):
        return "is a link or a special file"
    return None


def _zip_member(file: Path, number: int, name: str, max_bytes: int) -> bytes:
    shown = f"{printable(str(file))}/{printable(name)}"
    try:
        archive = _opened(file)
        info = next(iter(archive.infolist()[number:]), None)
        if info is None or info.filename != name:
            raise ImageError(f"{shown}: is not there any more. Run the command again.")
        if info.file_size > max_bytes:
            raise too_large(shown, max_bytes)
        with archive.open(info) as content:
            return bounded(content, max_bytes, shown)
    except ImageError:
        raise
    except Exception as error:
        raise _unread(shown, error) from error


def _opened(file: Path) -> zipfile.ZipFile:
    """Return a zip file that several threads may read; it is opened again if it was replaced."""
    facts = regular(file).stat()
    return _opened_as(file, facts.st_ino, facts.st_mtime_ns, facts.st_size)


@lru_cache(_OPEN)
def _opened_as(file: Path, *_facts: int) -> zipfile.ZipFile:
    return zipfile.ZipFile(file)


def named_member(file: Path, name: str, kind: str, max_bytes: int) -> bytes:
    """Read the one photo of this name in a tar or zip file.

    Raises:
        ImageError: If there is none, there are several, or it cannot be read.
    """
    facts = _facts(file)
    content = _by_name(file, kind, facts.st_ino, facts.st_mtime_ns, facts.st_size).get(_source(file, name))
    if content is None:
        raise ImageError(f"{printable(str(file))}/{printable(name)}: is no photo of this archive. Check the line.")
    read = content(max_bytes)
    assert isinstance(read, bytes)  # noqa: S101 - of an archive
    return read


@lru_cache(_OPEN)
def _by_name(file: Path, kind: str, *_facts: int) -> dict[str, Content]:
    return {image.source: image.content for image in in_archive(file, kind=kind) if image.content is not None}


def _unread(shown: str, error: Exception) -> ImageError:
    if isinstance(error, OSError) and error.errno is not None:
        return ImageError(unreadable(error, shown))
    return ImageError(f"{shown}: cannot be read ({first_line(error) or type(error).__name__}). Make the archive again.")
