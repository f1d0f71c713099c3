"""Build what is released, and try it: `release.py [--draft] [--only pythons,extras,tests] [--python 3.11,3.12]`. Nothing is uploaded.

From a clean checkout whose commit has the tag of the version, wheels and source distributions of visattn and of its networks are built into
`dist`. Both are installed in an empty environment of every Python from 3.11 that is found, and the first commands of the README run there.
Each extra is installed alone, and the tests of the source distribution run, both with the Python that runs this. What passed is kept in
`build/release.json`, so a run that was interrupted goes on where it stopped. The table is printed and written to `build/release.txt`. The
command that uploads is left out while something is missing. `--draft` does the same for a commit without a tag.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import owner
from releasing.building import Distributions, distributions
from releasing.environments import Environment, Python, pythons
from releasing.extras import COMMANDS, NETWORKS, tried
from releasing.record import Outcome, Record, failed
from releasing.table import rows, suite, text
from releasing.trying import suites, tests_pass, unpacked, with_python

ROOT = Path(__file__).parents[1]
PARTS = "pythons", "extras", "tests"
OWN = "Python {}".format  # the part of a Python


def main() -> int:
    """Build and try; return 1 if something failed."""
    options = _options()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    lacking = _not_ready(version)
    if lacking and not options.draft:
        return _stop(lacking)
    found = pythons()
    chosen = {name: one for name, one in found.items() if not options.python or name in options.python}
    if not chosen:
        return _stop([f"found Python {', '.join(found) or 'none'}, none of {', '.join(options.python or ['3.11 or later'])}"])
    record = Record(ROOT / "build" / "release.json", _git("rev-parse", "HEAD"))
    files = distributions(ROOT, record)
    if large := files.too_large():
        return _stop(large)
    _try(files, record, chosen, options.only)
    return _verdict(files, record, chosen, [*lacking, *owner.missing()])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Build what is released, and try it.")
    parser.add_argument("--draft", action="store_true", help="do not ask for a tag")
    parser.add_argument("--only", type=_names, default=PARTS, metavar="NAME,NAME", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--python", type=lambda given: given.split(","), help="only these versions", metavar="3.11,3.12")
    return parser.parse_args()


def _names(given: str) -> list[str]:
    if unknown := set(given.split(",")) - set(PARTS):
        raise argparse.ArgumentTypeError(f"no part is called '{min(unknown)}'. Choose from {', '.join(PARTS)}.")
    return given.split(",")


def _stop(why: list[str]) -> int:
    print("\n".join(f"release: {line}" for line in why), file=sys.stderr)
    return 1


def _not_ready(version: str) -> list[str]:
    """Return what keeps the commit from being a release."""
    found = []
    if _git("status", "--porcelain"):
        found.append("the checkout has changes, which are not in what is built; commit them")
    if f"v{version}" not in _git("tag", "--points-at", "HEAD").split():
        found.append(f"the commit has no tag v{version}; run: git tag v{version}")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changes, re.MULTILINE):
        found.append(f"CHANGELOG.md has no heading '## {version} (YYYY-MM-DD)'")
    return found


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _try(files: Distributions, record: Record, chosen: dict[str, Python], only: list[str]) -> None:
    """Try what has not passed yet; environments are deleted as soon as they were judged."""
    folder = ROOT / "build" / "release"
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was interrupted
    folder.mkdir(parents=True)
    if "pythons" in only:
        for name, python in chosen.items():
            _part(record, OWN(name), partial(with_python, python, files, folder))
    if "extras" in only:
        _extras(files, record, folder)
    if "tests" in only:
        _tests(files, record, folder)
    shutil.rmtree(folder)
    print(file=sys.stderr)


def _part(record: Record, name: str, run: Callable[[], list[Outcome]]) -> None:
    """Run a part that has not passed yet, keep what it did, and say so."""
    if record.passed(name):
        return
    outcomes = run()
    record.keep(name, outcomes)
    wrong = "".join(f"\nrelease: {name}: {one.name} failed: {one.last}\n" for one in failed(outcomes))
    print(wrong or f"{name}, ", end="", file=sys.stderr, flush=True)


def _extras(files: Distributions, record: Record, folder: Path) -> None:
    untried = [name for name in COMMANDS if not record.passed(f"extra {name}")]
    if not untried:
        return
    with Environment(folder / "plain", sys.executable) as base:
        installed = base.install(str(files.wheel))
        for name in untried:
            if name != NETWORKS and not installed.status:
                installed = base.install("--no-deps", str(files.networks))
            _part(record, f"extra {name}", partial(_extra, name, base, installed, files.wheel.parent))


def _extra(name: str, base: Environment, installed: Outcome, wheels: Path) -> list[Outcome]:
    return [installed] if installed.status else tried(name, base, sys.executable, wheels)


def _tests(files: Distributions, record: Record, folder: Path) -> None:
    place = unpacked(files.source, folder)
    for name, words in suites(ROOT):
        _part(record, name, partial(_suite, name, words, place))


def _suite(name: str, words: list[str], place: Path) -> list[Outcome]:
    return [tests_pass(name, words, place)]


def _verdict(files: Distributions, record: Record, chosen: dict[str, Python], lacking: list[str]) -> int:
    """Print the table, and the command that uploads or what is missing."""
    versions = {OWN(name): python.version for name, python in chosen.items()}
    suite_parts = [name for name, _ in suites(ROOT)]
    table = rows(files, record, ROOT, versions, COMMANDS)
    table.append(suite(record, suite_parts, platform.python_version()))
    (ROOT / "build" / "release.txt").write_text(text(table) + "\n", encoding="utf-8")
    print(text(table))
    parts = [*versions, *(f"extra {name}" for name in COMMANDS), *suite_parts]
    wrong = [part for part in parts if failed(record.outcomes(part))]
    untried = [part for part in parts if not record.outcomes(part)]
    missing = [f"{part} failed" for part in wrong] + [f"{part} was not tried" for part in untried] + lacking
    if missing:
        print("missing: " + "; ".join(missing))
        return int(bool(wrong))
    print(f"everything is there. To publish: python -m twine upload {' '.join(f'dist/{file.name}' for file in files)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
