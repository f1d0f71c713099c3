"""Start and end of a command's process."""

from __future__ import annotations

import gc
import subprocess
import sys

REPORT = "import atexit, gc, sys; atexit.register(lambda: print(gc.get_threshold()[0], gc.get_freeze_count() > 0)); "
COMMAND = "from visattn.cli import main; sys.argv = ['visattn', '--version']; main()"
CALL = "from visattn.cli import main; main(['--version'])"


def test_only_a_command_of_its_own_process_collects_garbage_rarely() -> None:
    ends = []
    for script in (COMMAND, CALL):
        done = subprocess.run([sys.executable, "-c", REPORT + script], capture_output=True, text=True, check=True)
        ends.append(done.stdout.splitlines()[-1])
    assert ends == ["10000 True", f"{gc.get_threshold()[0]} False"]
