"""Which messages tests reach: with `VISATTN_MESSAGES=FOLDER`, each place in visattn that makes an error is written down once.

`python scripts/messages.py FOLDER` prints the table.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import visattn
from visattn.errors import VisattnError

PACKAGE = Path(visattn.__file__).parent


def record(folder: Path) -> None:
    """Write down, from now on and in forks of this process, where errors are made."""
    folder.mkdir(parents=True, exist_ok=True)
    known: set[tuple[str, int]] = set()
    plain = VisattnError.__init__

    def noting(self: VisattnError, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        frame = sys._getframe(1)
        file = Path(frame.f_code.co_filename)
        place = str(file), frame.f_lineno
        if place not in known and file.is_relative_to(PACKAGE):
            known.add(place)
            with suppress(OSError), (folder / f"{os.getpid()}.txt").open("a") as stream:
                stream.write(f"{file.relative_to(PACKAGE)}:{frame.f_lineno}\n")

    VisattnError.__init__ = noting  # type: ignore[method-assign, assignment]
