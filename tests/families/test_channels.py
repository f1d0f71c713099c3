"""Checkpoints whose number of input channels is not that of a photo raise an error of one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.cli.test_commands import Run, run
from visattn.core.families import input_spec

__all__ = ["run"]


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


@pytest.mark.full
@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224"])
@pytest.mark.parametrize("channels", [0, 2, 4, 5, 16, 17, 48, 192])
def test_weights_for_other_channel_counts_raise_a_one_line_error(
    run: Run, photo: Path, tmp_path: Path, name: str, channels: int
) -> None:
    tensors = timm.create_model(name).state_dict()
    first = "conv1.0.weight" if name == "resnet10t" else "patch_embed.proj.weight"
    size = tensors[first].shape
    save_file(tensors | {first: torch.zeros(size[0], channels, *size[2:])}, tmp_path / "weights.safetensors")
    code, out, err = run("overlay", photo, "--model", name, "--weights", "weights.safetensors", "-o", "out.png", "-q")
    assert (code, out) == (4, "")
    assert err.count("\n") == 1
    assert str(channels) in err
    assert not Path("out.png").exists()


@pytest.mark.parametrize(("name", "channels"), [("tresnet_m", 3), ("resnet10t", 3)])
def test_stem_that_rearranges_pixels_takes_three_channels(name: str, channels: int) -> None:
    assert input_spec(timm.create_model(name)).channels == channels


def test_input_spec_gives_the_number_of_input_channels() -> None:
    assert [input_spec(timm.create_model("resnet10t", in_chans=count)).channels for count in (1, 3, 5, 17, 48)] == [
        1,
        3,
        5,
        17,
        48,
    ]
