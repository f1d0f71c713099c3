"""Arrays of a page as one stream, compressed as they come, so that a page that grows too large is known at once."""

from __future__ import annotations

import base64
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LEVEL = 6
_GZIP = 31  # `wbits` of zlib for a gzip stream
_KINDS = {"uint8": "u8", "uint16": "u16", "uint32": "u32", "int32": "i32", "float16": "f16", "float32": "f32"}


class Packed:
    """A growing gzip stream.

    Attributes:
        chunks: Kind and number of values of each array.
    """

    def __init__(self) -> None:
        """Begin an empty stream."""
        self.chunks: list[tuple[str, int]] = []
        self._gzip = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
        self._parts: list[bytes] = []
        self._bytes = 0

    def add(self, array: NDArray[Any]) -> int:
        """Append an array as little-endian bytes that end at a multiple of four; return its number."""
        raw = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        self._keep(self._gzip.compress(raw + bytes(-len(raw) % 4)))
        self.chunks.append((_KINDS[str(array.dtype)], int(array.size)))
        return len(self.chunks) - 1

    def text(self) -> str:
        """End the stream, and return it in base64."""
        self._keep(self._gzip.flush())
        return base64.b64encode(b"".join(self._parts)).decode()

    @property
    def characters(self) -> int:
        """Length of what is compressed so far, in base64."""
        return 4 * self._bytes // 3

    def _keep(self, part: bytes) -> None:
        self._parts.append(part)
        self._bytes += len(part)
