"""Checkpoints that the project ships: they are what their card says, and load into what it names."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import visattn
from visattn import data
from visattn._look import look
from visattn.methods import gates

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "assets" / "checkpoints"


def test_every_checkpoint_has_a_card_with_its_digest() -> None:
    cards = (FOLDER / "README.md").read_text(encoding="utf-8").split("\n## ")[1:]
    assert sorted(card.split("\n")[0] for card in cards) == sorted(file.name for file in FOLDER.glob("*.safetensors"))
    for card in cards:
        file = FOLDER / card.split("\n")[0]
        digest = re.search(r"sha256: ([0-9a-f]{64})", card)
        assert digest is not None
        assert digest[1] == hashlib.sha256(file.read_bytes()).hexdigest()


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
