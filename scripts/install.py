"""Install with pip, with signs of life: `python scripts/install.py WORD ...`, with the words that `pip install` takes.

A line for each large download, a dot for every ten seconds of silence, and all that pip said if it fails. It needs nothing but Python.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time

_LARGE = re.compile(r"Downloading (\S+?)-(\d[^-\s]*)-\S+ \((\d+(?:\.\d+)?) (MB|GB)\)")
_LEAST = 20  # MB of a download that has a line of its own
_TICK = 10.0  # seconds


def main() -> int:
    """Run pip; return its exit status."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", *sys.argv[1:]]
    started = time.monotonic()
    print("installing PyTorch and the rest, some GB; one to five minutes, once", flush=True)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    ended = threading.Event()
    threading.Thread(target=_dots, args=(ended,), daemon=True).start()
    said = []
    assert process.stdout is not None  # noqa: S101 - it is a pipe
    for line in process.stdout:
        said.append(line)
        if found := _LARGE.search(line):
            name, version, size, unit = found.groups()
            if float(size) * (1000 if unit == "GB" else 1) >= _LEAST:
                print(f"  {name} {version}: {size} {unit}", flush=True)
        elif line.startswith("Installing collected packages"):
            print(f"  unpacking {line.count(',') + 1} packages", flush=True)
    status = process.wait()
    ended.set()
    if status:
        print("".join(said), file=sys.stderr)
    else:
        print(f"installed in {time.monotonic() - started:.0f} s", flush=True)
    return status


def _dots(ended: threading.Event) -> None:
    while not ended.wait(_TICK):
        print(".", end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
