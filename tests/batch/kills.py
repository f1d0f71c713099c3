"""Kills of a run over many images at random moments: `python -m tests.batch.kills 300`.

Each process is a fork of this one, which holds the model, so most kills fall into the work itself. A run is killed several times, then
ended; its files must be those of a run that was not killed, and none may be half written.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests import tiny
from visattn.batch import Asked, Batches, Entry, Item, Journal, Ledger, Outcome, Wanted, Work, items_of, run
from visattn.core.pipeline.preprocessing import Preprocessing
from visattn.core.pipeline.question import ask

COUNT = 11
_KILLS = 12  # of one run

Files = dict[str, bytes]


def photos(folder: Path) -> Path:
    """Write photos of different sizes, and one that is none."""
    random = np.random.default_rng(0)
    for number in range(COUNT):
        size = (40 + 7 * (number % 3), 60)
        Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)).save(folder / f"{number:02}.png")
    (folder / "05.png").write_bytes(b"nothing")
    return folder


def go(
    model: Any,
    items: list[Item],
    folder: Path,
    *,
    method: str = "rollout",
    shard: tuple[int, int] = (0, 1),
    settings: dict[str, Any] | None = None,
    told: Callable[[Entry], None] = lambda entry: None,
    size: int = 3,
    parameters: dict[str, Any] | None = None,
) -> Outcome:
    """Run over the images, three in a batch."""
    folder.mkdir(exist_ok=True)
    wanted = Wanted(folder, method, raw=True, packed=True, statistics=True)
    work = Work(Asked(ask(method, parameters), Preprocessing()), wanted)
    with Journal(folder / f"journal.{shard[0]}.jsonl", settings or {"method": method}) as journal:
        return run(model, Ledger(items, journal, Batches(size, *shard), told), work)


def files_of(folder: Path) -> Files:
    """Return the content of all files but journals, hidden ones too, by their paths in the folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".jsonl")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def killed(work: Callable[[], object], delay: float) -> bool:
    """Run work in a fork of this process, and kill it after a delay; return whether it had not ended before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of Python warn about forks with threads
        child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        try:
            work()
        finally:
            os._exit(0)
    end = time.monotonic() + delay
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def many(folder: Path, most: int) -> int:
    """Kill runs at random moments until there were `most` kills, and check the files after each kill and at each end.

    Returns:
        The number of kills, which is smaller if runs end before.
    """
    torch.set_num_threads(1)
    model = tiny.vit()
    (folder / "photos").mkdir()
    items = items_of([photos(folder / "photos")])
    go(model, items, folder / "whole")
    start = time.monotonic()
    go(model, items, folder / "again")  # as a child: all is imported and compiled
    usual, random = time.monotonic() - start, np.random.default_rng(0)
    whole, kills = files_of(folder / "whole"), 0
    for turn in range(4 * most):
        out = folder / f"killed{turn}"
        for _ in range(_KILLS):
            if not killed(lambda out=out: go(model, items, out), float(random.uniform(0.05, 1.0)) * usual):  # type: ignore[misc]
                break
            kills += 1
            for path in out.rglob("[0-9]*.*"):
                name = str(path.relative_to(out))
                assert "files" in name or path.read_bytes() == whole[name], name
        go(model, items, out)
        assert files_of(out) == whole
        lines = map(json.loads, (out / "journal.0.jsonl").read_text().splitlines())
        assert {line[0] for line in lines if isinstance(line, list)} == set(range(COUNT))
        if kills >= most:
            break
    return kills


def main(most: int) -> int:
    """Kill runs, and print the number of kills; return 1 if they were too few."""
    with tempfile.TemporaryDirectory() as folder:
        kills = many(Path(folder), most)
    print(f"{kills} kills of runs over {COUNT} images: all files equal those of a run that was not killed")
    return int(kills < most)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
