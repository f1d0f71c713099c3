"""Small trained networks that come with the package `visattn-networks`; each has a model card, `README.md`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from visattn._support.checks import one_of
from visattn._support.extras import need
from visattn._support.files import exists

__all__ = ["CAPTIONERS", "NETWORKS", "captioner_folder", "cause_folder", "network_path"]

NETWORKS = (  # classifiers of `visattn.data.scenes`
    "scenes_cnn",
    "scenes_cnn_shortcut",
    "scenes_predictive_vit",
    "scenes_sliding_vit",
    "scenes_vit",
    "scenes_vit_shortcut",
)
CAPTIONERS = ("captions_soft", "captions_hard", "captions_local", "captions_uniform")  # of the same scenes
_PACKAGE = "visattn_networks"
_CHECKOUT = Path(__file__).resolve().parents[3] / "models"  # where the package is made from


def network_path(name: str) -> Path:
    """Return the folder of a network in `NETWORKS` or `CAPTIONERS`.

    Raises:
        OptionError: If there is no network of that name.
        MissingExtra: If the package with the networks is not installed.
    """
    return _folder(one_of(name, (*NETWORKS, *CAPTIONERS), "network"))


def cause_folder() -> Path:
    """Return the folder of the networks that decide by one known cause.

    Raises:
        MissingExtra: If the package with the networks is not installed.
    """
    return _folder("causes")


def _folder(name: str) -> Path:
    folder = _CHECKOUT / name
    if folder.is_dir():
        return folder
    need(_PACKAGE, "networks", f"the network {name}" if name in (*NETWORKS, *CAPTIONERS) else "networks of known causes")
    return Path(str(import_module(_PACKAGE).__file__)).parent / name


def captioner_folder(place: str | Path) -> Path:
    """Return the folder of a captioner: that of a name in `CAPTIONERS`, unless something of this name lies here; otherwise the path itself.

    Raises:
        MissingExtra: If the package with the networks is not installed.
    """
    return network_path(str(place)) if str(place) in CAPTIONERS and not exists(Path(place)) else Path(place)
