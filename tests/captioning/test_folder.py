"""Captioner folders: round trip to disk, one-line errors for damage, and no code execution."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from visattn.captioning import Captioner, load_captioner
from visattn.captioning.captioner_folders import CaptionerBlueprint, load, save_captioner
from visattn.core.loading import model_folders as folders
from visattn.core.loading.blueprints import Blueprint
from visattn.core.provenance import Provenance
from visattn.data.scenes import Scenes
from visattn.errors import OptionError, OutputError, UnsupportedModel, WeightsError
from visattn.models.show_attend_tell import ATTENTIONS, END, Attention

WORDS = ("<end>", "<unknown>", "a", "red", "disc", "left")
LOCAL = Blueprint("visattn_local_features", (), 3, (64, 64), (0.5,) * 3, (0.25,) * 3, options={"width": 8})


def plan(attention: Attention = "soft", **changes: Any) -> CaptionerBlueprint:
    values: dict[str, Any] = {"embed_dim": 7, "hidden_dim": 12, "attention_dim": 5, "coordinates": True} | changes
    return CaptionerBlueprint(values.pop("encoder", LOCAL), WORDS, attention=attention, **values)


def tiny(attention: Attention = "soft", *, seed: int = 1, end: float = 0.0, **changes: Any) -> Captioner:
    """Build a captioner with random weights. Captions have about three words, as a unit counts steps; none with a large `end`."""
    torch.manual_seed(seed)
    blueprint = plan(attention, **changes)
    model = blueprint.build().eval()
    torch.manual_seed(seed + 1)  # the same numbers, however many the attention took
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, nn.BatchNorm2d):  # far from the other numbers in a batch
                part.running_mean.normal_()  # type: ignore[union-attr]
                part.running_var.uniform_(0.1, 0.3)  # type: ignore[union-attr]
                part.weight.uniform_(0.5, 1.5)
        if model.look is not None:
            for layer in (model.look.feature, model.look.state, model.look.score):
                layer.weight *= 4
        model.from_state.weight *= 4
        model.from_seen.weight *= 8
        model.last.weight *= 6
        model.first_c.weight[0], model.first_c.bias[0] = 0, -3
        for gate, bias in enumerate((9.0, 9.0, 0.3, 9.0)):  # c_0 rises by tanh(0.3) a step, from -1
            model.lstm.weight_ih[gate * blueprint.hidden_dim] = 0
            model.lstm.weight_hh[gate * blueprint.hidden_dim] = 0
            model.lstm.bias_ih[gate * blueprint.hidden_dim], model.lstm.bias_hh[gate * blueprint.hidden_dim] = bias, 0
        model.embed.weight[:, 0], model.from_seen.weight[0], model.from_state.weight[0] = 0, 0, 0
        model.from_state.weight[0, 0], model.from_state.bias[0] = 9, 0
        model.last.weight[:, 0] = 0
        model.last.weight[END, 0] = 8
        model.last.bias[END] += end
    return Captioner(model, blueprint, Provenance(model="tiny"))


def kept(folder: Path, attention: Attention = "soft", **changes: Any) -> Path:
    """Save a tiny captioner, and return its folder."""
    captioner = tiny(attention, **changes)
    return save_captioner(captioner.model, captioner.blueprint, folder)


def changed(folder: Path, **values: Any) -> Path:
    """Change values in `model.json`; `...` removes a key."""
    facts = folder / "model.json"
    told = json.loads(facts.read_text()) | values
    facts.write_text(json.dumps({name: value for name, value in told.items() if value is not ...}))
    return folder


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kept(tmp_path_factory.mktemp("master") / "final")


@pytest.fixture
def folder(master: Path, tmp_path: Path) -> Path:
    """Copy a captioner folder that a test may damage."""
    place = tmp_path / "final"
    place.mkdir()
    for file in master.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    return place


class Payload:
    """Object that creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_save_and_load_round_trip_is_exact(tmp_path: Path, attention: Attention) -> None:
    first = tiny(attention, dropout=0.25, word_dropout=0.5, temperature=0.7)
    save_captioner(first.model.train(), first.blueprint, tmp_path / "final")
    random = torch.get_rng_state()
    second = load_captioner(tmp_path / "final")
    assert torch.equal(torch.get_rng_state(), random)
    assert second.blueprint == first.blueprint
    assert second.vocabulary.words == WORDS
    assert not any(part.training for part in second.model.modules())
    before, after = first.model.state_dict(), second.model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    photo = Scenes(1)[0][0]
    (one,), (other,) = first.generate([photo]), second.generate([photo])
    assert (one.words, one.score) == (other.words, other.score)
    assert torch.equal(one.map.values, other.map.values)
    assert "".join(one.words)
    assert second.provenance.weights == "final"
    assert second.provenance.weights_sha256 == json.loads((tmp_path / "final" / "model.json").read_text())["sha256"]


def test_a_learned_first_state_survives_a_round_trip(tmp_path: Path) -> None:
    blueprint = plan(first="learned")
    model = blueprint.build()
    state = model.state_dict()
    state["first_h"].copy_(torch.arange(blueprint.hidden_dim))
    save_captioner(model, blueprint, tmp_path / "final")
    second = load_captioner(tmp_path / "final")
    assert second.blueprint == blueprint
    assert torch.equal(second.model.state_dict()["first_h"], state["first_h"])


def test_captioners_from_before_the_option_start_from_the_mean(folder: Path) -> None:
    assert load(changed(folder, first=...))[1].first == "mean"


def test_unknown_facts_are_ignored(folder: Path) -> None:
    changed(folder, accuracy=0.5, history=[{"step": 1}])
    assert load(folder)[1] == plan()


DAMAGES: dict[str, tuple[dict[str, Any], str]] = {
    "classifier": ({"kind": ...}, "holds a classifier, not a captioner. Pass the folder of a trained captioner, RUN/final"),
    "newer": ({"format": 2, "made_by": "99.1"}, "made by visattn 99.1, needs >= 99.1; upgrade visattn"),
    "no-format": ({"format": ...}, "does not describe a network of visattn"),
    "no-words": ({"words": ...}, "is damaged (words"),
    "empty-words": ({"words": []}, "is damaged (words"),
    "words-in-one-string": ({"words": "a red disc"}, "is damaged (words"),
    "words-not-strings": ({"words": ["<end>", "<unknown>", 3, None, "a", "b"]}, "is damaged (words"),
    "a-word-twice": ({"words": ["<end>", "<unknown>", "a", "a", "b", "c"]}, "is damaged (words"),
    "end-not-first": ({"words": ["<unknown>", "<end>", "a", "b", "c", "d"]}, "does not begin with <end> and <unknown>"),
    "more-words": ({"words": [*WORDS, "dog"]}, "embed.weight"),
    "fewer-words": ({"words": WORDS[:-1]}, "embed.weight"),
    "another-attention": ({"attention": "hard", "attention_dim": 0}, "look.feature.bias"),
    "no-attention": ({"attention": "uniform"}, "look"),
    "unknown-attention": ({"attention": ["soft"]}, "is damaged (attention"),
    "no-coordinates": ({"coordinates": False}, "column"),
    "coordinates-a-number": ({"coordinates": 1}, "is damaged (coordinates"),
    "hidden-dim": ({"hidden_dim": 13}, "first_c.bias"),
    "hidden-dim-0": ({"hidden_dim": 0}, "is damaged (hidden_dim"),
    "embedding-below-0": ({"embed_dim": -7}, "is damaged (embed_dim"),
    "embedding-a-boolean": ({"embed_dim": True}, "is damaged (embed_dim"),
    "dropout": ({"dropout": 2.0}, "is damaged (dropout"),
    "dropout-nan": ({"dropout": float("nan")}, "is damaged (dropout"),
    "temperature": ({"temperature": 0}, "is damaged (temperature"),
    "unknown-first": ({"first": "none"}, "is damaged (first"),
    "another-first": ({"first": "learned"}, "first_c"),
    "no-encoder": ({"encoder": ...}, "is damaged (encoder"),
    "encoder-a-name": ({"encoder": "visattn_local_features"}, "is damaged (encoder"),
    "sha256": ({"sha256": "0" * 64}, "its sha256 differs"),
    "format-a-boolean": ({"format": True}, "does not describe a network of visattn"),
    "hidden-dim-too-large": ({"hidden_dim": 10**400}, "is damaged (hidden_dim"),
    "temperature-too-large": ({"temperature": 10**400}, "is damaged (temperature"),
    "dropout-infinite": ({"dropout": float("inf")}, "is damaged (dropout"),
}


@pytest.mark.parametrize(("values", "message"), DAMAGES.values(), ids=list(DAMAGES))
def test_wrong_facts_are_refused(folder: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError) as told:
        load(changed(folder, **values))
    assert message in str(told.value)
    assert str(folder) in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    "value", [{"model": 3}, {"channels": 0}, {"size": [64]}, {"std": [0, 1, 1]}, {"classes": ["a"]}], ids=str
)
def test_wrong_encoder_facts_are_refused(folder: Path, value: dict[str, Any]) -> None:
    encoder = json.loads((folder / "model.json").read_text())["encoder"]
    with pytest.raises(WeightsError, match=rf"is damaged \({next(iter(value))}"):
        load(changed(folder, encoder=encoder | value))


def test_weights_with_a_flipped_bit_are_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    with pytest.raises(WeightsError, match="its sha256 differs"):
        load(folder)


@pytest.mark.parametrize("damage", ["empty", "cut", "gone", "no-json", "no-object", "nothing", "a-file", "no-numbers"])
def test_damaged_folder_is_refused(folder: Path, damage: str) -> None:
    weights, facts = folder / "model.safetensors", folder / "model.json"
    if damage == "empty":
        weights.write_bytes(b"")
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "gone":
        weights.unlink()
    elif damage == "no-json":
        facts.write_text(facts.read_text()[:-40])
    elif damage == "no-object":
        facts.write_text("[1]")
    elif damage == "nothing":
        weights.unlink()
        facts.unlink()
    elif damage == "a-file":
        folder = facts
    else:
        tensors = safetensors.torch.load(weights.read_bytes())
        tensors["last.bias"][0] = torch.nan
        weights.write_bytes(content := safetensors.torch.save(tensors))
        changed(folder, sha256=hashlib.sha256(content).hexdigest())
    with pytest.raises(WeightsError) as told:
        load(folder)
    assert str(folder) in str(told.value)
    assert "\n" not in str(told.value)


def test_pickle_instead_of_weights_is_not_run(folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    content = pickle.dumps(Payload(mark))
    (folder / "model.safetensors").write_bytes(content)
    changed(folder, sha256=hashlib.sha256(content).hexdigest())
    with pytest.raises(WeightsError):
        load(folder)
    assert not mark.exists()
    pickle.loads(content)
    assert mark.exists()


def test_python_file_of_the_encoder_is_not_run(folder: Path, tmp_path: Path) -> None:
    code = tmp_path / "own.py"
    code.write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n")
    encoder = json.loads((folder / "model.json").read_text())["encoder"]
    with pytest.raises(WeightsError, match=r"was built by .*own\.py:make; loading does not run Python files"):
        load(changed(folder, encoder=encoder | {"model": f"{code}:make"}))
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", ["hf-hub:somebody/something", "local-dir:/tmp", "tv:nothing"])
def test_encoder_from_another_source_is_refused(folder: Path, name: str) -> None:
    encoder = json.loads((folder / "model.json").read_text())["encoder"]
    with pytest.raises(UnsupportedModel, match=r"unknown model|no model"):
        load(changed(folder, encoder=encoder | {"model": name}))


@pytest.mark.parametrize("option", ["pretrained", "checkpoint_path"])
def test_options_that_load_weights_are_refused(folder: Path, option: str) -> None:
    encoder = json.loads((folder / "model.json").read_text())["encoder"]
    with pytest.raises(OptionError, match=f"options must not load weights, got {option}"):
        load(changed(folder, encoder=encoder | {"options": {option: "x"}}))


def test_existing_folder_is_not_overwritten(folder: Path, tmp_path: Path) -> None:
    captioner, before = tiny(), (folder / "model.json").read_bytes()
    with pytest.raises(OutputError, match="exists already"):
        save_captioner(captioner.model, captioner.blueprint, folder)
    assert (folder / "model.json").read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["final"]


def test_classifier_and_captioner_folders_are_distinguished(tmp_path: Path) -> None:
    blueprint = Blueprint("visattn_local_features", ("a", "b"), 3, (64, 64), (0.5,) * 3, (0.25,) * 3, options={"width": 8})
    folders.save(blueprint.build(), blueprint, tmp_path / "final")
    with pytest.raises(WeightsError, match="holds a classifier, not a captioner"):
        load_captioner(tmp_path / "final")
    with pytest.raises(WeightsError, match=r"holds a captioner, not a classifier; use visattn\.captioning\.load_captioner\.$"):
        folders.load(kept(tmp_path / "other"))
    neither = changed(kept(tmp_path / "neither"), kind="DRAW network")
    with pytest.raises(WeightsError, match=r"holds a DRAW network, not a classifier\.$"):
        folders.load(neither)
    with pytest.raises(WeightsError, match="holds a DRAW network, not a captioner"):
        load_captioner(neither)
