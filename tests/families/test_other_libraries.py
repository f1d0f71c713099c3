"""Small models of torchvision, open_clip and diffusers: every attention call is placed, and lit cells are found where recorded."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.samples import sampled

ROOT = Path(__file__).parents[2]
QUICK = {
    ("torchvision", "vit_b_16"): "2 self",
    ("open_clip", "ViT-B-32"): "2 self, 2 self among words",
    ("diffusers", "DiTTransformer2DModel"): "2 self",
    ("diffusers", "UNet2DModel"): "4 self",
}
FULL = {
    ("torchvision", "swin_v2_t"): "8 self",
    ("torchvision", "maxvit_t"): "16 self",
    ("torchvision", "mvit_v2_s"): "14 cross, 2 self",
    ("torchvision", "swin3d_t"): "8 self",
    ("open_clip", "RN50"): "1 self, 2 self among words",
    ("open_clip", "coca_ViT-B-32"): "2 self, 1 pool, 2 self among pool, 2 self among words, 2 cross among pool",
    ("open_clip", "ViT-B-16-SigLIP"): "2 self, 1 pool, 2 self among words",
    ("open_clip", "ViTamin-S"): "2 self, 2 self among words",
    ("diffusers", "SD3Transformer2DModel"): "2 self",
    ("diffusers", "PixArtTransformer2DModel"): "2 self, 2 cross among words",
    ("diffusers", "UNet2DConditionModel"): "4 self, 4 cross among words",
    ("diffusers", "AutoencoderKL"): "2 self",
}


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], dict[str, Any]]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    sweep = import_module("libraries.sweep")

    def made(library: str, name: str) -> dict[str, Any]:
        model, inputs = import_module(f"libraries.{library}_models").build(name)
        return dict(sweep.examined(model, inputs, sweep.output(model, inputs)))

    return made


def check(row: dict[str, Any], kinds: str) -> None:
    right, lit = row["lit cells"].split(" of ")
    assert row["kinds"] == kinds
    assert row["output"] in ("same", "same without fast path")  # of nn.MultiheadAttention
    assert not row["wrong"]
    assert row["calls"] == row["placed"]
    assert int(right) == int(lit) > 0


@pytest.mark.parametrize(("library", "name"), QUICK)
def test_all_calls_are_placed(library: str, name: str, row: Callable[[str, str], dict[str, Any]]) -> None:
    check(row(library, name), QUICK[library, name])


@pytest.mark.full
@pytest.mark.parametrize(("library", "name"), sampled(FULL, 6))
def test_all_calls_of_larger_models_are_placed(library: str, name: str, row: Callable[[str, str], dict[str, Any]]) -> None:
    check(row(library, name), FULL[library, name])
