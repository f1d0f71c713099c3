"""Files and folders that an ordinary user may not read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

Close = Callable[[Path], Callable[[], None]]


@pytest.fixture
def closed(public_folder: Path, request: pytest.FixtureRequest) -> Close:
    """Return a function that takes all permissions from a path, goes on as an ordinary user, and returns one that gives them back."""
    del public_folder  # requested before `ordinary_user`, so that root removes it

    def close(path: Path) -> Callable[[], None]:
        mode = path.stat().st_mode
        path.chmod(0)
        request.getfixturevalue("ordinary_user")

        def reopen() -> None:
            user = os.geteuid()
            os.seteuid(os.getuid())
            path.chmod(mode)
            os.seteuid(user)

        return reopen

    return close
