"""Write TIFF files with one gray image of any depth from their tags (TIFF 6.0)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def gray(
    samples: NDArray[Any],
    bits: int,
    *,
    order: bytes = b"II",
    photometric: int = 1,
    kind: int = 1,
    fill_order: int = 1,
    extra: Sequence[int] = (),
) -> bytes:
    """Return a TIFF of samples `(height, width)` or, with extra samples, `(height, width, 1 + extra)`.

    Args:
        samples: Values that fit the bits.
        bits: Bits per sample; packed if below 8 or equal to 12.
        order: Byte order, `II` or `MM`.
        photometric: 0 white is zero, 1 black is zero.
        kind: 1 unsigned, 2 signed, 3 floating-point.
        fill_order: 2: the lowest bit of a byte comes first.
        extra: Meaning of the samples after the first.
    """
    mark = {b"II": "<", b"MM": ">"}[order]
    data = _packed(samples, bits, mark, fill_order)
    count = 1 + len(extra)
    height, width = samples.shape[:2]
    tags = [(256, [width]), (257, [height]), (258, [bits] * count), (259, [1]), (262, [photometric]), (266, [fill_order])]
    tags += [(277, [count]), (278, [height])]
    tags += [(338, list(extra))] if extra else []
    tags += [(339, [kind] * count)]
    entries = sorted([*tags, (273, [0]), (279, [len(data)])])
    start = 8 + 2 + 12 * len(entries) + 4
    directory = b""
    for number, values in entries:
        wide = number in (273, 279)
        body = (
            struct.pack(f"{mark}I", start if number == 273 else values[0])
            if wide
            else struct.pack(f"{mark}{len(values)}H", *values)
        )
        directory += struct.pack(f"{mark}HHI", number, 4 if wide else 3, len(values)) + body.ljust(4, b"\0")
    return order + struct.pack(f"{mark}HIH", 42, 8, len(entries)) + directory + b"\0" * 4 + data


def _packed(samples: NDArray[Any], bits: int, mark: Any, fill_order: int) -> bytes:
    if bits in (8, 16, 32, 64):
        data = samples.astype(samples.dtype.newbyteorder(mark)).tobytes()
    else:
        rows = samples.reshape(len(samples), -1).astype(np.int64)
        digits = (rows[..., None] >> np.arange(bits - 1, -1, -1)) & 1
        data = np.packbits(digits.reshape(len(rows), -1).astype(np.uint8), axis=1).tobytes()
    if fill_order == 2:
        data = bytes(int(f"{byte:08b}"[::-1], 2) for byte in data)
    return data
