"""Groups of source files whose mutants are drawn together, and the tests that are asked about them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Group(NamedTuple):
    """Files, tests and bound of a group; folders count with all that is in them.

    Attributes:
        sources: Files and folders whose mutants are drawn.
        tests: Files and folders of tests.
        least: Least share of the mutants that the tests must kill.
    """

    sources: tuple[str, ...]
    tests: tuple[str, ...]
    least: float


GROUPS = {
    "capturing": Group(("visattn/core/capturing",), ("tests/capturing", "tests/pipeline"), 0.85),
    "maps": Group(
        (
            "visattn/core/drawing",
            "visattn/core/geometry.py",
            "visattn/core/maps",
            "visattn/core/methods",
            "visattn/core/operators",
            "visattn/nn",
        ),
        (
            "tests/drawing",
            "tests/maps",
            "tests/methods",
            "tests/nn",
            "tests/test_geometry.py",
            "tests/test_operators.py",
            "tests/test_operators_in_numbers.py",
        ),
        0.90,
    ),
}


def sources(root: Path, places: tuple[str, ...]) -> list[str]:
    """Return the source files of some places, sorted."""
    return _files(root, places, "*.py")


def tests(root: Path, places: tuple[str, ...]) -> list[str]:
    """Return the test files of some places, sorted."""
    return _files(root, places, "test_*.py")


def matching(source: str, files: list[str]) -> list[str]:
    """Return the test files of the folder, or the one file, named like a source file or a folder that it is in; else all.

    `visattn/core/maps/scaling.py` has `tests/maps/`, and `visattn/core/geometry.py` has `tests/test_geometry.py`.
    """
    names = [Path(part).stem for part in reversed(Path(source).parts)]
    for name in names:
        if found := [file for file in files if file == f"tests/test_{name}.py" or file.startswith(f"tests/{name}/")]:
            return found
    return files


def _files(root: Path, places: tuple[str, ...], pattern: str) -> list[str]:
    found = set()
    for place in places:
        path = root / place
        if not path.exists():
            raise FileNotFoundError(f"'{place}' does not exist in {root}")
        found |= {path} if path.is_file() else {*path.rglob(pattern)}
    return sorted(str(path.relative_to(root)) for path in found)
