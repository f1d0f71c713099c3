"""Regenerate `color.json`: colors of profiles with lookup tables, by ArgyllCMS, an engine that shares no code with littleCMS.

Needs `xicclu` (Debian: `apt-get install argyll`). Run `python -m tests.golden.color`. Colors are converted by `xicclu -ff -ir PROFILE`,
device to CIELAB, and then by `xicclu -fb -ir sRGB`, CIELAB to device, relative colorimetric.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.images import icc


def rgb_table() -> NDArray[np.float64]:
    """Return the table of a device with rotated hues: CIELAB at 9 x 9 x 9 corners."""
    r, g, b = np.meshgrid(*[np.linspace(0, 1, 9)] * 3, indexing="ij")
    light = 12 + 80 * (0.2 * b + 0.5 * r**1.2 + 0.3 * g)
    return np.stack([light, 28 * np.sin(2 * (g - b)) * (0.3 + r / 2), 24 * (r - g) * (1 - b / 2)], -1)


def cmyk_table() -> NDArray[np.float64]:
    """Return the table of a printer with soft inks: CIELAB at 7 x 7 x 7 x 7 corners."""
    c, m, y, k = np.meshgrid(*[np.linspace(0, 1, 7)] * 4, indexing="ij")
    paper = (1 - 0.85 * k) * (1 - 0.3 * c) * (1 - 0.35 * m) * (1 - 0.05 * y)
    inks = 1 - k
    return np.stack([10 + 85 * paper, inks * (35 * m - 20 * c), inks * (30 * y - 25 * c - 5 * m)], -1)


def table_profiles() -> dict[str, bytes]:
    """Return the profiles by color space."""
    return {"RGB": icc.table_profile("RGB ", rgb_table()), "CMYK": icc.table_profile("CMYK", cmyk_table())}


def _lookup(profile: Path, direction: str, colors: NDArray[np.float64], columns: int) -> NDArray[np.float64]:
    lines = "\n".join(" ".join(f"{v:.6f}" for v in color) for color in colors)
    command = ["xicclu", f"-f{direction}", "-ir", "-pl", "-v0", str(profile)]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=True)
    return np.array([[float(word) for word in line.split()[:columns]] for line in done.stdout.splitlines()])


def main() -> None:
    """Convert every color with the profile and then to sRGB, and write the levels."""
    found = {}
    tone = icc.srgb_decoded(np.linspace(0, 1, 4096))
    with tempfile.TemporaryDirectory() as folder:
        srgb, table = Path(folder) / "srgb.icc", Path(folder) / "table.icc"
        srgb.write_bytes(icc.matrix_profile("sRGB", icc.curve(list(tone))))
        for space, profile in table_profiles().items():
            table.write_bytes(profile)
            colors = np.random.default_rng(7).integers(0, 256, (200, len(space)))
            lab = _lookup(table, "f", colors / 255, 3)
            levels = _lookup(srgb, "b", lab, 3) * 255
            found[space] = {"colors": colors.tolist(), "srgb": levels.round(3).tolist()}
    (Path(__file__).parent / "color.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
