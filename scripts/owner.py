"""Write what only the owner knows, from `owner.toml`, to where it belongs: `owner.py`; with `--check`, only say what is missing."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIELDS = "authors", "email", "source", "documentation", "issues"
_MARKED = re.compile(r"( *(?:#|<!--) owner(?: -->)?\n).*?( *(?:#|<!--) end of owner(?: -->)?\n)", re.DOTALL)


def known() -> dict[str, str]:
    """Return the fields that are filled in."""
    given = tomllib.loads((ROOT / "owner.toml").read_text(encoding="utf-8"))
    return {name: given[name].strip() for name in FIELDS if given.get(name, "").strip()}


def lines(owner: dict[str, str]) -> dict[str, str]:
    """Return what each file holds between its marks."""
    people = [name.strip() for name in owner.get("authors", "").split(",") if name.strip()]
    mail = f', email = "{owner["email"]}"' if "email" in owner else ""
    authors = "".join(f'    {{name = "{name}"{mail if number == 0 else ""}}},\n' for number, name in enumerate(people))
    addresses = {name: owner[name] for name in ("source", "documentation", "issues") if name in owner}
    urls = "".join(f'{name.capitalize()} = "{address}"\n' for name, address in addresses.items())
    return {
        "pyproject.toml": (f"authors = [\n{authors}]\n" if authors else "") + (f"[project.urls]\n{urls}" if urls else ""),
        "CITATION.cff": "".join(f"  - name: {name}\n" for name in people) or "  - name: The developers of visattn\n",
        "SECURITY.md": f"Write to {owner['email']}.\n" if "email" in owner else "",
        "mkdocs.yml": f"repo_url: {owner['source']}\n" if "source" in owner else "",
    }


def missing() -> list[str]:
    """Return what is not filled in, and the files that do not hold yet what is."""
    owner = known()
    empty = [f"owner.toml: {name}" for name in FIELDS if name not in owner]
    stale = [name for name, text in lines(owner).items() if _written(name, text) != (ROOT / name).read_text(encoding="utf-8")]
    return empty + [f"{name}: run python scripts/owner.py" for name in stale]


def _written(name: str, text: str) -> str:
    whole, count = _MARKED.subn(lambda marks: f"{marks[1]}{text}{marks[2]}", (ROOT / name).read_text(encoding="utf-8"))
    if count != 1:
        sys.exit(f"{name}: must contain the marks 'owner' and 'end of owner' once, as comments")
    return whole


def main() -> int:
    """Write the files, and print what is missing."""
    if "--check" not in sys.argv:
        for name, text in lines(known()).items():
            (ROOT / name).write_text(_written(name, text), encoding="utf-8")
    print("\n".join(missing()) or "owner: everything is filled in")
    return int(bool(missing()))


if __name__ == "__main__":
    sys.exit(main())
