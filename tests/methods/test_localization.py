from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Figures, Seen
from tests.oracles import maps as oracles
from visattn.core import methods
from visattn.core.maps import AttentionMap

BOXES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[1] / "golden" / "boxes.json").read_text())
BOUNDS = {"astronaut": 1.15, "coffee": 1.5, "rocket": 4.0}  # lift of the best head

pytestmark = pytest.mark.real


def lift(made: AttentionMap, photo: str) -> float:
    """Compute how much denser the 60 % mass mask is inside the object's box than over the photo; 1 is chance level."""
    facts = BOXES[photo]
    left, top, right, bottom = facts["box"]
    width, height = facts["size"]
    mask = made.mass(0.6).values[0].numpy().astype(bool)
    return oracles.lift(mask, (left, top, right, bottom), width, height)


@pytest.mark.full
@pytest.mark.parametrize("photo", list(BOUNDS))
def test_best_head_of_the_last_layer_finds_the_object(photo: str, seen: Seen, figures: Figures) -> None:
    prepared, recording = seen(photo)
    assert list(prepared.photo.size) == BOXES[photo]["size"]
    heads = [lift(methods.attention(recording, query="cls", head=i), photo) for i in range(6)]
    mean = lift(methods.attention(recording, query="cls", fusion="mean"), photo)
    rolled = {how: lift(methods.rollout(recording, query="cls", sinks=how), photo) for how in ("keep", "drop")}
    best = int(np.argmax(heads))
    figures(f"lift on {photo}: best head (head {best})", heads[best], f">= {BOUNDS[photo]}")
    figures(f"lift on {photo}: mean of the heads", mean, "")
    figures(f"lift on {photo}: rollout, sinks kept", rolled["keep"], "")
    figures(f"lift on {photo}: rollout, sinks dropped", rolled["drop"], "")
    assert heads[best] >= BOUNDS[photo]


@pytest.mark.parametrize("photo", list(BOUNDS))
def test_mass_mask_is_the_fewest_cells_that_hold_the_share(photo: str, seen: Seen) -> None:
    made = methods.attention(seen(photo)[1], query="cls", head=0)
    expected = oracles.mass_mask(oracles.array(made.values[0]), 0.6)
    assert np.array_equal(made.mass(0.6).values[0].numpy().astype(bool), expected)


@pytest.mark.parametrize("photo", list(BOUNDS))
def test_lift_of_the_full_grid_is_one(photo: str) -> None:
    facts = BOXES[photo]
    assert oracles.lift(np.ones((5, 7), dtype=bool), tuple(facts["box"]), *facts["size"]) == pytest.approx(1)
