"""Transparent layers: laid over the photo they give the overlay, and what cannot be transparent is refused."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

import visattn
from tests.cli.test_commands import COLORED, TINY, Run, photo, run
from tests.drawing.overlaying import GRID, HEIGHT, WIDTH, heat_values, heatmap, noise
from visattn.core.drawing import colormaps, contact_sheet, overlay
from visattn.core.drawing.pictures import Picture
from visattn.core.geometry import Box, Geometry
from visattn.core.maps import AttentionMap, Detection, MapFacts
from visattn.core.pipeline.explanation import Explanation
from visattn.core.provenance import Provenance, Sink
from visattn.core.records import TokenLayout
from visattn.errors import OptionError, VisattnWarning

__all__ = ["photo", "run"]

SIZE = 120, 180
WHOLE = Geometry(SIZE, (32, 48), Box(0, 0, *SIZE))
CROP = Geometry(SIZE, (32, 48), Box(15.2, 30, 105, 150.7))
PADDED = Geometry(SIZE, (32, 48), Box(-20, -20, 140, 200))
BOX = Box(4, 6, 20, 30)
SINKS = ((Sink(0, 1, 20.0, "blocks.0"),),)
MARKED = MapFacts(
    query_at=((24.0, 8.0),), sinks=SINKS, detections=(Detection("dog", BOX),), glimpses=(((BOX, Box(0, 0, 32, 48)),) * 2,)
)


def pixels(picture: Image.Image) -> NDArray[np.int64]:
    return np.asarray(picture).astype(np.int64)


def explanation(
    geometry: Geometry = WHOLE, values: Any = None, *, facts: MapFacts | None = None, holes: tuple[int, ...] = ()
) -> Explanation:
    grid = torch.as_tensor(GRID if values is None else values, dtype=torch.float32)
    layout = TokenLayout("tokens", (), (2, 3), Box(0, 0, 32, 48), holes)
    one = AttentionMap(grid, (), layout, {}, "attention", Provenance(versions={}), facts=facts or MapFacts())
    return Explanation(noise(*SIZE), geometry, one)


def laid_over(background: Image.Image, layer: Image.Image) -> NDArray[np.int64]:
    return pixels(Image.alpha_composite(background.convert("RGBA"), layer).convert("RGB"))


def gray(photo: Image.Image) -> Image.Image:
    return photo.convert("L").convert("RGB")


def check(found: Explanation, *, lines: bool = False, **style: Any) -> Picture:
    """Check a layer against the overlay of the same explanation, and return it. OpenCV rounds down at each soft edge of a line."""
    layer = found.overlay(transparent=True, **style)
    assert (layer.mode, layer.size) == ("RGBA", found.photo.size)
    by_value = style.get("blend", "value") == "value" and 0 < style.get("opacity", 0.5) < 1
    apart = np.abs(laid_over(gray(found.photo) if by_value else found.photo, layer) - pixels(found.overlay(**style))).max(-1)
    assert apart.max() <= (8 if lines else 2)
    assert (apart <= 2).mean() > 0.98
    return layer


STYLES: dict[str, dict[str, Any]] = {
    "by value": {},
    "constant": {"blend": "constant"},
    "faint": {"opacity": 0.07},
    "strong": {"opacity": 0.95, "blend": "value"},
    "only colors": {"opacity": 1},
    "nothing": {"opacity": 0},
    "lines alone": {"opacity": 0, "contours": [0.3, 0.7]},
    "lines": {"contours": [0.2, 0.5], "mass": 0.6},
    "cells": {"interpolation": "nearest", "colormap": "gray", "normalize": "percentile"},
    "no rings": {"marks": False, "blend": "constant", "opacity": 0.4},
}


@pytest.mark.parametrize("geometry", [WHOLE, CROP, PADDED], ids=["whole", "crop", "padding"])
@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
@pytest.mark.parametrize("facts", [MapFacts(), MARKED], ids=["plain", "marked"])
def test_a_layer_over_the_ground_is_the_overlay(style: dict[str, Any], geometry: Geometry, facts: MapFacts) -> None:
    lines = facts is MARKED or "contours" in style
    layer = pixels(check(explanation(geometry, facts=facts), lines=lines, **style))
    seen = geometry.seen()
    outside = np.ones(SIZE, bool)
    outside[int(seen.top) : int(seen.bottom), int(seen.left) : int(seen.right)] = False
    assert not layer[outside].any()


@pytest.mark.parametrize("opacity", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("blend", ["value", "constant"])
def test_colors_are_those_of_the_color_map_and_alpha_follows_the_blend(blend: Any, opacity: float) -> None:
    values = heat_values()
    layer = pixels(overlay(noise(), values, blend=blend, opacity=opacity, transparent=True, colormap="viridis"))
    share = (values - values.min()) / np.ptp(values)
    alpha = 255 * opacity * (share if blend == "value" else np.ones_like(share))
    assert np.abs(layer[..., 3] - alpha).max() <= 1
    table = colormaps.table("viridis")[(share * 255).round().astype(int)].astype(int)
    there = layer[..., 3] > 0
    assert np.abs(layer[..., :3] - table)[there].max() <= 3  # a level of the color map
    if blend == "constant":
        assert np.unique(layer[..., 3]).tolist() == [round(255 * opacity)]


def test_signed_values_are_laid_over_the_gray_photo() -> None:
    found = explanation(values=[[-3.0, 1.0, 2.0], [0.0, 3.0, -1.0]])
    layer = found.overlay(transparent=True)
    assert np.abs(laid_over(gray(found.photo), layer) - pixels(found.overlay())).max() <= 2
    assert pixels(layer)[..., 3].min() <= 1, "zero is transparent"


def test_holes_are_hatched_and_hold_no_heat() -> None:
    found = explanation(holes=(0, 4))
    layer = pixels(check(found, interpolation="nearest"))
    hole = layer[: SIZE[0] // 2, : SIZE[1] // 3]
    assert {tuple(pixel) for pixel in hole.reshape(-1, 4).tolist()} == {(0, 0, 0, 170), (190, 190, 190, 255)}


def test_a_constant_map_is_transparent_with_one_warning() -> None:
    with pytest.warns(VisattnWarning, match="the map is constant") as told:
        layer = explanation(values=[[1.0] * 3] * 2).overlay(transparent=True)
    assert sum(one.category is VisattnWarning for one in told) == 1
    assert not pixels(layer).any()


def test_a_layer_stores_its_provenance(tmp_path: Path) -> None:
    found = explanation()
    path = found.save(tmp_path / "layer.png", transparent=True)
    with Image.open(path) as image:
        assert image.mode == "RGBA"
        assert '"transparent": true' in image.info["visattn"]
    assert np.array_equal(pixels(Image.open(path)), pixels(found.overlay(transparent=True)))
    assert found.overlay().provenance.drawing["transparent"] is False
    webp = pixels(Image.open(found.save(tmp_path / "layer.webp", transparent=True)))
    assert np.array_equal(webp[..., 3], pixels(Image.open(path))[..., 3])


@pytest.mark.parametrize("name", ["layer.jpg", "layer.JPEG"])
def test_jpeg_is_refused(name: str, tmp_path: Path) -> None:
    message = r"^JPEG holds no transparency\. Choose a name that ends in \.png or \.webp"
    with pytest.raises(OptionError, match=message):
        explanation().save(tmp_path / name, transparent=True)
    with pytest.raises(OptionError, match=message):
        overlay(noise(), heatmap(GRID), transparent=True).save(tmp_path / name)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("band", ["legend", "caption"])
def test_bands_are_refused(band: str) -> None:
    options: Any = {band: True}
    with pytest.raises(OptionError, match=r"without a band\. Leave legend and caption out"):
        explanation().overlay(transparent=True, **options)


def test_components_are_refused() -> None:
    one = explanation().map
    parts = replace(one, values=torch.rand(3, 2, 3), axes=("component",))
    with pytest.raises(OptionError, match="no layer is transparent"):
        replace(explanation(), map=parts).overlay(transparent=True)


def test_figures_of_panels_are_refused() -> None:
    found = explanation()
    heads = replace(found.map, values=torch.rand(2, 2, 3), axes=("head",))
    message = "transparent draws the layer of one picture; figures of panels and films have none"
    with pytest.raises(OptionError, match=message):
        contact_sheet(found.photo, heads, found.geometry, transparent=True)
    with pytest.raises(OptionError, match=message):
        visattn.stage_page([found], transparent=True)


def test_the_command_writes_a_layer(run: Run, photo: Path) -> None:
    for name, flags in (("plain.png", ()), ("layer.png", ("--transparent",))):
        assert run("overlay", photo, *TINY, *COLORED, "--method", "rollout", "-o", name, *flags)[0] == 0
    with Image.open("plain.png") as plain, Image.open("layer.png") as layer, Image.open(photo) as before:
        assert np.abs(laid_over(gray(before), layer) - pixels(plain)).max() <= 2


def test_batch_writes_layers(run: Run, photo: Path) -> None:
    code, _, err = run("batch", photo, *TINY, *COLORED, "--method", "rollout", "--transparent", "-o", "out")
    assert code == 0, err
    with Image.open("out/dog.rollout.png") as layer:
        assert layer.mode == "RGBA"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("overlay", "--legend"), "--legend has no effect with --transparent"),
        (("overlay", "--caption"), "--caption has no effect with --transparent"),
        (("overlay", "-o", "a.jpg"), "Choose a name that ends in .png"),
        (("batch", "--caption", "-o", "out"), "--caption has no effect with --transparent"),
        (("heads",), "transparent draws the layer of one picture"),
        (("video",), "transparent draws the layer of one picture"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_commands_refuse_it_before_a_model_is_loaded(
    command: tuple[str, ...],
    message: str,
    run: Run,
    photo: Path,
    tmp_path: Path,
) -> None:
    code, _, err = run(command[0], photo, "--model", "no_such_model", "--transparent", *command[1:])
    assert code == 2
    assert err.startswith("visattn: error: ")
    assert message in err
    assert len(err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["dog.png"]


def test_an_array_is_drawn_as_a_layer_too() -> None:
    values = heat_values(HEIGHT, WIDTH)
    layer = overlay(noise(), values, transparent=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.abs(laid_over(gray(noise()), layer) - pixels(overlay(noise(), values))).max() <= 2
        assert np.abs(laid_over(noise(), layer) - pixels(overlay(noise(), values, ground="photo"))).max() <= 2
