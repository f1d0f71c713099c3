"""Tiny models of transformers: every attention call is placed, and lit cells are found where the recording says."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import visattn
from tests.samples import sampled

ROOT = Path(__file__).parents[2]
QUICK = {
    "BlipForConditionalGeneration": "2 self, 2 self among words, 2 cross",
    "CLIPModel": "2 self, 2 self among words",
    "DetrForObjectDetection": "2 self, 2 self among pool, 2 pool",
    "Qwen3VLForConditionalGeneration": "4 self",
    "RTDetrForObjectDetection": "1 self, 2 self among pool, 2 sampled",
    "SegformerForImageClassification": "6 cross, 2 self",
    "ViltForQuestionAnswering": "2 self",
}
FULL = {
    "LlavaNextForConditionalGeneration": "4 self",
    "Qwen2_5_VLForConditionalGeneration": "4 self",
    "Sam2Model": "9 self, 3 cross, 2 self among pool, 3 pool, 2 cross among pool",
    "TimesformerModel": "4 self",
    "VideoMAEForVideoClassification": "2 self",
    "Florence2ForConditionalGeneration": "7 self, 5 channel, 2 self among words, 2 cross",
    "VisionEncoderDecoderModel": "2 self, 2 self among words, 2 cross",
}

FAR = {  # the attention behind a deformable encoder, whose points lie beyond the cells of their tokens
    "Mask2FormerForUniversalSegmentation": ("8 self, 2 unplaced", "up to 16.0 cells away"),
    "OneFormerForUniversalSegmentation": ("8 self, 6 unplaced", "up to 16.0 cells away"),
}


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    models, sweep = import_module("libraries.transformers_models"), import_module("libraries.sweep")

    def made(name: str) -> dict[str, Any]:
        model, inputs = models.build(name)
        return dict(sweep.examined(model, inputs, sweep.output(model, inputs)))

    return made


def placed(row: dict[str, Any], kinds: str) -> bool:
    return bool(row["calls"] == row["placed"] and is_true(row, kinds))


def is_true(row: dict[str, Any], kinds: str) -> bool:
    right, lit = row["lit cells"].split(" of ")
    assert row["kinds"] == kinds
    assert row["output"] == "same"
    assert not row["wrong"]
    return int(right) == int(lit) > 0


@pytest.mark.parametrize("name", sampled(QUICK, 3))
def test_all_calls_are_placed_and_lit_cells_are_found(name: str, row: Callable[[str], dict[str, Any]]) -> None:
    assert placed(row(name), QUICK[name])


@pytest.mark.full
@pytest.mark.parametrize("name", sampled(FULL, 4))
def test_all_calls_of_larger_models_are_placed(name: str, row: Callable[[str], dict[str, Any]]) -> None:
    assert placed(row(name), FULL[name])


@pytest.mark.full
@pytest.mark.parametrize("name", sampled(FAR, 4))
def test_attention_behind_points_that_lie_far_is_refused(name: str, row: Callable[[str], dict[str, Any]]) -> None:
    kinds, reason = FAR[name]
    made = row(name)
    assert is_true(made, kinds)
    assert reason in made["refused"]


def test_word_maps_of_blip_equal_its_own_cross_attentions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    model, inputs = import_module("libraries.transformers_models").build("BlipForConditionalGeneration")
    with torch.no_grad(), visattn.capture(model) as recording:
        model(**inputs)
        seen = model.vision_model(inputs["pixel_values"]).last_hidden_state
        own = model.text_decoder(inputs["input_ids"], encoder_hidden_states=seen, output_attentions=True).cross_attentions
    found = [record for record in recording.select(forward=0) if record.kind == "cross"]
    assert len(found) == len(own) > 0
    for record, weights in zip(found, own, strict=True):
        assert torch.allclose(record.operator.dense(), weights, atol=1e-5)
    word = visattn.methods.attention(recording.select(forward=0), query="word:2")
    assert torch.allclose(word.values.flatten(2), own[-1][:, :, 2, 1:], atol=1e-5)  # without the class token
