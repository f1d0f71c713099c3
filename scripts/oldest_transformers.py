"""Tests of models of transformers with the oldest version that the extra `hf` allows. Exits with the status of pytest.

The version and what it needs are installed into a folder of their own, which Python searches before the installed packages.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".bench" / "oldest-transformers"
TESTS = (
    "tests/captioning/test_generated.py",
    "tests/families/test_transformers.py",
    "tests/families/test_transformers_on_real_weights.py",
    "tests/loading/test_transformers_models.py",
    "tests/methods/test_relevance_of_decoders.py",
    "tests/pipeline/test_methods_on_transformers.py",
    "tests/pipeline/test_prompts.py",
    "tests/pipeline/test_structure.py",
)


def main() -> int:
    """Install the oldest version and run the tests with it."""
    stated = re.search(r'"transformers>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text())
    assert stated is not None  # noqa: S101
    version = stated[1] + ".0" * (2 - stated[1].count("."))
    install = ["-m", "pip", "install", "--quiet", "--upgrade", "--target", str(FOLDER), f"transformers=={version}"]
    subprocess.run([sys.executable, *install], check=True)
    paths = os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-c", "import transformers; print(transformers.__version__)"],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    print(f"transformers {found}", flush=True)
    if found != version:
        return 1
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "2", *TESTS], env=environment, cwd=ROOT, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
