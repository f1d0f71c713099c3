"""Run over many images on a cluster of Ray.

Actors receive paths, explain batches, and write their files; lines of the journal come back. Ray Data distributes the batches, and gives
those of an actor that has died to another.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import shutil
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from torch import nn

from visattn._support.checks import first_line, printable
from visattn._support.extras import need
from visattn._support.language import flag, in_shell
from visattn.batch.image_work import Work, done
from visattn.batch.journal import Entry
from visattn.batch.local_run import Ledger, Outcome
from visattn.core.loading.weights import state_digest
from visattn.errors import ModelError, OptionError, OutputError, VisattnError

_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal"}  # it would send statistics over the network
_TOGETHER = 4  # batches that an actor takes at once, so that it decodes one while the model runs on another


@dataclass(frozen=True)
class Actors:
    """Processes on the cluster, each with a model.

    Attributes:
        count: Their number; None: as many as CPUs or, with `gpus`, as fit on the GPUs.
        gpus: GPUs for each, such as 0.5; 0: none.
    """

    count: int | None = None
    gpus: float = 0.0


class Explainer:
    """Model in a process of the cluster."""

    def __init__(self, load: Callable[[], nn.Module], digest: str, work: Work, spare: Path, place: str) -> None:
        """Note what to load; it is loaded with the first batch.

        Args:
            load: Function that loads the model.
            digest: Digest of its weights, see `state_digest`.
            work: Question, files and folders.
            spare: Folder in which it creates one for files that are not whole yet.
            place: Working directory of the caller, from which all paths start.
        """
        self._load, self._digest, self._work, self._place = load, digest, work, place
        self._spare = spare / uuid4().hex
        self._model: nn.Module | None = None

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        """Explain pickled batches; return their entries, and the error that ended the work or None, pickled."""
        with in_shell():  # the work is of a command, in another process
            return self._explained(rows)

    def _explained(self, rows: dict[str, Any]) -> dict[str, Any]:
        entries: list[list[Entry]] = []
        ended: VisattnError | None = None
        try:
            model = self._loaded()
            batches = [pickle.loads(row) for row in rows["batch"]]
            entries.extend(done(model, batches, self._work, self._spare))
        except VisattnError as error:
            ended = error
        except Exception as error:
            traceback.print_exc()  # into the logs of Ray
            ended = ModelError(
                f"a process of the cluster failed: {type(error).__name__}: {first_line(error)}. See the logs of Ray."
            )
        return {"told": np.array([pickle.dumps((entries, ended))], dtype=object)}

    def _loaded(self) -> nn.Module:
        """Load the model once.

        Raises:
            OutputError: If this machine lacks the caller's folders.
            ModelError: If the weights are not those of the caller.
        """
        if self._model is None:
            try:
                os.chdir(self._place)
            except OSError as error:
                raise OutputError(
                    f"{printable(self._place)}: is not on every machine of the cluster. Use a file system that they share."
                ) from error
            if not self._work.wanted.folder.is_dir():
                raise OutputError(
                    f"{printable(str(self._work.wanted.folder))}: is not on every machine of the cluster. "
                    f"Choose a folder on a file system that they share{flag('output')}."
                )
            model = self._load()
            if state_digest(model) != self._digest:
                raise ModelError(
                    f"a machine of the cluster has other weights. Pass a file that all machines share{flag('weights')}, or a model that is "
                    "built from a seed."
                )
            self._model = model
        return self._model


def run_on_ray(load: Callable[[], nn.Module], digest: str, ledger: Ledger, work: Work, actors: Actors) -> Outcome:
    """Explain images batch by batch, as `run` does, in processes of a cluster of Ray.

    The cluster is that of `RAY_ADDRESS`, one that `ray start` started on this machine, or a new one of this machine alone. All its
    machines need visattn and the folders of the images and of the output.

    Args:
        load: Function that loads the model on its device.
        digest: Digest of its weights, see `state_digest`.
        ledger: The images. Only this process writes the journal.
        work: Question, files and folders.
        actors: Processes that compute.

    Returns:
        Numbers of images.

    Raises:
        MissingExtra: If Ray is not installed.
        OptionError: If the cluster has too few CPUs or GPUs for an actor.
        ModelError: If the cluster fails.
        VisattnError: An error that concerns all images, such as a full disk.
    """
    need("ray", "ray", "a run on a cluster")
    rows = [{"batch": pickle.dumps(batch)} for batch in ledger.left()]
    if not rows:
        return ledger.outcome
    with redirect_stdout(sys.stderr):  # Ray prints what happens to its processes
        try:
            _distribute(rows, load, digest, ledger, work, actors)
        finally:
            shutil.rmtree(ledger.spare, ignore_errors=True)
    return ledger.outcome


def _distribute(
    rows: Sequence[Any], load: Callable[[], nn.Module], digest: str, ledger: Ledger, work: Work, actors: Actors
) -> None:
    """Send batches to the actors, and enter what comes back in the journal."""
    ray, ours = _connected()
    try:
        count = actor_count(ray.cluster_resources(), actors, work.threads)
        blocks = math.ceil(len(rows) / min(_TOGETHER, math.ceil(len(rows) / count)))
        answers = ray.data.from_items(rows, override_num_blocks=blocks).map_batches(
            Explainer,
            fn_constructor_args=(load, digest, work, ledger.spare, str(Path.cwd())),
            batch_size=None,
            compute=ray.data.ActorPoolStrategy(size=min(count, blocks)),
            num_cpus=work.threads,
            num_gpus=actors.gpus or None,
        )
        for answer in answers.iter_rows():
            entries, ended = pickle.loads(answer["told"])
            for some in entries:
                ledger.settle(some)
            if ended is not None:
                raise ended
    except ray.exceptions.RayError as error:
        raise ModelError(f"the cluster failed: {first_line(error)}. See the logs of Ray.") from error
    finally:
        if ours:
            ray.shutdown()


def _connected() -> tuple[Any, bool]:
    """Connect to the cluster, without Ray's messages; return the module, and whether this call connected it.

    Raises:
        ModelError: If none can be reached.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    import ray
    import ray.data

    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    ours = not ray.is_initialized()
    if ours:
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            address = os.environ.get("RAY_ADDRESS", "")
            raise ModelError(
                f"no cluster of Ray can be reached{' at ' * bool(address)}{printable(address)} ({first_line(error)}). Check RAY_ADDRESS."
            ) from error
    return ray, ours


def actor_count(found: Mapping[str, float], actors: Actors, threads: int) -> int:
    """Return the number of actors.

    Raises:
        OptionError: If the cluster has no place for one.
    """
    fit = int(found.get("CPU", 0) // threads)
    if actors.gpus:
        fit = min(fit, int(found.get("GPU", 0) / actors.gpus))
    if not fit:
        raise OptionError(
            f"the cluster has no place for an actor: it has {found.get('CPU', 0):g} CPUs and {found.get('GPU', 0):g} GPUs, and an actor "
            f"takes {threads} and {actors.gpus:g}. Use fewer threads{flag('workers')} or GPUs{flag('gpus_per_actor')}, or add machines."
        )
    return actors.count or fit
