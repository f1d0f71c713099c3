"""A copy of what the tests need, into which the faults are put: the checkout is only read."""

from __future__ import annotations

import hashlib
import platform
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

COPIED = "visattn", "tests", "models", "pyproject.toml"
_RUNNING = "asking.py", "copies.py", "warm.py", "workshops.py"
_DECIDING = "torch", "timm", "numpy", "pytest", "hypothesis", "coverage", "cosmic-ray"


def contents(root: Path) -> dict[str, bytes]:
    """Return the content of each file that is copied: those that git tracks or would track."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *COPIED],
        cwd=root,
        check=True,
        capture_output=True,
    ).stdout
    names = sorted({name for name in listing.decode(errors="surrogateescape").split("\0") if name})
    return {name: (root / name).read_bytes() for name in names if (root / name).is_file()}


class Digests:
    """Digests by which kept results are compared with the present tree.

    What a file of tests finds depends on all copied files but the other files of tests that none imports, on the modules of this package
    that run it, and on versions. So a new test leaves the results of the other files valid.

    Attributes:
        whole: Digest of everything.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        """Compute the digest of all but files of tests."""
        versions = "\n".join([platform.python_version(), *(f"{name} {version(name)}" for name in _DECIDING)])
        own = {f"mutants/{name}": (Path(__file__).parent / name).read_bytes() for name in _RUNNING}
        tests = {name: content for name, content in files.items() if Path(name).match("test_*.py")}
        for file in {file for content in tests.values() for file in _imported(content)}:
            tests.pop(file, None)
        others = {name: content for name, content in files.items() if name not in tests}
        self._others = _digest({**others, **own, "versions": versions.encode()})
        self._tests = {name: _digest({name: content}) for name, content in tests.items()}
        self.whole = _digest({"others": self._others.encode(), "tests": "".join(self._tests.values()).encode()})

    def of(self, test_file: str) -> str:
        """Return the digest of what the tests of a file find."""
        return f"{self._others}-{self._tests.get(test_file, '')}"


def _imported(content: bytes) -> list[str]:
    """Return the files of tests that a file of tests imports from."""
    modules = re.findall(r"^(?:from|import) (tests\.[\w.]*\btest_\w+)", content.decode(), re.MULTILINE)
    return [f"{module.replace('.', '/')}.py" for module in modules]


def _digest(contents: dict[str, bytes]) -> str:
    found = hashlib.sha256()
    for name, content in contents.items():
        found.update(f"{name}\0{len(content)}\0".encode(errors="surrogateescape") + content)
    return found.hexdigest()[:16]


class Copy:
    """A copy of the project in a folder."""

    def __init__(self, folder: Path, files: dict[str, bytes]) -> None:
        """Write the files."""
        self.folder, self._files = folder, files
        for name, content in files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)

    @contextmanager
    def changed(self, name: str, text: str) -> Iterator[None]:
        """Give a file another text. No compiled file of it is left, as one of the same second and size would be taken for it."""
        file = self.folder / name
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            compiled.unlink()
        file.write_text(text, encoding="utf-8")
        try:
            yield
        finally:
            file.write_bytes(self._files[name])
