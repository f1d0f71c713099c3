"""Checks for optional dependencies; the error says how to install a missing one."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from visattn.errors import MissingExtra

EXTRAS = {  # extra: a module that it brings
    "flow": "scipy",
    "figures": "matplotlib",
    "attribution": "captum",
    "cam": "pytorch_grad_cam",
    "tensorboard": "tensorboard",
    "caption-metrics": "pycocoevalcap",
    "hf": "transformers",
    "clip": "open_clip",
    "notebook": "anywidget",
    "embed": "sklearn",
    "umap": "umap",
    "video": "av",
    "segmentation": "h5py",
    "ray": "ray",
}
_PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"  # only a source checkout has it beside the package


def installed(module: str) -> bool:
    """Check whether an optional dependency is installed."""
    return find_spec(module) is not None


def need(module: str, extra: str, what: str) -> None:
    """Check that an optional dependency is installed.

    Raises:
        MissingExtra: If it is not installed.
    """
    if not installed(module):
        raise MissingExtra(f"{what} needs {module}, which is not installed. {installing(extra)}")


def installing(extra: str) -> str:
    """Return the line that installs an extra."""
    if _PROJECT.is_file():
        return f'In the source folder of visattn, run: pip install -e ".[{extra}]"'
    return f'Run: pip install "visattn[{extra}]"'
