"""The page of the benchmark is made of its tables, which lie in files; a part that is measured anew replaces its own."""

from __future__ import annotations

import csv
import importlib
import shutil
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Return the module that writes the page, on a copy of it."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    module = importlib.import_module("bench.page")
    shutil.copytree(ROOT / "docs" / "benchmarks", tmp_path / "benchmarks")
    shutil.copy(ROOT / "docs" / "benchmarks.md", tmp_path)
    monkeypatch.setattr(module, "DOCS", tmp_path / "benchmarks.md")
    monkeypatch.setattr(module, "FILES", tmp_path / "benchmarks")
    return module


def lines_of(page: Path) -> list[str]:
    """Return the lines that do not depend on this machine."""
    return [line for line in page.read_text(encoding="utf-8").splitlines() if not line.startswith(("- Versions", "- PyTorch on"))]


def test_page_states_its_tables(page: ModuleType) -> None:
    before = lines_of(page.DOCS)
    page.write({})
    assert lines_of(page.DOCS) == before


def test_a_part_that_is_measured_anew_replaces_its_table_alone(page: ModuleType) -> None:
    before = {path.name: path.read_bytes() for path in page.FILES.iterdir()}
    cells = {"measured": "2 GB", "bound": "<= 1 GB", "verdict": "over", "set by": "promise: a test"}
    page.write({"memory": [{"px": 1, "what": "a peak", **cells}]})
    with (page.FILES / "memory.csv").open(newline="", encoding="utf-8") as file:
        assert list(csv.DictReader(file)) == [{"px": "1", "what": "a peak", **cells}]
    assert {path.name for path in page.FILES.iterdir() if path.read_bytes() != before[path.name]} == {"memory.csv"}
    text = page.DOCS.read_text(encoding="utf-8")
    assert "| [memory](benchmarks/memory.csv): 1 px, a peak | 2 GB | <= 1 GB | promise: a test |" in text
    if page.machine() not in (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8"):
        assert f"- Machine of memory: {page.machine()}." in text
