"""Training loop: batches, optimizer steps, tests, checkpoints and a log; at the end, the files of a finished run.

`train` may be killed at any moment and called again. It then resumes from the last checkpoint, and the result is bit-identical (on the
CPU) to that of an uninterrupted run. `trainer.py` defines a training step, `batches.py` the order of the images.
"""

from __future__ import annotations

import math
import signal
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from visattn._support.checks import printable
from visattn._support.language import flag, option
from visattn.data import ImageDataset
from visattn.errors import DataError, TrainingError
from visattn.training.batches import Batch, Samples, Stream, check_batch, loader, patient, training_transform
from visattn.training.config import Recipe, differences
from visattn.training.report.outcomes import top
from visattn.training.report.run_files import write_results
from visattn.training.run.best import Best
from visattn.training.run.board import Board
from visattn.training.run.checkpoints import Checkpoints, State, fitting
from visattn.training.run.folder import (
    BOARD,
    LOG,
    MAPS,
    SPEED,
    STATES,
    Result,
    check_clear,
    check_recipe,
    check_same,
    claim,
    clear,
    finish,
    finished,
    held,
)
from visattn.training.run.log import Log
from visattn.training.run.processes import Processes, processes
from visattn.training.run.randomness import random_state, set_random_state
from visattn.training.run.run_progress import Progress, count
from visattn.training.run.signals import asked_to_stop
from visattn.training.tasks.task import Draw, Measured
from visattn.training.tasks.task_table import task_of
from visattn.training.testing import tested
from visattn.training.trainer import Trainer, calmer

_LOOK = 16  # steps between fetches of the losses from a GPU, and between checks of all processes for a request to stop
_SKIPPED = 10  # steps in a row that may have a nonfinite loss; after more, recovery is unlikely


def train(config: Recipe, run: Path, *, force: bool = False, overwrite: bool = False, quiet: bool = True) -> Result:
    """Train a classifier or a captioner and save it to a folder, or resume the run in that folder.

    During the training the folder holds `config.toml`, `log.jsonl`, `speed.jsonl`, `checkpoints/` and `maps/`. A finished run adds
    `final/` (for `visattn.load_model`), `README.md` (a model card), `log.csv`, `curves.png` and `result.json`. Under `torchrun`, every
    process calls this function.

    Args:
        config: Settings of the training.
        run: Folder of the run.
        force: Whether to resume even if the settings or the data differ from those the run was started with.
        overwrite: Whether to remove an earlier run in the folder first.
        quiet: Whether to hide the progress bar.

    Returns:
        Result of the run. If a signal stopped it early, `stopped` is that signal, and a checkpoint was saved.

    Raises:
        OptionError: If the settings differ from those of the run, or are incompatible with each other.
        DataError: If the data cannot be used for training.
        OutputError: If the folder cannot be used.
        ModelError: If the model cannot be built, all checkpoints are damaged, or the training diverges.
        ResourceError: If the disk is full, or a data loader worker was killed.
    """
    run = Path(run)
    with (
        patient(),
        processes(config.device) as group,
        ExitStack() as stack,
    ):  # PyTorch may report a dead worker even during cleanup

        def begin() -> Result | None:
            stack.enter_context(held(run))
            if overwrite:
                check_clear(run)
                return None
            done = finished(run)
            if done is not None or not force:  # the settings of a finished run cannot be changed
                check_recipe(run, config)
            return done

        done = group.by_first(begin)
        if done is not None:
            return done
        with asked_to_stop() as asked, patient():
            prepared = _Run(config, run, group, force=force, anew=overwrite)

            def start() -> None:
                if overwrite:
                    clear(run, but=(MAPS,) if config.maps_every else ())
                claim(run, config)

            group.by_first(start)  # the run starts here; everything that can be refused was checked before
            with closing(prepared):
                return prepared.go(asked, quiet)


class _Run:
    """State and loop of one call of `train`."""

    def __init__(self, config: Recipe, run: Path, group: Processes, *, force: bool, anew: bool) -> None:
        """Load the data, build the trainer, and restore the last checkpoint unless the run starts `anew`. Write nothing."""
        self.config, self.run, self.group = config, run, group
        self.task = task_of(config)
        self.pictures, self.tests, self.validation = self.task.pictures, self.task.tests, self.task.validation
        check_batch(config, len(self.pictures), group.world, in_pairs=self.task.in_pairs)
        each = len(self.pictures) / config.batch_size
        self.steps = max(1, math.floor(config.epochs * each))
        self.learner = Trainer(self.task, self.steps, each, group)
        self.progress, self.best = Progress(), Best()
        self.tested: tuple[int, Measured] | None = None  # the last test on the test images, and its step
        self.resumed: int | None = None  # step of the restored checkpoint, until the first step after it
        self.checkpoints = Checkpoints(run / STATES)
        self.data = [pictures.fingerprint() for pictures in (self.pictures, self.tests)]
        self.recent: list[tuple[Tensor, list[int]]] = []  # losses still on the device, and the images they belong to
        length = 0 if anew else self._resume(force)
        self.log, self.speed = Log(run / LOG), Log(run / SPEED)
        self.board: Board | None = None
        self.draw: Draw | None = None

        def prepare() -> tuple[int, int]:
            if config.tensorboard:
                self.board = Board(run / BOARD)
            if config.maps_every:
                self.draw = self.task.maps(self.learner.model, run)
            if anew:
                return 0, 0
            return self.log.check(length, "step", "epoch"), self.speed.check(None, "step", "images_per_second", "seconds")

        self.lengths = group.by_first(prepare)

    def _resume(self, force: bool) -> int:
        """Restore the last checkpoint, if there is one. Return the length of the log at that time, else 0."""

        def last() -> State | None:
            self.checkpoints.tidy()
            return self.checkpoints.latest()

        state = self.group.by_first(last)
        if state is None:
            return 0
        self.resumed = state.step
        with fitting(self.run, self.resumed):
            return self._take(state, force)

    def _take(self, state: State, force: bool) -> int:
        """Restore the training state from a checkpoint. Return the length of the log at that time."""
        facts = state.facts
        if not force:
            different = differences(facts["config"], self.config)
            different += ["the data changed"] if facts["data"] != self.data else []
            check_same(self.run, different)
        self.learner.restore(facts, state.tensors)
        self.progress = Progress.of(state.step, facts, self.group.rank, self.group.world)
        if self.validation is not None:
            self.best = Best.of(facts, state.tensors.get("best", {}), kept=self.task.keeps_best)
        mine = state.tensors.get(f"random{self.group.rank}")
        if mine is not None:  # a process that the saved run did not have keeps the generators of its rank
            set_random_state(mine, self.group.device)
        return count(facts, "log")

    def go(self, asked: list[int], quiet: bool) -> Result:
        """Train to the end, or until a signal asks to stop."""
        config, progress = self.config, self.progress
        if self.group.first:
            for log, length in zip((self.log, self.speed), self.lengths, strict=True):
                log.cut(length)
            if self.board is not None:
                self.board.begin(progress.step)
        task = self.task
        samples = Samples(
            task.pictures,
            training_transform(config, task.blueprint),
            mode=task.mode,
            seed=config.seed,
            replace=True,
            targets=task.targets,
        )
        order = Stream(
            len(self.pictures),
            config.batch_size,
            progress.seen,
            self.steps - progress.step,
            seed=config.seed,
            rank=self.group.rank,
            world=self.group.world,
            parts=config.accumulate,
        )
        batches = iter(loader(samples, order, config.workers, self.group.device))
        bar = tqdm(total=self.steps, initial=progress.step, unit="step", disable=True if quiet or not self.group.first else None)
        clock, timed = time.perf_counter(), progress.step
        while progress.step < self.steps and not self._tired():
            parts = [next(batches) for _ in range(config.accumulate)]
            self._note_bad(parts)
            loss = self.learner.learn(parts, progress.step, fitting(self.run, self.resumed))
            self.resumed = None
            self.recent.append((loss, [number for part in parts for number in part.numbers]))
            epoch = progress.seen // len(self.pictures)
            progress.step += 1
            progress.seen += config.batch_size
            bar.update()
            if self.group.device.type == "cpu" or config.nonfinite == "skip" or len(self.recent) >= _LOOK:
                self._settle()
            last = progress.step == self.steps
            if last or progress.step % config.log_every == 0:
                self._settle()
                self._row(bar, (progress.step - timed) * config.batch_size, time.perf_counter() - clock)
                clock, timed = time.perf_counter(), progress.step
            if last or progress.seen // len(self.pictures) > epoch:
                began = time.perf_counter()
                self._test(bar)
                last = last or self._tired()
                self.save()
                clock += time.perf_counter() - began
            elif progress.step % config.save_every == 0:
                began = time.perf_counter()
                self.save()
                clock += time.perf_counter() - began
            if self.draw is not None:
                self.draw(progress.step)
            if self._stop(asked) and not last:
                self.save()
                bar.close()
                return self._result(math.nan, math.nan, stopped=asked[0] if asked else signal.SIGTERM)
        bar.close()
        return self._finish()

    def close(self) -> None:
        """Close the files for TensorBoard."""
        if self.board is not None:
            self.board.close()

    def _tired(self) -> bool:
        """Check whether the validation accuracy has not risen for `patience` epochs."""
        return 0 < self.task.patience <= self.best.waited

    def _stop(self, asked: list[int]) -> bool:
        """Check whether to stop. All processes get the same answer."""
        if self.group.world == 1:
            return bool(asked)
        each = 1 if self.group.device.type == "cpu" else _LOOK  # steps on a CPU are long
        return self.progress.step % each == 0 and self.group.sum(len(asked))[0] > 0

    def _settle(self) -> None:
        """Fetch the losses of the last steps. Record nonfinite ones, and stop the run if the settings or their number require it.

        Raises:
            TrainingError: If the run must stop.
        """
        for loss, numbers in self.recent:
            value = float(loss)
            self.progress.losses.append(value)
            if math.isfinite(value):
                self.progress.skipped = 0
                continue
            self.progress.skipped += 1
            names = [self.pictures.name(number) for number in numbers]
            step = self.progress.step
            listed = f"nonfinite{self.group.rank or ''}.jsonl"
            Log(self.run / listed).add(step=step, loss=str(value), numbers=numbers, pictures=names)
            if self.config.nonfinite == "stop" or self.progress.skipped > _SKIPPED:
                raise TrainingError(
                    f"{printable(str(self.run))}: the loss is {value} near step {step}. The images are listed in {listed}. "
                    f"{calmer(self.config)}"
                )
        self.recent.clear()

    def _note_bad(self, parts: Sequence[Batch]) -> None:
        """Record images that could not be read.

        Raises:
            DataError: If their share exceeds `max_unreadable`.
        """
        self.progress.bad.update((text, None) for part in parts for text in part.bad)
        count = len(self.pictures) + len(self.tests) + (0 if self.validation is None else len(self.validation))
        if len(self.progress.bad) > self.config.max_unreadable * count:
            raise DataError(
                f"{next(iter(self.progress.bad))} ({len(self.progress.bad)} of {count} images cannot be read, at most "
                f"{self.config.max_unreadable:.2%} may be). Repair them or raise {option('max_unreadable')}."
            )

    def _row(self, bar: Any, pictures: int, seconds: float) -> None:  # noqa: ANN401 - tqdm's types are partial
        """Add a row to the log: the mean loss since the last row, and the time taken."""
        finite = [loss for loss in self.progress.losses if math.isfinite(loss)]
        loss, count = self.group.sum(sum(finite), len(finite))
        self.progress.losses.clear()
        if not self.group.first:
            return
        mean = loss / count if count else None
        step, epoch = self.progress.step, self.progress.seen / len(self.pictures)
        self._log(step=step, epoch=round(epoch, 4), loss=mean, lr=self.learner.rate)
        pace = pictures / seconds
        self.speed.add(step=step, images_per_second=round(pace, 1), seconds=round(seconds, 3))
        bar.set_postfix(
            {"epoch": f"{epoch:.1f}", "loss": f"{mean:.3f}" if count else "none", "img/s": f"{pace:.0f}"}, refresh=False
        )

    def _test(self, bar: Any) -> None:  # noqa: ANN401
        """Test the model on the images for the end of an epoch and log the result."""
        if self.validation is None:
            found, kind = self._test_and_log(), "test"
        else:
            found, kind = self.test(self.validation), "validation"
            kept = self.learner.tested if self.task.keeps_best else None
            self.best.note(found.accuracy, self.progress.step, kept)
            self._log_test(kind, found)
        epoch = self.progress.seen / len(self.pictures)
        text = f"epoch {epoch:.1f}: {kind} accuracy {found.accuracy:.4f}, loss {found.mean_loss:.4f}"
        bar.write(text) if not bar.disable else None

    def _test_and_log(self) -> Measured:
        """Test the model on the test images and log the result."""
        found = self.test(self.tests)
        self.tested = self.progress.step, found
        self._log_test("test", found)
        return found

    def _log_test(self, kind: str, found: Measured) -> None:
        if self.group.first:
            epoch = round(self.progress.seen / len(self.pictures), 4)
            self._log(
                step=self.progress.step, epoch=epoch, **{f"{kind}_loss": found.mean_loss, f"{kind}_accuracy": found.accuracy}
            )

    def _log(self, **row: Any) -> None:  # noqa: ANN401 - of JSON
        """Add a row to the log."""
        self.log.add(**row)
        if self.board is not None:
            self.board.add(row)

    def test(self, images: ImageDataset) -> Measured:
        """Measure the answers for images, across all processes.

        Raises:
            DataError: If none of them can be read.
        """
        found = tested(self.task, self.learner, images, self._note_bad)
        if not found.total:
            raise DataError(f"{self.config.data}: no test image can be read.")
        return found

    def save(self) -> None:
        """Save a checkpoint."""
        self._settle()
        facts, tensors = self.learner.state()
        progress = self.progress
        streams, losses, bad = zip(
            *self.group.gather((random_state(self.group.device), progress.losses, list(progress.bad))), strict=True
        )
        progress.bad = dict.fromkeys(text for texts in bad for text in texts)
        if not self.group.first:
            return
        facts |= {
            "config": self.config.digest(),
            "data": self.data,
            "seen": progress.seen,
            "losses_of_each": losses,
            "skipped": progress.skipped,
            "bad": list(progress.bad),
            "log": self.log.length,
            "processes": self.group.world,
        }
        if self.validation is not None:
            facts["best"] = self.best.facts()
            tensors |= {"best": self.best.tensors} if self.best.tensors else {}
        tensors |= {f"random{rank}": stream for rank, stream in enumerate(streams)}
        self.checkpoints.save(State(progress.step, facts, tensors))

    def _result(self, accuracy: float, loss: float, stopped: int = 0) -> Result:
        paces = [row["images_per_second"] for row in self.speed.rows()]
        return Result(
            accuracy=accuracy,
            loss=loss,
            images_per_second=statistics.median(paces) if paces else 0.0,
            parameters=sum(parameter.numel() for parameter in self.learner.model.parameters()),
            steps=self.progress.step,
            bad=tuple(self.progress.bad),
            stopped=stopped,
        )

    def _finish(self) -> Result:
        """Write the files of a finished run: final model, tables, model card and result."""
        if self.best.tensors:
            self.learner.tested.load_state_dict(self.best.tensors)
        step = self.progress.step
        found = self.tested[1] if self.tested is not None and self.tested[0] == step else None
        logged = any(row["step"] == step and "test_accuracy" in row for row in self.log.rows()) if self.group.first else None
        if found is None:
            found = self.test(self.tests) if self.group.from_first(logged) else self._test_and_log()
        if not math.isfinite(found.loss):
            raise TrainingError(
                f"{printable(str(self.run))}: the loss on the test images is {found.mean_loss}. Check these images, or lower "
                f"{option('lr')}, set {option('clip_grad')}, and start again in another folder{flag('output')}."
            )
        top5 = None if found.outcomes is None else top(found.outcomes, 5, len(self.task.classes))
        result = replace(self._result(found.accuracy, found.mean_loss), top5=top5)
        if not self.group.first:
            return result
        step = self.best.step if self.best.tensors else result.steps
        write_results(self.run, self.task, self.learner.tested, result, found.outcomes, step)
        return finish(self.run, result)
