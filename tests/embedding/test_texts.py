"""Words of a text tower in the space: their states, places, spelling and padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
import transformers

from tests.embedding.test_gathering import PHOTOS
from tests.pipeline.test_prompts import saved
from visattn import embedding
from visattn.errors import OptionError

TEXTS = ["a dog", "a photo of a cat", "dog"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models") / "clip"


def layers_of(space: embedding.Space) -> list[embedding.LayerStates]:
    return [states for states in space.layers if states.tokens.words]


def test_words_are_those_of_the_tokenizer_with_the_states_of_the_model(folder: Path) -> None:
    model = saved(folder)
    space = embedding.gather(model, PHOTOS, texts=TEXTS, points=6)
    assert [states.layer for states in layers_of(space)] == [f"text_model.encoder.layers.{i}.self_attn" for i in range(3)]
    assert len(space.layers) == 6
    states = layers_of(space)[1]
    given = transformers.AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt")
    kept: list[Any] = []
    own = model.text_model.encoder.layers[1].self_attn
    handles = [part.register_forward_hook(lambda _m, _a, out: kept.append(out)) for part in (own.q_proj, own.k_proj)]
    with torch.no_grad():
        model.text_model(**{name: given[name] for name in ("input_ids", "attention_mask")})
    for handle in handles:
        handle.remove()
    length = given["input_ids"].shape[1]
    queries, keys = (each.view(3, length, 2, 8).permute(2, 0, 1, 3) for each in kept)
    real = given["attention_mask"].bool()
    for side, expected in (("queries", queries), ("keys", keys)):
        found = getattr(states, side).float().view(2, 3, length, 8)[:, real]
        scale = float((found * expected[:, real]).sum() / expected[:, real].square().sum())
        assert torch.allclose(found, expected[:, real] * scale, rtol=2e-3, atol=2e-3)
    tokens = states.tokens
    assert tokens.words[1] == ("<s>", "a", "photo", "of", "a", "cat", "</s>")
    assert tokens.words[2] == ("<s>", "dog", "</s>")
    assert tokens.column.view(3, length)[2].tolist() == [-1, 1, 2, *[-1] * (length - 3)]
    assert int(tokens.plain.sum()) == int(real.sum()) - 3  # all texts begin with <s>
    assert len(states.some) == int(real.sum())  # padding is not drawn
    assert any("bias or a mask" in note for note in states.notes)  # a word attends to those before it


def test_attention_of_a_word_is_that_of_the_model(folder: Path) -> None:
    states = layers_of(embedding.gather(saved(folder), PHOTOS, texts=TEXTS, points=6))[2]
    given = transformers.AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        out = saved(folder, "eager").text_model(
            input_ids=given["input_ids"], attention_mask=given["attention_mask"], output_attentions=True
        )
    dense = out.attentions[2]  # (texts, heads, L, L)
    length = dense.shape[-1]
    for number, at in enumerate(states.some.tolist()):
        assert torch.allclose(states.rows[:, number], dense[at // length, :, at % length], atol=1e-5)


def test_layers_whose_queries_are_not_known_are_left_out_and_named(folder: Path) -> None:
    space = embedding.gather(saved(folder, "eager"), PHOTOS, texts=TEXTS, points=6)
    (note,) = (note for note in space.provenance.notes if "left out" in note)
    assert "text_model.encoder.layers.0.self_attn" in note
    assert len(space.layers) == 3
    with pytest.raises(OptionError, match="queries and keys were not recorded"):
        embedding.gather(saved(folder, "eager"), PHOTOS, texts=TEXTS, points=6, layers="text_model.*")


def test_words_stand_beside_patches_in_numbers_and_files(folder: Path, tmp_path: Path) -> None:
    space = embedding.gather(saved(folder), PHOTOS, texts=TEXTS, points=30)
    assert {row["layer"] for row in embedding.head_numbers(space)} == {states.layer for states in space.layers}
    embedding.save_html(space, tmp_path / "space.html")
    embedding.save_npz(space, tmp_path / "space.npz")
    again = embedding.gather(saved(folder), PHOTOS, texts=TEXTS, points=30, keep=tmp_path / "kept")
    whole = embedding.gather(saved(folder), PHOTOS, texts=TEXTS, points=30, keep=tmp_path / "kept")
    assert [states.tokens.words for states in again.layers] == [states.tokens.words for states in whole.layers]
    other = embedding.gather(saved(folder), PHOTOS, texts=TEXTS[::-1], points=30, keep=tmp_path / "kept")
    assert layers_of(other)[0].tokens.words[0] == ("<s>", "dog", "</s>")


def test_texts_of_open_clip_end_with_their_last_token() -> None:
    torch.manual_seed(0)
    model: Any = open_clip.create_model("ViT-S-32-alt", pretrained=None, output_dict=True).eval()
    space = embedding.gather(model, PHOTOS[:2], texts=["a dog", "a red chair"], points=4, layers="*transformer.resblocks.0.*")
    (states,) = layers_of(space)
    assert states.tokens.words == (
        ("<start_of_text>", "a", "dog", "<end_of_text>"),
        ("<start_of_text>", "a", "red", "chair", "<end_of_text>"),
    )


def test_a_text_is_needed_for_each_image_and_a_tower_for_texts(folder: Path) -> None:
    with pytest.raises(OptionError, match="texts must have an entry for each of the 3 images, got 1"):
        embedding.gather(saved(folder), PHOTOS, texts=["a dog"])
    with pytest.raises(OptionError, match="has no text tower"):
        embedding.gather("vit_tiny_patch16_224", PHOTOS, texts=TEXTS, weights="none")
