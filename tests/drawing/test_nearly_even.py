"""Maps whose values hardly differ get no colors, wherever maps become colors; a chosen normalization colors them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import visattn
from tests.maps.making import make_map
from visattn.batch.films import explain_video
from visattn.core.drawing import contact_sheet, gate_pages, overlay, sheets
from visattn.core.drawing.gate_pages import gate_page
from visattn.core.drawing.pages import Cell
from visattn.core.geometry import Box, Geometry
from visattn.core.maps import Heatmap, normalize
from visattn.core.maps.scaling import nearly_even
from visattn.core.pipeline.inputs import prepare
from visattn.errors import VisattnWarning
from visattn.nn import publish

PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8))
EVEN = torch.linspace(0.5052, 0.5073, 24).view(4, 6)  # gates of a network early in training
PLACE = Geometry((64, 96), (64, 96), Box(0, 0, 64, 96))
SAID = r"the map is nearly even \(0.505 to 0.507\); the photo is unchanged. normalize='minmax' colors it"


class Gated(nn.Module):
    """CNN with one spatial gate of fixed values on a 4 x 6 grid."""

    def __init__(self, gate: Tensor) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 4, 16, 16)
        self.head = nn.Linear(4, 3)
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        publish(self, "spatial_gate", self.gate.expand(len(x), 1, *self.gate.shape), x)
        return self.head((x * self.gate).mean((2, 3)))  # type: ignore[no-any-return]


def model(gate: Tensor = EVEN) -> nn.Module:
    torch.manual_seed(0)
    return Gated(gate).eval()


def heat(values: Tensor = EVEN) -> Heatmap:
    return make_map(values, box=Box(0, 0, 64, 96)).to_heatmap(PLACE)


def explained(gate: Tensor = EVEN) -> visattn.Explanation:
    return visattn.explain(model(gate), PHOTO, method="gates", img_size=(64, 96), resize="fit")


PICTURES: dict[str, Callable[..., Image.Image]] = {
    "overlay of a heatmap": lambda **style: overlay(PHOTO, heat(), **style),
    "overlay of an array": lambda **style: overlay(PHOTO, heat().values, **style),
    "explanation": lambda **style: explained().overlay(**style),
    "layer": lambda **style: overlay(PHOTO, heat(), transparent=True, **style),
}


@pytest.mark.parametrize("how", list(PICTURES))
def test_a_nearly_even_map_leaves_the_photo_alone_and_says_so(how: str) -> None:
    with pytest.warns(VisattnWarning, match=SAID):
        made: Any = PICTURES[how]()
    if how == "layer":
        assert np.asarray(made)[..., 3].max() == 0
    else:
        assert made.tobytes() == PHOTO.tobytes()
    assert "nearly even" in made.provenance.drawing["uncolored"]
    forced = PICTURES[how](normalize="minmax")  # what the message says to do
    assert forced.tobytes() != made.tobytes()
    assert "uncolored" not in forced.provenance.drawing  # type: ignore[attr-defined]


def test_the_rule_is_a_share_of_the_largest_magnitude() -> None:
    edge = 0.951
    assert nearly_even(edge, 1.0)
    assert nearly_even(-1.0, -edge)
    assert not nearly_even(0.949, 1.0)
    assert not nearly_even(0.0, 0.01)  # zero is no offset
    assert not nearly_even(-0.01, 0.01)
    assert nearly_even(5.0, 5.0)


def test_signed_maps_are_centered_on_zero_and_keep_their_colors() -> None:
    made = overlay(PHOTO, replace(heat(), signed=True))
    assert made.tobytes() != PHOTO.tobytes()
    found = explained()
    signed = replace(found, map=replace(found.map, signed=True))
    assert signed.overlay(legend=True).height > signed.overlay().height, "the color bar is there"


def test_a_map_without_colors_has_no_color_bar() -> None:
    with pytest.warns(VisattnWarning, match=SAID):
        assert explained().overlay(legend=True).size == PHOTO.size


def test_normalized_maps_are_not_stretched() -> None:
    assert normalize(heat()).grid.max() == 0
    assert normalize(heat(), "minmax").grid.max() == 1


def test_one_peak_on_an_even_ground_is_seen() -> None:
    values = torch.linspace(0.5052, 0.5073, 400).view(20, 20)
    values[3, 7:10] = 0.9
    made = overlay(PHOTO, make_map(values, box=Box(0, 0, 64, 96)).to_heatmap(PLACE, "nearest"), opacity=1, normalize="auto")
    assert made.provenance.value_range == pytest.approx((0.5052, 0.9))
    assert np.asarray(made)[11, 40].sum() > 600
    assert np.asarray(made)[50, 40].sum() < 30


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    """Return the list that receives the panels of every figure."""
    drawn: list[Cell] = []
    for module in (gate_pages, sheets):

        def sheet(rows: Any, *args: Any, original: Any = module.sheet, **options: Any) -> Image.Image:
            drawn.extend(cell for row in rows for cell in row if cell)
            return original(rows, *args, **options)  # type: ignore[no-any-return]

        monkeypatch.setattr(module, "sheet", sheet)
    return drawn


@pytest.mark.parametrize("shared", [False, True])
def test_gates_of_a_figure_are_told_to_be_nearly_even(shared: bool, cells: list[Cell]) -> None:
    network = model()
    prepared = prepare(PHOTO, network, img_size=(64, 96), resize="fit")
    with torch.no_grad(), visattn.capture(network) as recording:
        network(prepared.pixels)
    for mode in ("auto", "minmax"):
        gate_page(recording, prepared.photo, prepared.geometry, panel=96, normalize=mode, shared_scale=shared)
    plain, colored = cells
    assert plain.caption == "nearly even, 0.505 to 0.507"
    assert plain.picture.convert("RGB").tobytes() == PHOTO.tobytes()
    assert colored.caption == "0.505 to 0.507"
    assert colored.picture.convert("RGB").tobytes() != PHOTO.tobytes()


def test_panels_on_their_own_scale_are_told_to_be_nearly_even(cells: list[Cell]) -> None:
    wide = torch.linspace(0, 1, 24).view(4, 6)
    both = make_map(torch.stack([EVEN, wide]), ("head",), box=Box(0, 0, 64, 96))
    contact_sheet(PHOTO, both, PLACE, panel=96)
    contact_sheet(PHOTO, both, PLACE, panel=96, shared_axes=("head",))
    even, other, shared, _ = cells
    assert "nearly even, 0.505 to 0.507" in even.caption
    assert even.picture.tobytes() == PHOTO.tobytes()
    assert "0 to 1" in other.caption
    assert other.picture.tobytes() != PHOTO.tobytes()
    assert shared.picture.tobytes() != PHOTO.tobytes(), "beside others, its color says how large its values are"


def test_frames_of_a_film_with_nearly_even_maps_are_unchanged(tmp_path: Path) -> None:
    frames = [Image.fromarray(np.full((64, 96, 3), 90 + 10 * number, np.uint8)) for number in range(3)]
    frames[0].save(tmp_path / "in.gif", save_all=True, append_images=frames[1:], duration=100)
    options: dict[str, Any] = {"method": "gates", "img_size": (64, 96), "resize": "fit"}
    made = explain_video(model(), tmp_path / "in.gif", tmp_path / "out.webm", **options)
    assert any("all maps are nearly even (0.505 to 0.507); the frames are unchanged" in text for text in made.provenance.warnings)
    with av.open(tmp_path / "out.webm") as film:
        pixels = [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]
    assert max(int(np.ptp(one)) for one in pixels) <= 6
    colored = explain_video(model(), tmp_path / "in.gif", tmp_path / "colored.webm", normalize="minmax", **options)
    assert not any("nearly even" in text for text in colored.provenance.warnings)
    with av.open(tmp_path / "colored.webm") as film:
        assert int(np.ptp(next(film.decode(video=0)).to_ndarray(format="rgb24"))) > 60
