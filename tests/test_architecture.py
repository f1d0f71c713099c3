"""Rules of the source that no linter checks."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import visattn.errors
from visattn.errors import VisattnError

ROOT = Path(__file__).parents[1]
FILES = sorted(path for path in (ROOT / "visattn").rglob("*.py") if "models" not in path.relative_to(ROOT / "visattn").parts[:1])
BANNED = (
    "cv2.imread",
    "cv2.imwrite",
    "cv2.VideoCapture",
    "cv2.putText",
    "cv2.imshow",
    "LOAD_TRUNCATED_IMAGES",
    "MAX_IMAGE_PIXELS",
    "shell=True",
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_one_thing(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 430


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_banned_call_and_no_print(path: Path) -> None:
    text = path.read_text()
    assert not [word for word in BANNED if word in text]
    calls = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    assert not [call for call in calls if isinstance(call, ast.Name) and call.id == "print"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_torch_load_runs_no_code(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            assert "weights_only=True" in ast.unparse(node)


def test_only_one_module_imports_opencv() -> None:
    assert [path.name for path in FILES if "import cv2  # noqa" in path.read_text()] == ["_cv2.py"]


def test_every_error_has_an_exit_code_and_a_builtin_base() -> None:
    classes = [item for item in vars(visattn.errors).values() if isinstance(item, type) and issubclass(item, VisattnError)]
    assert {error.exit_code for error in classes} <= {1, 2, 3, 4, 5}
    for error in classes:
        builtins = [base for base in error.__mro__ if base.__module__ == "builtins"]
        assert builtins[0] is not Exception or error is VisattnError
        assert error.__name__ in (visattn.errors.__doc__ or "")
