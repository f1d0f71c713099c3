"""README and docs: their Python runs, their links resolve, and their commands exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from visattn.cli.commands import _run
from visattn.cli.help import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted((ROOT / "docs").rglob("*.md"))
TEXTS = {page: page.read_text() for page in PAGES}
COMMAND_LINES = sorted({line for text in TEXTS.values() for line in re.findall(r"`(visattn [a-z][^`]*)`", text)})


def test_python_of_the_capture_page_runs_and_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "capture.md").read_text(), re.DOTALL)
    exec(compile("\n".join(blocks), "capture.md", "exec"), {})
    shown = [line.removeprefix("# ") for block in blocks for line in block.splitlines() if line.startswith("# ")]
    assert capsys.readouterr().out.splitlines() == shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_a_page_exist(page: Path) -> None:
    named = set(re.findall(r"`([A-Za-z_./]+\.py)`", TEXTS[page]))
    assert not [name for name in sorted(named) if not any((ROOT / base / name).exists() for base in (".", "visattn"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_have_existing_targets(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()) if not link.startswith("https:")]
    assert not [link for link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_commands_in_the_docs_have_the_options_they_show(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(line)
    assert words[1] in COMMANDS or words[1].isupper()
    if words[1] in COMMANDS:
        command = words[1:3] if words[1] == "train" and len(words) > 2 else words[1:2]
        assert _run([*command, "--help"], debug=False) == 0
        shown = capsys.readouterr().out
        assert not [word for word in words if word.startswith("--") and word.split("=")[0] not in shown]


def test_the_first_screen_has_the_two_commands_and_three_lines_of_python() -> None:
    first = (ROOT / "README.md").read_text().split("\n## ")[0]
    assert "make demo" in first
    assert "make test" in first
    (python,) = re.findall(r"```python\n(.*?)```", first, re.DOTALL)
    assert len([line for line in python.splitlines() if line]) == 3
