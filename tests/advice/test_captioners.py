# mypy: disable-error-code="no-untyped-call"
"""Captioners: what is wrong with them is true, and what the message says to do works."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import visattn
from tests.advice.packing import PHOTO
from tests.captioning import test_encoder as encoders, test_folder as captioners
from visattn.captioning import Captioner, load_captioner, search
from visattn.captioning.captioner_folders import load
from visattn.captioning.encoders import encoder
from visattn.captioning.generated import generate_text
from visattn.captioning.vocabulary import Vocabulary
from visattn.core.provenance import Provenance
from visattn.data.scenes import Scenes
from visattn.errors import DataError, LayoutError, ModelError, UnsupportedModel, WeightsError


def captioned(captioner: Captioner) -> tuple[str, ...]:
    (found,) = captioner.generate([Scenes(1)[0][0]])
    return found.words


def test_a_captioner_without_numbers_speaks_again_with_its_weights() -> None:
    captioner = captioners.tiny()
    words, kept = captioned(captioner), captioner.model.last.bias.detach().clone()
    with torch.no_grad():
        captioner.model.last.bias.fill_(torch.nan)
    with pytest.raises(
        ModelError, match=r"must give log-probabilities, got NaN or -inf for every word\. Check its weights and the images"
    ):
        captioned(captioner)
    with torch.no_grad():
        captioner.model.last.bias.copy_(kept)
    assert captioned(captioner) == words
    with torch.no_grad(), pytest.raises(ModelError, match="got NaN or -inf for every word"):
        search(captioner.model, captioner.model.encode(torch.full((1, 3, 64, 64), torch.nan)))


OWN = """
class Shuffled(nn.Module):
    def __init__(self, num_classes, in_channels):
        super().__init__()
        self.first, self.mixed, self.fc = nn.Conv2d(in_channels, 6, 8, 8), Mixed(), nn.Linear(6, num_classes)
    def forward(self, x):
        return self.fc(self.mixed(self.first(x)).mean((2, 3)))

class Mixed(nn.Module):
    def forward(self, maps):
        return maps.flatten(2).sort(2).values.view_as(maps)

class Aside(nn.Module):  # a layer that does not run
    def __init__(self, num_classes, in_channels):
        super().__init__()
        self.first, self.aside, self.head = nn.Conv2d(in_channels, 4, 4, 4), nn.Conv2d(4, 4, 1), nn.Linear(4, num_classes)
    def forward(self, x):
        return self.head(self.first(x).mean((2, 3)))

class Turned(nn.Module):  # channels last inside, as Swin
    def __init__(self, num_classes, in_channels):
        super().__init__()
        self.first, self.turn, self.back = nn.Conv2d(in_channels, 24, 4, 4), Order(0, 2, 3, 1), Order(0, 3, 1, 2)
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, num_classes)
    def forward(self, x):
        return self.head(self.back(self.norm(self.turn(self.first(x)))).mean((2, 3)))

class Order(nn.Module):
    def __init__(self, *order):
        super().__init__()
        self.order = order
    def forward(self, x):
        return x.permute(self.order)

class Branches(nn.Module):  # which way it goes depends on the pixels
    def __init__(self, num_classes, in_channels):
        super().__init__()
        self.first, self.fc = nn.Conv2d(in_channels, 4, 3), nn.Linear(4, num_classes)
    def forward(self, x):
        x = self.first(x)
        return self.fc(x.mean((2, 3)) if x.sum() > 0 else x.amax((2, 3)))
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(encoders.OWN + OWN)
    return str(tmp_path / "own.py")


def test_another_layer_has_positions_that_can_be_traced(file: str) -> None:
    def of(layer: str) -> Captioner:
        blueprint = captioners.plan(encoder=encoders.plan(f"{file}:Shuffled", (64, 64)), layer=layer)
        return Captioner(blueprint.build().eval(), blueprint, Provenance(model="tiny"))

    with pytest.raises(LayoutError, match=r"the positions of its feature map could not be traced\. Choose another layer\.$"):
        of("mixed").generate([Scenes(1)[0][0]])
    (caption,) = of("first").generate([Scenes(1)[0][0]])
    assert caption.map.values.shape[1:] == (8, 8)


def test_layers_and_sizes_that_messages_of_encoders_name(file: str) -> None:
    plan = encoders.plan
    with pytest.raises(UnsupportedModel, match=r"got \(1, 96, 1, 1\)\. Name an earlier layer, or enlarge img_size\.$"):
        encoder(plan("test_resnet"))
    assert encoder(plan("test_resnet"), "2")[1].grid == (4, 4)
    assert encoder(plan("test_resnet", (64, 64)))[1].grid == (2, 2)
    with pytest.raises(UnsupportedModel, match=r"got \(1, 1, 8, 8\)\. Name an earlier layer\.$"):
        encoder(plan(f"{file}:Scores"))
    assert encoder(plan(f"{file}:Scores"), "first")[1].channels == 4
    with pytest.raises(UnsupportedModel, match=r"to square with channels last\. Name another layer, "):
        encoder(plan(f"{file}:Turned"), "norm")
    assert encoder(plan(f"{file}:Turned"), "back")[1].channels == 24
    with pytest.raises(UnsupportedModel, match=r"Aside: cannot be cut at 'aside' \(.*\)\. Choose another layer\.$"):
        encoder(plan(f"{file}:Aside"), "aside")
    assert encoder(plan(f"{file}:Aside"), "first")[1].channels == 4
    with pytest.raises(UnsupportedModel, match=r"no feature map was found in it\. .* or choose another CNN or a timm model\.$"):
        encoder(plan(f"{file}:Flat"))
    for model in ("visattn_local_features", "test_vit"):
        assert encoder(plan(model, (64, 64) if model == "visattn_local_features" else (160, 160)))[1].channels > 1


def test_a_captioner_folder_is_named_or_copied_again(tmp_path: Path) -> None:
    final = captioners.kept(tmp_path / "run" / "final")
    facts = (final / "model.json").read_text()
    captioners.changed(final, kind=...)
    with pytest.raises(
        WeightsError, match=r"holds a classifier, not a captioner\. Pass the folder of a trained captioner, RUN/final"
    ):
        load(final)
    captioners.kept(tmp_path / "other" / "final")
    assert load(tmp_path / "other" / "final")[1].words == captioners.WORDS
    (final / "model.json").write_text(facts)
    captioners.changed(final, hidden_dim=0)
    with pytest.raises(WeightsError, match=r"is damaged \(hidden_dim .*\); copy the folder again\.$"):
        load(final)
    (final / "model.json").write_text(facts)
    assert load(final)[1].hidden_dim == 12


def test_a_vocabulary_is_read_from_a_checkpoint_and_rare_words_are_kept(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"must begin with <end> and <unknown> and have no word twice\. Read it from a checkpoint"
    ):
        Vocabulary(("a", "red", "disc"))
    assert load_captioner(captioners.kept(tmp_path / "final")).vocabulary.words == captioners.WORDS
    with pytest.raises(DataError, match=r"no word occurs 2 times or more .* Give more captions, or lower min_count\.$"):
        Vocabulary.of(["a red disc"], 2)
    assert len(Vocabulary.of(["a red disc"], 1)) == 5
    assert Vocabulary.of(["a red disc", "a star"], 2).words[2:] == ("a",)


def test_another_model_has_a_layer_where_no_layer_of_one_can_be_cut(file: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"no feature map was found in it\. Name its layer, or choose another CNN"):
        encoder(encoders.plan(f"{file}:Branches"))
    for layer in ("first", "fc"):
        with pytest.raises(UnsupportedModel, match=rf"cannot be cut at '{layer}' \(.*\)\. Choose another model\.$"):
            encoder(encoders.plan(f"{file}:Branches"), layer)
    assert encoder(encoders.plan(f"{file}:Aside"), "first")[1].channels == 4


def test_a_captioner_with_smaller_dimensions_is_built() -> None:
    with pytest.raises(UnsupportedModel, match=r"Choose a smaller embed_dim, hidden_dim and attention_dim\.$"):
        captioners.plan(embed_dim=1, hidden_dim=1, attention_dim=2**40).build()
    assert captioners.plan(embed_dim=1, hidden_dim=1, attention_dim=4).build()


@pytest.fixture
def writer() -> Any:
    """Build a model that generates at most eight tokens."""
    encoder_config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=32
    )
    decoder = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=20, n_positions=8, add_cross_attention=True)
    decoder.is_decoder = True
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder_config, decoder)
    config.decoder_start_token_id = config.pad_token_id = 0
    return transformers.VisionEncoderDecoderModel(config).eval()


@pytest.mark.parametrize(("fails_always", "count"), [(True, 3), (False, 100)])
def test_generate_fails_in_the_same_way_without_visattn(fails_always: bool, count: int, writer: Any) -> None:
    pixels = visattn.prepare(PHOTO, writer).pixels
    handle = writer.decoder.register_forward_pre_hook(lambda *_: [][1] if fails_always else None)
    advice = rf"generate\(\) fails: IndexError: .* Check that it runs without visattn and with max_new_tokens={count}\.$"
    with pytest.raises(ModelError, match=advice):
        generate_text(writer, PHOTO, max_new_tokens=count)
    with pytest.raises(IndexError):
        writer.generate(pixel_values=pixels, max_new_tokens=count)
    handle.remove()
    assert writer.generate(pixel_values=pixels, max_new_tokens=3).shape[1] <= 4
    assert len(generate_text(writer, PHOTO, max_new_tokens=3, tokenizer=SimpleNamespace(decode=str)).ids) <= 3
