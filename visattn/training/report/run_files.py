"""Files of a finished run: the model, its card, tables and, with matplotlib, plots."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visattn._support.checks import printable
from visattn._support.tables import to_csv
from visattn._support.whole_files import discard, write_whole
from visattn.core.loading.weights import WEIGHTS, digest
from visattn.core.provenance import Provenance, processor
from visattn.training.config import Recipe
from visattn.training.report.card import Achieved, Origin
from visattn.training.report.outcomes import as_rows, by_class, confusion
from visattn.training.report.source import commit
from visattn.training.run.folder import CARD, CLASSES, CONFUSION, CURVES, FINAL, LOG, MATRIX, SPEED, TABLE, Result
from visattn.training.run.log import Log
from visattn.training.tasks.task import Task

_ALWAYS = "data", "model", "attention"  # told in the command even if they are the defaults


def write_results(run: Path, task: Task, model: nn.Module, result: Result, outcomes: Tensor | None, step: int) -> None:
    """Write the model, its card and the tables of a finished run into its folder, and with matplotlib their plots.

    Args:
        run: Folder of the run, with its log.
        task: Task of the run.
        model: Trained network.
        result: Result of the run.
        outcomes: Outcomes of the test images of a classifier, see `visattn.training.report.outcomes`.
        step: Optimizer step after which the network had these weights.
    """
    facts = {"data": task.config.shared().data, "test_accuracy": result.accuracy, "seed": task.config.seed, "steps": step}
    discard(run / FINAL)
    task.keep(model, run / FINAL, facts)
    Log(run / LOG).to_csv(run / TABLE)
    config = task.config.shared()
    rows = Log(run / LOG).rows()
    seconds = sum(row["seconds"] for row in Log(run / SPEED).rows())
    reached = Achieved(
        result.accuracy, result.loss, rows[-1]["epoch"], result.steps, seconds, result.images_per_second, machine(), result.top5
    )
    versions = {name: version(name) for name in ("visattn", "torch", "torchvision", "timm")}
    origin = Origin(command(config), versions, digest(run / FINAL / WEIGHTS), config.license, commit())
    write_whole(run / CARD, task.card(model, reached, origin).encode())
    counts = None if outcomes is None else confusion(outcomes, len(task.classes))
    names = tuple(map(printable, task.classes))
    if counts is not None:
        write_whole(run / CLASSES, to_csv(by_class(counts, names)).encode())
        write_whole(run / CONFUSION, to_csv(as_rows(counts, names)).encode())
    if find_spec("matplotlib"):
        from visattn.core.drawing.plots import confusion as matrix, learning_curves

        told: list[dict[str, Any]] = [{"accuracy" if key == "test_accuracy" else key: row[key] for key in row} for row in rows]
        provenance = Provenance(model=config.model, method="training", parameters=config.digest())
        write_whole(run / CURVES, learning_curves.curves(told, task.title, provenance))
        if counts is not None and len(task.classes) <= matrix.LARGEST:
            write_whole(run / MATRIX, matrix.confusion(counts, names, task.title, provenance))


def command(config: Recipe) -> str:
    """Return the command that trains with these settings: those in `_ALWAYS`, and all that are not the default. Paths are base names."""
    config = config.shared()
    words = ["visattn", "train", config.command]
    usual = type(config)()
    for setting in fields(config):
        value = getattr(config, setting.name)
        if value == getattr(usual, setting.name) and setting.name not in _ALWAYS:
            continue
        flag = f"--{setting.name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, dict):
            words += [word for key, one in value.items() for word in (flag, f"{key}={json.dumps(one)}")]
        elif isinstance(value, tuple) and setting.default:
            words += [flag, *map(str, value)]
        elif isinstance(value, tuple):
            words += [word for one in value for word in (flag, str(one))]
        else:
            words += [flag, str(int(value)) if isinstance(value, float) and value == int(value) else str(value)]
    return shlex.join([*words, "-o", "RUN"])


def machine() -> str:
    """Describe this machine: the name of the GPU, or of the CPU with the number of threads."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{processor()}, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)}"
