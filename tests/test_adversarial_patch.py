"""The adversarial patches: they cover what the mask says, and turn as many scenes as the page tells."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import visattn
from tests.conftest import Figures

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[1]
NETWORKS = "scenes_cnn", "scenes_vit"


@pytest.fixture(scope="module")
def script() -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(ROOT / "scripts"))
        yield importlib.import_module("adversarial_patch")


def test_a_patch_covers_the_pixels_of_its_mask_alone(script: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    images, patch = torch.rand(9, 3, 20, 24, generator=generator), torch.rand(3, 5, 5, generator=generator)
    covered, masks = script.put(images, patch, generator)
    corners = set()
    for image, before, mask in zip(covered, images, masks, strict=True):
        rows, columns = np.nonzero(mask.numpy())
        top, left = int(rows.min()), int(columns.min())
        corners.add((top, left))
        assert len(rows) == 25
        for row in range(20):
            for column in range(24):
                inside = top <= row < top + 5 and left <= column < left + 5
                expected = patch[:, row - top, column - left] if inside else before[:, row, column]
                assert bool(mask[row, column]) == inside
                assert torch.equal(image[:, row, column], expected)
    assert len(corners) > 5


def test_pixels_are_prepared_as_photos_are(script: ModuleType) -> None:
    model = visattn.load_model("scenes_cnn")
    images, _ = script.scenes(2, 5)
    photos = [Image.fromarray((image.permute(1, 2, 0) * 255).round().byte().numpy()) for image in images]
    with torch.no_grad():
        torch.testing.assert_close(script.seen(model)(images), model(visattn.prepare_batch(photos, model).pixels))


def test_training_lowers_the_cross_entropy(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    model = visattn.load_model("scenes_cnn").requires_grad_(False)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(script, "TRAIN", 200)
        patch = script.trained(model, 20)
    first, last = (float(found) for found in re.findall(r"cross-entropy ([\d.]+)", capsys.readouterr().err))
    assert last < first
    assert patch.shape == (3, 16, 16)
    assert 0 <= float(patch.min()) < float(patch.max()) <= 1


@pytest.mark.parametrize("name", NETWORKS)
def test_a_shipped_patch_turns_as_many_scenes_as_the_page_tells(script: ModuleType, name: str, figures: Figures) -> None:
    model = visattn.load_model(name).requires_grad_(False)
    patch = script.pil_to_tensor(Image.open(ROOT / "models" / "patches" / f"{name}.png")).float() / 255
    shares = script.turning(model, patch, 200)
    page = (ROOT / "docs" / "known_truth.md").read_text(encoding="utf-8")
    told = float(re.search(rf"\| {name} \| the patch \| ([\d.]+)%", page)[1])  # type: ignore[index]
    found = float(shares["the patch"].partition("%")[0])
    figures(f"{name}: scenes that the patch turns, of 200, %", found, f"{told} +- 12")
    assert found == pytest.approx(told, abs=12)  # four standard errors of about 170 scenes


def test_the_table_tells_every_method_and_its_controls(script: ModuleType) -> None:
    told = script.looking("cnn", 3)
    assert told.startswith("3 scenes that the patch turned.")
    assert all(word in told for word in ("| gradcam |", "| captum.saliency |", "cause without effect", "found"))
