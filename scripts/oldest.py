"""Print constraints for pip: the oldest versions, of what visattn and its extras need, that `pyproject.toml` allows beside each other.

`oldest.py UV` finds them by uv, whose path it is given. A newer version than the floor is printed where another floor requires it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
TOOLS = "dev", "docs", "ultralytics", "networks"  # extras whose oldest versions are not promised
_BOUND = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^]]*\])?>=([0-9.]+)")
_PINNED = re.compile(r"^([A-Za-z0-9_.-]+)==([0-9.]+)", re.MULTILINE)


def floors() -> dict[str, str]:
    """Return the floor of each requirement, by its normalized name."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    texts = list(project["dependencies"])
    for extra, more in project["optional-dependencies"].items():
        texts += more if extra not in TOOLS else []
    found = (_BOUND.fullmatch(text) for text in texts)
    return {bound[1].lower().replace("_", "-"): bound[2] for bound in found if bound is not None}


def together(uv: str) -> dict[str, str]:
    """Return the oldest versions that can be installed together, by name."""
    words = [
        uv,
        "pip",
        "compile",
        "--quiet",
        "--extra",
        "all",
        "--resolution",
        "lowest-direct",
        "--python",
        sys.executable,
        str(PROJECT),
    ]
    return dict(_PINNED.findall(subprocess.run(words, check=True, capture_output=True, text=True).stdout))


def main() -> None:
    """Print them: the floor's own line of versions, so that its latest corrections are used."""
    versions = together(sys.argv[1])
    for name, floor in sorted(floors().items()):
        parts = max(floor.count(".") + 1, 2)
        print(f"{name}=={'.'.join(versions[name].split('.')[:parts])}.*")


if __name__ == "__main__":
    main()
