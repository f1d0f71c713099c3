"""The notebooks of the docs run from the first cell to the last, show pictures, and stay small."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.pages.blocks import ROOT
from visattn import data

FILES = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
LARGEST = 5e6  # bytes of a notebook with its outputs


def cells(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["cells"]
    return found


def test_there_are_six() -> None:
    assert len(FILES) == 6


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_notebook_is_kept_without_outputs_and_installs_in_its_first_cell(file: Path) -> None:
    title, first, *rest = cells(file)
    assert title["cell_type"] == "markdown"
    assert "".join(title["source"]).startswith("# ")
    assert "%pip install -q visattn" in "".join(first["source"])
    assert not [cell for cell in (first, *rest) if cell.get("outputs") or cell.get("execution_count")]


@pytest.mark.full
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_notebook_runs(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("nbclient", "nbformat"):
        pytest.importorskip(module)
    for model in ("vit_small_patch14_dinov2", "tf_efficientnet_lite0"):
        data.offline_weights(model)
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "website"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    import notebooks

    ran = notebooks.executed(file)
    outputs = [output for cell in ran.cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output.output_type == "error"]
    shown = [output for output in outputs if {"image/png", "image/jpeg"} & set(output.get("data", {}))]
    assert shown or file.stem == "all_heads_in_one_space"  # which writes a page
    assert len(json.dumps(ran)) < LARGEST
    for name in ("notebooks", "places"):
        sys.modules.pop(name, None)
