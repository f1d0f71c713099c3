"""Checkpoints that the project ships: they are what their card says, and load into what it names."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import visattn
from visattn import data
from visattn._look import look
from visattn.data.scenes import Mark, Scenes
from visattn.methods import gates

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "assets" / "checkpoints"


def test_every_checkpoint_has_a_card_with_its_digest() -> None:
    sections = (FOLDER / "README.md").read_text(encoding="utf-8").split("\n## ")[1:]
    cards = [section for section in sections if section.split("\n")[0].endswith(".safetensors")]
    assert sorted(card.split("\n")[0] for card in cards) == sorted(file.name for file in FOLDER.glob("*.safetensors"))
    for card in cards:
        file = FOLDER / card.split("\n")[0]
        digest = re.search(r"sha256: ([0-9a-f]{64})", card)
        assert digest is not None
        assert digest[1] == hashlib.sha256(file.read_bytes()).hexdigest()


NETWORKS: dict[str, Mark] = {
    "scenes_cnn": "none",
    "scenes_vit": "none",
    "scenes_cnn_shortcut": "label",
    "scenes_vit_shortcut": "label",
}


def test_every_folder_is_known_and_all_are_small() -> None:
    assert sorted(path.name for path in FOLDER.iterdir() if path.is_dir()) == sorted(NETWORKS)
    assert sum(path.stat().st_size for path in FOLDER.rglob("*.safetensors")) < 12e6


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_what_its_card_says(name: str) -> None:
    card = (FOLDER / name / "README.md").read_text(encoding="utf-8")
    told = json.loads((FOLDER / name / "model.json").read_text(encoding="utf-8"))
    digest = hashlib.sha256((FOLDER / name / "model.safetensors").read_bytes()).hexdigest()
    assert f"sha256 `{digest}`" in card
    assert told["sha256"] == digest
    assert f"Test accuracy: {100 * told['test_accuracy']:.2f} %" in card
    assert "Apache-2.0" in card
    assert f"--data {told['data']} --model {told['model']}" in card


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_tell_the_classes_of_new_scenes(name: str) -> None:
    model = visattn.load_model(str(FOLDER / name))
    scenes = Scenes(200, (64, 64), seed=99, watermark=NETWORKS[name])
    pictures = [Image.fromarray(scenes.scene(i).image) for i in range(len(scenes))]
    with torch.no_grad():
        answers = model(visattn.prepare_batch(pictures, model).pixels).argmax(1)
    right = sum(int(answer) == scenes.scene(i).label for i, answer in enumerate(answers)) / len(scenes)
    assert right >= 0.95


@pytest.mark.real
def test_trained_gates_close_on_the_sky() -> None:
    model = visattn.load_model(f"{ROOT / 'scripts' / 'train_gates.py'}:gated")
    own = load_file(FOLDER / "efficientnet_lite0_cbam.safetensors")
    found = model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in own.items())
    prepared = visattn.prepare(visattn.load_image(data.photo_path("rocket")), model)
    gate = gates(look(model, prepared, features="none"), layer="blocks.2.attention").at(batch=0).values
    assert gate.shape == (28, 28)
    assert float(gate[:8].mean()) < 0.15  # sky
    assert float(gate[8:24, 13:15].mean()) > 0.5  # the rocket
