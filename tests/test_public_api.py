"""The public door: what is behind it, and that it opens without torch."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest

import visattn

ROOT = Path(__file__).parents[1]
PUBLIC = """
AttentionMap AttentionRecord Explanation FeatureRecord Geometry Heatmap Prepared Provenance Recording Survey TokenLayout
VisattnError __version__ animation attach captioning capture colorize contact_sheet data drawing evaluation explain families
filmstrip gate_page images intervene load_image load_map load_model loading maps matrix_page methods models nn normalize
overlay prepare prepare_batch save_map training
""".split()  # noqa: SIM905 - one name after another reads best


def test_public_names_are_frozen() -> None:
    assert visattn.__all__ == PUBLIC
    assert dir(visattn) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(visattn, name) is not None


@pytest.mark.parametrize("name", ["capture", "explain", "overlay", "normalize", "contact_sheet"])
def test_functions_stay_functions_after_everything_was_imported(name: str) -> None:
    for public in PUBLIC:
        getattr(visattn, public)
    assert isinstance(getattr(visattn, name), FunctionType)
    assert getattr(visattn, name) is getattr(visattn, name)


def test_import_leaves_torch_and_numpy_out() -> None:
    code = "import sys, visattn; print([m for m in ('torch', 'numpy', 'PIL', 'cv2', 'timm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'rolout'"):
        visattn.rolout  # noqa: B018


def test_page_of_public_names_is_what_its_command_writes() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "api.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert (ROOT / "docs" / "api.md").read_text() == done.stdout


def test_shape_of_the_package_has_no_fault_and_the_check_finds_faults() -> None:
    spec = importlib.util.spec_from_file_location("structure", ROOT / "scripts" / "structure.py")
    assert spec is not None
    assert spec.loader is not None
    structure = importlib.util.module_from_spec(spec)
    sys.modules["structure"] = structure
    spec.loader.exec_module(structure)
    assert structure.main() == 0
    assert structure.circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    face = ast.parse("from visattn.x.y import draw")
    assert structure.shadowing(
        {"visattn.x": face, "visattn.x.y": ast.parse("def draw(): ..."), "visattn.x.draw": ast.parse("")}
    ) == ["visattn.x.draw"]
    late = ast.parse("def f():\n    from visattn.b import _hidden")
    found = list(structure.imports("visattn.a", late, {"visattn.b": ast.parse("")}))
    assert [(one.of, one.name, one.late) for one in found] == [("visattn.b", "_hidden", True)]
