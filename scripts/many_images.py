"""Many images through `visattn batch`: none is lost, bad ones are told, and memory stays.

    python scripts/many_images.py    10,000 images, of which 3 are damaged

Images are generated from a seed. Fails if a picture is missing, a damaged image is not told in one line, the exit status is not 1, or
memory grows by more than 50 MB from the first tenth of the run to its end.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from visattn.data.scenes import Scenes

GROWTH = 50  # MB
BAD = 3
_DISTINCT = 64
_SIDE = 96


def write(folder: Path, count: int) -> list[Path]:
    """Write images, most of them hard links to a few, and damage three; return the damaged ones."""
    folder.mkdir()
    scenes = Scenes(_DISTINCT, (_SIDE, _SIDE), seed=0)
    for number in range(_DISTINCT):
        scenes[number][0].save(folder / f"{number:05}.png")
    for number in range(_DISTINCT, count):
        os.link(folder / f"{number % _DISTINCT:05}.png", folder / f"{number:05}.png")
    bad = [folder / f"{count * part // (BAD + 1):05}.png" for part in range(1, BAD + 1)]
    for file in bad:
        content = file.read_bytes()
        file.unlink()
        file.write_bytes(content[: len(content) // 2])
    return bad


def watched(process: subprocess.Popen[str], output: Path, memory: list[tuple[int, float]]) -> None:
    """Note the pictures and the memory in MB, without mapped files such as libraries, ten times a second, until the process ends."""
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            return
        resident = next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("RssAnon")), 0.0)
        memory.append((len(os.listdir(output)) if output.exists() else 0, resident))  # noqa: PTH208 - 10,000 names
        time.sleep(0.1)


def main() -> int:
    """Run, print the figures, and return 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    count = parser.parse_args().count
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bad = write(folder / "images", count)
        out, memory = folder / "out", list[tuple[int, float]]()
        command = [sys.executable, "-m", "visattn", "batch", str(folder / "images"), "--model", "scenes_vit"]
        command += ["--method", "rollout", "-q", "-o", str(out)]
        start = time.perf_counter()
        with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
            watcher = threading.Thread(target=watched, args=(process, out, memory))
            watcher.start()
            assert process.stderr is not None  # noqa: S101
            told = [line for line in process.stderr.read().splitlines() if line.strip()]
            watcher.join()
        seconds = time.perf_counter() - start
        pictures = len(list(out.glob("*.png")))
    early = max((resident for done, resident in memory if done <= count // 10), default=0.0)
    late = max((resident for done, resident in memory if done > count * 9 // 10), default=0.0)
    print(f"{count:,} images, {BAD} of them damaged: {pictures:,} pictures, {len(told)} lines, exit status {process.returncode}")
    print(
        f"{seconds / 60:.1f} minutes, {count / seconds:.0f} images/s; at most {early:.0f} MB in the first tenth, {late:.0f} MB at the end"
    )
    wrong = [
        text
        for text, holds in {
            "a picture is missing": pictures == count - BAD,
            "a damaged image is not told in one line": len(told) == BAD
            and all(any(f.name in line for line in told) for f in bad),
            "the exit status is not 1": process.returncode == 1,
            f"memory grew by more than {GROWTH} MB": late - early <= GROWTH,
        }.items()
        if not holds
    ]
    for text in wrong:
        print(f"many_images: {text}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
