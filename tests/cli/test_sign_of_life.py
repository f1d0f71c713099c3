"""The line that a terminal shows while a command prints nothing."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

CODE = """
import sys, time
from visattn.cli.sign_of_life import sign_of_life
before = sys.stdout.write, sys.stderr.write
with sign_of_life():
    time.sleep(WAIT)
    print("done")
    print("warning", file=sys.stderr)
assert before == (sys.stdout.write, sys.stderr.write)
time.sleep(1.2)
print("after")
"""


def in_terminal(wait: float) -> str:
    """Run the code in a terminal, and return all that it wrote there."""
    process, terminal = pty.fork()
    if process == 0:
        os.execv(sys.executable, [sys.executable, "-c", CODE.replace("WAIT", str(wait))])
    written = b""
    while True:
        try:
            part = os.read(terminal, 1000)
        except OSError:  # the other end was closed
            break
        if not part:
            break
        written += part
    assert os.waitpid(process, 0)[1] == 0
    os.close(terminal)
    return written.decode()


def test_a_silent_command_counts_seconds_until_its_next_output() -> None:
    written = in_terminal(3.6)
    parts = written.split("\r\033[K")
    assert parts[0] == ""
    assert parts[1] == "visattn: working, 2 s"
    assert all(part.startswith("visattn: working, ") for part in parts[1:-1])
    assert parts[-1] == "done\r\nwarning\r\nafter\r\n"


def test_a_fast_command_writes_its_output_alone() -> None:
    assert in_terminal(0.2) == "done\r\nwarning\r\nafter\r\n"


def test_files_and_pipes_get_the_output_alone() -> None:
    done = subprocess.run([sys.executable, "-c", CODE.replace("WAIT", "3.6")], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("done\nafter\n", "warning\n")
