"""Runs over many images: what they write, what they keep, and that kills and shards change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests import tiny
from tests.batch import kills
from tests.batch.kills import COUNT, files_of, go
from visattn import explain, load_map
from visattn.batch import Asked, Batches, Entry, Journal, Ledger, Outcome, Wanted, Work, items_of, run
from visattn.errors import OutputError
from visattn.pipeline.preprocessing import Preprocessing
from visattn.pipeline.question import ask


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.vit()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kills.photos(tmp_path_factory.mktemp("photos"))


def test_every_image_gets_what_explain_gives(model: Any, photos: Path, tmp_path: Path) -> None:
    entries: list[Entry] = []
    outcome = go(model, items_of([photos]), tmp_path / "out", told=entries.append)
    assert outcome == Outcome(COUNT - 1, 0, 1)
    assert [entry.number for entry in entries] == list(range(COUNT))
    assert "not an image" in entries[5].error
    for entry in entries:
        if entry.error:
            assert not entry.outputs
            continue
        found, _ = load_map(tmp_path / "out" / entry.outputs[1])
        alone = explain(model, entry.image, method="rollout")
        assert torch.allclose(found.values, alone.map.values, atol=1e-6)
        with Image.open(tmp_path / "out" / entry.outputs[0]) as picture:
            assert picture.size == alone.photo.size
    assert len(files_of(tmp_path / "out")) == 2 * (COUNT - 1) + 2 * 4  # and two for each batch


def test_a_second_run_keeps_what_is_done_and_repeats_what_has_changed(model: Any, photos: Path, tmp_path: Path) -> None:
    copies = tmp_path / "photos"
    copies.mkdir()
    for path in photos.iterdir():
        (copies / path.name).write_bytes(path.read_bytes())
    items, out = items_of([copies]), tmp_path / "out"
    go(model, items, out)
    before = files_of(out)
    assert go(model, items, out) == Outcome(2, 9 - 1, 1)  # the batch with the damaged image is computed again
    assert files_of(out) == before
    (copies / "05.png").write_bytes((copies / "04.png").read_bytes())
    (copies / "09.png").write_bytes((copies / "08.png").read_bytes())
    (out / "00.rollout.png").unlink()
    assert go(model, items, out) == Outcome(3 + 3 + 2, 3, 0)
    after = files_of(out)
    assert after["00.rollout.png"] == before["00.rollout.png"]
    assert after["09.rollout.npz"] != before["09.rollout.npz"]
    changed = {name for name in before if after[name] != before[name]}
    of_batches = {
        f"{folder}/0000000{first}.{end}" for first in (3, 9) for folder, end in (("maps", "rollout.tar"), ("statistics", "json"))
    }
    assert changed - of_batches <= {"09.rollout.npz", "09.rollout.png"}


def test_shards_together_give_the_whole(model: Any, photos: Path, tmp_path: Path) -> None:
    items = items_of([photos])
    go(model, items, tmp_path / "whole")
    outcomes = [go(model, items, tmp_path / "parts", shard=(part, 3)) for part in range(3)]
    assert sum(outcome.written for outcome in outcomes) == COUNT - 1
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")


def test_two_runs_do_not_write_one_journal(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl", {}), pytest.raises(OutputError, match="another run writes it"):
        Journal(tmp_path / "journal.jsonl", {})
    with pytest.raises(OutputError, match=r"other settings \(method None -> rollout\)"):
        Journal(tmp_path / "journal.jsonl", {"method": "rollout"})


def test_a_torn_line_is_dropped_and_a_damaged_journal_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path, {"a": 1}) as journal:
        journal.add([Entry(0, "a.png", "12", ("a.x.png",)), Entry(1, "b.png", "", (), "no")])
    whole = path.read_bytes()
    for cut in range(1, len(whole.splitlines(keepends=True)[-1])):
        path.write_bytes(whole[:-cut])
        with Journal(path, {"a": 1}) as journal:
            assert journal.known == {0: Entry(0, "a.png", "12", ("a.x.png",))}
            journal.add([Entry(1, "b.png", "", (), "no")])
        assert path.read_bytes() == whole
    path.write_bytes(whole.replace(b"[1,", b"{1,"))
    with pytest.raises(OutputError, match="is damaged"):
        Journal(path, {"a": 1})


def test_one_image_at_fault_leaves_the_others(model: Any, tmp_path: Path) -> None:
    for name, size in (("a", (40, 60)), ("b", (400, 60)), ("c", (40, 60))):
        Image.new("RGB", (size[1], size[0]), "red").save(tmp_path / f"{name}.png")
    items = items_of([tmp_path])
    out = tmp_path / "out"
    out.mkdir()
    entries: list[Entry] = []
    with Journal(out / "journal.jsonl", {}) as journal:
        asked = Asked(ask("attention", {"query": "pixel:30,5"}), Preprocessing(resize="model"))
        outcome = run(model, Ledger(items, journal, Batches(3), entries.append), Work(asked, Wanted(out, "attention")))
    assert outcome == Outcome(2, 0, 1)
    assert "pixel 30,5" in entries[1].error
    assert sorted(path.name for path in out.glob("*.png")) == ["a.attention.png", "c.attention.png"]


@pytest.mark.full
def test_kills_at_any_moment_leave_the_same_files(tmp_path: Path) -> None:
    assert kills.many(tmp_path, 20) >= 20


def test_parts_of_a_run_share_its_settings(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.0-of-2.jsonl", {"batch_size": 4}):
        Journal(tmp_path / "journal.1-of-2.jsonl", {"batch_size": 4}).__exit__(None, None, None)
        with pytest.raises(OutputError, match=r"journal.0-of-2.jsonl: is of a run with other settings \(batch_size 4 -> 8\)"):
            Journal(tmp_path / "journal.jsonl", {"batch_size": 8})
