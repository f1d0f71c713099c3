"""Rules for the source that no linter checks."""

from __future__ import annotations

import ast
import re
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
def test_a_file_has_at_most_430_lines(path: Path) -> None:
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


@pytest.mark.parametrize(
    "path", [path for path in FILES if "cli" not in path.parts], ids=lambda path: str(path.relative_to(ROOT))
)
def test_messages_of_the_library_name_the_python_argument_before_the_option(path: Path) -> None:
    tree = ast.parse(path.read_text())
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    texts = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            texts.append("".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (said | parts):
            texts.append(node.value)
    bare = []
    for text in filter(lambda text: " " in text, texts):  # single words are arguments of a command
        options = re.finditer(r"(?<![\w-])(--[a-z]|-o/)", text)
        bare += [text for found in options if text[: found.start()].count("(") == text[: found.start()].count(")")]
    assert not bare


def test_only_one_module_imports_opencv() -> None:
    assert [path.name for path in FILES if "import cv2  # noqa" in path.read_text()] == ["opencv.py"]


def test_one_module_reads_json() -> None:
    others = {  # what they read is their own text, or not yet moved
        "training/config.py",
        "cli/stats.py",
        "batch/journal.py",
        "loading/transformers_models.py",
    }
    readers = {str(path.relative_to(ROOT / "visattn")) for path in FILES if re.search(r"\bjson\.loads?\b", path.read_text())}
    assert readers <= others | {"_support/json_files.py"}


def test_every_error_has_an_exit_code_and_a_builtin_base() -> None:
    classes = [item for item in vars(visattn.errors).values() if isinstance(item, type) and issubclass(item, VisattnError)]
    assert {error.exit_code for error in classes} <= {1, 2, 3, 4, 5}
    for error in classes:
        builtins = [base for base in error.__mro__ if base.__module__ == "builtins"]
        assert builtins[0] is not Exception or error is VisattnError
        assert error.__name__ in (visattn.errors.__doc__ or "")
