"""A run on a cluster of Ray against one on this machine: `python -m tests.batch.cluster 500`.

Two nodes are started on this machine, with four actors. The files must be those of a local run, also if a process of an actor and then a
node are killed in the middle.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from tests import tiny
from tests.batch.kills import files_of
from visattn.batch import Asked, Batches, Entry, Item, Journal, Ledger, Outcome, Wanted, Work, items_of, run
from visattn.batch.cluster import Actors, run_on_ray
from visattn.core.loading.weights import state_digest
from visattn.core.pipeline.preprocessing import Preprocessing
from visattn.core.pipeline.question import ask

METHOD = "rollout"
SIZE = 4  # images in a batch
BAD = 7  # of a hundred, one is no image


_PATIENCE = 300  # seconds for the start of a node


def photos(folder: Path, count: int) -> list[Item]:
    """Write photos of three sizes, and some files that are none."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(count):
        path = folder / f"{number:04}.png"
        if number % 100 == BAD:
            path.write_bytes(b"\x89PNG nothing")
        else:
            size = (40 + 7 * (number % 3), 60)
            Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)).save(path)
    return items_of([folder])


@contextmanager
def two_nodes() -> Iterator[Callable[[], None]]:
    """Start a cluster of two nodes with two CPUs each, and give a function that ends the second."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal"}
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    cluster.add_node(wait=False, num_cpus=2, include_dashboard=False)
    second = cluster.add_node(wait=False, num_cpus=2)
    cluster.wait_for_nodes(_PATIENCE)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        yield lambda: cluster.remove_node(second, allow_graceful=False)
    finally:
        ray.shutdown()
        cluster.shutdown()


def work(folder: Path) -> Work:
    """Return what is done with each image."""
    return Work(Asked(ask(METHOD), Preprocessing()), Wanted(folder, METHOD, raw=True, statistics=True), 1)


def locally(items: list[Item], folder: Path) -> Outcome:
    """Run on this machine."""
    folder.mkdir()
    with Journal(folder / "journal.jsonl", {}) as journal:
        return run(tiny.vit(), Ledger(items, journal, Batches(SIZE)), work(folder))


def on_ray(items: list[Item], folder: Path, told: Callable[[Entry], None] = lambda entry: None) -> Outcome:
    """Run on the cluster, with four actors."""
    folder.mkdir(exist_ok=True)
    with Journal(folder / "journal.jsonl", {}) as journal:
        ledger = Ledger(items, journal, Batches(SIZE), told)
        return run_on_ray(tiny.vit, state_digest(tiny.vit()), ledger, work(folder), Actors(4))


def kill_an_actor() -> None:
    """Kill the process of one actor of Ray Data."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            named = (process / "cmdline").read_bytes().startswith(b"ray::MapWorker")
        except OSError:
            continue
        if named:
            os.kill(int(process.name), signal.SIGKILL)
            return
    raise AssertionError("no actor runs")


def deaths(end_node: Callable[[], None], count: int) -> Callable[[Entry], None]:
    """Return a function that kills an actor when a fifth of the images is done, and a node at two fifths."""
    done = 0

    def told(entry: Entry) -> None:
        nonlocal done
        done += 1
        if done == count // 5:
            kill_an_actor()
        if done == 2 * count // 5:
            end_node()

    return told


def differences(folder: Path, whole: Path) -> tuple[float, int]:
    """Compare the files and journals of two runs.

    Returns:
        Largest difference of two maps as a share of the maximum, and of two pictures in levels.
    """
    here, there = files_of(folder), files_of(whole)
    assert here.keys() == there.keys()
    lines = [
        sorted(line for line in (path / "journal.jsonl").read_text().splitlines() if line.startswith("["))
        for path in (folder, whole)
    ]
    assert lines[0] == lines[1]
    maps, levels = 0.0, 0
    for name in here:
        if name.endswith(".npz"):
            one, other = (np.load(io.BytesIO(files[name]))["values"] for files in (here, there))
            maps = max(maps, float(np.abs(one - other).max() / np.abs(other).max()))
        elif name.endswith(".png"):
            first, second = (np.asarray(Image.open(io.BytesIO(files[name])), np.int16) for files in (here, there))
            levels = max(levels, int(np.abs(first - second).max()))
    assert maps <= 1e-5
    assert levels <= 1
    return maps, levels


def main(count: int) -> int:
    """Run locally, on the cluster, and on the cluster with deaths; print the times and differences."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        items = photos(folder / "photos", count)
        start = time.perf_counter()
        outcome = locally(items, folder / "local")
        local = time.perf_counter() - start
        print(f"{count} files, {outcome.failed} of them no images, {outcome.written} explained")
        print(f"this machine, 1 process: {local:.1f} s")
        with two_nodes() as end_node:
            for title, told in (("", None), (", an actor and a node killed", deaths(end_node, count))):
                out = folder / f"ray{title}"
                start = time.perf_counter()
                assert on_ray(items, out, *([told] if told else [])) == outcome
                seconds = time.perf_counter() - start
                maps, levels = differences(out, folder / "local")
                print(
                    f"two nodes, 4 actors{title}: {seconds:.1f} s ({seconds - local:+.1f} s); maps differ by at most {maps:.1g}, "
                    f"pictures by {levels} levels, journals are equal"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
