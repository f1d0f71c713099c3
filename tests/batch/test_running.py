"""Runs over many images: what they write, what they keep, and that kills and shards change nothing."""

from __future__ import annotations

import errno
import io
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from PIL import Image

from tests import tiny
from tests.batch import kills
from tests.batch.kills import COUNT, files_of, go
from visattn import explain, load_map, load_maps
from visattn._support.threads import pool
from visattn.batch import (
    Asked,
    Batches,
    Entry,
    Journal,
    Ledger,
    Outcome,
    Wanted,
    Work,
    check_outputs,
    image_work as work,
    items_of,
    other_lists,
    run,
)
from visattn.core.drawing.pictures import to_png
from visattn.core.pipeline.preprocessing import Preprocessing
from visattn.core.pipeline.question import ask
from visattn.errors import MapError, OptionError, OutputError, ResourceError


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
        found, _ = load_map(tmp_path / "out" / list(entry.outputs)[1])
        alone = explain(model, entry.image, method="rollout")
        assert torch.allclose(found.values, alone.map.values, atol=1e-6)
        with Image.open(tmp_path / "out" / next(iter(entry.outputs))) as picture:
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
    assert go(model, items, out) == Outcome(0, COUNT - 1, 1)  # the neighbors of the damaged image too
    assert files_of(out) == before
    (copies / "05.png").write_bytes((copies / "04.png").read_bytes())
    (copies / "09.png").write_bytes((copies / "08.png").read_bytes())
    (out / "00.rollout.png").unlink()
    assert go(model, items, out) == Outcome(3 + 3 + 2, 3, 0)
    after = files_of(out)
    assert after["00.rollout.png"] == before["00.rollout.png"]
    assert after["09.rollout.npz"] != before["09.rollout.npz"]
    for name in ("03.rollout.npz", "04.rollout.npz"):  # of a batch that has one image more, which may round otherwise
        (out / "former.npz").write_bytes(before[name])
        one, other = (load_map(out / file)[0].values for file in ("former.npz", name))
        assert torch.allclose(one, other, rtol=0, atol=1e-6)
    others = {f"{number}.rollout.{end}" for number in ("03", "04") for end in ("npz", "png")}
    changed = {name for name in before if after[name] != before[name] and name not in others}
    of_batches = {
        f"{folder}/0000000{first}.{end}" for first in (3, 9) for folder, end in (("maps", "rollout.tar"), ("statistics", "json"))
    }
    assert changed - of_batches <= {"09.rollout.npz", "09.rollout.png"}


def test_a_damaged_image_that_is_mended_is_computed_alone(model: Any, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for file in sorted(photos.iterdir())[3:6]:
        (tmp_path / "photos" / file.name).write_bytes(file.read_bytes())
    items, out, told = items_of([tmp_path / "photos"]), tmp_path / "out", list[Entry]()
    wanted = Wanted(out, "rollout", raw=True)

    def again() -> Outcome:
        told.clear()
        asked = Work(Asked(ask("rollout", None), Preprocessing()), wanted)
        with Journal(out / "journal.jsonl", {}) as journal:
            return run(model, Ledger(items, journal, Batches(3), told.append, wanted=wanted), asked)

    out.mkdir()
    assert again() == Outcome(2, 0, 1)
    before = {file: (out / file).stat().st_mtime_ns for file in files_of(out)}
    assert again() == Outcome(0, 2, 1)
    assert "not an image" in next(entry.error for entry in told if entry.error)
    (tmp_path / "photos" / "05.png").write_bytes((photos / "06.png").read_bytes())
    assert again() == Outcome(1, 2, 0)
    assert [entry.number for entry in sorted(told)] == [0, 1, 2]
    assert {file: (out / file).stat().st_mtime_ns for file in before} == before
    assert again() == Outcome(0, 3, 0)


def test_shards_together_give_the_whole(model: Any, photos: Path, tmp_path: Path) -> None:
    items = items_of([photos])
    go(model, items, tmp_path / "whole")
    outcomes = [go(model, items, tmp_path / "parts", shard=(part, 3)) for part in range(3)]
    assert sum(outcome.written for outcome in outcomes) == COUNT - 1
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")


def test_two_runs_do_not_write_one_journal(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl", {}), pytest.raises(OutputError, match="another run writes it"):
        Journal(tmp_path / "journal.jsonl", {})
    with Journal(tmp_path / "journal.jsonl", {"method": "heads"}) as journal:  # nothing was done with the other settings
        assert journal.new
        journal.add([Entry(0, "a.png", "a", "12")])
    with pytest.raises(OutputError, match=r"other settings \(method heads -> rollout\)"):
        Journal(tmp_path / "journal.jsonl", {"method": "rollout"})


def test_a_torn_or_damaged_line_is_left_out_and_a_damaged_head_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path, {"a": 1}) as journal:
        journal.add([Entry(0, "a.png", "a", "12", {"a.x.png": "12"}), Entry(1, "b.png", "b", "", {}, "no")])
    whole = path.read_bytes()
    for cut in range(1, len(whole.splitlines(keepends=True)[-1])):
        path.write_bytes(whole[:-cut])
        with Journal(path, {"a": 1}) as journal:
            assert journal.known == {0: Entry(0, "a.png", "a", "12", {"a.x.png": "12"})}
            journal.add([Entry(1, "b.png", "b", "", {}, "no")])
        assert path.read_bytes() == whole
    path.write_bytes(whole.replace(b"[1,", b"{1,"))
    with Journal(path, {"a": 1}) as journal:
        assert journal.known == {0: Entry(0, "a.png", "a", "12", {"a.x.png": "12"})}
        assert journal.damaged == [3]
    for damaged in (b"[]\n", b"{}\n", b'{"settings": 3}\n'):
        path.write_bytes(damaged)
        with pytest.raises(OutputError, match="is damaged"):
            Journal(path, {"a": 1})


def test_a_full_disk_is_told_by_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            self.flush()

    def fill() -> None:
        with Journal(tmp_path / "journal.jsonl", {}) as journal:
            whole = journal._stream
            monkeypatch.setattr(journal, "_stream", Full())
            try:
                journal.add([Entry(0, "a.png", "a", "12")])
            finally:
                whole.close()

    with pytest.raises(ResourceError, match=r"journal.jsonl: disk full"):
        fill()


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


def test_errors_of_any_kind_of_one_image_leave_the_others(
    model: Any, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(picture: Any, provenance: Any) -> bytes:
        errors = {"01": ZeroDivisionError("no cause"), "02": MapError("no map"), "03": MemoryError()}
        for name, error in errors.items():
            if Path(provenance.image).stem == name:
                raise error
        return to_png(picture, provenance)

    monkeypatch.setattr(work, "to_png", refuse)
    (tmp_path / "photos").mkdir()
    for file in sorted(photos.iterdir())[:5]:
        (tmp_path / "photos" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "photos" / ("a" * 250 + ".png")).write_bytes((photos / "00.png").read_bytes())
    entries: list[Entry] = []
    assert go(model, items_of([tmp_path / "photos"]), tmp_path / "out", told=entries.append) == Outcome(2, 0, 4)
    assert {entry.number: entry.error for entry in entries if entry.error} == {
        1: "internal error of visattn (ZeroDivisionError: no cause). Please report it with the traceback of this image alone.",
        2: "no map",
        3: "out of memory. Choose a smaller image.",
        5: "its name is too long for files that are named by it. Rename it to at most 243 bytes.",
    }
    assert {name for name, _, _ in load_maps(tmp_path / "out" / "maps" / "00000000.rollout.tar")} == {"00"}


def test_what_is_the_fault_of_an_option_ends_the_run_at_once(model: Any, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="got 99"):
        go(model, items_of([photos]), tmp_path / "out", method="attention", parameters={"layer": 99})
    assert go(model, items_of([photos]), tmp_path / "out").written == COUNT - 1  # the journal holds nothing, so it is free


def test_a_later_batch_that_fails_alike_leaves_the_others(tmp_path: Path) -> None:
    for number, height in enumerate((40, 40, 400, 400, 40)):
        Image.new("RGB", (60, height), "red").save(tmp_path / f"{number}.png")
    items, out = items_of([tmp_path]), tmp_path / "out"
    out.mkdir()
    asked = Asked(ask("attention", {"query": "pixel:30,5"}), Preprocessing(resize="model"))
    for kept in (0, 3):
        with Journal(out / "journal.jsonl", {}) as journal:
            outcome = run(tiny.vit(), Ledger(items, journal, Batches(2)), Work(asked, Wanted(out, "attention")))
        assert outcome == Outcome(3 - kept, kept, 2)


def test_a_journal_of_another_part_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "journal.0-of-2.jsonl").mkdir()
    with pytest.raises(OutputError, match=r"journal.0-of-2.jsonl: must be a file, got a folder; remove it"):
        Journal(tmp_path / "journal.1-of-2.jsonl", {})


def test_threads_that_cannot_be_started_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Thread, "start", refuse)
    with pytest.raises(ResourceError, match=r"2 threads cannot be started. Pass fewer\.$"), pool(2):
        pass


@pytest.mark.filterwarnings("ignore:the map is constant")
def test_warnings_are_in_the_journal(photos: Path, tmp_path: Path) -> None:
    model: Any = tiny.vit()
    torch.nn.init.zeros_(model.head.weight)
    entries: list[Entry] = []
    for _ in range(2):
        go(model, items_of([photos / "00.png"]), tmp_path / "out", method="gradcam", told=entries.append)
    assert [entry.warnings for entry in entries] == [explain(model, photos / "00.png", method="gradcam").provenance.warnings] * 2
    assert "the map is zero everywhere" in entries[1].warnings[-1]


def test_images_that_fail_later_lose_their_files(model: Any, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for file in sorted(photos.iterdir())[:4]:
        (tmp_path / "photos" / file.name).write_bytes(file.read_bytes())
    items, out = items_of([tmp_path / "photos"]), tmp_path / "out"
    assert go(model, items, out).written == 4
    (tmp_path / "photos" / "01.png").write_bytes(b"nothing")
    (tmp_path / "photos" / "03.png").write_bytes(b"nothing")
    assert go(model, items, out) == Outcome(2, 0, 2)
    assert sorted(files_of(out)) == [
        *(f"0{number}.rollout.{end}" for number in (0, 2) for end in ("npz", "png")),
        "maps/00000000.rollout.tar",
        "statistics/00000000.json",
    ]


def test_a_batch_from_which_images_are_removed_is_computed_again_once(model: Any, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for file in sorted(photos.iterdir())[:5]:
        (tmp_path / "photos" / file.name).write_bytes(file.read_bytes())
    out = tmp_path / "out"
    go(model, items_of([tmp_path / "photos"]), out)
    (tmp_path / "photos" / "04.png").unlink()
    assert go(model, items_of([tmp_path / "photos"]), out) == Outcome(1, 3, 0)
    assert [name for name, _, _ in load_maps(out / "maps" / "00000003.rollout.tar")] == ["03"]
    assert go(model, items_of([tmp_path / "photos"]), out) == Outcome(0, 4, 0)


def test_images_whose_names_change_are_computed_again(model: Any, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes((photos / "00.png").read_bytes())
    go(model, items_of([tmp_path / "photos"]), tmp_path / "out", size=1)
    (tmp_path / "photos" / "a.png").write_bytes((photos / "01.png").read_bytes())
    assert go(model, items_of([tmp_path / "photos"]), tmp_path / "out", size=1) == Outcome(2, 0, 0)
    assert {"a.jpg.rollout.png", "a.png.rollout.png"} <= set(files_of(tmp_path / "out"))


def checked(inputs: list[Path], folder: Path, settings: Any = None) -> None:
    """Check the outputs of a run with pictures and packed maps, one image in a batch."""
    items = items_of(inputs)
    with Journal(folder / "journal.jsonl", settings or {}) as journal:
        check_outputs(Wanted(folder, "rollout", packed=True), items, Batches(1), journal)
        journal.start()


def test_nothing_else_is_replaced(photos: Path, tmp_path: Path) -> None:
    for name in ("a.png", "a.rollout.png", "b/a.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((photos / "00.png").read_bytes())
    with pytest.raises(OutputError, match=r"/a.rollout.png: is an input of this run, and would be replaced. Choose another"):
        checked([tmp_path / "a.png", tmp_path / "a.rollout.png"], tmp_path)
    with pytest.raises(OutputError, match=r"/a.rollout.png: exists already, and no journal of this run names it. Choose another"):
        checked([tmp_path / "a.png"], tmp_path, {"other": 1})
    out = tmp_path / "out"
    out.mkdir()
    checked([tmp_path / "a.png"], out)
    (out / "a.rollout.png").write_bytes(b"of somebody else")
    with pytest.raises(OutputError, match=r"out/a.rollout.png: exists already, and no journal of this run names it"):
        checked([tmp_path / "a.png"], out)
    with Journal(out / "journal.jsonl", {}) as journal:
        journal.intend(["a.rollout.png"])  # of a run that was killed
    checked([tmp_path / "a.png"], out)
    with Journal(out / "journal.jsonl", {}) as journal:
        journal.add([Entry(0, str(tmp_path / "a.png"), "a", "12", {"a.rollout.png": "1", "maps/00000000.rollout.tar": "2"})])
    checked([tmp_path / "b", tmp_path / "a.png"], out)
    with pytest.raises(OutputError, match=r"out/a.rollout.png: is of another image, .*/a.png, and would be replaced"):
        checked([tmp_path / "b"], out)
    (tmp_path / "new" / "maps").mkdir(parents=True)
    (tmp_path / "new" / "maps" / "00000000.rollout.tar").write_bytes(b"")
    with pytest.raises(OutputError, match=r"new/maps/00000000.rollout.tar: exists already"):
        checked([tmp_path / "b"], tmp_path / "new")


@pytest.mark.full
def test_kills_at_any_moment_leave_the_same_files(tmp_path: Path) -> None:
    assert kills.many(tmp_path, 20) >= 20


def test_parts_of_a_run_share_its_settings(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.0-of-2.jsonl", {"batch_size": 4}) as journal:
        journal.start()
        Journal(tmp_path / "journal.1-of-2.jsonl", {"batch_size": 4}).__exit__(None, None, None)
        with pytest.raises(OutputError, match=r"journal.0-of-2.jsonl: is of a run with other settings \(batch_size 4 -> 8\)"):
            Journal(tmp_path / "journal.jsonl", {"batch_size": 8})


def test_tables_of_a_run_replace_no_input_and_nothing_of_others(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "photos.csv").write_text(f"image\n{photos / '00.png'}\n")
    wanted, items = Wanted(tmp_path, "rollout", statistics=True), items_of([tmp_path / "photos.csv"])
    with Journal(tmp_path / "journal.jsonl", {}) as journal:
        with pytest.raises(OutputError, match=r"photos.csv: is an input of this run, and would be replaced"):
            check_outputs(wanted, items, Batches(1), journal, inputs=[tmp_path / "photos.csv"])
        with pytest.raises(OutputError, match=r"photos.csv: exists already, and no journal of this run names it"):
            check_outputs(wanted, items, Batches(1), journal)
        journal.add([Entry(0, str(photos / "00.png"), "00", "12")])
    with Journal(tmp_path / "journal.1-of-2.jsonl", {}) as journal:  # the tables are those of the other part
        check_outputs(wanted, items, Batches(1, 1, 2), journal)


def test_results_of_another_part_of_other_images_are_not_replaced(photos: Path, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.png").write_bytes((photos / "00.png").read_bytes())
    out, wanted = tmp_path / "out", Wanted(tmp_path / "out", "rollout")
    out.mkdir()
    of_a, of_b = (items_of([tmp_path / folder]) for folder in ("a", "b"))
    with Journal(out / "journal.0-of-2.jsonl", {}) as journal:
        journal.add([Entry(3, str(tmp_path / "a" / "x.png"), "x", "12", {"x.rollout.png": "12"})])
    with Journal(out / "journal.1-of-2.jsonl", {}) as journal:
        journal.add([Entry(9, "y.png", "y", "12")])
        check_outputs(wanted, of_a, Batches(1), journal)
        with pytest.raises(OutputError, match=r"x.rollout.png: is of another image, .*a/x.png, and would be replaced"):
            check_outputs(wanted, of_b, Batches(1), journal)


def test_parts_of_other_lists_are_told(tmp_path: Path) -> None:
    for part, images in enumerate((["a.png", "c.png"], ["b.png", "c.png"])):
        with Journal(tmp_path / f"journal.{part}-of-2.jsonl", {}) as journal:
            journal.add([Entry(2 * part + number, image, image, "12") for number, image in enumerate(images)])
    own = tmp_path / "journal.0-of-2.jsonl"
    assert list(other_lists(own, ["a.png", "c.png", "b.png", "c.png", "d.png"])) == []
    (told,) = other_lists(own, ["a.png", "c.png", "new.png", "b.png", "c.png"])
    assert told.endswith(
        "journal.1-of-2.jsonl: is of another list of images (its image 2 is b.png, that of this part new.png). Run that part again."
    )
    (told,) = other_lists(own, ["a.png"])  # images that are not given any more stay in this part's own journal
    assert "its image 2 is b.png, that of this part none" in told


def test_a_path_that_cannot_be_leaves_the_other_images(model: Any, photos: Path, tmp_path: Path) -> None:
    for name in ("a.png", "b/c.png", "d.png"):
        (tmp_path / "photos" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "photos" / name).write_bytes((photos / "00.png").read_bytes())
    items, out, entries = items_of([tmp_path / "photos"]), tmp_path / "out", list[Entry]()
    out.mkdir()
    (out / "b").write_text("a file where a folder should be")
    assert go(model, items, out, told=entries.append) == Outcome(2, 0, 1)
    assert [entry.error.partition(": ")[2] for entry in entries if entry.error] == [
        "is no folder. Remove it, or choose another folder."
    ]
    (out / "b").unlink()
    assert go(model, items, out) == Outcome(3, 0, 0)


@pytest.mark.parametrize("content", ["a,b\n1,2\n", "no line end", '{"visattn": 1}', '{"a": 1}\n{"a'])
def test_a_file_of_something_else_is_not_taken_for_a_journal(content: str, tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text(content)
    with pytest.raises(OutputError, match="is damaged"):
        Journal(tmp_path / "journal.jsonl", {"a": 1})
    assert (tmp_path / "journal.jsonl").read_text() == content
