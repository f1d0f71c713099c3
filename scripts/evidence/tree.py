"""Content of the project's files, by which a kept result is compared with the present tree."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

Tree = Mapping[str, str]


def tree_of(root: Path, but: Path) -> dict[str, str]:
    """Return a digest for each file that git tracks or would track, and for the names in each folder (`FOLDER/`), relative to `root`.

    Args:
        root: The checkout.
        but: Folder that is left out: that of the results.
    """
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=root, check=True, capture_output=True
    ).stdout
    files = sorted({name for name in listing.decode(errors="surrogateescape").split("\0") if name and (root / name).is_file()})
    files = [name for name in files if but not in (root / name).parents]
    names: dict[str, list[str]] = {}
    for file in files:
        for inner, folder in zip((Path(file), *Path(file).parents), Path(file).parents, strict=False):
            names.setdefault(f"{folder}/", []).append(inner.name)
    digests = {file: _digest((root / file).read_bytes()) for file in files}
    return digests | {folder: _digest("\0".join(sorted(set(inside))).encode()) for folder, inside in names.items()}


def read_by(log: Path, root: Path, tree: Tree) -> set[str]:
    """Return the files and folders of the tree among the lines of a log; compiled modules count as their source."""
    read: set[str] = set()
    for line in log.read_text(errors="surrogateescape").splitlines() if log.exists() else ():
        kind, _, text = line.partition(" ")
        path = Path(text)
        if path.parent.name == "__pycache__":
            path = path.parents[1] / f"{path.name.partition('.')[0]}.py"
        if path.is_relative_to(root):
            read.add(f"{path.relative_to(root)}{'/' if kind == 'folder' else ''}")
    return read & tree.keys()


def changed(before: Tree, tree: Tree) -> list[str]:
    """Return the files and folders of an earlier tree that are other ones now, or gone."""
    return [name for name, digest in before.items() if tree.get(name) != digest]


def part(tree: Tree, names: Iterable[str]) -> dict[str, str]:
    """Return the tree of some names only, sorted."""
    return {name: tree[name] for name in sorted(names)}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
