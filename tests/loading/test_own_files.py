"""Models from a file of the user."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import visattn

OWN = "from torch import nn\nfrom beside import WIDTH\n\ndef make():\n    return nn.Sequential(nn.Conv2d(3, WIDTH, 4, 4))\n"


@pytest.mark.parametrize("writes", [True, False])
def test_loading_leaves_nothing_in_the_folder(writes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", not writes)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "beside.py").write_text("WIDTH = 5\n")
    model = visattn.load_model(f"{tmp_path / 'own.py'}:make")
    assert next(model.parameters()).shape[0] == 5
    assert {path.name for path in tmp_path.iterdir()} == {"own.py", "beside.py"}
    assert sys.dont_write_bytecode is not writes
    sys.modules.pop("beside")
