"""Quantus, installed beside the environment: it requires a package that replaces another one of OpenCV, so its requirements stay out."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

VERSION = "0.6.0"
FOLDER = Path(__file__).parents[1] / "build" / f"quantus-{VERSION}"


def quantus() -> Any:  # noqa: ANN401 - the package
    """Return the package, after installing it once."""
    if not FOLDER.is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(FOLDER), f"quantus=={VERSION}"]
        subprocess.run(command, check=True)
    sys.path.append(str(FOLDER))
    return importlib.import_module("quantus")
