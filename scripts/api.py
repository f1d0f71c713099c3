"""Table of all public names with one-line descriptions, for docs/api.md: `python scripts/api.py --write-docs`."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"
HEAD = """# Public names

Made by `python scripts/api.py --write-docs`. A name stands under the module that you import it from; `help(name)` has the arguments.
"""


def packages() -> list[str]:
    """Return the public modules: the package, its public submodules, and their public submodules."""
    found = ["visattn"]
    for module in found:
        whole = import_module(module)
        found += [f"{module}.{name}" for name in whole.__all__ if isinstance(getattr(whole, name), ModuleType)]
    return found


def line(value: object) -> str:
    """Return the first line of a docstring; for values without one, their type."""
    text = inspect.getdoc(value) if callable(value) or isinstance(value, ModuleType) else None
    if text:
        return text.split("\n")[0]
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (dict, tuple, frozenset)) else type(value).__name__


def page() -> str:
    """Return the page as Markdown."""
    parts = [HEAD]
    for module in packages():
        whole = import_module(module)
        rows = [f"| `{name}` | {line(getattr(whole, name))} |" for name in whole.__all__]
        parts.append("\n".join([f"## {module}\n", line(whole), "\n| name | what it is |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    if "--write-docs" in sys.argv:
        PAGE.write_text(page())
    else:
        print(page(), end="")
