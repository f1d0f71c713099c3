"""Public API: its contents, and that importing it does not import torch."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

import visattn

ROOT = Path(__file__).parents[1]
PUBLIC = """
AttentionCall AttentionMap AttentionRecord Explanation FeatureRecord Geometry Heatmap Prepared Preprocessing Provenance Recording Study
Survey TokenLayout VisattnError __version__ animation attach captioning capture colorize comparison_page contact_sheet data drawing
embedding errors evaluation explain explain_batch explain_pictures explain_stages explain_video families filmstrip gate_page geometry
images intervene load_image load_map load_maps load_model load_study loading maps matrix_page methods models nn normalize operators
overlay permuted prepare prepare_batch prepare_tensor provenance records save_map similar_to stage_page studies study
training
""".split()  # noqa: SIM905 - one name after another reads best


def test_public_names_are_frozen() -> None:
    assert visattn.__all__ == PUBLIC
    assert dir(visattn) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(visattn, name) is not None


@pytest.mark.parametrize("name", ["capture", "explain", "overlay", "normalize", "contact_sheet"])
def test_functions_are_not_shadowed_by_submodules(name: str) -> None:
    for public in PUBLIC:
        getattr(visattn, public)
    assert isinstance(getattr(visattn, name), FunctionType)
    assert getattr(visattn, name) is getattr(visattn, name)


def test_import_does_not_import_torch_or_numpy() -> None:
    code = "import sys, visattn; print([m for m in ('torch', 'numpy', 'PIL', 'cv2', 'timm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'rolout'"):
        visattn.rolout  # noqa: B018


def test_the_check_of_the_package_structure_finds_faults() -> None:
    spec = importlib.util.spec_from_file_location("structure", ROOT / "scripts" / "structure.py")
    assert spec is not None
    assert spec.loader is not None
    structure = importlib.util.module_from_spec(spec)
    sys.modules["structure"] = structure
    spec.loader.exec_module(structure)
    assert structure.circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    face = ast.parse("from visattn.x.y import draw")
    assert structure.shadowing(
        {"visattn.x": face, "visattn.x.y": ast.parse("def draw(): ..."), "visattn.x.draw": ast.parse("")}
    ) == ["visattn.x.draw"]
    late = ast.parse("def f():\n    from visattn.b import _hidden")
    found = list(structure.imports("visattn.a", late, {"visattn.b": ast.parse("")}))
    assert [(one.of, one.name, one.late) for one in found] == [("visattn.b", "_hidden", True)]


def _api() -> Any:
    spec = importlib.util.spec_from_file_location("names", ROOT / "scripts" / "website" / "names.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_names_in_the_pages_are_public() -> None:
    """Check that every dotted name in README and docs is a public module, or a public name or attribute of one."""
    modules = set(_api().packages())
    public = modules | {f"{module}.{name}" for module in modules for name in import_module(module).__all__}
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    pages.remove(ROOT / "docs" / "decisions.md")  # it also names internals
    hidden = []
    for page in pages:
        for name in set(re.findall(r"visattn(?:\.[A-Za-z_]\w*)+", page.read_text())):
            parts = name.split(".")
            known = [".".join(parts[:i]) for i in range(2, len(parts) + 1) if ".".join(parts[:i]) in public]
            if not known or (known[-1] in modules and known[-1] != name):
                hidden.append(f"{page.name}: {name}")
    assert not hidden
