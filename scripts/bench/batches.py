"""Folder of photos, in one run and stage by stage, as JSON: `python -m bench.batches COUNT`.

The bound is the time of a run that wastes none: decoding, drawing and writing spread over the CPUs, and the model on all of them.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from embedding import photos

from bench.measuring import load
from bench.shared import THREADS
from visattn._support.whole_files import write_whole
from visattn.batch import Asked, Batches, Journal, Ledger, Wanted, Work, items_of, run
from visattn.core.drawing.pictures import to_png
from visattn.core.pipeline.inputs import prepare_with, read
from visattn.core.pipeline.preprocessing import Preprocessing
from visattn.core.pipeline.question import ask
from visattn.core.pipeline.running import explained
from visattn.embedding import crops_of

METHOD = "rollout"
SIZE = 16  # images in a batch
ROUNDS = 3
_CROPS = 5
_SIDE = 640  # longer side of a photo


def main(count: int) -> dict[str, Any]:
    """Return the images, seconds of each stage and of the run, and the share of the bound that the run reaches."""
    model, how, question = load(), Preprocessing(resize="model", img_size=224), ask(METHOD)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder / "photos", count)
        items = items_of([folder / "photos"])
        rounds = []
        for number in range(ROUNDS):
            found = _stages(model, [item.source for item in items], how, question, folder / f"stages{number}")
            out = folder / f"run{number}"
            out.mkdir()
            start = time.perf_counter()
            with Journal(out / "journal.jsonl", {}) as journal:
                run(model, Ledger(items, journal, Batches(SIZE)), Work(Asked(question, how), Wanted(out, METHOD), THREADS))
            found["run"] = time.perf_counter() - start
            rounds.append(found)
    seconds = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    bound = seconds["model"] + sum(seconds[name] for name in ("decode", "draw", "write")) / THREADS
    return {"images": len(items), **seconds, "bound": bound, "share": bound / seconds["run"]}


def _write(folder: Path, count: int) -> None:
    """Write photos: those that are shipped, and crops of them."""
    folder.mkdir()
    every = [part for number, (photo, _) in enumerate(photos()) for part in (photo, *crops_of(photo, _CROPS, seed=number))]
    for number, part in enumerate(every[:count]):
        part.thumbnail((_SIDE, _SIDE))
        part.save(folder / f"{number:03}.jpg", quality=92)


def _stages(model: Any, paths: list[str], how: Preprocessing, question: Any, folder: Path) -> dict[str, float]:  # noqa: ANN401
    """Time each stage alone for all photos: those of one thread on one, the model on all."""
    folder.mkdir()
    prepared: list[Any] = []
    torch.set_num_threads(1)
    found = {"decode": _timed(lambda: prepared.extend(prepare_with([read(path, how)], model, how) for path in paths))}
    torch.set_num_threads(THREADS)
    answers: list[Any] = []
    parts = [prepared[first : first + SIZE] for first in range(0, len(prepared), SIZE)]
    found["model"] = _timed(lambda: answers.extend(one for part in parts for one in explained(model, part, question)))
    torch.set_num_threads(1)
    drawn: list[bytes] = []
    found["draw"] = _timed(lambda: drawn.extend(to_png(*one.draw()) for one in answers))
    found["write"] = _timed(lambda: [write_whole(folder / f"{number}.png", data) for number, data in enumerate(drawn)])
    torch.set_num_threads(THREADS)
    return found


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))
