"""Fuzzer: seeded generators of hostile inputs, and a driver that checks the outcomes.

The inputs are maps, model files, run folders, command lines, archives, journals, lists, films and configurations. A command must end with a
result or one line for each failed input. It must change nothing but its outputs, run no code of an input, and draw the right photo.

`python -m tests.hostile [--count 500] [--seed 0] [--no-net] [--only maps]` runs the cases; the test suite runs a few of each kind.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path

import timm
import torch

import visattn.training  # noqa: F401 - all that a child needs is imported before it is forked
from tests.hostile import archives, commands, configurations, driver, films, folders, journals, lists, maps, models
from visattn import captioning  # noqa: F401
from visattn.batch import batch_command, video_command  # noqa: F401
from visattn.captioning import caption_command  # noqa: F401
from visattn.cli import heads_command as heads, inspect_command as inspect, list_command as list, overlay_command as overlay  # noqa: F401
from visattn.evaluation import stats_command  # noqa: F401
from visattn.training import train_command  # noqa: F401

KINDS = {
    "maps": maps.cases,
    "models": models.cases,
    "folders": folders.cases,
    "commands": commands.cases,
    "archives": archives.cases,
    "journals": journals.cases,
    "lists": lists.cases,
    "films": films.cases,
    "configurations": configurations.cases,
}
FULL = {
    **dict.fromkeys(("maps", "models", "folders", "commands"), 125),
    **{"archives": 500, "journals": 300, "lists": 300, "films": 200, "configurations": 200},
}  # cases of each kind in a full run

_LATE = (
    "tqdm",
    "fsspec.implementations.zip",
    "fsspec.implementations.tar",
    "fsspec.implementations.local",
    "fsspec.implementations.reference",
    "fsspec.implementations.cached",
    "jinja2",
    "visattn.batch.films",
    "visattn.batch.statistics",
    "visattn.core.command_line.study_files",
)  # what commands import when they run


def outcomes(kind: str, seed: int, count: int, folder: Path, *, net: bool = True) -> Iterator[driver.Outcome]:
    """Run `count` cases of a kind; see `driver.run`."""
    torch.set_num_threads(1)  # threads do not survive a fork
    timm.create_model("vit_tiny_patch16_224")  # preloads what the first use imports
    os.environ["MPLCONFIGDIR"] = str(folder / "matplotlib")
    for name in _LATE:
        importlib.import_module(name)
    importlib.import_module("visattn.core.drawing.plots.learning_curves")  # finds the fonts of the system, in the folder above
    yield from driver.run(KINDS[kind](seed, count), folder / kind, net=net)
