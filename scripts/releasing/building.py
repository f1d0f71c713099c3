"""Wheels and source distributions of a commit."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from releasing.record import Record

MOST = 4e6  # bytes of the wheel that a first minute downloads


class Distributions(NamedTuple):
    """The four files of a release."""

    wheel: Path
    source: Path
    networks: Path
    networks_source: Path

    def too_large(self) -> list[str]:
        """Return what is wrong with the size of the wheel."""
        size = self.wheel.stat().st_size
        return [f"{self.wheel.name} has {size / 1e6:.2f} MB, more than {MOST / 1e6:.0f}"] if size > MOST else []


def distributions(root: Path, record: Record) -> Distributions:
    """Return those of the commit; they are built if `dist` does not hold them."""
    folder = root / "dist"
    if not record.files or record.files != _digests(folder):
        _build(root, folder)
        record.built(_digests(folder))
    names = ("visattn-*.whl", "visattn-*.tar.gz", "visattn_networks-*.whl", "visattn_networks-*.tar.gz")
    return Distributions(*(next(folder.glob(name)) for name in names))


def _digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.glob("*"))}


def _build(root: Path, folder: Path) -> None:
    """Build both projects from what is committed."""
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as place:
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=root, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", place], input=archive, check=True)
        for project in (Path(place), Path(place, "models")):
            command = [sys.executable, "-m", "build", "--outdir", str(folder), str(project)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"release: {project.name or 'visattn'} cannot be built:\n{(done.stdout + done.stderr)[-2000:]}")
