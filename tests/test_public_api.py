"""The public door: what is behind it, and that it opens without torch."""

from __future__ import annotations

import subprocess
import sys
from types import FunctionType

import pytest

import visattn

PUBLIC = """
AttentionMap AttentionRecord Explanation FeatureRecord Heatmap Recording TokenLayout VisattnError __version__ attach captioning
capture colorize contact_sheet data evaluation explain families filmstrip intervene load_image load_model methods models nn
normalize overlay prepare prepare_batch training
""".split()  # noqa: SIM905 - one name after another reads best


def test_public_names_are_frozen() -> None:
    assert visattn.__all__ == PUBLIC
    assert dir(visattn) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(visattn, name) is not None


@pytest.mark.parametrize("name", ["capture", "explain", "overlay", "normalize", "contact_sheet"])
def test_functions_stay_functions_after_everything_was_imported(name: str) -> None:
    for public in PUBLIC:
        getattr(visattn, public)
    assert isinstance(getattr(visattn, name), FunctionType)
    assert getattr(visattn, name) is getattr(visattn, name)


def test_import_leaves_torch_and_numpy_out() -> None:
    code = "import sys, visattn; print([m for m in ('torch', 'numpy', 'PIL', 'cv2', 'timm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'rolout'"):
        visattn.rolout  # noqa: B018
