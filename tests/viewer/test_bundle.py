"""The built script is what esbuild makes of the sources, stays small, and the page passes axe-core. Needs npm, which fetches both."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from pathlib import Path

import pytest

import visattn
from tests.viewer.conftest import Opened
from tests.viewer.driving import settled

VIEWER = Path(visattn.__file__).parent / "viewer"
BUILT = "viewer.js", "viewer.css", "space.js", "space.css"
AXE = "axe-core@4.10.3"
_UNREACHED = "ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT"


@pytest.fixture(scope="session")
def npm() -> str:
    """Return the command, or skip."""
    found = shutil.which("npm")
    if found is None:
        pytest.skip("npm is not installed; on Debian: apt-get install npm")
    return found


def run(*command: str, folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def install(npm: str, *packages: str, folder: Path) -> None:
    """Install packages, or those of the folder; skip if the registry cannot be reached."""
    command = [npm, "install", "--no-audit", "--no-fund", "--fetch-retries=5", *packages]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode and (lost := next((code for code in _UNREACHED if code in done.stderr), None)):
        pytest.skip(f"npm does not reach its registry ({lost})")
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.full
def test_the_built_files_are_those_of_the_sources(npm: str, tmp_path: Path) -> None:
    shutil.copytree(VIEWER / "src", tmp_path / "src")
    shutil.copy(VIEWER / "package.json", tmp_path)
    install(npm, folder=tmp_path)
    run(npm, "run", "build", folder=tmp_path)
    for name in BUILT:
        assert (tmp_path / "built" / name).read_bytes() == (VIEWER / "built" / name).read_bytes(), name


def test_the_built_files_are_small() -> None:
    assert sum(len(gzip.compress((VIEWER / "built" / name).read_bytes())) for name in BUILT) <= 120_000


@pytest.mark.full
@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 1280), ("light", 390)])
def test_axe_finds_nothing(theme: str, width: int, npm: str, study: visattn.Study, opened: Opened, tmp_path: Path) -> None:
    install(npm, AXE, folder=tmp_path)
    axe = (tmp_path / "node_modules" / "axe-core" / "axe.min.js").read_text()
    page = opened(study + study, color_scheme=theme, width=width)
    page.evaluate(axe)
    for name in ("heads", "maps", "words", "keys", "lines", "matrix"):
        page.locator(f"#tab-{name}").click()
        settled(page)
        found = page.evaluate(
            "axe.run().then((result) => result.violations.map((one) => [one.id, one.nodes.map((node) => node.html)]))"
        )
        assert found == [], json.dumps(found, indent=1)[:3000]
