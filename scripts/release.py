"""Build what is released, and try it: `release.py [--draft] [--python 3.11,3.12] [--no-extras]`. Nothing is uploaded.

From a clean checkout whose commit has the tag of the version, wheels and source distributions of visattn and of its networks are built into
`dist`. Each is installed into a new environment of every Python from 3.11 that is found, and the first commands of the README run there.
The tests of the source distribution run in the first one, and each extra is installed alone. At the end stand sizes and the command that
uploads, which is left out while something is missing. `--draft` does the same for a commit without a tag.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

import owner
from releasing.environments import Environment, failed, pythons
from releasing.extras import matrix

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
MOST = 4e6  # bytes of the wheel that a first minute downloads
QUICK = (
    ("visattn doctor", "visattn", "doctor", "--imports"),
    ("visattn demo", "visattn", "demo", "-q", "-o", "demo"),
    ("visattn overlay", "visattn", "overlay", "photo:chelsea", "--model", "tf_efficientnet_lite0", "-q"),
    ("three lines of Python", "python", "-c", "import visattn; visattn.explain('scenes_vit', 'scene:7').save('scene.png')"),
)


def main() -> int:
    """Build and try; return 1 if something failed."""
    parser = argparse.ArgumentParser(description="Build what is released, and try it.")
    parser.add_argument("--draft", action="store_true", help="do not ask for a tag")
    parser.add_argument("--python", type=lambda text: text.split(","), help="only these versions")
    parser.add_argument("--no-extras", action="store_true", help="leave the extras out")
    parser.add_argument("--no-tests", action="store_true", help="leave the tests of the source distribution out")
    options = parser.parse_args()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    lacking = [*_not_ready(version), *owner.missing()]
    if not options.draft and (stop := _not_ready(version)):
        print("\n".join(f"release: {text}" for text in stop), file=sys.stderr)
        return 1
    chosen = {name: path for name, path in pythons().items() if not options.python or name in options.python}
    if not chosen:
        print("release: no Python of these versions was found", file=sys.stderr)
        return 1
    files = _built()
    wrong = [
        f"{file.name} has {file.stat().st_size / 1e6:.1f} MB, more than {MOST / 1e6:.0f}"
        for file in files
        if _is_first(file) and file.stat().st_size > MOST
    ]
    with tempfile.TemporaryDirectory() as place:
        for number, (name, python) in enumerate(chosen.items()):
            wrong += _tried(Path(place, name), name, python, is_first=number == 0, options=options)
    print("\n".join(f"{file.stat().st_size / 1e6:6.2f} MB  {file.name}" for file in files))
    print(f"tried with Python {', '.join(chosen)}")
    if wrong or lacking:
        print("\n".join(f"missing: {text}" for text in [*wrong, *lacking]))
        return int(bool(wrong))
    print(f"everything is there. To publish: python -m twine upload {' '.join(f'dist/{file.name}' for file in files)}")
    return 0


def _not_ready(version: str) -> list[str]:
    """Return what keeps the commit from being a release."""
    found = []
    if _git("status", "--porcelain"):
        found.append("the checkout has changes; commit them")
    if f"v{version}" not in _git("tag", "--points-at", "HEAD").split():
        found.append(f"the commit has no tag v{version}; run: git tag v{version}")
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE):
        found.append(f"CHANGELOG.md has no heading '## {version} (YYYY-MM-DD)'")
    return found


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _built() -> list[Path]:
    """Build both projects from what is committed; return wheels and source distributions."""
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as place:
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", place], input=archive, check=True)
        for project in (Path(place), Path(place, "models")):
            subprocess.run([sys.executable, "-m", "build", "--outdir", str(DIST), str(project)], check=True, capture_output=True)
    return sorted(DIST.iterdir())


def _is_first(file: Path) -> bool:
    return file.name.startswith("visattn-") and file.suffix == ".whl"


def _tried(folder: Path, name: str, python: str, *, is_first: bool, options: argparse.Namespace) -> list[str]:
    """Install and try both distributions in new environments; return what failed."""
    wrong = []
    folder.mkdir()
    base = Environment(folder / "plain", python)
    print(f"== Python {name}")
    (wheel,) = (str(file) for file in DIST.iterdir() if _is_first(file))
    (networks,) = (str(file) for file in DIST.glob("visattn_networks-*.whl"))
    if failed([base.install(wheel)]):
        return [f"the wheel cannot be installed with Python {name}"]
    own = Environment(folder / "with-networks", base=base, python=python)
    outcomes = [own.install("--no-deps", networks), *(own.run(*command, folder=folder) for command in QUICK)]
    if failed(outcomes):
        wrong.append(f"the wheel with Python {name}")
    (source,) = (str(file) for file in DIST.glob("visattn-*.tar.gz"))
    from_source = Environment(folder / "source", base=base, python=python)
    installed = from_source.install("--no-deps", "--force-reinstall", source)
    if failed(
        [
            installed,
            from_source.run("visattn demo of the source distribution", "visattn", "demo", "-q", "-o", "demo2", folder=folder),
        ]
    ):
        wrong.append(f"the source distribution with Python {name}")
    if is_first and not options.no_tests and _tests_fail(Path(source), folder):
        wrong.append("the tests of the source distribution")
    if is_first and not options.no_extras and matrix(own, DIST, folder):
        wrong.append("an extra")
    return wrong


def _tests_fail(source: Path, folder: Path) -> bool:
    """Run the quick tests of the source distribution, with the packages of this environment."""
    with tarfile.open(source) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (place,) = (folder / "unpacked").iterdir()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "--dist",
        "worksteal",
        "-m",
        "not full and not evidence",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(command, cwd=place, env={**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}, check=False)
    return done.returncode != 0


if __name__ == "__main__":
    sys.exit(main())
