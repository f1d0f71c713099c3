"""Processes of the benchmark, and the environment of its peers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "scripts"
PEERS = ROOT / ".bench" / "peers"
ALLOCATORS: dict[str, dict[str, str]] = {  # settings of glibc's malloc for a process
    "keeps": {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_MAX_": "0"},
    "apart": {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
    "default": {},
}
_PEERS = (
    "grad-cam==1.5.7",
    "torchcam==0.5.0",
    "torchxai-explain==0.3.0",
    "fast-vit-rollout==0.1.1",
)  # installed without dependencies, which would include a second PyTorch
_THEIR_NEEDS = ("matplotlib", "scikit-learn", "ttach")  # what their imports need in addition to the shared packages


class NotMeasured(Exception):
    """A part of the benchmark could not run; the message states why and what to do."""


def run_json(python: str, part: str, *arguments: str, allocator: str = "default") -> Any:  # noqa: ANN401
    """Run a part of the benchmark in its own process and return the JSON that it prints.

    Raises:
        NotMeasured: If the process fails.
    """
    command = [python, "-m", part, *arguments]
    env = (
        os.environ
        | ALLOCATORS[allocator]
        | {"PYTHONPATH": os.pathsep.join(filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")]))}
    )
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=env)
    if done.returncode != 0:
        raise NotMeasured(f"{part} {' '.join(arguments)} ended with status {done.returncode}; its message is above.")
    return json.loads(done.stdout)


def peers_python() -> Path:
    """Return the interpreter of the peers' environment; create it on first use. PyTorch, OpenCV and visattn are shared with ours.

    Raises:
        NotMeasured: If the peers cannot be installed.
    """
    python = PEERS / "bin" / "python"
    ready = PEERS / ".ready"
    wanted = "\n".join((*_PEERS, *_THEIR_NEEDS, sys.version))
    if ready.exists() and ready.read_text() == wanted:
        return python
    progress("installing the peers into .bench/peers (some 170 MB)")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1", "--timeout", "15"]
    steps = [[sys.executable, "-m", "venv", "--clear", str(PEERS)], [*pip, *_THEIR_NEEDS], [*pip, "--no-deps", *_PEERS]]
    for number, step in enumerate(steps):
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            reason = (done.stderr.strip() or done.stdout.strip() or "no reason given").splitlines()[-1]
            raise NotMeasured(
                f"the peers {' and '.join(_PEERS)} cannot be installed ({reason}). Run this once where a package index can be "
                "reached; the other parts need none: --only time, --only memory."
            )
        if number == 0:
            site = next((PEERS / "lib").glob("python*/site-packages"))
            (site / "shared.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    ready.write_text(wanted)
    return python


def settings(allocator: str) -> str:
    """Return an allocator's environment variables as shell assignments."""
    return " ".join(f"{name}={value}" for name, value in ALLOCATORS[allocator].items())


def progress(text: str) -> None:
    """Print on stderr what is being measured."""
    print(f"  ... {text}", file=sys.stderr, flush=True)
