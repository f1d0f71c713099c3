"""Table of all public names with one-line descriptions, for docs/api.md: `python scripts/api.py --write-docs`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import GenericAlias, ModuleType, UnionType
from typing import Literal, get_args, get_origin

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"
HEAD = """# Public names

Made by `python scripts/api.py --write-docs`. A name stands under the module that you import it from; `help(name)` has the arguments.
The modules of the core are attributes of `visattn` too: `visattn.methods.rollout`.
"""


def packages() -> list[str]:
    """Return the public modules: the package, its public submodules, and their public submodules."""
    found = ["visattn"]
    for module in found:
        whole = import_module(module)
        found += [part.__name__ for name in whole.__all__ if isinstance(part := getattr(whole, name), ModuleType)]
    return found


_KINDS = {Mapping: "Dictionary", tuple: "Tuple", frozenset: "Set", str: "Text", int: "Whole number", float: "Number"}


def line(value: object, name: str = "") -> str:
    """Return the first line of a docstring; for values without one, their kind in words. `NETWORKS` holds networks, by its name."""
    if isinstance(value, (GenericAlias, UnionType)):
        return f"Type: {str(value).replace('|', 'or')}."
    text = inspect.getdoc(value) if callable(value) or isinstance(value, ModuleType) else None
    if text:
        return text.split("\n")[0]
    if get_origin(value) is Literal:
        return f"Type: {', '.join(map(repr, get_args(value)))}."
    kind = next((words for kind, words in _KINDS.items() if isinstance(value, kind)), type(value).__name__)
    if isinstance(value, (Mapping, tuple, frozenset)):
        return f"{kind} of {len(value)} {name.lower() if name.endswith('S') else 'entries'}."
    return f"{kind}."


def page() -> str:
    """Return the page as Markdown."""
    parts = [HEAD]
    for module in packages():
        whole = import_module(module)
        rows = [f"| `{name}` | {line(getattr(whole, name), name)} |" for name in whole.__all__]
        parts.append("\n".join([f"## {module}\n", line(whole), "\n| name | what it is |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    if "--write-docs" in sys.argv:
        PAGE.write_text(page())
    else:
        print(page(), end="")
