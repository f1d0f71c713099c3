"""Plain English: spelling and words that readers stumble over."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


WORDS = script("words")


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ('"""A module."""\nx = 1  # the col' + "our\n", "not American"),
        ('"""A module."""\nraise ValueError("pixels in the pl' + 'ace of tokens")\n', "reads badly"),
    ],
)
def test_bad_words_are_found(code: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(code)
    assert [text for _, text in WORDS.faults(path) if fault in text]


def test_good_words_pass(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        '"""Colors."""\n\n\nclass A:\n    """A cell."""\n\n    @property\n    def color(self) -> str:\n        """The color."""\n\n'
        '    def shift(self) -> None:\n        """Shift the cell."""\n'
    )
    assert not list(WORDS.faults(path))
