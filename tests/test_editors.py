"""View of editors and type checkers on an installed visattn: names, types and choices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from visattn._support.types import Colormap
from visattn.core.drawing import colormaps
from visattn.core.methods import METHODS
from visattn.core.methods.method_table import MethodName

ROOT = Path(__file__).parents[1]
USER = """
import visattn

explanation = visattn.explain("vit_tiny_patch16_224", "a.jpg", method="rollout")
reveal_type(explanation)
reveal_type(explanation.overlay(opacity=0.5))
explanation.save("a.png", blend="valued")
explanation.show(colormap="jett")
"""


def test_choices_of_the_types_are_those_of_the_tables() -> None:
    assert get_args(MethodName) == ("auto", *METHODS)
    assert get_args(Colormap) == colormaps.NAMES


@pytest.mark.full
def test_a_type_checker_resolves_visattn_in_another_folder(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    place = os.environ | {"MYPYPATH": str(ROOT)}  # as that of a wheel; mypy does not follow the hook of an editable installation
    command = [sys.executable, "-m", "mypy", "user.py"]
    done = subprocess.run(command, cwd=tmp_path, env=place, capture_output=True, text=True, check=False)
    assert 'Revealed type is "visattn.core.pipeline.explanation.Explanation"' in done.stdout
    assert 'Revealed type is "visattn.core.drawing.pictures.Picture"' in done.stdout
    wrong = [line for line in done.stdout.splitlines() if "error" in line and line.startswith("user.py")]
    assert ['"blend"' in wrong[0], '"colormap"' in wrong[1], len(wrong)] == [True, True, 2], done.stdout


@pytest.mark.full
@pytest.mark.parametrize("name", ["models", "tests", "scripts"])
def test_only_visattn_is_importable_elsewhere(name: str, tmp_path: Path) -> None:
    find = f"from importlib.util import find_spec; found = find_spec('{name}'); print(found and found.origin)"
    done = subprocess.run([sys.executable, "-c", find], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert not Path(done.stdout.strip()).is_relative_to(ROOT / name)  # another package may have such a name
