"""Figures of gates: the modules that get a panel, and the values that are drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn

import visattn
from visattn import nn as ours
from visattn.core.drawing import gate_pages
from visattn.core.drawing.gate_pages import gate_page
from visattn.core.drawing.pictures import Picture
from visattn.core.methods import gates
from visattn.core.methods.gate_maps import mixed
from visattn.core.pipeline.inputs import Prepared, prepare
from visattn.core.records import Recording
from visattn.errors import OptionError

PANEL = 64


def network(*parts: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), *parts, nn.AdaptiveAvgPool2d(1)).eval()


def seen(model: nn.Module) -> tuple[Recording, Prepared]:
    noise = np.random.default_rng(0).integers(0, 255, (48, 72, 3), np.uint8)
    prepared = prepare(Image.fromarray(noise), model)
    with torch.no_grad(), visattn.capture(model) as recording:
        model(prepared.pixels)
    return recording, prepared


def page_of(recording: Recording, prepared: Prepared, **options: Any) -> Picture:
    return gate_page(recording, prepared.photo, prepared.geometry, **options)


def layers(model: nn.Module) -> list[str]:
    return [module.layer for module in gate_pages._modules(seen(model)[0])]


def test_gates_of_one_module_share_a_panel() -> None:
    assert layers(network(ours.CBAM(8), ours.SqueezeExcite(8), ours.CBAM(8))) == ["1", "2", "3"]
    assert layers(network(ours.SCSE(8))) == ["1"]
    assert layers(timm.create_model("resnet18", block_args={"attn_layer": "cbam"}).eval())[:2] == ["layer1.0.se", "layer1.1.se"]


def test_gates_of_neighboring_modules_do_not_share_a_panel() -> None:
    model = timm.create_model("seresnet18").eval()
    assert layers(model) == [name for name, part in model.named_modules() if name.endswith(".se")]


def test_map_shows_the_gate_at_its_position() -> None:
    """Check a gate with two open corners: only their pixels get the brightest color."""
    recording, prepared = seen(network(ours.CBAM(8)))
    gate = next(feature for feature in recording.features if feature.role == "spatial_gate")
    gate.value.fill_(0.2)
    gate.value[0, 0, 0, 0] = gate.value[0, 0, -1, -1] = 0.9
    assert gate.layout is not None
    page = np.asarray(page_of(recording, prepared, panel=225, opacity=1.0))
    color = visattn.colorize(np.array([[0.0, 1.0]])).getpixel((1, 0))
    found = np.argwhere((page[:240] == color).all(-1))  # above the color bar
    place = prepared.geometries[0].resized((150, 225))
    first, last = (place.patch_box(at, at, (112, 112), gate.layout.box) for at in (0, 111))
    assert abs(np.ptp(found[:, 0]) + 1 - (last.bottom - first.top)) <= 1
    assert abs(found[:, 1].min() - first.left - 18) <= 1  # margin of the figure
    assert abs(found[:, 1].max() + 1 - last.right - 18) <= 1
    assert len(found) <= 8


def test_the_photo_comes_first_only_where_no_map_or_window_shows_it() -> None:
    def has_color(recording: Recording) -> bool:
        """Check whether the middle of the first panel shows the photo, which is noise; maps are gray there."""
        middle = np.asarray(page_of(recording, prepared, panel=72, opacity=1.0, colormap="gray"))[70:110, 36:72].astype(int)
        return bool(np.ptp(middle, -1).max() > 100)

    bars, prepared = seen(network(ours.SqueezeExcite(8)))
    maps, _ = seen(network(ours.CBAM(8)))
    assert has_color(bars)
    assert not has_color(maps)


def test_the_last_map_is_the_default() -> None:
    recording, _ = seen(network(ours.CBAM(8), ours.CBAM(8)))
    assert gates(recording).provenance.parameters["layer"] == "2"
    assert torch.equal(gates(recording).values, gates(recording, layer="2").values)
    assert not torch.equal(gates(recording).values, gates(recording, layer="1").values)


def test_gate_of_attached_attention_is_stated() -> None:
    model = network()
    visattn.attach(model, "cbam", ["0"], init=0.25)
    recording, prepared = seen(model)
    assert gates(recording).provenance.notes[-1] == "0.attention acts with the weight 0.25: y = x + 0.25 (A(x) - x)"
    assert mixed(recording, "0.attention") == 0.25
    bare, _ = seen(network(ours.CBAM(8)))
    assert mixed(bare, "1") is None
    assert (
        page_of(recording, prepared, panel=PANEL).height > page_of(bare, prepared, panel=PANEL).height
    )  # a line with the weight


def test_window_of_a_spatial_transformer_is_framed_on_the_photo() -> None:
    transformer = ours.SpatialTransformer(3)
    with torch.no_grad():
        transformer.theta.bias.copy_(torch.tensor([0.5, 0, 0.25, 0, 0.4, -0.2]))  # half as wide, moved right and up
    recording, prepared = seen(nn.Sequential(transformer, nn.AdaptiveAvgPool2d(1)).eval())
    (window,) = recording.features
    assert window.layout is not None
    place = prepared.geometries[0].resized((200, 300))
    corners = gate_pages._corners(window.value, window.layout.box, place)
    side = 200  # side of the model's input, a square in the middle of the photo
    rows, columns = (0.5 + (-0.2 + step * 0.4) / 2 for step in (-1, 1)), (0.5 + (0.25 + step * 0.5) / 2 for step in (-1, 1))
    (top, bottom), (left, right) = (y * side for y in rows), (50 + x * side for x in columns)
    assert corners == [pytest.approx(point, abs=0.7) for point in ((top, left), (top, right), (bottom, right), (bottom, left))]
    page = page_of(recording, prepared, panel=PANEL)
    assert page.tobytes() != page_of(seen(nn.Sequential(ours.SpatialTransformer(3)).eval())[0], prepared, panel=PANEL).tobytes()


def test_bars_of_the_strip_are_as_high_as_the_sorted_gates() -> None:
    strip = np.asarray(gate_pages._strip(np.linspace(0, 1, 50, dtype=np.float32), 200, "inferno"))[1:-1, 1:-1]
    filled = (strip < 190).any(-1).sum(0) / len(strip)
    assert (np.diff(filled) <= 1e-6).all()  # the largest first
    assert np.abs(filled - np.linspace(1, 0, 198)).max() < 0.06


def test_shared_scale_changes_the_page() -> None:
    recording, prepared = seen(network(ours.CBAM(8), ours.CBAM(8)))
    one, own = (page_of(recording, prepared, panel=PANEL, shared_scale=shared) for shared in (True, False))
    assert one.size[0] == own.size[0]
    assert one.tobytes() != own.tobytes()


def test_layer_is_chosen_by_position_or_name() -> None:
    recording, prepared = seen(network(ours.CBAM(8), ours.SqueezeExcite(8)))
    last, named = (page_of(recording, prepared, layer=layer, panel=PANEL) for layer in (-1, "2"))
    assert last.tobytes() == named.tobytes()
    with pytest.raises(OptionError, match="layer must be all or one of the modules with such gates, 1, 2, got 7"):
        page_of(recording, prepared, layer=7)


def test_network_without_gates_is_refused() -> None:
    _, prepared = seen(network(ours.CBAM(8)))
    with pytest.raises(OptionError, match="the network has no gates"):
        page_of(Recording(), prepared)


class Half(nn.Module):
    """Gate that opens the left half in the first call and the upper half in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        gate = torch.full_like(x[:, :1], 0.1)
        half = gate[..., : x.shape[3] // 2] if self.calls % 2 else gate[..., : x.shape[2] // 2, :]
        half.fill_(0.9)
        ours.publish(self, "spatial_gate", gate, x)
        return x * gate


def test_module_that_is_called_twice_shows_both_maps() -> None:
    half = Half()
    recording, prepared = seen(network(half, half))
    page = np.asarray(page_of(recording, prepared, panel=225, opacity=1.0))
    left, right = page[:230, 18:243], page[:230, 251:476]
    color = visattn.colorize(np.array([[0.0, 1.0]])).getpixel((1, 0))
    spans = [np.ptp(np.argwhere((part == color).all(-1)), axis=0) + 1 for part in (left, right)]
    assert spans[0].tolist() == [150, 75]  # out of a square of 150 pixels
    assert spans[1].tolist() == [75, 150]


def test_gates_of_other_modules_in_one_sequential_are_separate() -> None:
    model = nn.Sequential(network(ours.SqueezeExcite(8), Half(), ours.SqueezeExcite(8), Half()), nn.Identity()).eval()
    assert layers(model) == ["0.1", "0.2", "0.3", "0.4"]


def test_bars_of_negative_gates_point_down() -> None:
    strip = np.asarray(gate_pages._strip(np.array([1, 0.5, -0.5, -1], np.float32), 80, "inferno"))[1:-1, 1:-1]
    dark = np.any(strip < 190, axis=-1)
    middle = len(strip) // 2
    assert dark[:middle, :30].any()
    assert not dark[middle + 2 :, :30].any()
    assert dark[middle:, -30:].any()
    assert not dark[: middle - 2, -30:].any()


def test_gate_of_unknown_position_is_not_drawn() -> None:
    class Turned(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            turned: Tensor = torch.fft.fft2(x).real
            return turned

    recording, prepared = seen(network(Turned(), Half()))
    (gate,) = [feature for feature in recording.features if feature.role == "spatial_gate"]
    assert gate.layout is None
    assert page_of(recording, prepared, panel=PANEL).height > PANEL / 2
