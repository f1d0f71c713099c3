"""Kept results of proofs: interrupted runs go on, and only what read a changed file runs again."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DRIVER = f"""
import sys
sys.path.insert(0, {str(ROOT / "scripts")!r})
from pathlib import Path
from evidence.running import Evidence, Proof
root = Path(__file__).parent
proofs = {{
    "reads": Proof("reads.py"),
    "imports": Proof("imports.py"),
    "lists": Proof("lists.py"),
    "child": Proof("child.py", alone=True),
    "fails": Proof("fails.py", alone=True),
    "all": Proof("whole.py", alone=True, whole=True),
}}
evidence = Evidence(proofs, root, root / "results")
try:
    evidence.run(list(proofs))
except KeyboardInterrupt:
    pass
print("TABLE", *evidence.table(list(proofs))[0], sep="\\n")
"""
PROOFS = {
    "reads.py": "print(open('data/a.txt').read())",
    "imports.py": "import part.inner",
    "lists.py": "import os\nprint(sorted(os.listdir('data')))",
    "child.py": "import os\npid = os.fork()\nif pid == 0:\n    open('data/b.txt').read()\n    os._exit(0)\nos.wait()",
    "fails.py": "raise SystemExit(int(open('data/status.txt').read()))",
    "whole.py": "",
    "part/__init__.py": "",
    "part/inner.py": "NUMBER = 1",
    "part/other.py": "NUMBER = 2",
    "data/a.txt": "a",
    "data/b.txt": "b",
    "data/status.txt": "3",
    "driver.py": DRIVER,
    ".gitignore": "results/\nruns/\n__pycache__/\n",
}
_COUNTED = "import os, time\nos.makedirs('runs', exist_ok=True)\nopen(f'runs/{os.path.basename(__file__)}.{time.time_ns()}', 'w').close()\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Write a small project with proofs, each of which notes that it ran."""
    for name, text in PROOFS.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        counted = _COUNTED if "/" not in name and name.endswith(".py") and name != "driver.py" else ""
        file.write_text(counted + text)
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "x"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def ran(project: Path) -> list[str]:
    """Return the proofs that ran since the last call."""
    files = sorted((project / "runs").glob("*")) if (project / "runs").exists() else []
    for file in files:
        file.unlink()
    return sorted({file.name.partition(".")[0] for file in files})


def table(project: Path) -> list[str]:
    """Run the driver, and return the lines of its table without times."""
    done = subprocess.run([sys.executable, "driver.py"], cwd=project, check=True, capture_output=True, text=True, timeout=120)
    lines = done.stdout.partition("TABLE\n")[2].splitlines()
    return [re.sub(r"\s+\d+\.\d min.*", "", line) for line in lines]


def test_only_what_read_a_changed_file_runs_again(project: Path) -> None:
    first = table(project)
    assert ran(project) == ["child", "fails", "imports", "lists", "reads", "whole"]
    assert [line.split()[0] for line in first if " ok" in line] == ["reads", "imports", "lists", "child", "all"]
    assert any(line.startswith("fails") and "status 3" in line for line in first)
    assert table(project) == first
    assert ran(project) == ["fails"], "a proof that failed runs again, all others are kept"
    changes = {
        "data/a.txt": ["fails", "reads", "whole"],
        "part/inner.py": ["fails", "imports", "whole"],
        "part/other.py": ["fails", "whole"],
        "data/b.txt": ["child", "fails", "whole"],
        "data/new.txt": ["fails", "lists", "whole"],
        "reads.py": ["fails", "reads", "whole"],
    }
    for name, expected in changes.items():
        file = project / name
        file.write_text((file.read_text() if file.exists() else "") + "\n")
        table(project)
        assert ran(project) == expected, name
    (project / "data/status.txt").write_text("0")
    assert "6 of 6 proofs hold" in table(project)[-1]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_goes_on_to_the_table_of_one_run(project: Path, how: signal.Signals) -> None:
    (project / "data/status.txt").write_text("0")
    whole = table(project)
    ran(project)
    for file in (project / "results").glob("*"):
        file.unlink()
    names = ("reads.py", "lists.py", "child.py")
    bodies = {name: (project / name).read_text() for name in names}
    for name in names:  # each waits for a run that interrupts it
        (project / name).write_text(f"{bodies[name]}\nimport os, time\nwhile not os.path.exists('go/{name}'): time.sleep(0.02)\n")
    (project / ".gitignore").write_text("results/\nruns/\ngo/\n__pycache__/\n")
    (project / "go").mkdir()
    ignored = "trap '' INT; " if how is signal.SIGTERM else ""  # as in a script's background
    for name in names:
        ran(project)  # an earlier run may have begun this proof too
        with subprocess.Popen(
            ["sh", "-c", f"{ignored}exec {sys.executable} driver.py"], cwd=project, stdout=subprocess.PIPE, text=True
        ) as process:
            deadline = time.monotonic() + 60
            while not any(file.name.startswith(name) for file in (project / "runs").glob("*")) and time.monotonic() < deadline:
                time.sleep(0.02)
            process.send_signal(how)
            try:
                out, _ = process.communicate(timeout=60)
            finally:
                process.kill()
        assert f"{name.removesuffix('.py')} " in out
        assert "6 of 6" not in out
        assert not list((project / "results").glob("*.tmp"))
        (project / "go" / name).touch()
    assert table(project) == whole
    ran(project)
    assert table(project) == whole
    assert not ran(project)
