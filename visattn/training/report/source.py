"""Commit of the source of visattn that runs, as far as it can be known."""

from __future__ import annotations

import subprocess
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from visattn._support.json_files import decoded

_PACKAGE = Path(__file__).parents[2]
_SECONDS = 10


def commit() -> str:
    """Return the commit of visattn's source; empty if it is unknown, as for a released package.

    It is that of the repository that tracks the package's files, with ", changed since" if they differ from it, or that which pip
    installed from.
    """
    head = _git("rev-parse", "HEAD") if _git("ls-files", "--error-unmatch", "__init__.py") else ""
    if not head:
        return _installed_from()
    return head + ", changed since" * bool(_git("status", "--porcelain", "--untracked-files=no", "--", "."))


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(_PACKAGE), *arguments], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _installed_from() -> str:
    try:
        told = distribution("visattn").read_text("direct_url.json")
        return str(decoded((told or "{}").encode(), dict[str, Any], lax=True).get("vcs_info", {}).get("commit_id", ""))
    except (PackageNotFoundError, ValueError, AttributeError):
        return ""
