"""The wheel, built from the commit and installed with all dependencies into a clean environment; exits 1 if a command fails there."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from visattn.data import photo_path

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Build the wheel, install it with all dependencies into a new environment, and run it from another folder."""
    failed = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tracked = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
        (folder / "source").mkdir()
        subprocess.run(["tar", "-x", "-C", str(folder / "source")], input=tracked, check=True)
        subprocess.run([sys.executable, "-m", "build", "--wheel", str(folder / "source")], check=True, capture_output=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True)
        python = str(folder / "env" / "bin" / "python")
        wheel = str(next((folder / "source" / "dist").glob("*.whl")))
        subprocess.run([python, "-m", "pip", "install", "--quiet", wheel], check=True, capture_output=True)
        photo = str(photo_path("rocket"))
        for command in (
            ["-c", "import visattn.models"],
            ["-m", "visattn", "demo", "-q", "-o", str(folder / "demo")],
            [
                "-m",
                "visattn",
                "overlay",
                photo,
                "--model",
                "vit_tiny_patch16_224",
                "--weights",
                "none",
                "-q",
                "-o",
                str(folder / "o.png"),
            ],
        ):
            done = subprocess.run([python, *command], cwd=folder, capture_output=True, text=True, check=False)
            print(
                f"exit {done.returncode}: {' '.join(command[:3])} {done.stderr.strip().splitlines()[-1:] if done.returncode else ''}"
            )
            failed += done.returncode != 0
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
