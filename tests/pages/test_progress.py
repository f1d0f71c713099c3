"""Progress bars: shown in terminals and notebooks for long work, and nowhere else."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator

import pytest

import visattn
from visattn._support import progress

CALLS: dict[str, Callable[[], object]] = {
    "edited images": lambda: visattn.explain("scenes_vit", "scene:7", method="captum.occlusion", grid_size=(4, 4)),
    "edited images of a CNN": lambda: visattn.explain("scenes_cnn", "scene:7", method="scorecam"),
    "forward passes": lambda: visattn.explain("scenes_vit", "scene:7", method="transition_attention", steps=4, start_layer=1),
}


class Stderr(io.StringIO):
    """A stderr that may be a terminal."""

    terminal = True

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture(autouse=True)
def _loud() -> Iterator[None]:
    progress.silence(False)
    yield
    progress.silence(False)


@pytest.mark.parametrize("name", CALLS)
def test_long_work_shows_a_bar_in_a_terminal_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stderr := Stderr())
    monkeypatch.setattr(progress, "_DELAY", 0.0)
    CALLS[name]()
    assert f"{name.removesuffix(' of a CNN')}: " in stderr.getvalue()
    before, stderr.terminal = stderr.getvalue(), False
    CALLS[name]()
    assert stderr.getvalue() == before


def test_short_work_and_quiet_work_show_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stderr := Stderr())
    assert progress._DELAY == 2
    monkeypatch.setattr(progress, "_DELAY", 60.0)  # a slow machine may take longer than two seconds
    CALLS["edited images"]()
    monkeypatch.setattr(progress, "_DELAY", 0.0)
    progress.silence()
    CALLS["edited images"]()
    assert stderr.getvalue() == ""
