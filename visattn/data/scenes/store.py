"""Scenes as arrays: drawn once, kept in the cache, and memory-mapped after that."""

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

from visattn._support.checks import printable
from visattn._support.files import building_folder, cache_folder
from visattn.data.labeled.arrays import ArrayPictures
from visattn.data.scenes import CLASSES, VERSION, Mark, Scenes
from visattn.errors import DataError, OutputError, ResourceError

GROUND = "scenes-ground"  # without any object: nothing in it tells the label
MARKS: dict[str, Mark] = {"scenes": "none", "scenes-shortcut": "label", "scenes-conflict": "random", GROUND: "none"}
COUNTS = {"train": 20_000, "test": 2_000}
_ALONE = 2_000  # scenes, at some 3 ms each, that are drawn before processes would have started
_PART = 100  # scenes that a process hands over at a time

Part = tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.bytes_]]  # pixels, labels, captions


def drawn(data: str, split: str, count: int | None = None, size: tuple[int, int] = (64, 64), seed: int = 0) -> ArrayPictures:
    """Scenes of `visattn.data.scenes` from the cache; they are drawn first where they are not there.

    Train and test never share a scene: theirs are the seeds `2 * seed + 1` and `2 * seed + 2`. The first pictures of a larger `count` are
    those of a smaller one, and the kinds of data differ in nothing but the mark and, without objects, those.

    Args:
        data: A key of `MARKS`.
        split: A key of `COUNTS`.
        count: How many, 20,000 and 2,000 unless told.
        size: `(height, width)`; see `Scenes`.
        seed: 0 to 2**31 - 2.

    Returns:
        The pictures, mapped read-only.

    Raises:
        OptionError: If `size` or `seed` is out of range.
        DataError: If the files in the cache are damaged.
        OutputError: If the cache cannot be written.
        ResourceError: If the disk is full, or the processes that draw were ended.
    """
    scenes = Scenes(
        COUNTS[split] if count is None else count, (size[0], size[1]), seed=seed_of(split, seed), watermark=MARKS[data]
    )
    pixels, labels = kept(scenes, data, "labels", ground=data == GROUND)
    source = json.dumps([VERSION, data, scenes.size, scenes.seed])
    return ArrayPictures(pixels, labels, CLASSES, f"{data} {split}", source=source)


def seed_of(split: str, seed: int) -> int:
    """The seed of a split's scenes; no two splits or seeds have the same."""
    return 2 * seed + (1 if split == "train" else 2)


def kept(
    scenes: Scenes, title: str, told: Literal["labels", "captions"], *, ground: bool = False
) -> tuple[np.memmap[Any, np.dtype[np.uint8]], NDArray[Any]]:
    """Scenes from the cache; they are drawn first where they are not there.

    Args:
        scenes: Which.
        title: Tells them in the cache from others of the same size, seed and count.
        told: What is told of each.
        ground: Whether the pictures are those without any object.

    Returns:
        Pixels `(N, H, W, 3)`, mapped read-only, and labels, or captions as bytes of ASCII, `(N,)`.

    Raises:
        DataError: If the files in the cache are damaged.
        OutputError: If the cache cannot be written.
        ResourceError: If the disk is full, or the processes that draw were ended.
    """
    name = f"{title}-{VERSION}-{scenes.size[0]}x{scenes.size[1]}-{scenes.seed}-{len(scenes)}"
    folder = cache_folder() / "scenes" / name
    if not folder.is_dir():
        try:
            _draw(scenes, folder, ground=ground)
        except OutputError:
            if not folder.is_dir():  # else another process was faster
                raise
    try:
        pixels, words = np.load(folder / "pixels.npy", mmap_mode="r"), np.load(folder / f"{told}.npy")
        kinds = pixels.dtype == np.uint8 and words.dtype.kind == ("i" if told == "labels" else "S")
        whole = kinds and pixels.shape == (len(scenes), *scenes.size, 3) and words.shape == (len(scenes),)
    except (OSError, EOFError, ValueError):
        whole = False
    if not whole:
        raise DataError(f"{printable(str(folder))}: must hold {len(scenes)} scenes, got damaged files. Remove this folder.")
    return pixels, words


def _draw(scenes: Scenes, folder: Path, *, ground: bool) -> None:
    """Write pixels, labels and captions of all scenes."""
    header = {"descr": "|u1", "fortran_order": False, "shape": (len(scenes), *scenes.size, 3)}
    labels, captions = [], []
    with building_folder(folder) as place, (place / "pixels.npy").open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, header)
        with (
            closing(_parts(scenes, ground)) as parts,
            tqdm(total=len(scenes), desc="drawing scenes", unit="scene", disable=None) as bar,
        ):
            for pixels, numbers, texts in parts:
                stream.write(pixels.data)  # not into a mapped file: a full disk would end the process without a word
                labels.append(numbers)
                captions.append(texts)
                bar.update(len(numbers))
        np.save(place / "labels.npy", np.concatenate(labels))
        np.save(place / "captions.npy", np.concatenate(captions))


def _parts(scenes: Scenes, ground: bool) -> Generator[Part, None, None]:
    """All scenes in their order, `_PART` at a time."""
    ranges = [range(start, min(start + _PART, len(scenes))) for start in range(0, len(scenes), _PART)]
    if len(scenes) <= _ALONE or _cores() == 1:
        yield from map(partial(_part, scenes, ground), ranges)
        return
    # Ctrl-C is for the one process that can tidy up
    pool = ProcessPoolExecutor(_cores(), initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN))
    try:
        yield from pool.map(partial(_part, scenes, ground), ranges)
    except BrokenProcessPool as error:
        raise ResourceError(
            "the processes that draw scenes ended early; free some memory, or ask for a smaller count; "
            "a script that calls this must do so under: if __name__ == '__main__'"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _part(scenes: Scenes, ground: bool, indices: Iterable[int]) -> Part:
    found = [scenes.scene(index) for index in indices]
    pixels = np.stack([scene.ground if ground else scene.image for scene in found])
    return pixels, np.array([scene.label for scene in found], np.int64), np.array([scene.caption for scene in found], np.bytes_)


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
