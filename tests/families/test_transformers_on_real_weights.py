"""DINOv2 with its trained weights in the code of transformers: maps equal those of the eager implementation and those of timm's code."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import visattn
from tests.conftest import Figures, Seen
from tests.samples import sampled
from visattn.core.pipeline.answering import answer
from visattn.core.pipeline.question import ask
from visattn.core.pipeline.recordings import recorded

ROOT = Path(__file__).parents[2]


@pytest.fixture
def twin(dinov2: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return import_module("libraries.dinov2").twin(dinov2)


def test_maps_equal_the_eager_implementation_and_those_of_timms_code(twin: Any, seen: Seen, figures: Figures) -> None:
    prepared, of_timm = seen("astronaut")
    with torch.no_grad(), visattn.capture(twin) as recording:
        twin(prepared.pixels)
    assert [record.keys for record in recording] == [record.keys for record in of_timm]
    twin.set_attn_implementation("eager")
    with torch.no_grad():
        eager = twin(prepared.pixels, output_attentions=True).attentions
    twin.set_attn_implementation("sdpa")
    for record, other, theirs in zip(recording, of_timm, eager, strict=True):
        rows = torch.tensor([0, 100, 700])
        mine = record.operator.rows(rows)
        assert torch.allclose(mine, theirs[:, :, rows], atol=1e-4)
        assert torch.allclose(mine, other.operator.rows(rows), atol=1e-4)
    worst = max(
        float((record.operator.rows(rows) - theirs[:, :, rows]).abs().max())
        for record, theirs in zip(recording, eager, strict=True)
    )
    figures("DINOv2 in transformers: weights against its eager implementation", worst, "<= 1e-4")


@pytest.mark.parametrize("method", sampled(["rollout", "attention", "norm_attention", "pca", "similarity"], 3))
def test_every_method_gives_the_map_of_timms_code(method: str, twin: Any, dinov2: nn.Module) -> None:
    prepared = visattn.prepare("photo:coffee", dinov2, img_size=(518, 518))  # both have the position embedding of this size
    query = {"query": "pixel:300,170"} if method == "similarity" else {}
    one, other = (
        recorded(model, prepared, ask(method, query | ({"layer": layer} if method in ("pca", "similarity") else {})))
        for model, layer in ((dinov2, "blocks.11"), (twin, "encoder.layer.11"))
    )
    maps = [answer(found.recording, prepared, settled).map.values for settled, found in (one, other)]
    assert maps[0].shape == maps[1].shape
    assert torch.allclose(maps[0], maps[1], atol=1e-3 * float(maps[0].abs().max()))
