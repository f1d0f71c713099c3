"""Notes which files and folders of the project a proof reads: Python imports this module at its start, see `evidence.running`.

A line is written at once for each path, so that processes that are killed, forked or replaced are covered too.
"""

import fcntl
import os
import sys

_LOG, _ROOT = os.environ.get("VISATTN_EVIDENCE_LOG"), os.environ.get("VISATTN_EVIDENCE_ROOT", "")
_IMPORTLIB = "<frozen importlib"  # lists folders to look for modules, and then opens those that it takes
_HIGH = 400  # number of the descriptor
_noted: set[tuple[str, str]] = set()


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if event not in ("open", "os.listdir", "os.scandir") or (event == "open" and int(arguments[2] or 0) & os.O_WRONLY):  # type: ignore[call-overload]
        return
    if event != "open" and sys._getframe(1).f_code.co_filename.startswith(_IMPORTLIB):
        return
    try:
        path = os.path.realpath(os.fsdecode(arguments[0] or "."))  # type: ignore[arg-type]
        line = "file" if event == "open" else "folder", path
        if line in _noted or not path.startswith(_ROOT):
            return
        _noted.add(line)
        os.write(_log, f"{line[0]} {path}\n".encode("utf-8", "surrogateescape"))
    except (OSError, TypeError, ValueError):  # a descriptor in place of a path, or a process without any room
        return


if _LOG:  # opened once, so that a fork with a file system of its own writes there too; a high number stands in nobody's way
    _opened = os.open(_LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    _log = fcntl.fcntl(_opened, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    os.close(_opened)
    sys.addaudithook(_note)
