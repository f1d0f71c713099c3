"""Special files (pipes, devices, links) and endlessly nested data: an error of one line, without waiting."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from visattn import load_model
from visattn.captioning import load_captioner
from visattn.core.loading.model_folders import read_facts
from visattn.core.loading.weights import FACTS, read_checkpoint
from visattn.core.maps import load_map
from visattn.core.pipeline.label_files import read_labels
from visattn.data import load_captions
from visattn.errors import VisattnError
from visattn.training import config
from visattn.training.report import comparison
from visattn.training.run import checkpoints, folder, log

READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "labels": ("names.txt", read_labels),
    "map": ("map.npz", load_map),
    "weights": ("model.safetensors", read_checkpoint),
    "weights by load_model": ("model.safetensors", lambda path: load_model("test_vit", weights=path)),
    "facts of a network": (FACTS, lambda path: read_facts(path.parent)),
    "configuration": ("run.toml", lambda path: config.read_config(path)),
    "state": ("state.json", lambda path: checkpoints.read(path.parent)),
    "comparison": ("told.json", lambda path: comparison._read(path, dict)),
    "captions": ("captions.jsonl", lambda path: load_captions(str(path), "train")),
}


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    """End the test if a read blocks."""

    def end(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("what", list(READERS))
def test_a_pipe_is_refused_at_once(what: str, tmp_path: Path) -> None:
    name, read = READERS[what]
    os.mkfifo(tmp_path / name)
    with pytest.raises(VisattnError, match=r"(?i)not a regular file|must be a caption file") as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_result_file_that_is_a_pipe_is_ignored(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / folder.RESULT)
    assert folder.finished(tmp_path) is None


READERS_OF_JSON: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "captions of COCO": ("captions.json", lambda path: load_captions(str(path), "train")),
    "facts of a captioner": (FACTS, lambda path: load_captioner(path.parent)),
    "log": (folder.LOG, lambda path: log.Log(path).check(None, "step")),
}
NESTED = {
    name: READERS[name] for name in ("facts of a network", "configuration", "state", "comparison", "captions")
} | READERS_OF_JSON


@pytest.mark.parametrize("depth", [900, 985, 990, 995, 1000, 50_000])
@pytest.mark.parametrize("what", sorted(NESTED))
def test_deeply_nested_files_raise_a_one_line_error(what: str, depth: int, tmp_path: Path) -> None:
    name, read = NESTED[what]
    deep = "[" * depth + "]" * depth + "\n"
    (tmp_path / name).write_text(f"a = {deep}" if name.endswith(".toml") else deep)
    with pytest.raises(VisattnError) as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
