"""T08: several processes train to the same result as one. `torchrun` runs this file, too, in each process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from timm.layers import BatchNormAct2d
from torch import Tensor, distributed, nn

from visattn.errors import OutputError
from visattn.training import Config, loop, train
from visattn.training.batches import Batch, Stream
from visattn.training.run.folder import held
from visattn.training.run.processes import Processes
from visattn.training.run.signals import asked_to_stop
from visattn.training.trainer import Trainer, _for_several

pytestmark = pytest.mark.full

COUNT, SIDE, BATCH, STEPS = 300, 32, 32, 20
BREAK, ASKED, LAST_SAVED = 13, 5, 8  # a run is interrupted in step 13 and resumes from step 8
WAIT = 600.0  # seconds until torchrun counts as hanging; alone it needs 15
VIT = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "qkv_bias": False}  # Adam amplifies the noise in a key bias
AVERAGED = {"ema": 0.9, "clip_grad": 0.5}
ADAMW = {"opt": "adamw", "lr": 1e-3, "weight_decay": 0.05}
RECIPES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "sgd accumulate": {"accumulate": 2},
    "sgd ema clipping": AVERAGED,
    "adamw": ADAMW,
    "adamw accumulate ema clipping": {**ADAMW, **AVERAGED, "accumulate": 2},
}
ALL = "adamw accumulate ema clipping"


def recipe(folder: Path, name: str, **more: Any) -> Config:
    """Return settings for twenty steps over 300 images, which is more than two epochs."""
    values: dict[str, Any] = {
        "data": str(folder / "pictures"),
        "img_size": SIDE,
        "model": "vit_tiny_patch16_224",
        "model_kwargs": VIT,
        "epochs": STEPS * BATCH / COUNT,
        "batch_size": BATCH,
        "lr": 0.05,
        "log_every": 5,
        "save_every": LAST_SAVED,
        "device": "cpu",
    }
    return Config(**{**values, **RECIPES[name], **more})


class Broken(Exception):
    """Exception that ends a run in the middle of a step."""


@contextmanager
def learning(before: Callable[[int], object], notes: Path | None = None) -> Iterator[None]:
    """Call `before` before each step, and record the images of the step."""
    learn = Trainer.learn

    def noted(self: Trainer, parts: Sequence[Batch], step: int, stepping: Any) -> Tensor:
        before(step)
        if notes is not None:
            with notes.open("a") as stream:
                stream.write(json.dumps([step, [part.numbers for part in parts]]) + "\n")
        return learn(self, parts, step, stepping)

    with mock.patch.object(Trainer, "learn", noted):
        yield


def breaks(step: int) -> None:
    if step == BREAK:
        raise Broken


def until_broken(config: Config, run: Path, notes: Path | None = None) -> None:
    with pytest.raises(Broken), learning(breaks, notes):
        train(config, run)


# Code of each torchrun process


def work(folder: Path) -> None:
    """Run all successful cases in one start. Then rank 0 signals `torchrun` to stop."""
    distributed.init_process_group("gloo")
    rank, told, written = distributed.get_rank(), dict[str, Any](), list[str]()
    sys.addaudithook(lambda event, values: written.append(opened) if (opened := _written(event, values)) else None)
    with pytest.raises(OutputError) as refused:
        train(recipe(folder, "sgd"), folder / "held")
    told["refused"] = str(refused.value)
    for name in RECIPES:
        train(recipe(folder, name), folder / "two" / name)
    notes = folder / f"notes{rank}.jsonl"
    until_broken(recipe(folder, ALL), folder / "two then two", notes)
    with learning(lambda step: None, notes):
        train(recipe(folder, ALL), folder / "two then two")
        train(recipe(folder, ALL), folder / "one then two")
    until_broken(recipe(folder, ALL), folder / "two then one", notes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(recipe(folder, "sgd", model="visattn_resnet14", model_kwargs={}, widths=(4, 4, 4), epochs=0.2), folder / "norms")
    told["warnings"] = [str(each.message) for each in caught if "batch norms" in str(each.message)]
    told["written"] = [path for path in written if path.startswith(str(folder)) and path != str(notes)]
    (folder / f"told{rank}.json").write_text(json.dumps(told))
    asked: list[list[int]] = []
    with mock.patch.object(loop, "asked_to_stop", _overheard(asked)), learning(lambda step: _ask(step, rank, asked)):
        train(recipe(folder, ALL), folder / "asked")


def fail(folder: Path) -> None:
    """Train with a nonfinite loss in the second process only. `train` itself joins the process group."""
    learn = Trainer.learn

    def no_number(self: Trainer, parts: Sequence[Batch], step: int, stepping: Any) -> Tensor:
        return learn(self, parts, step, stepping) * (torch.nan if self.group.rank == 1 and step == ASKED else 1)

    with mock.patch.object(Trainer, "learn", no_number):
        train(recipe(folder, "sgd"), folder / "no number")


def _written(event: str, values: tuple[Any, ...]) -> str:
    """Return the path that an audit event writes to, or an empty string."""
    if event == "open":
        return str(values[0]) if values[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) else ""
    return str(values[0]) if event in ("os.mkdir", "os.rename", "os.remove", "os.truncate", "shutil.rmtree") else ""


def _overheard(asked: list[list[int]]) -> Any:
    original = asked_to_stop

    @contextmanager
    def overheard() -> Iterator[list[int]]:
        with original() as signals:
            asked.append(signals)
            yield signals

    return overheard


def _ask(step: int, rank: int, asked: list[list[int]]) -> None:
    """Terminate `torchrun`, and wait until its signal arrives in this process."""
    if step != ASKED:
        return
    if rank == 0:
        os.kill(os.getppid(), signal.SIGTERM)
    while not asked[-1]:
        time.sleep(0.01)


# The tests


def torchrun(act: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run this file in two processes."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(
        [*start, __file__, act, str(folder)], capture_output=True, text=True, timeout=WAIT, check=False, env=environment
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    draws = np.random.default_rng(0)
    for split, count in (("train", COUNT), ("test", 13)):
        for number in range(count):
            label = number % 3
            pixels = draws.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
            pixels[:, :, label] //= 3
            path = folder / "pictures" / split / f"class{label}" / f"{number:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    return folder


@pytest.fixture(scope="module")
def done(place: Path) -> Path:
    """Return the folder after training with one process and with two."""
    with torch.random.fork_rng(devices=[]), ExitStack() as stack:
        for name in RECIPES:
            train(recipe(place, name), place / "one" / name)
        until_broken(recipe(place, ALL), place / "one then two")
        stack.enter_context(held(place / "held"))
        ended = torchrun("work", place)
        assert (place / "told1.json").exists(), ended.stderr[-3000:]
        (place / "stderr").write_text(ended.stderr)
        for name in ("two then one", "asked"):
            train(recipe(place, ALL), place / name)
    return place


def weights(run: Path) -> dict[str, Tensor]:
    return dict(safetensors.torch.load((run / "final" / "model.safetensors").read_bytes()))


def distance(one: Path, other: Path) -> float:
    """Compute the largest difference between the weights of two runs."""
    here, there = weights(one), weights(other)
    assert here.keys() == there.keys()
    return max(float((here[name] - there[name]).abs().max()) for name in here)


def rows(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", RECIPES)
def test_two_processes_match_one_process(done: Path, name: str, figures: Callable[[str, float, str], None]) -> None:
    apart = distance(done / "one" / name, done / "two" / name)
    figures(f"two processes against one, {name}", apart, "<= 1e-5")
    assert apart <= 1e-5
    for one, two in zip(rows(done / "one" / name / "log.jsonl"), rows(done / "two" / name / "log.jsonl"), strict=True):
        assert one == pytest.approx(two, abs=1e-5)


def test_recipes_differ_more_than_process_counts(done: Path) -> None:
    names = ["sgd", "sgd ema clipping", "adamw", ALL]
    assert min(distance(done / "one" / one, done / "one" / other) for one, other in pairwise(names)) > 1e-3


@pytest.mark.parametrize("name", ["two then one", "one then two", "two then two"])
def test_resume_with_another_process_count_matches_one_process(
    done: Path, name: str, figures: Callable[[str, float, str], None]
) -> None:
    apart = distance(done / "one" / ALL, done / name)
    figures(f"{name} against one, unbroken", apart, "<= 1e-5")
    assert apart <= 1e-5
    for one, other in zip(rows(done / "one" / ALL / "log.jsonl"), rows(done / name / "log.jsonl"), strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_resume_with_the_same_process_count_is_bit_identical(done: Path) -> None:
    for name in ("log.jsonl", "final/model.safetensors"):
        assert (done / "two then two" / name).read_bytes() == (done / "two" / ALL / name).read_bytes()


def test_each_image_is_used_once_per_epoch_by_one_process(done: Path) -> None:
    taken: dict[tuple[int, int], list[int]] = {}
    for rank in range(2):
        for line in (done / f"notes{rank}.jsonl").read_text().splitlines()[: BREAK + STEPS - LAST_SAVED]:
            step, parts = json.loads(line)
            assert [len(part) for part in parts] == [BATCH // 4] * 2
            taken[step, rank] = [number for part in parts for number in part]  # steps after the last checkpoint are repeated
    seen = [number for _, numbers in sorted(taken.items()) for number in numbers]
    assert len(seen) == STEPS * BATCH
    assert sorted(seen[:COUNT]) == sorted(seen[COUNT : 2 * COUNT]) == list(range(COUNT))
    assert seen[:COUNT] != seen[COUNT : 2 * COUNT]
    assert len(set(seen[2 * COUNT :])) == STEPS * BATCH - 2 * COUNT


@pytest.mark.parametrize(("world", "parts"), [(1, 1), (2, 1), (2, 2), (4, 2), (8, 1)])
def test_sample_order_does_not_depend_on_processes_or_interruptions(world: int, parts: int) -> None:
    whole = [[ticket for part in [piece] for ticket in part] for piece in Stream(50, 16, 0, 9, seed=3)]
    for begun in range(10):  # steps by one process, then by several
        first = list(Stream(50, 16, 0, begun, seed=3))
        shared = [
            list(Stream(50, 16, begun * 16, 9 - begun, seed=3, rank=rank, world=world, parts=parts)) for rank in range(world)
        ]
        later = [
            [ticket for pieces in shared for part in pieces[step * parts : (step + 1) * parts] for ticket in part]
            for step in range(9 - begun)
        ]
        assert first + later == whole


def test_only_the_main_process_writes(done: Path) -> None:
    first, second = (json.loads((done / f"told{rank}.json").read_text())["written"] for rank in range(2))
    assert any(path.endswith("log.jsonl") for path in first)
    assert not second


def test_locked_run_is_refused_in_every_process(done: Path) -> None:
    messages = {json.loads((done / f"told{rank}.json").read_text())["refused"] for rank in range(2)}
    assert messages == {f"{done / 'held'}: another process is training here; wait for it, or choose another folder"}


def test_sigterm_saves_a_checkpoint_that_one_process_resumes(done: Path, figures: Callable[[str, float, str], None]) -> None:
    assert "SIGTERM" in (done / "stderr").read_text()
    paces = rows(done / "asked" / "speed.jsonl")
    assert [row["step"] for row in paces] == [5, 10, 15, 20]  # no step was repeated: the checkpoint of step 6 was saved
    apart = distance(done / "one" / ALL, done / "asked")
    figures("SIGTERM to torchrun, then one process, against one, unbroken", apart, "<= 1e-5")
    assert apart <= 1e-5


def test_unsynchronized_batch_norm_on_cpu_warns_once(done: Path) -> None:
    first, second = (json.loads((done / f"told{rank}.json").read_text())["warnings"] for rank in range(2))
    assert len(first) == 1
    assert "PyTorch synchronizes them on GPUs only" in first[0]
    assert not second


def test_torch_sync_batch_norm_works_only_on_gpus(tmp_path: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="on GPU"):
            nn.SyncBatchNorm(2)(torch.randn(3, 2, 4, 4))
    finally:
        distributed.destroy_process_group()


def test_sync_batch_norm_keeps_its_activation() -> None:
    norm = BatchNormAct2d(2)
    x = torch.randn(3, 2, 4, 4)
    model = _for_several(nn.Sequential(norm), Processes(torch.device("cuda"), 0, 2))
    assert isinstance(model[0], nn.SyncBatchNorm)  # type: ignore[index]
    torch.testing.assert_close(model.eval()(x), norm.eval()(x))
    assert (model(x) >= 0).all()


def test_nan_loss_in_one_process_ends_all_processes(place: Path) -> None:
    began = time.monotonic()
    ended = torchrun("fail", place)  # a hanging process takes longer than WAIT
    assert ended.returncode != 0
    assert "TrainingError" in ended.stderr
    assert "the loss is nan near step 6" in ended.stderr
    rest = b""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            rest += (process / "cmdline").read_bytes()
    assert str(place).encode() not in rest, f"processes are left {time.monotonic() - began:.0f} s after the start"


if __name__ == "__main__":
    {"work": work, "fail": fail}[sys.argv[1]](Path(sys.argv[2]))
