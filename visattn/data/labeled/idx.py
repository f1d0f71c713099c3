"""Reader for the idx format of MNIST and Fashion-MNIST."""

from __future__ import annotations

import contextlib
import gzip
import struct
import zlib
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from visattn._support.checks import printable, unreadable
from visattn._support.files import regular
from visattn.errors import DataError

_BYTES = 0x08  # type code of unsigned bytes, the only type these datasets use
_LARGEST = 2**31


def read_idx(path: Path, item: tuple[int, ...] = ()) -> NDArray[np.uint8]:
    """Read one array; a gzip file is decompressed, whatever its name.

    The file holds two zero bytes, the type, the number of axes, a big-endian 32-bit length for each axis, and the data.

    Args:
        path: The file.
        item: Shape of one image, `()` for labels.

    Returns:
        `(N, *item)`, uint8, read-only.

    Raises:
        DataError: If the file cannot be read, has another type or shape, or is shorter or longer than its header says.
    """
    name, axes = printable(str(path)), 1 + len(item)
    wanted = f"({', '.join(['N', *map(str, item)])})"
    try:
        with regular(path).open("rb") as file, _unpacked(file) as stream:
            head = stream.read(4 + 4 * axes)
            if head[:4] != bytes((0, 0, _BYTES, axes)):
                raise DataError(
                    f"{name}: must be an idx file of bytes with {axes} axes, got a file that starts with {head[:4].hex(' ') or 'nothing'}. "
                    "Download it again."
                )
            if len(head) < 4 + 4 * axes:
                raise DataError(
                    f"{name}: must have a header of {4 + 4 * axes} bytes, got {len(head)}. It is damaged; download it again."
                )
            shape = struct.unpack(f">{axes}I", head[4:])
            length = int(np.prod(shape, dtype=object))
            if shape[1:] != item:
                raise DataError(f"{name}: must have the shape {wanted}, got {shape}. Pass the files of this dataset.")
            if length > _LARGEST:
                raise DataError(
                    f"{name}: must hold at most {_LARGEST} bytes of data, its header states {length}. Download it again."
                )
            data = stream.read(length + 1)  # reading one byte past the end makes gzip verify its checksum
    except PermissionError as error:
        raise DataError(unreadable(error, path)) from error
    except (OSError, EOFError, zlib.error) as error:
        cause = getattr(error, "strerror", None) or str(error)
        raise DataError(f"{name}: cannot be read ({printable(cause).lower()}). Download it again.") from error
    if len(data) != length:
        more = "more" if len(data) > length else str(len(data))
        raise DataError(f"{name}: must hold {length} bytes of data, got {more}. It is damaged; download it again.")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _unpacked(file: IO[bytes]) -> gzip.GzipFile | contextlib.nullcontext[IO[bytes]]:
    packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    return gzip.GzipFile(fileobj=file) if packed else contextlib.nullcontext(file)
