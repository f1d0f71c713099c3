"""Memory of `visattn overlay` for many large photos: the peak, compared with one photo, and the growth during the run.

    python scripts/many_photos.py    200 photos of 12 megapixels, about ten minutes

Photos are generated from a seed, in portrait and landscape format, in two folders with the same file names. Fails if the peak
is more than 100 MB above that of one photo, if memory grows by more than 20 MB from the 11th to 50th photo to the last 40, or if a
picture is missing. Memory is read when a picture is told, while buffers of the next photo may be open; so the largest values are compared.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

PEAK, GROWTH = 100, 20  # largest allowed values in MB
SIZES = ((3000, 4000), (4000, 3000), (3456, 3472))


def photos(folder: Path, count: int) -> list[Path]:
    """Write `count` photos, half of them in each of two folders, with the same names; identical photos are hard links to one file."""
    made = []
    for i, (height, width) in enumerate(SIZES):
        coarse = np.random.default_rng(i).integers(0, 256, (height // 50, width // 50, 3), dtype=np.uint8)
        made.append(folder / f"source{i}.jpg")
        Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(made[-1], quality=90)
    names = []
    for part in ("a", "b"):
        (folder / part).mkdir()
        for i in range(count // 2):
            names.append(folder / part / f"{i:03}.jpg")
            os.link(made[i % len(made)], names[-1])
    return names


def run(images: Sequence[Path], output: Path) -> tuple[int, list[int]]:
    """Draw all images in one process; return its peak memory and its memory after each picture, in MB."""
    output.mkdir()
    options = ["--model", "vit_tiny_patch16_224", "--weights", "none", "--method", "rollout", "--quiet", "-o", str(output)]
    command = [sys.executable, "-m", "visattn", "overlay", *map(str, images), *options]
    after, peak = [], 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdout is not None  # noqa: S101
        for _ in process.stdout:
            status = Path(f"/proc/{process.pid}/status").read_text()
            values = {line.split(":")[0]: int(line.split()[1]) // 1024 for line in status.splitlines() if line.startswith("Vm")}
            after.append(values["VmRSS"])
            peak = values["VmHWM"]
    if process.returncode:
        sys.exit(f"visattn overlay failed with exit status {process.returncode}")
    return peak, after


def main() -> None:
    """Measure, print the figures, and exit with an error if a bound is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    count = parser.parse_args().count
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        images = photos(folder, count)
        alone = max(run(images[i : i + 1], folder / f"one{i}")[0] for i in range(2))
        peak, after = run(images, folder / "all")
        pictures = len(list((folder / "all").glob("*.png")))
    early, late = (max(part) for part in (after[10:50], after[-40:]))
    growth = late - early
    print(
        f"{count} photos: {pictures} pictures; peak {peak} MB, for one photo {alone} MB; "
        f"pictures 11 to 50 {early} MB, the last 40 {late} MB (the largest)"
    )
    print(f"peak above that of one photo: {peak - alone} MB (at most {PEAK}); growth: {growth} MB (at most {GROWTH})")
    if pictures != count or peak - alone > PEAK or growth > GROWTH:
        sys.exit("too much memory was used, or a picture is missing")


if __name__ == "__main__":
    main()
