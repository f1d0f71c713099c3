"""Pages for users of other tools: their lines and ours run on the same input, and print the numbers that the page shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.pages.blocks import ROOT, blocks_of
from visattn import data

pytestmark = pytest.mark.full

FOLDER = ROOT / "docs" / "coming_from"
PACKAGES = {  # what must be importable for their side
    "grad_cam": "pytorch_grad_cam",
    "torch_cam": "torchcam",
    "captum": "captum",
    "bertviz": "bertviz",
    "transformers": "transformers",
    "dino": "timm",
    "attentionviz": "sklearn",
}
TINY = 1e-4  # differences below are rounding, whose digits depend on the machine
_NUMBER = re.compile(r"\d+\.?\d*(?:e[-+]\d+)?")


def test_every_page_is_tested() -> None:
    assert {page.stem for page in FOLDER.glob("*.md")} == {"README", *PACKAGES}


# BertViz leaves its own file open, which is told at any later time
@pytest.mark.filterwarnings(
    "ignore:.*head_view.js:pytest.PytestUnraisableExceptionWarning", "ignore:unclosed file:ResourceWarning"
)
@pytest.mark.parametrize("name", PACKAGES)
def test_both_sides_run_and_print_what_the_page_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(PACKAGES[name])
    for model in ("vit_small_patch14_dinov2", "tf_efficientnet_lite0"):
        data.offline_weights(model)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    names: dict[str, Any] = {}
    blocks = blocks_of(FOLDER / f"{name}.md")
    assert [block.mark for block in blocks if block.kind == "python"].count("theirs") == 1
    for block in blocks:
        if block.kind == "python":
            exec(compile(block.text, name, "exec"), names)
    (shown,) = [block.text for block in blocks if block.kind == "text"]
    printed = capsys.readouterr().out
    assert _NUMBER.sub("#", printed) == _NUMBER.sub("#", shown)
    for found, told in zip(_NUMBER.findall(printed), _NUMBER.findall(shown), strict=True):
        assert float(found) == pytest.approx(float(told), rel=0.02) or max(float(found), float(told)) < TINY
