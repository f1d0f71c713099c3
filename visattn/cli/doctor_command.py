"""Command `visattn doctor`: a check of the installation."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Callable
from importlib import metadata

import click

from visattn._support.extras import EXTRAS, installed, installing
from visattn._support.files import cache_folder
from visattn._support.tables import to_json, to_text
from visattn.core.command_line.late import Command
from visattn.core.command_line.shared_options import talk_options
from visattn.errors import VisattnError


@click.command("doctor", cls=Command)
@click.option("--imports", is_flag=True, help="Also import PyTorch and look for a GPU, which takes seconds.")
@click.option("--network", is_flag=True, help="Also check that the Hugging Face Hub can be reached.")
@talk_options
def doctor_command(imports: bool, network: bool, as_json: bool, quiet: bool, debug: bool) -> int:
    """Check the installation; exit with code 1 if something required is missing. The network is not used without --network."""
    rows = []
    for name, needed, check in _CHECKS:
        flag = {_devices: "--imports", _hub: "--network"}.get(check, "")
        if flag and not {"--imports": imports, "--network": network}[flag]:
            rows.append({"check": name, "state": "not checked", "detail": f"pass {flag} to check it"})
            continue
        try:
            rows.append({"check": name, "state": "ok", "detail": check()})
        except (VisattnError, OSError, ImportError, RuntimeError) as error:
            rows.append({"check": name, "state": "missing" if needed else "absent", "detail": str(error)})
    click.echo(to_json(rows) if as_json else to_text(rows).rstrip())
    return int(any(row["state"] == "missing" for row in rows))


def _python() -> str:
    return f"{platform.python_version()} on {platform.platform()}"


def _torch() -> str:
    return ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "torchvision", "timm"))


def _devices() -> str:
    import torch

    if torch.cuda.is_available():
        return f"{torch.get_num_threads()} threads, CUDA {torch.cuda.get_device_name()}"
    if torch.version.cuda is None and torch.version.hip is None:
        why = "this build of PyTorch has no CUDA; for a GPU, install one that has, see pytorch.org"
    else:
        why = f"PyTorch is built for CUDA {torch.version.cuda}, and no GPU or driver for it is found"
    return f"{torch.get_num_threads()} threads, CPU only: {why}"


def _opencv() -> str:
    from visattn._support.opencv import cv2

    builds = [name for name in ("opencv-python", "opencv-python-headless") if _installed(name)]
    both = "; both builds are installed: removing one breaks the other" if len(builds) > 1 else ""
    return f"{cv2.__version__} ({', '.join(builds) or 'not from a wheel'}){both}"


def _pillow() -> str:
    from PIL import features

    lacking = [name for name in ("webp", "avif", "freetype2") if not features.check(name)]
    return f"{metadata.version('pillow')}" + (f", without {', '.join(lacking)}" if lacking else "")


def _cache() -> str:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder):
        return f"{folder} can be written"


def _offline() -> str:
    from visattn.core.loading import offline

    if not (there := [str(path) for model in offline.SOURCES if (path := offline.cached(model)).exists()]):
        raise FileNotFoundError("not downloaded yet; visattn demo downloads them if the Hugging Face Hub cannot be reached")
    return ", ".join(there)


def _hub() -> str:
    from visattn.core.command_line.shared_options import DEFAULT_MODEL
    from visattn.core.loading import timm_models

    return timm_models.reach_hub(DEFAULT_MODEL)


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _extras() -> str:
    absent = {extra: module for extra, module in EXTRAS.items() if not installed(module)}
    if not absent:
        return f"all of {len(EXTRAS)} are installed"
    lines = "; ".join(f"{extra} ({module})" for extra, module in absent.items())
    raise FileNotFoundError(f"not installed: {lines}. {installing('NAME')}")


def _networks() -> str:
    from visattn.core.loading.networks import NETWORKS, network_path

    return str(network_path(NETWORKS[0]).parent)


_CHECKS: tuple[tuple[str, bool, Callable[[], str]], ...] = (
    ("python", True, _python),
    ("torch", True, _torch),
    ("devices", True, _devices),
    ("opencv", True, _opencv),
    ("pillow", True, _pillow),
    ("cache", True, _cache),
    ("extras", False, _extras),
    ("small networks", False, _networks),
    ("offline weights", False, _offline),
    ("model hub", False, _hub),
)
