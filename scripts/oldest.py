"""Print the oldest versions that `pyproject.toml` allows for what visattn and its extras need, as constraints for pip."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = "dev", "docs", "ultralytics"  # extras whose oldest versions are not promised
_BOUND = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^]]*\])?>=([0-9.]+)")


def oldest(text: str) -> str:
    """Return the constraint of a requirement: the first release of the oldest line that it allows, or nothing."""
    bound = _BOUND.fullmatch(text)
    if bound is None:
        return ""
    name, version = bound.groups()
    return f"{name}=={version if '.' in version else version + '.0'}.*"


def main() -> None:
    """Print them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = list(project["dependencies"])
    for extra, more in project["optional-dependencies"].items():
        needed += more if extra not in TOOLS else []
    print("\n".join(sorted({line for text in needed if (line := oldest(text))})))


if __name__ == "__main__":
    main()
