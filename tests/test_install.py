"""The script that installs: signs of life while pip is silent, what pip said if it fails, and no pip that outlives it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
DRIVER = f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); import install; install._TICK = 0.1; sys.exit(install.main())"
DOWNLOADS = """
print("  Downloading torch-2.14.1-cp311-cp311-manylinux_2_28_x86_64.whl (915.5 MB)")
print("  Downloading nvidia_cublas-13.1-py3-none-any.whl (1.2 GB)")
print("  Downloading click-8.2.0-py3-none-any.whl (0.1 MB)")
print("Installing collected packages: a, b, c")
"""
FAILS = """
print("\\n".join(f"line {number}" for number in range(100)))
print("ERROR: no such package", file=sys.stderr)
sys.exit(3)
"""
STUBBORN = """
import os, signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open("pids", "w").write(f"{os.getpid()} {child.pid}")
time.sleep(60)
"""


def start(folder: Path, pip: str, driver: str = DRIVER) -> subprocess.Popen[str]:
    """Start the script, with a module of this content in place of pip."""
    (folder / "pip").mkdir()
    (folder / "pip" / "__init__.py").touch()
    (folder / "pip" / "__main__.py").write_text(f"import sys\n{pip}")
    command = [sys.executable, "-c", driver, "-e", "."]
    own = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.Popen(command, cwd=folder, env=own, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_signs_of_life_are_printed_while_pip_is_silent(tmp_path: Path) -> None:
    silent, _ = start(tmp_path, "import time; time.sleep(1)").communicate(timeout=30)
    first, dots = silent.splitlines()
    assert first.startswith("installing PyTorch")
    assert re.fullmatch(r"\.{5,}installed in \d s", dots)


def test_large_downloads_have_a_line_and_small_ones_none(tmp_path: Path) -> None:
    out, err = start(tmp_path, DOWNLOADS).communicate(timeout=30)
    assert [line.lstrip(".") for line in out.splitlines()[1:4]] == [
        "  torch 2.14.1: 915.5 MB",
        "  nvidia_cublas 13.1: 1.2 GB",
        "  unpacking 3 packages",
    ]
    assert "click" not in out + err


def test_pip_is_given_the_words(tmp_path: Path) -> None:
    _, err = start(tmp_path, "sys.exit(' '.join(sys.argv[1:]))").communicate(timeout=30)
    assert err.split()[0] == "install"
    assert err.split()[-2:] == ["-e", "."]


def test_a_failure_passes_on_the_status_and_the_last_lines(tmp_path: Path) -> None:
    process = start(tmp_path, FAILS)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 3
    assert "installed" not in out
    assert {"line 99", "ERROR: no such package"} <= set(err.splitlines())
    assert "line 1" not in err.splitlines()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_pip_and_what_it_started(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, STUBBORN, DRIVER.replace("install._TICK", "install._PATIENCE"))
    pids = waited(tmp_path / "pids")
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert gone(pids)


def waited(file: Path) -> list[int]:
    """Return the processes that the stubborn pip names."""
    for _ in range(300):
        if file.exists() and len(pids := file.read_text().split()) == 2:
            return [int(pid) for pid in pids]
        time.sleep(0.05)
    raise AssertionError("pip did not start")


def gone(pids: list[int]) -> bool:
    """Check that no process of these runs; one that ended but was not waited for counts as gone."""
    for _ in range(100):
        states = [Path(f"/proc/{pid}/stat") for pid in pids]
        if not any(state.exists() and state.read_text().split()[2] != "Z" for state in states):
            return True
        time.sleep(0.05)
    return False
