"""Write ICC profiles from numbers (ICC.1:2001-04 and ICC.1:2010), to test images with profiles."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

D50 = (0.9642, 1.0, 0.8249)
PRIMARIES = {  # rows are red, green and blue in XYZ under D50
    "sRGB": ((0.4360747, 0.2225045, 0.0139322), (0.3850649, 0.7168786, 0.0971045), (0.1430804, 0.0606169, 0.7141733)),
    "Adobe RGB": ((0.6097559, 0.3111242, 0.0194811), (0.2052401, 0.6256560, 0.0608902), (0.1492240, 0.0632197, 0.7448387)),
    "ProPhoto RGB": ((0.7976749, 0.2880402, 0.0), (0.1351917, 0.7118741, 0.0), (0.0313534, 0.0000857, 0.8252100)),
}


def curve(gamma: float | Sequence[float]) -> bytes:
    """Return a `curv` tag: one exponent, or a table of values in [0, 1]."""
    if isinstance(gamma, (int, float)):
        return b"curv" + struct.pack(">IIH", 0, 1, round(gamma * 256))
    values = (np.asarray(gamma) * 65535).round().astype(">u2")
    return b"curv" + struct.pack(">II", 0, len(values)) + values.tobytes()


def parametric(*numbers: float) -> bytes:
    """Return a `para` tag; five numbers define a curve of sRGB's type."""
    kind = {1: 0, 3: 1, 4: 2, 5: 3, 7: 4}[len(numbers)]
    return b"para" + struct.pack(">IHH", 0, kind, 0) + b"".join(struct.pack(">i", round(n * 65536)) for n in numbers)


def srgb_decoded(encoded: NDArray[np.float64]) -> NDArray[np.float64]:
    """Decode sRGB values to linear light, both in [0, 1] (IEC 61966-2-1)."""
    return np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)


SRGB_CURVE = parametric(2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)


def matrix_profile(primaries: str, tone: bytes) -> bytes:
    """Return a profile of an RGB display: three primaries and one tone curve."""
    colors = {f"{name}XYZ": _xyz(xyz) for name, xyz in zip("rgb", PRIMARIES[primaries], strict=True)}
    return _profile("mntr", "RGB ", "XYZ ", colors | {f"{name}TRC": tone for name in "rgb"})


def gray_profile(tone: bytes) -> bytes:
    """Return a gray profile: one tone curve."""
    return _profile("mntr", "GRAY", "XYZ ", {"kTRC": tone})


def table_profile(space: str, lab: NDArray[np.float64]) -> bytes:
    """Return a profile with a lookup table of colors.

    Args:
        space: `RGB ` or `CMYK`.
        lab: `(g, ..., g, 3)`: CIELAB under D50 at each corner of the grid, first channel slowest.
    """
    inputs, grid = lab.ndim - 1, lab.shape[0]
    scaled = np.stack([lab[..., 0] / 100 * 65280, (lab[..., 1] + 128) * 256, (lab[..., 2] + 128) * 256], -1)
    corners = scaled.round().clip(0, 65535).astype(">u2").tobytes()
    ends = np.array([0, 65535], ">u2").tobytes()
    identity = b"".join(struct.pack(">i", 65536 * (i % 4 == 0)) for i in range(9))
    head = b"mft2" + struct.pack(">IBBBB", 0, inputs, 3, grid, 0) + identity + struct.pack(">HH", 2, 2)
    table = head + ends * inputs + corners + ends * 3
    return _profile("prtr", space, "Lab ", {"A2B0": table, "A2B1": table})


def _xyz(values: Sequence[float]) -> bytes:
    return b"XYZ " + struct.pack(">I", 0) + b"".join(struct.pack(">i", round(v * 65536)) for v in values)


def _text(text: str) -> bytes:
    words = text.encode() + b"\0"
    return b"desc" + struct.pack(">II", 0, len(words)) + words + struct.pack(">IIHB67s", 0, 0, 0, 0, b"")


def _profile(kind: str, space: str, connection: str, tags: Mapping[str, bytes]) -> bytes:
    whole = {"desc": _text("made for a test"), "cprt": b"text" + struct.pack(">I", 0) + b"CC0\0", "wtpt": _xyz(D50), **tags}
    table, body = b"", b""
    start = 128 + 4 + 12 * len(whole)
    for name, data in whole.items():
        table += name.encode() + struct.pack(">II", start + len(body), len(data))
        body += data + b"\0" * (-len(data) % 4)
    content = struct.pack(">I", len(whole)) + table + body
    head = struct.pack(
        ">I4sI4s4s4s", 128 + len(content), b"\0\0\0\0", 0x02400000, kind.encode(), space.encode(), connection.encode()
    )
    head += (
        struct.pack(">6H4s", 2026, 1, 1, 0, 0, 0, b"acsp")
        + b"\0" * 28
        + b"".join(struct.pack(">i", round(v * 65536)) for v in D50)
    )
    return head + b"\0" * (128 - len(head)) + content
