"""Built distributions: their files, and that they work outside the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[1]
IGNORED = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", "out", ".bench", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build a wheel and an sdist from a copy, so that nothing is left in the checkout."""
    source = tmp_path_factory.mktemp("source") / "visattn"
    shutil.copytree(ROOT, source, symlinks=True, ignore=IGNORED)
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", str(source)], check=True, capture_output=True)
    wheel, sdist = next((source / "dist").glob("*.whl")), next((source / "dist").glob("*.tar.gz"))
    return {"wheel": wheel, "sdist": sdist}


@pytest.fixture(scope="module", params=["wheel", "sdist"])
def clean(request: pytest.FixtureRequest, distributions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of a new environment with one distribution; dependencies come from this environment, by path."""
    folder = tmp_path_factory.mktemp(request.param)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    site = next((folder / "lib").glob("python3*/site-packages"))
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-build-isolation"]
    (site / "dependencies.pth").write_text(
        sysconfig.get_path("purelib")
    )  # only a path: this environment's own visattn is not on it
    subprocess.run([*install, "--disable-pip-version-check", str(distributions[request.param])], check=True, capture_output=True)
    return python


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(python), *arguments], capture_output=True, text=True, cwd="/", timeout=300, check=False)


def test_only_visattn_is_added_to_site_packages(clean: Path) -> None:
    site = next((clean.parents[1] / "lib").glob("python3*/site-packages"))
    assert {path.name.split("-")[0] for path in site.iterdir()} == {"visattn", "dependencies.pth"}


def test_models_and_the_version_are_there(clean: Path) -> None:
    done = run(
        clean, "-c", "import visattn, visattn.models; print(visattn.__file__, visattn.models.__file__, visattn.__version__)"
    )
    package, models, version = done.stdout.split()
    assert str(clean.parents[1]) in package
    assert str(clean.parents[1]) in models
    assert version == "0.1.0"


def test_the_command_draws_an_overlay(clean: Path, tmp_path: Path) -> None:
    photo = run(clean, "-c", "from visattn.data import photo_path; print(photo_path('coffee'))").stdout.strip()
    options = ["--model", "vit_tiny_patch16_224", "--weights", "none", "-o", str(tmp_path / "out.png")]
    done = subprocess.run(
        [str(clean.parent / "visattn"), "overlay", photo, *options],
        capture_output=True,
        text=True,
        cwd="/",
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.png").exists()


@pytest.mark.real
@pytest.mark.parametrize("clean", ["wheel"], indirect=True)
def test_the_demo_works(clean: Path, tmp_path: Path) -> None:
    done = run(clean, "-m", "visattn", "demo", "-o", str(tmp_path / "demo"))
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == [
        "astronaut.png",
        "chelsea.png",
        "classes.png",
        "coffee.html",
        "coffee.png",
        "rocket.png",
    ]


def test_no_weights_or_cache_files_are_packed(distributions: dict[str, Path]) -> None:
    with zipfile.ZipFile(distributions["wheel"]) as wheel, tarfile.open(distributions["sdist"]) as sdist:
        names = wheel.namelist() + sdist.getnames()
    weights = [name for name in names if name.endswith((".safetensors", ".pth", ".pyc", ".onnx"))]
    assert not [name for name in weights if not re.search(r"^[^/]+/(models|tests/golden/references)/", name)]
    assert "visattn/models/vit.py" in names
    assert {"visattn/viewer/built/viewer.js", "visattn/viewer/built/viewer.css"} <= set(names)
    assert "visattn/core/shipped/photos/coffee.png" in names


def test_the_tests_of_the_source_distribution_run(distributions: dict[str, Path], tmp_path: Path) -> None:
    with tarfile.open(distributions["sdist"]) as sdist:
        sdist.extractall(tmp_path, filter="data")
    (place,) = tmp_path.iterdir()
    own = os.environ | {"PYTHONPATH": str(place)}
    for arguments in (["--collect-only", "tests"], ["tests/test_geometry.py", "tests/maps/test_values_that_stay.py"]):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(command, cwd=place, env=own, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:]
