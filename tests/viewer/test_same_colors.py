"""The page draws the colors of static overlays, for each kind of map and each way to blend them."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from playwright.sync_api import Browser, Page
from torch import Tensor

import visattn
from tests import tiny
from tests.samples import sampled
from tests.viewer.conftest import Opened
from tests.viewer.driving import settled
from tests.viewer.test_attn_in_page import opened_in
from tests.viewer.test_panels import Even
from visattn.core.maps import AttentionMap
from visattn.core.operators import MatrixOperator
from visattn.core.pipeline.explanation import Explanation
from visattn.studies import Study, View

ROWS, COLUMNS, SIDE = 6, 9, 24  # cells of the maps, and about as many pixels of the photo along a cell
ABOVE = 20  # rows of the photo, at least, that the model does not receive, at the top and at the bottom
QUERY, HOLES, SINK = (2, 3), (0, 13, 14, 40), 22
LEVELS = 4  # of 255: the photo of the page is a JPEG, and its weights have eight bits
HATCH = 18  # pixels of the photo: three lines of hatching


def photo() -> Image.Image:
    """Return a photo whose colors change so slowly that neither JPEG nor another size changes them."""
    y, x = np.mgrid[: ROWS * SIDE + 2 * ABOVE, : COLUMNS * SIDE].astype(float)
    return Image.fromarray(np.stack([40 + 0.8 * x, 200 - 0.8 * y, 60 + 0.3 * x + 0.3 * y], -1).astype(np.uint8))


def made_of(like: AttentionMap, values: Tensor, holes: tuple[int, ...] = (), **facts: Any) -> AttentionMap:
    layout = replace(like.layout, holes=holes)
    return replace(like, values=values.view(ROWS, COLUMNS), layout=layout, facts=replace(like.facts, **facts))


def attending() -> View:
    """Look at the photo with a transformer, and add maps that are rare."""
    size = (ROWS * 16, COLUMNS * 16)
    how: dict[str, Any] = {"img_size": size, "mean": (0.5,) * 3, "std": (0.5,) * 3, "resize": "model"}
    query = {"query": "patch:{},{}".format(*QUERY)}
    methods = {"rollout": {}, "similarity": query, "pca": {}, "gradcam": {}, "captum.saliency": {}, "captum.input_x_gradient": {}}
    (view,) = visattn.study(tiny.vit(img_size=size), photo(), methods=methods, **how)
    cells = ROWS * COLUMNS
    wave, tokens = torch.linspace(-9, 14, cells).sin(), 1 + cells
    like, last = view.maps["rollout"], view.recording[-1]
    peak = torch.zeros(cells).index_fill(0, torch.tensor([9]), 5.0)
    weights = torch.rand(1, 2, tokens, tokens).softmax(-1) / 2
    weights[..., SINK] += 0.5
    recording = replace(view.recording, records=[*list(view.recording)[:-1], replace(last, operator=MatrixOperator(weights))])
    rare = {
        "holes": made_of(like, wave + 2, HOLES),
        "signed holes": made_of(like, wave, HOLES),
        "signed": made_of(like, wave - 0.4),
        "sparse": made_of(like, wave + 2 + peak),
        "one peak": made_of(like, peak),
        "one sign": made_of(like, wave - 1.2),
        "nearly even": made_of(like, 100 + wave),
        "constant": made_of(like, torch.zeros(cells)),
        "nothing signed": replace(made_of(like, torch.zeros(cells)), signed=True),
        "no zero": made_of(like, wave / 2 - 0.2, interval=True),
        "points": made_of(like, wave + 2, pixelwise=True),
        "signed points": made_of(like, wave + peak / 4, pixelwise=True),
    }
    components = torch.stack([wave, wave.roll(7) + peak, wave.flip(0)]).view(3, ROWS, COLUMNS)
    pca = view.maps["pca"]
    rare["components with holes"] = replace(pca, values=components, layout=replace(pca.layout, holes=HOLES))
    return replace(view, recording=recording, maps={**view.maps, **rare})


def gating() -> View:
    """Look at the photo with a network that has a gate and no attention."""
    model = Even(torch.rand(ROWS, COLUMNS)).eval()
    (view,) = visattn.study(
        model, photo(), methods={"gates": {}, "gradcam": {"layer": "down"}}, img_size=(ROWS * 16, COLUMNS * 16)
    )
    return view


@pytest.fixture(scope="module")
def study() -> Study:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Study((attending(), gating()))


@pytest.fixture(scope="module")
def page(browser: Browser, written: Callable[[Study], Path], study: Study) -> Iterator[Page]:
    made = browser.new_page(viewport={"width": 1280, "height": 900})
    made.goto(written(study).as_uri())
    made.wait_for_selector("html[data-ready]", state="attached")
    yield made
    made.close()


def colors_of(picture: Image.Image, points: NDArray[np.float64], across: float = 0) -> NDArray[np.float64]:
    """Return mean colors of squares around points (y, x) of the photo in a picture of any size; at 0, of single pixels."""
    pixels = np.asarray(picture.convert("RGB")).astype(float)
    factor = picture.width / photo().width
    found = []
    for y, x in points:
        (top, bottom), (left, right) = ((int((at - across / 2) * factor), int((at + across / 2) * factor)) for at in (y, x))
        found.append(pixels[top : max(bottom, top + 1), left : max(right, left + 1)].mean((0, 1)))
    return np.array(found)


def differences(page: Page, view: int, static: Explanation, chosen: dict[str, Any], options: dict[str, Any]) -> float:
    """Return the largest difference of a color of the page from the static overlay: at centers of cells, in holes and beside the map."""
    rings = not static.map.facts.pixelwise  # they would lie on pixels
    told = {"view": view, "query": {"name": "cls"}, "sinks": rings, "smooth": False} | chosen
    page.evaluate("(told) => viewer.page.state.set(told)", told)
    settled(page)
    shown = visattn.load_image(base64.b64decode(page.evaluate("viewer.image.canvas.toDataURL().split(',')[1]")))
    drawn = static.overlay(interpolation="bilinear" if told["smooth"] else "nearest", marks=rings, **options)
    layout, (rows, columns) = static.map.layout, static.map.layout.grid[-2:]
    boxes = [
        static.geometry.patch_box(row, column, (rows, columns), layout.box) for row in range(rows) for column in range(columns)
    ]
    centers = np.array([((box.top + box.bottom) / 2, (box.left + box.right) / 2) for box in boxes])
    seen = np.delete(centers, layout.holes, axis=0) + ((5, -4) if told["smooth"] else (0, 0))
    beside = np.array([(ABOVE / 2, 30), (ABOVE / 2, 170)])
    pairs = [(np.concatenate([seen, beside]), 0.0), *([(centers[list(layout.holes)], HATCH)] if layout.holes else [])]
    return max(float(np.abs(colors_of(shown, at, across) - colors_of(drawn, at, across)).max()) for at, across in pairs)


MAPS = [
    *["@attention", "@similarity", "rollout", "similarity", "pca", "gradcam", "captum.saliency", "captum.input_x_gradient"],
    *[
        "holes",
        "signed holes",
        "signed",
        "sparse",
        "one peak",
        "one sign",
        "nearly even",
        "constant",
        "nothing signed",
        "no zero",
    ],
    *["points", "signed points", "components with holes", "gates", "gradcam of gates"],
]
CASES = list(itertools.product(MAPS, ("value", "constant"), ("photo", "gray", "auto")))


def pictured(study: Study, name: str) -> tuple[int, Explanation, dict[str, Any]]:
    """Return the number of the view of a map, its explanation, and what the page is told to show it."""
    cell = "patch:{},{}".format(*QUERY)
    box = study[0].geometry.patch_box(*QUERY, (ROWS, COLUMNS), study[0].maps["rollout"].layout.box)
    query = {"y": (box.top + box.bottom) / 2, "x": (box.left + box.right) / 2}
    if name == "@attention":
        told = {"map": name, "query": query, "record": 1, "head": 1}
        return 0, study[0].explain("attention", layer=-1, head=1, query=cell), told
    if name == "@similarity":
        return 0, study[0].explain("similarity", query=cell), {"map": name, "query": query}
    view = 1 if "gates" in name else 0
    own = name.removesuffix(" of gates")
    return view, study[view].explanation(own), {"map": own}


@pytest.mark.filterwarnings("ignore:the map is")
@pytest.mark.parametrize(("name", "blend", "ground"), sampled(CASES, 5))
def test_the_page_has_the_colors_of_static_overlays(name: str, blend: str, ground: str, page: Page, study: Study) -> None:
    view, static, told = pictured(study, name)
    if name == "@attention":
        assert static.map.facts.sinks[0]
    options = {"blend": blend, "ground": ground}
    assert differences(page, view, static, told | options, options) <= LEVELS


@pytest.mark.parametrize("name", ["signed", "sparse", "holes", "pca"])
def test_smooth_pages_have_the_colors_of_interpolated_values(name: str, page: Page, study: Study) -> None:
    view, static, told = pictured(study, name)
    assert differences(page, view, static, told | {"blend": "value", "ground": "auto", "smooth": True}, {}) <= 2 * LEVELS


def test_opened_files_have_the_scales_of_their_maps(opened: Opened, study: Study, tmp_path: Path) -> None:
    page = opened(study)
    assert opened_in(page, study[:1].save(tmp_path / "a.attn")) == ["Opened a.attn."]
    told = page.evaluate("viewer.page.view.maps.map((one) => [one.name, one.signed, one.pixelwise])")
    assert told == [[name, one.signed, one.facts.pixelwise] for name, one in study[0].maps.items()]
    _, static, chosen = pictured(study, "no zero")
    assert differences(page, 0, static, chosen, {}) <= LEVELS
