"""Install with pip, with signs of life: `python scripts/install.py WORD ...`, with the words that `pip install` takes.

A line for each large download, a dot for every ten seconds of silence, and the end of what pip said if it fails. A signal stops pip too. It
needs nothing but Python.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from types import FrameType

_LARGE = re.compile(r"Downloading (\S+?)-(\d[^-\s]*)-\S+ \((\d+(?:\.\d+)?) (MB|GB)\)")
_LEAST = 20  # MB of a download that has a line of its own
_TICK = 10.0  # seconds
_LAST = 40  # lines that are shown if pip fails
_PATIENCE = 10.0  # seconds that pip has to stop
_STOPS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def main() -> int:
    """Run pip; return its exit status."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", *sys.argv[1:]]
    started = time.monotonic()
    print("installing PyTorch and the rest, some GB; one to five minutes, once", flush=True)
    for number in _STOPS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stopped)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    ended = threading.Event()
    threading.Thread(target=_dots, args=(ended,), daemon=True).start()
    try:
        said = _followed(process)
        status = process.wait()
    except SystemExit:
        _end(process)
        raise
    finally:
        ended.set()
    if status:
        print("".join(said), file=sys.stderr)
    else:
        print(f"installed in {time.monotonic() - started:.0f} s", flush=True)
    return status


def _followed(process: subprocess.Popen[str]) -> deque[str]:
    """Print what is worth a line; return the last lines."""
    said: deque[str] = deque(maxlen=_LAST)
    assert process.stdout is not None  # noqa: S101 - it is a pipe
    for line in process.stdout:
        said.append(line)
        if found := _LARGE.search(line):
            name, version, size, unit = found.groups()
            if float(size) * (1000 if unit == "GB" else 1) >= _LEAST:
                print(f"  {name} {version}: {size} {unit}", flush=True)
        elif line.startswith("Installing collected packages"):
            print(f"  unpacking {line.count(',') + 1} packages", flush=True)
    return said


def _stopped(number: int, _frame: FrameType | None) -> None:
    for other in _STOPS:
        signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + number)


def _end(process: subprocess.Popen[str]) -> None:
    """Stop pip and what it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _dots(ended: threading.Event) -> None:
    while not ended.wait(_TICK):
        print(".", end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
