"""Print the oldest versions that `pyproject.toml` allows for what visattn needs, as words for pip."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Print them."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    print(" ".join(text.replace(">=", "==") + ".*" for text in needed if ">=" in text))


if __name__ == "__main__":
    main()
