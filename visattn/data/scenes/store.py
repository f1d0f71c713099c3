"""Cache of generated scenes: they are drawn once, stored as arrays, and memory-mapped from then on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Generator, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from visattn._support.checks import printable, unreadable
from visattn._support.files import cache_folder
from visattn._support.whole_files import building_folder
from visattn.data.labeled.arrays import ArrayDataset
from visattn.data.scenes import VERSION, Scenes
from visattn.data.scenes.causes import CausedScenes
from visattn.data.scenes.scene_names import CAUSE_OF, GROUND_ALONE, MARKS
from visattn.errors import DataError, OutputError, ResourceError

COUNTS = {"train": 20_000, "test": 2_000}
_STORED = 3  # counts changes of what is stored: captions of version 1 had British spelling, those of version 2 said "a orange"
_ALONE = 2_000  # up to this count (about 3 ms per scene) one process is faster than starting several
_PART = 100  # scenes per task of a worker process

Part = tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.bytes_]]  # pixels, labels, captions


def drawn(data: str, split: str, count: int | None = None, size: tuple[int, int] = (64, 64), seed: int = 0) -> ArrayDataset:
    """Load labeled scenes from the cache; draw them first if they are not cached.

    Train and test never share a scene: they use the seeds `2 * seed + 1` and `2 * seed + 2`. A larger `count` begins with the images of a
    smaller one. The datasets in `MARKS` differ only in the mark; `scenes-ground` also lacks the objects. The scenes of those in
    `CAUSE_OF` are others.

    Args:
        data: A name in `DRAWN`.
        split: A key of `COUNTS`.
        count: Number of scenes; 20,000 for train and 2,000 for test by default.
        size: `(height, width)`; see `Scenes`.
        seed: 0 to 2**31 - 2.

    Returns:
        The dataset, memory-mapped read-only.

    Raises:
        OptionError: If `size` or `seed` is out of range.
        DataError: If the files in the cache are damaged.
        OutputError: If the cache cannot be written.
        ResourceError: If the disk is full, or the worker processes were killed.
    """
    number, sides, own = COUNTS[split] if count is None else count, (size[0], size[1]), seed_of(split, seed)
    scenes = (
        CausedScenes(CAUSE_OF[data], number, sides, seed=own)
        if data in CAUSE_OF
        else Scenes(number, sides, seed=own, watermark=MARKS[data])
    )
    pixels, labels = kept(scenes, data, "labels", ground=data == GROUND_ALONE)
    source = json.dumps([VERSION, data, scenes.size, scenes.seed])
    return ArrayDataset(pixels, labels, scenes.classes, f"{data} {split}", source=source)


def seed_of(split: str, seed: int) -> int:
    """Return the seed of a split's scenes, which is unique to the split and `seed`."""
    return 2 * seed + (1 if split == "train" else 2)


def kept(
    scenes: Scenes | CausedScenes, title: str, told: Literal["labels", "captions"], *, ground: bool = False
) -> tuple[np.memmap[Any, np.dtype[np.uint8]], NDArray[Any]]:
    """Load the arrays of scenes from the cache; draw the scenes first if they are not cached.

    Args:
        scenes: Scenes to load.
        title: Name of the dataset, part of the cache folder's name.
        told: Array to load with the pixels: labels or captions.
        ground: Whether to draw the background only, without objects.

    Returns:
        Pixels `(N, H, W, 3)`, memory-mapped read-only, and labels or captions `(N,)`; captions are ASCII bytes.

    Raises:
        DataError: If the files in the cache are damaged.
        OutputError: If the cache cannot be written.
        ResourceError: If the disk is full, or the worker processes were killed.
    """
    name = f"{title}-{VERSION}.{_STORED}-{scenes.size[0]}x{scenes.size[1]}-{scenes.seed}-{len(scenes)}"
    folder = cache_folder() / "scenes" / name
    if not folder.is_dir():
        try:
            _draw(scenes, folder, ground=ground)
        except OutputError:
            if not folder.is_dir():  # otherwise another process has written it meanwhile
                raise
    try:
        pixels, words = np.load(folder / "pixels.npy", mmap_mode="r"), np.load(folder / f"{told}.npy")
        kinds = pixels.dtype == np.uint8 and words.dtype.kind == ("i" if told == "labels" else "S")
        whole = kinds and pixels.shape == (len(scenes), *scenes.size, 3) and words.shape == (len(scenes),)
    except PermissionError as error:
        raise DataError(unreadable(error, folder)) from error
    except (OSError, EOFError, ValueError):
        whole = False
    if not whole:
        raise DataError(f"{printable(str(folder))}: must hold {len(scenes)} scenes, got damaged files. Remove this folder.")
    return pixels, words


def _draw(scenes: Scenes | CausedScenes, folder: Path, *, ground: bool) -> None:
    """Draw all scenes and write their pixels, labels and captions."""
    header = {"descr": "|u1", "fortran_order": False, "shape": (len(scenes), *scenes.size, 3)}
    labels, captions = [], []
    with building_folder(folder) as place, (place / "pixels.npy").open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, header)
        with (
            closing(_parts(scenes, ground)) as parts,
            tqdm(total=len(scenes), desc="drawing scenes", unit="scene", disable=None) as bar,
        ):
            for pixels, numbers, texts in parts:
                stream.write(pixels.data)  # not through a memory map: on a full disk that kills the process without a message
                labels.append(numbers)
                captions.append(texts)
                bar.update(len(numbers))
        np.save(place / "labels.npy", np.concatenate(labels))
        np.save(place / "captions.npy", np.concatenate(captions))


def _parts(scenes: Scenes | CausedScenes, ground: bool) -> Generator[Part, None, None]:
    """Yield all scenes in order, `_PART` at a time."""
    ranges = [range(start, min(start + _PART, len(scenes))) for start in range(0, len(scenes), _PART)]
    if len(scenes) <= _ALONE or _cores() == 1:
        yield from map(partial(_part, scenes, ground), ranges)
        return
    # workers ignore Ctrl-C; only the main process handles it and cleans up
    pool = ProcessPoolExecutor(_cores(), initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN))
    try:
        yield from pool.map(partial(_part, scenes, ground), ranges)
    except BrokenProcessPool as error:
        raise ResourceError(
            "the processes that draw scenes died; free some memory, or use a smaller count; "
            "in a script, guard the call with: if __name__ == '__main__'"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _part(scenes: Scenes | CausedScenes, ground: bool, indices: Iterable[int]) -> Part:
    found = [scenes.scene(index) for index in indices]
    pixels = np.stack([scene.ground if ground else scene.image for scene in found])
    return pixels, np.array([scene.label for scene in found], np.int64), np.array([scene.caption for scene in found], np.bytes_)


def _cores() -> int:
    """Return the number of CPU cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
