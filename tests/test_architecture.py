"""Rules for the source that no linter checks."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import visattn.errors
from visattn.errors import VisattnError

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "visattn").rglob("*.py"))
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


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT / "visattn"))


def _is_of_commands(path: Path) -> bool:
    return bool({"cli", "command_line"} & {*path.parts}) or path.stem.endswith("_command")


def test_no_banned_call_and_no_print() -> None:
    found = [(_name(path), word) for path in FILES for word in BANNED if word in path.read_text()]
    for path in FILES:
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        found += [(_name(path), "print") for call in calls if isinstance(call, ast.Name) and call.id == "print"]
    assert not found


def test_torch_load_runs_no_code() -> None:
    calls = [
        (_name(path), ast.unparse(node))
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert calls
    assert not [call for call in calls if "weights_only=True" not in call[1]]


_FLAG = re.compile(r"(?<![\w-])(--[a-z]|-o\b)")
_KEYWORD = re.compile(r"(?<![\w.-])[a-z_]+=|visattn\.[a-z]")
_HELP = "option", "setting"  # calls whose texts are for `--help`


def _messages(path: Path, languages: str = "python shell") -> list[str]:
    """Return the texts of a module but docstrings and help texts; of those for one language alone, given to `worded`, the `languages`."""
    tree = ast.parse(path.read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    helps = [call for call in calls if call.func.id in _HELP]  # type: ignore[attr-defined]
    only = [call.args for call in calls if call.func.id == "worded"]  # type: ignore[attr-defined]
    apart = helps + [args[i] for args in only for i, language in enumerate(("python", "shell")) if language not in languages]
    apart += [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    apart += [
        part
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
        if isinstance(part, ast.Constant)
    ]
    left_out = {id(node) for root in apart for node in ast.walk(root)}
    texts = []
    for node in ast.walk(tree):
        if id(node) not in left_out and isinstance(node, ast.JoinedStr):
            texts.append("".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values))
        elif id(node) not in left_out and isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
    return [text for text in texts if " " in text]  # single words are arguments of a command


def test_messages_of_the_library_name_flags_to_the_shell_alone() -> None:
    texts = [(_name(path), text) for path in FILES if not _is_of_commands(path) for text in _messages(path, "python")]
    assert texts
    assert not [text for text in texts if _FLAG.search(text[1])]


def test_messages_of_commands_name_no_keyword_and_no_function_of_python() -> None:
    texts = [(_name(path), text) for path in FILES if _is_of_commands(path) for text in _messages(path)]
    assert texts
    assert not [text for text in texts if _KEYWORD.search(text[1])]


def test_the_rules_of_language_find_what_they_forbid(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        '"""Text with --flags."""\nraise E(f"{name}: exists (--overwrite)")\nraise E("pass overwrite=True " + worded("a b", "pass --b"))\n'
    )
    assert _messages(file, "python") == ["{}: exists (--overwrite)", "pass overwrite=True ", "a b"]
    assert [bool(_FLAG.search(text)) for text in _messages(file)] == [True, False, False, True]
    assert [bool(_KEYWORD.search(text)) for text in _messages(file)] == [False, True, False, False]


def test_only_one_module_imports_opencv() -> None:
    assert [path.name for path in FILES if "import cv2  # noqa" in path.read_text()] == ["opencv.py"]


def test_one_module_reads_json() -> None:
    others = {  # what they read is their own text
        "training/config.py",
        "evaluation/stats_command.py",
        "batch/journal.py",
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
