"""A process that has loaded the libraries and forks a child for each job, which saves seconds for each mutant.

Run as `python -m mutants.warm` in a copy of the project. It loads nothing of the project, so each child loads the copy as it is then.

A job is a line of JSON: `{"kind": "lines", "tests" or "compile", "limit": seconds, "answer": file, "log": file, ...}`. The line that is
printed for it is `{"seconds": ..., "busy": ..., "ended": ...}`: time, time of the processor, and whether the child ended within its limit.
The libraries have begun no thread yet when a child is forked, which would be missing in it; this is checked.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from mutants.asking import answer

_LIBRARIES = """
numpy torch torchvision timm cv2 PIL.Image safetensors.torch msgspec click pytest hypothesis coverage scipy.stats matplotlib.figure
matplotlib.backends.backend_agg captum.attr transformers.modeling_utils
"""
_MEMORY = 12 << 30  # bytes of a child's own data
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def main() -> None:
    """Answer jobs until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for library in _LIBRARIES.split():
        with suppress(ModuleNotFoundError):
            importlib.import_module(library)
    for line in sys.stdin:
        job = json.loads(line)
        if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208
            raise RuntimeError("a library began a thread when it was imported; a fork would lack it")
        if any(name.partition(".")[0] in ("visattn", "tests") for name in sys.modules):
            raise RuntimeError("the project is loaded already, so mutants would have no effect")
        started, before = time.monotonic(), _busy()
        ended = _waited(_forked(job), started + job["limit"])
        facts = {"seconds": round(time.monotonic() - started, 2), "busy": round(_busy() - before, 2), "ended": ended}
        print(json.dumps(facts), file=answers, flush=True)


def _busy() -> float:
    """Return the processor's time of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _forked(job: dict[str, Any]) -> int:
    """Begin a child that does the job, in a session of its own; return its number."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    os.setsid()
    cast(Any, ctypes.CDLL(None)).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        Path(job["answer"]).write_text(json.dumps(answer(job)))
    finally:
        sys.stdout.flush()
        os._exit(0)


def _waited(child: int, deadline: float) -> bool:
    """Wait for a child until the deadline; end it with what it has begun, and return whether it ended itself."""
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            return True
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


if __name__ == "__main__":
    main()
