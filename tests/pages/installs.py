"""Run every installation command of the pages in fresh clones: `python -m tests.pages.installs`.

Each block marked *install* runs as printed in a clone of its own. In the first clone run, too, the single `pip install` lines inside of
texts, and the `make demo` of README.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.pages.blocks import PAGES, ROOT, blocks_of

_INLINE = re.compile(r"`(pip install [^`]*)`")


def main() -> int:
    """Print each block with its exit status and seconds; return 1 if one failed."""
    blocks = [(page.name, block.text) for page in PAGES for block in blocks_of(page) if block.mark == "install"]
    lines = dict.fromkeys(line for page in PAGES for line in _INLINE.findall(page.read_text()))
    failed = 0
    with tempfile.TemporaryDirectory() as place:
        for number, (page, text) in enumerate(blocks):
            clone = Path(place, str(number))
            subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
            failed += _run(f"{page}, its install block", text, clone)
            if number == 0:
                failed += sum(_run(line, f". .venv/bin/activate\n{line}", clone) for line in lines)
                failed += _run("make demo", "make demo", clone)
    print(f"{len(blocks) + len(lines) + 1} installations of {len(PAGES)} pages, {failed} failed")
    return int(failed > 0)


def _run(name: str, text: str, folder: Path) -> bool:
    """Run shell lines in a folder; return whether they failed."""
    own = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
    started = time.perf_counter()
    done = subprocess.run(["bash", "-euc", text], cwd=folder, env=own, capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1:] if done.returncode else ""
    print(f"exit {done.returncode}, {time.perf_counter() - started:.0f} s: {name} {last}", flush=True)
    return done.returncode != 0


if __name__ == "__main__":
    sys.exit(main())
