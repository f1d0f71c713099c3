"""Pages of the reference: each public module with every public name, its signature and docstring."""

from __future__ import annotations

from functools import reduce
from types import ModuleType

from names import is_documented, line, packages

import visattn


def pages() -> dict[str, str]:
    """Return the pages by their place on the site."""
    modules = [name.replace("visattn.core.", "visattn.") for name in packages()]
    homes: dict[int, str] = {}
    for (
        module
    ) in modules:  # the last one that offers a name is its home: visattn.maps.Heatmap is documented there, and named in visattn
        values = [getattr(_module(module), name) for name in _module(module).__all__]
        homes |= {id(value): module for value in values if is_documented(value)}
    made = {f"reference/{module}.md": _page(module, homes) for module in modules}
    rows = [f"| [{module}]({module}.md) | {line(_module(module))} |" for module in modules]
    head = "# Reference\n\nEvery public name stands under the module that you import it from.\n\n| module | what it is |\n|---|---|\n"
    return made | {"reference/index.md": head + "\n".join(rows) + "\n"}


def _page(module: str, homes: dict[int, str]) -> str:
    whole = _module(module)
    described, rows = [], []
    for name in whole.__all__:
        value = getattr(whole, name)
        if isinstance(value, ModuleType):
            rows.append(f"| [{name}]({value.__name__.replace('visattn.core.', 'visattn.')}.md) | {line(value)} |")
        elif homes.get(id(value), module) != module:
            rows.append(f"| [{name}][{homes[id(value)]}.{name}] | {line(value, name)} |")
        elif is_documented(value):
            described.append(f"::: {module}.{name}\n")
        else:
            rows.append(f"| `{name}` | {line(value, name)} |")
    table = ["| name | what it is |", "|---|---|", *rows, ""] if rows else []
    return "\n".join([f"# {module}\n", f"{line(whole)}\n", *table, *described])


def _module(path: str) -> ModuleType:
    """Return the module that has this name for users: those of the core are attributes of `visattn`."""
    return reduce(getattr, path.split(".")[1:], visattn)
