"""Mutation testing: what is drawn, what is left alone, and what kills a mutant."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cosmic_ray")
pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[1]
SOURCE = '''"""Numbers, such as 1 + 1."""

from typing import TYPE_CHECKING, Literal, overload

if TYPE_CHECKING:
    NEVER = 1 + 1

__all__ = ["added"] + ["left"]


@overload
def left(x: int = 0) -> int: ...


def added(x: "int | None", y: Literal[3] = 4, *, named: int) -> Literal[5]:
    """Add 1 + 1."""
    if x is None:
        raise ValueError(f"expected {1 + 1}" + "or more")
    total: Literal[6] = (
        x
        + y
    )
    return total
'''
PROJECT = {
    "pyproject.toml": '[tool.pytest.ini_options]\nmarkers = ["full"]\n',
    "visattn/__init__.py": "",
    "visattn/sums.py": """
def climb(number):
    while number < 3:
        number += 1
    return number


def checked(number):
    return number > 0


LIMIT = 7
""",
    "tests/__init__.py": "",
    "tests/test_sums.py": """
import time
from visattn import sums
def test_climb(): assert sums.climb(0) == 3
def test_checked(): assert sums.checked(5)
def test_limit(): assert sums.LIMIT == 7
def test_that_fails(): assert sums.LIMIT == 8
""",
}


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


def module(name: str) -> Any:
    return importlib.import_module(f"mutants.{name}")


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_annotations_messages_and_docstrings_are_left_alone(tmp_path: Path) -> None:
    written(tmp_path, {"source.py": SOURCE})
    mutants = module("drawing").drawn(tmp_path, ["source.py"], 1000, 0)
    assert {(mutant.code, mutant.change.replace(" ", "")) for mutant in mutants} == {
        (
            'def added(x: "int | None", y: Literal[3] = 4, *, named: int) -> Literal[5]:',
            f'defadded(x:"int|None",y:Literal[3]={number},*,named:int)->Literal[5]:',
        )
        for number in (3, 5)
    } | {("if x is None:", "ifxisnotNone:"), ("if x is None:", "ifnotxisNone:"), ("+ y", "-y"), ("+ y", "*y")}


def test_the_draw_is_the_same_for_one_tree_and_seed() -> None:
    groups, drawing = module("groups"), module("drawing")
    files = groups.sources(ROOT, ("visattn/core/geometry.py", "visattn/core/maps"))
    few, many, others = (drawing.drawn(ROOT, files, *what) for what in ((5, 0), (9, 0), (9, 1)))
    assert few == many[:5]
    assert {mutant.name for mutant in many} != {mutant.name for mutant in others}
    for mutant in many:
        compile(mutant.text, mutant.place.file, "exec")
        assert mutant.text != (ROOT / mutant.place.file).read_text()


def test_lines_that_run_together() -> None:
    code = module("code").Code(SOURCE)
    lines = SOURCE.split("\n")
    inside = lines.index("        + y") + 1
    assert [lines[line - 1].strip() for line in code.statement(inside)] == ["total: Literal[6] = (", "x", "+ y", ")"]
    head = next(number for number, line in enumerate(lines, 1) if line.startswith("def added"))
    assert code.statement(head) == range(head, head + 1)
    assert code.function(head) == range(head + 1, len(lines))
    assert not code.function(1)


def test_a_source_has_the_tests_of_its_folder() -> None:
    groups = module("groups")
    files = ["tests/maps/test_files.py", "tests/test_geometry.py", "tests/nn/test_mean.py"]
    assert groups.matching("visattn/core/maps/scaling.py", files) == files[:1]
    assert groups.matching("visattn/core/geometry.py", files) == files[1:2]
    assert groups.matching("visattn/core/other/thing.py", files) == files


def test_every_equivalent_is_in_the_source() -> None:
    assert not module("equivalents").Equivalents().outdated(ROOT)


def test_a_new_test_leaves_the_results_of_other_files_valid() -> None:
    copies = module("copies")
    first = {
        "visattn/a.py": b"1",
        "tests/test_a.py": b"1",
        "tests/test_b.py": b"from tests.test_c import x",
        "tests/test_c.py": b"1",
    }
    before = copies.Digests(first)

    def same(**changes: bytes) -> list[bool]:
        after = copies.Digests(first | {f"{name.replace('__', '/')}.py": content for name, content in changes.items()})
        return [after.of(f"tests/test_{name}.py") == before.of(f"tests/test_{name}.py") for name in "ab"] + [
            after.whole == before.whole
        ]

    assert same() == [True, True, True]
    assert same(tests__test_b=b"from tests.test_c import y") == [True, False, False]
    assert same(tests__test_c=b"2") == [False, False, False]
    assert same(visattn__a=b"2") == [False, False, False]


@pytest.mark.full
def test_each_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that notices a fault kills it, as does an endless loop; a test that fails anyway kills nothing."""
    trying, copies = module("trying"), module("copies")
    monkeypatch.setattr(trying, "LIMITS", (20.0, 25.0))
    root = written(tmp_path / "project", PROJECT)
    files = {name: text.encode() for name, text in PROJECT.items()}
    mutants = module("drawing").drawn(root, ["visattn/sums.py"], 100, 0)
    results = trying.Results(tmp_path / "results.jsonl", copies.Digests(files), ["tests/test_sums.py"])
    with module("workshops").Workshop(files, tmp_path / "work") as workshop:
        known = module("maps").mapped(
            tmp_path / "map.jsonl", copies.Digests(files), workshop, ["tests/test_sums.py"], ["visattn/sums.py"]
        )
        assert known.bad == ["tests/test_sums.py::test_that_fails"]
        trying.Trial(workshop, known, results).run(mutants)
        assert (workshop.copy.folder / "visattn/sums.py").read_text() == PROJECT["visattn/sums.py"]
    assert not list((tmp_path / "work").iterdir())
    found = {(mutant.code, mutant.change.replace(" ", "")): results.valid()[mutant.name] for mutant in mutants}
    assert {change: (one.outcome, one.by.partition("::")[2]) for change, one in found.items() if change[0] == "LIMIT = 7"} == {
        ("LIMIT = 7", f"LIMIT={number}"): ("killed", "test_limit") for number in (6, 8)
    }
    assert found["return number > 0", "returnnumber>=0"].outcome == "survived"
    assert found["return number > 0", "returnnumber<=0"].by == "tests/test_sums.py::test_checked"
    assert found["number += 1", "number+=0"].outcome == "timeout"
    lines, share = trying.summary(mutants, [], results.valid())
    assert share is not None
    assert share < 1
    assert "survived: visattn/sums.py:9: `return number > 0` -> `return number >= 0`" in lines
