"""Check that the oracles of the hostile cases can fail: `python -m tests.hostile.oracles`.

A child changes files outside its folder, and results of a run are exchanged; each must be told.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from tests.hostile.driver import Case, Outcome
from tests.hostile.photos import OUT, SECRET, Expected, photo, place_of
from tests.hostile.watch import Watch, state


def main() -> None:
    """Run all checks; an oracle that does not tell is an error."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _watched(folder)
        _drawn(folder)


def _watched(folder: Path) -> None:
    place = folder / "case"
    place.mkdir()
    with Watch(folder / "watch") as watch:
        watch.begin(place)
        child = os.fork()
        if child == 0:
            watch.enter(place)
            _harm(folder / "harmed", place, watch.complete)
            os._exit(0)
        os.waitpid(child, 0)
        told = watch.changes(place)
    assert any(str(folder / "harmed") in change for change in told), told
    assert not any(str(place) in change for change in told), told
    if watch.complete:
        expected = {"made /etc/visattn-test", "removed /etc/hostname", "wrote /etc/group", "changed /dev/full"}
        assert expected <= set(told), told
        assert not (folder / "harmed").exists()
        assert not Path("/etc/visattn-test").exists()
    assert (place / "own").read_bytes() == b"mine"
    before = state(place)
    (place / "own").write_bytes(b"your")
    assert state(place) != before


def _harm(harmed: Path, place: Path, complete: bool) -> None:
    """Change files; under a complete watch, those of the system too."""
    harmed.mkdir()
    (place / "own").write_bytes(b"mine")
    if complete:
        Path("/etc/visattn-test").touch()
        Path("/etc/hostname").unlink(missing_ok=True)
        os.utime("/etc/group")
        Path("/dev/full").unlink()


def _drawn(folder: Path) -> None:
    work = folder / "run" / "work"
    work.mkdir(parents=True)
    place_of(work)
    out = work / OUT
    out.mkdir()
    for name, number in (("a", 1), ("b", 2)):
        (out / f"{name}.overlay.png").write_bytes(photo(number))
    entries = [[number, f"{name}.png", name, "", {f"{name}.overlay.png": ""}, "", [], []] for number, name in enumerate("ab")]
    journal = "".join(f"{json.dumps(line)}\n" for line in [{"visattn batch": 1}, *entries])
    (out / "journal.jsonl").write_text(journal)
    case = Case("oracle", lambda _: [])

    def told(expected: Expected, code: int = 0, err: str = "") -> list[str]:
        return expected.check(work, Outcome(case, [], code, 0.0, "", err))

    assert not told(Expected({"a.png": 1, "b.png": 2}))
    assert told(Expected({"a.png": 2, "b.png": 1})), "exchanged photos"
    assert told(Expected({"a.png": 1})), "a photo that nobody gave"
    assert told(Expected({"a.png": 1, "b.png": 2, "c.png": 3})), "a missing picture"
    assert told(Expected({"a.png": 1, "b.png": 2}, fails=True)), "success in spite of a failure"
    assert told(Expected({"a.png": 1, "b.png": 2}), code=3), "a refused run"
    assert told(Expected({"a.png": 1, "b.png": 2}), err="visattn: error: x"), "an error without an exit code"
    assert told(Expected({"a.png": 1, "b.png": 2}), err="noise"), "a strange line"
    (out / "b.overlay.png").write_bytes(photo(SECRET))
    assert told(Expected({"a.png": 1}, may={2})), "a photo of elsewhere"
    (out / "b.overlay.png").write_bytes(photo(2))
    (out / ".journal.jsonl.files").mkdir()
    (out / ".journal.jsonl.files" / ".x").touch()
    assert told(Expected({"a.png": 1, "b.png": 2})), "leftovers"


if __name__ == "__main__":
    main()
