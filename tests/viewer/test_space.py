"""The page of a space in Chromium: its points, attention and colors against those of Python; lasso, keys and links."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from playwright.sync_api import Page

from tests import tiny, zoo
from tests.pipeline.test_prompts import saved as clip
from tests.viewer.conftest import Opened
from tests.viewer.driving import settled, wait_until
from tests.viewer.test_bundle import AXE, install, npm
from visattn import embedding
from visattn.errors import OptionError

__all__ = ["npm"]

random = np.random.default_rng(0)
PHOTOS = [Image.fromarray(random.integers(0, 256, (32, 48, 3), dtype=np.uint8)) for _ in range(4)]
MASKS = [random.random((32, 48)) > 0.5 for _ in PHOTOS]


@pytest.fixture(scope="session")
def space() -> embedding.Space:
    """Gather four small photos, every patch of them."""
    model = tiny.vit(reg_tokens=1)
    return embedding.gather(model, PHOTOS, points=400, masks=MASKS, labels=["cat", "dog", "cat", "dog"])


@pytest.fixture(scope="session")
def saved(space: embedding.Space, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return a function that writes the page with two or three dimensions."""
    folder = tmp_path_factory.mktemp("spaces")

    def write(dimensions: int) -> Path:
        file = folder / f"{dimensions}.html"
        if not file.exists():
            embedding.save_html(space, file, dimensions=dimensions)
        return file

    return write


def points_shown(page: Page, row: int, head: int, side: str) -> torch.Tensor:
    return torch.tensor(page.evaluate(f"Array.from(app.places({row}, {head}, '{side}'))")).view(-1, 2)


def test_points_are_those_of_python_on_one_scale(space: embedding.Space, saved: Callable[[int], Path], opened: Opened) -> None:
    page = opened(saved(2))
    for row, one in enumerate(embedding.lay_out(space)):
        for head in range(len(one.heads)):
            shown = torch.cat([points_shown(page, row, head, side) for side in ("query", "key")])
            known = torch.cat([one.queries[head], one.keys[head]])
            scale = (known[:, 0].max() - known[:, 0].min()) / (shown[:, 0].max() - shown[:, 0].min())
            other = (known[:, 1].max() - known[:, 1].min()) / (shown[:, 1].max() - shown[:, 1].min())
            assert float(scale) == pytest.approx(float(other), rel=1e-3)
            flipped = shown * torch.tensor([1.0, -1.0]) * scale  # the screen's rows grow downward
            assert torch.allclose(flipped - flipped.mean(0), known - known.mean(0), atol=float(scale) * 1e-4)


def test_rows_numbers_and_properties_are_those_of_python(
    space: embedding.Space, saved: Callable[[int], Path], opened: Opened
) -> None:
    page = opened(saved(2))
    for row, states in enumerate(space.layers):
        for token in (0, 5, len(states.some) - 1):
            shown = torch.tensor(page.evaluate(f"Array.from(app.space.layers[{row}].row(1, {token}))"))
            assert torch.allclose(shown, states.rows[1, token].float(), atol=0.002)
        mean = torch.tensor(page.evaluate(f"Array.from(app.space.layers[{row}].meanRow(0, [1, 4, 6]))"))
        assert torch.allclose(mean, states.rows[0, [1, 4, 6]].float().mean(0), atol=0.002)
    states, table = space.layers[0], "app.space.layers[0].table"
    of = states.tokens
    assert page.evaluate(f"Array.from({table}.row)") == of.row[states.some].tolist()
    assert page.evaluate(f"Array.from({table}.image)") == of.image[states.some].tolist()
    plain = states.tokens.plain[states.some]
    shown = torch.tensor(page.evaluate(f"Array.from({table}.object)"))
    assert torch.allclose(shown[plain], of.object[states.some][plain], atol=1e-3)
    luma = of.color[states.some] @ torch.tensor([0.299, 0.587, 0.114])
    shown = torch.tensor(page.evaluate(f"Array.from({table}.image, (_, i) => {table}.brightness(i))"))
    assert torch.allclose(shown[plain], luma[plain], atol=0.005)
    assert page.evaluate("app.panels.numbers.rows.length") == sum(len(one.queries) for one in space.layers)
    first = embedding.head_numbers(space)[0]["row_pearson"]
    assert page.evaluate("app.panels.numbers.rows[0].row_pearson") == pytest.approx(first)
    page.locator("#tab-numbers").click()
    settled(page)
    low, high = (embedding.head_numbers(space)[0][side] for side in ("low", "high"))
    assert f"{first:.2f} ({low:.2f} to {high:.2f})" in page.locator(".numbers tbody tr").first.inner_text()


def pixels(page: Page) -> Any:
    """Return the colors of the head's picture, and how many pixels have each."""
    return page.evaluate(
        """() => {
          const count = {};
          for (const pixel of app.plot.raster.pixels) count[pixel] = (count[pixel] || 0) + 1;
          return count;
        }"""
    )


def test_queries_and_keys_have_their_colors_and_can_be_hidden(saved: Callable[[int], Path], opened: Opened) -> None:
    page = opened(saved(2))
    query, key = ("4278214357", "4289884672")  # of Okabe and Ito: #d55e00 and #0072b2, as alpha, blue, green, red
    both = pixels(page)
    assert both[query] > 100
    assert both[key] > 100
    page.get_by_label("keys", exact=True).click()
    settled(page)
    only = pixels(page)
    assert key not in only
    assert only[query] >= both[query]


@pytest.mark.parametrize(
    "mode", ["row", "column", "position", "checks", "norm", "color", "hue", "brightness", "object", "label", "image", "outlier"]
)
def test_every_color_draws_and_has_a_legend(mode: str, saved: Callable[[int], Path], opened: Opened) -> None:
    page = opened(saved(2), link=f"mode={mode}")
    assert page.locator(".controls select").first.input_value() == mode
    assert len(pixels(page)) > 2
    assert page.locator(".legend").inner_text().strip() or page.locator(".legend canvas").count()


def test_a_lasso_selects_what_lies_in_it_in_every_head(saved: Callable[[int], Path], opened: Opened) -> None:
    page = opened(saved(2), link="row=1&head=1")
    box = page.locator(".stack canvas").first.bounding_box()
    assert box is not None
    side = box["width"]
    corners = [(0.2, 0.2), (0.6, 0.25), (0.55, 0.8), (0.25, 0.6)]
    page.mouse.move(box["x"] + corners[0][0] * side, box["y"] + corners[0][1] * side)
    page.mouse.down()
    for x, y in [*corners[1:], corners[0]]:
        page.mouse.move(box["x"] + x * side, box["y"] + y * side, steps=4)
    page.mouse.up()
    settled(page)
    told = page.evaluate("['query', 'key'].map((side) => Array.from(app.members(1, side)))")

    def inside(x: float, y: float) -> bool:
        crossings = 0
        for (x1, y1), (x2, y2) in zip(corners, [*corners[1:], corners[0]], strict=True):
            if (y1 > y) != (y2 > y) and x < x1 + (y - y1) * (x2 - x1) / (y2 - y1):
                crossings += 1
        return crossings % 2 == 1

    differ = 0
    for which, members in zip(("query", "key"), told, strict=True):
        places = 0.03 + 0.94 * points_shown(page, 1, 1, which)
        expected = [int(inside(float(x), float(y))) for x, y in places]
        assert 0 < sum(expected) < len(expected)
        differ += sum(abs(one - other) for one, other in zip(expected, members, strict=True))
    assert differ <= 2  # points on the edge, which the mouse rounds to pixels
    assert page.locator("#tab-patches").get_attribute("aria-selected") == "true"
    assert "selected by lasso" in page.locator("#panel-patches").inner_text()
    assert f"{sum(told[0])} queries, {sum(told[1])} keys" in page.locator(".left .reading").inner_text()
    saved_numbers = page.evaluate("app.selection()")
    assert len(saved_numbers["queries"]) == sum(told[0])
    page.get_by_role("button", name="Clear selection").click()
    settled(page)
    assert page.evaluate("app.selected") is None


def test_a_click_chooses_the_token_and_shows_its_attention(
    space: embedding.Space, saved: Callable[[int], Path], opened: Opened
) -> None:
    page = opened(saved(2), link="row=0&head=0")
    box = page.locator(".stack canvas").first.bounding_box()
    assert box is not None
    token = 7
    x, y = (0.03 + 0.94 * points_shown(page, 0, 0, "query")[token]).tolist()
    page.mouse.click(box["x"] + x * box["width"], box["y"] + y * box["width"])
    settled(page)
    chosen = page.evaluate("app.token")
    near = points_shown(page, 0, 0, "query")
    assert chosen == token or float((near[chosen] - near[token]).norm()) < 0.03
    of = space.layers[0].tokens
    at = int(space.layers[0].some[chosen])
    assert f"query {int(of.row[at])},{int(of.column[at])}" in page.locator(".left .reading").inner_text()
    weights = space.layers[0].rows[0, chosen]
    assert f"{100 * float(weights.max()):.1f} %" in page.locator("figure.image .reading").inner_text()
    page.locator("figure.image select").nth(1).select_option("mean")
    settled(page)
    assert "Mean attention of" in page.locator("figure.image").inner_text()


def test_colors_lie_on_the_gray_photo_and_no_colors_on_the_photo_itself(
    space: embedding.Space, saved: Callable[[int], Path], opened: Opened
) -> None:
    page, layer, query = opened(saved(2), link="row=0&head=0"), space.layers[0], 2
    (rows, columns), names = layer.tokens.grid, 2
    row, column = divmod(int(layer.rows[0, query, names:].argmin()), columns)  # the weakest patch gets no color

    def colorfulness() -> float:
        settled(page)
        shown = np.asarray(Image.open(io.BytesIO(page.locator("figure.image canvas").screenshot())).convert("RGB")).astype(int)
        y, x = (np.array([row, column]) + 0.25) / (rows, columns) * shown.shape[:2]  # beside the dot in the center
        inner = shown[int(y) - 3 : int(y) + 4, int(x) - 3 : int(x) + 4]
        return float((inner.max(2) - inner.min(2)).max())

    page.evaluate("app.choose(null)")
    assert colorfulness() > 20
    page.evaluate(f"app.choose({query})")
    assert colorfulness() <= 2


def test_heads_are_chosen_by_click_and_by_keys_and_the_link_keeps_them(saved: Callable[[int], Path], opened: Opened) -> None:
    page = opened(saved(2), link="row=0&head=1")
    box = page.locator(".spacematrix canvas").first.bounding_box()
    assert box is not None
    left, top, side = page.evaluate("app.matrix.tile(1, 1)")
    page.mouse.click(box["x"] + left + side / 2, box["y"] + top + side / 2)
    settled(page)
    assert page.evaluate("[app.state.row, app.state.head]") == [1, 1]
    page.locator(".spacematrix canvas").first.focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowLeft")
    settled(page)
    assert page.evaluate("[app.state.row, app.state.head]") == [0, 0]
    assert "row=0&head=0" in page.evaluate("location.hash")
    for _ in range(3):
        page.keyboard.press("+")
    settled(page)
    assert page.evaluate("app.matrix.view.zoom") == pytest.approx(1.5**3)
    page.keyboard.press("0")
    settled(page)
    assert page.evaluate("app.matrix.view.zoom") == 1


def test_three_dimensions_turn(saved: Callable[[int], Path], opened: Opened) -> None:
    page = opened(saved(3))
    before = points_shown(page, 0, 0, "query")
    assert float(before.min()) >= 0
    assert float(before.max()) <= 1
    box = page.locator(".stack canvas").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 100, box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 180, box["y"] + 100, steps=4)
    page.mouse.up()
    settled(page)
    after = points_shown(page, 0, 0, "query")
    assert not torch.allclose(before, after, atol=1e-3)
    assert page.evaluate("app.selected") is None


def test_numbers_sort_and_open_a_head(space: embedding.Space, saved: Callable[[int], Path], opened: Opened) -> None:
    page = opened(saved(2), link="tab=numbers")
    page.locator("[data-name=brightness]").click()
    settled(page)
    (scores,) = (one for one in space.scores if one.name == "brightness")
    best = scores.rows()[0]
    page.locator(".numbers tbody button").first.click()
    settled(page)
    layer, head = page.evaluate("[app.layer.name, app.state.head]")
    assert (layer, head) == (best["layer"], best["head"])
    assert page.locator("th[aria-sort=descending]").inner_text().strip() == "brightness"


def test_bad_links_are_ignored(saved: Callable[[int], Path], opened: Opened) -> None:
    page = opened(saved(2), link="row=99&head=-1&mode=x&tab=y&image=1.5")
    assert page.evaluate("app.state.mode") == "kind"
    assert page.evaluate("app.state.tab") == "image"


@pytest.mark.full
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(theme: str, npm: str, saved: Callable[[int], Path], opened: Opened, tmp_path: Path) -> None:
    install(npm, AXE, folder=tmp_path)
    axe = (tmp_path / "node_modules" / "axe-core" / "axe.min.js").read_text()
    page = opened(saved(2), color_scheme=theme)
    page.evaluate(axe)
    for name in ("image", "patches", "images", "numbers"):
        page.locator(f"#tab-{name}").click()
        settled(page)
        found = page.evaluate(
            "axe.run().then((result) => result.violations.map((one) => [one.id, one.nodes.map((node) => node.html)]))"
        )
        assert found == [], json.dumps(found, indent=1)[:3000]


def test_a_page_that_is_too_large_is_refused(space: embedding.Space, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="MB"):
        embedding.save_html(space, tmp_path / "a.html", max_mb=0.01)
    assert not (tmp_path / "a.html").exists()


@pytest.fixture(scope="session")
def compared(space: embedding.Space, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the page of two checkpoints of one model."""
    other = embedding.gather(tiny.vit(reg_tokens=1, seed=5), PHOTOS, points=400, masks=MASKS, labels=["cat", "dog", "cat", "dog"])
    return embedding.save_html(space, tmp_path_factory.mktemp("two") / "two.html", compare=other)


def test_two_models_stand_beside_each_other_and_share_the_chosen_token(
    space: embedding.Space, compared: Path, opened: Opened
) -> None:
    page = opened(compared, link="row=0&head=0")
    layers = len(space.layers)
    assert page.evaluate("app.space.layers.length") == 2 * layers
    names = page.evaluate("app.space.blocks.map((block) => block.model)")
    assert len(set(names)) == 2
    left, top, side = page.evaluate("app.matrix.tile(0, 0)")
    right, same, _ = page.evaluate(f"app.matrix.tile({layers}, 0)")
    assert right > left + side
    assert same == top
    page.evaluate("app.choose(9)")
    settled(page)
    assert page.evaluate(f"app.tokenIn({layers})") == 9
    canvas = page.locator(".spacematrix canvas").first
    canvas.focus()
    for _ in range(tiny.HEADS):
        page.keyboard.press("ArrowRight")
    settled(page)
    assert page.evaluate("[app.state.row, app.state.head]") == [layers, 0]
    assert page.evaluate("app.token") == 9
    rows = page.evaluate("app.panels.numbers.rows.length")
    assert rows == 2 * sum(len(one.queries) for one in space.layers)
    page.locator("#tab-numbers").click()
    settled(page)
    assert page.locator(".numbers tbody tr").count() == rows


def test_images_lie_by_their_codes(space: embedding.Space, saved: Callable[[int], Path], opened: Opened) -> None:
    page = opened(saved(2), link="tab=images")
    shown = torch.tensor(page.evaluate("app.space.blocks[0].codes"))
    known = embedding.lay_out_images(space)
    apart = torch.pdist(shown) / torch.pdist(known)
    assert torch.allclose(apart, apart[0].expand_as(apart), rtol=1e-3)
    wait_until(page, "app.space.pictures[0].every((picture) => picture.complete)")
    thumb, side = page.evaluate("[app.panels.images.thumb, app.panels.images.side]")
    x, y = (thumb / 2 + part * (side - thumb) for part in (float(shown[2, 0]), 1 - float(shown[2, 1])))
    page.locator("#panel-images canvas").click(position={"x": x, "y": y})
    settled(page)
    assert page.evaluate("app.state.image") == 2
    assert "Selected by image" in page.locator(".left .reading").inner_text()


def test_spaces_of_other_images_are_not_compared(space: embedding.Space, tmp_path: Path) -> None:
    other = embedding.gather(tiny.vit(reg_tokens=1), ["photo:chelsea"], points=4)
    with pytest.raises(OptionError, match="must have the same images"):
        embedding.save_html(space, tmp_path / "a.html", compare=other)


@pytest.fixture(scope="session")
def swin(tmp_path_factory: pytest.TempPathFactory) -> tuple[embedding.Space, Path]:
    """Write the page of a model whose layers have different grids."""
    photos = [photo.resize((96, 64)) for photo in PHOTOS]
    found = embedding.gather(zoo.FAMILIES["swin"].build((64, 96)), photos, img_size=(64, 96), points=24)
    return found, embedding.save_html(found, tmp_path_factory.mktemp("swin") / "swin.html")


@pytest.fixture(scope="session")
def another(space: embedding.Space, tmp_path_factory: pytest.TempPathFactory) -> tuple[embedding.Space, Path]:
    """Write the page of two models with other tokens without a place, of which the second has a sink."""
    other = embedding.gather(tiny.vit(seed=5), PHOTOS, points=400)
    for states in other.layers:
        states.tokens.sink[3] = True
    return other, embedding.save_html(space, tmp_path_factory.mktemp("another") / "two.html", compare=other)


def test_layers_with_other_patches_say_that_they_do_not_have_the_token(
    swin: tuple[embedding.Space, Path], opened: Opened
) -> None:
    space, file = swin
    page = opened(file, link="row=0&head=0&image=2")
    page.evaluate("app.choose(Array.from(app.layer.table.image).indexOf(2))")
    settled(page)
    last = len(space.layers) - 1
    for tab in ("image", "patches", "images", "numbers"):
        page.evaluate(f"app.set({{row: {last}, head: 0, tab: '{tab}'}})")
        settled(page)
    assert page.evaluate("app.token") is None
    assert page.evaluate("app.image") == 2
    page.evaluate("app.set({tab: 'image'})")
    settled(page)
    assert "This layer does not have query" in page.locator("figure.image").inner_text()
    assert space.images[2] in page.locator(".left .reading").inner_text()
    page.evaluate("app.set({row: 1})")  # of the same grid as the first
    settled(page)
    assert page.evaluate("app.token") == page.evaluate("app.picked.token")


def test_a_selection_is_saved_as_it_was_drawn_whatever_layer_is_open(swin: tuple[embedding.Space, Path], opened: Opened) -> None:
    space, file = swin
    page = opened(file, link="row=0&head=0")
    page.evaluate("app.plot.lasso([[0, 0], [1000, 0], [1000, 1000], [0, 1000]])")
    settled(page)
    every = len(space.layers[0].some)
    page.evaluate(f"app.set({{row: {len(space.layers) - 1}, head: 0}})")
    settled(page)
    saved_numbers = page.evaluate("app.selection()")
    assert saved_numbers["layer"] == space.layers[0].layer
    assert len(saved_numbers["queries"]) == len(saved_numbers["keys"]) == every
    assert saved_numbers["queries"][0] == {"image": space.images[0], "number": 0, "token": saved_numbers["keys"][0]["token"]}
    assert "has no patch of the selection" in page.locator("#panel-patches").inner_text()
    assert sum(page.evaluate("Array.from(app.members(app.state.row, 'query'))")) == 0
    page.evaluate("app.set({tab: 'image', attention: 'mean'})")
    settled(page)
    assert "No queries of patches are selected in this layer" in page.locator("figure.image").inner_text()
    page.evaluate("app.set({tab: 'patches'})")
    page.evaluate("app.chooseImage(1)")
    settled(page)
    assert "of 1 image, selected by image" in page.locator("#panel-patches").inner_text()


def test_a_second_model_has_its_own_sinks_and_shares_patches_by_their_place(
    another: tuple[embedding.Space, Path], space: embedding.Space, opened: Opened
) -> None:
    other, file = another
    page = opened(file, link="row=0&head=0")
    layers = len(space.layers)
    assert "and cls, register0 where there are any, as query and as key" in page.locator("footer").inner_text()
    assert (
        page.evaluate(f"Array.from(app.space.layers[{layers}].table.sink)")
        == other.layers[0].tokens.sink[other.layers[0].some].to(torch.uint8).tolist()
    )
    assert sum(page.evaluate("Array.from(app.space.layers[0].table.sink)")) == int(space.layers[0].tokens.sink.sum())
    for name in ("cls", "0,1", "register0"):
        token = page.evaluate(f"Array.from({{length: 30}}, (_, i) => app.layer.table.nameOf(i)).indexOf('{name}')")
        page.evaluate(f"app.choose({token})")
        settled(page)
        there = page.evaluate(f"app.tokenIn({layers})")
        if name == "register0":
            assert there is None
        else:
            assert there == token - (name == "0,1")  # one token without a place less
            assert page.evaluate(f"app.space.layers[{layers}].table.nameOf({there})") == name
    page.evaluate(f"app.set({{row: {layers}, tab: 'image'}})")
    settled(page)
    assert "does not have query register0" in page.locator("figure.image").inner_text()


def test_a_second_model_shows_the_same_patches_of_a_selection(
    another: tuple[embedding.Space, Path], space: embedding.Space, opened: Opened
) -> None:
    _, file = another
    page = opened(file, link="row=0&head=1")
    names = "Array.from({length: app.layer.table.count}, (_, i) => app.layer.table.nameOf(i))"
    only = f"{{query: Uint8Array.from({names}, (name) => ['0,1', 'register0'].includes(name)), key: new Uint8Array(99)}}"
    page.evaluate(f"app.selectPoints({only}, 'lasso')")
    page.evaluate(f"app.set({{row: {len(space.layers)}, head: 0}})")
    settled(page)
    own = f"Array.from(app.members(app.state.row, 'query')).flatMap((one, i) => one ? {names}[i] : [])"
    assert page.evaluate(own) == ["0,1"] * len(PHOTOS)
    assert sum(page.evaluate("Array.from(app.members(app.state.row, 'key'))")) == 0
    saved_numbers = page.evaluate("app.selection()")
    assert (saved_numbers["layer"], saved_numbers["head"]) == (space.layers[0].layer, 1)
    assert {one["token"] for one in saved_numbers["queries"]} == {"0,1", "register0"}


def test_missing_numbers_are_empty_cells_and_come_last(saved: Callable[[int], Path], opened: Opened) -> None:
    page = opened(saved(2), link="tab=numbers")
    page.evaluate("""() => {
      const [first, second] = app.panels.numbers.rows;
      first.brightness = {score: null, null: null, p: null};
      second.brightness = {score: 0.5, null: 0.25, p: null};
      first.row_spearman = null;
    }""")
    page.locator("[data-name=brightness]").click()
    settled(page)
    column = page.evaluate("app.panels.numbers.columns.indexOf('brightness')")
    shown = [row.locator("td").all_inner_texts() for row in page.locator(".numbers tbody tr").all()]
    assert shown[-1][column] == ""
    assert shown[-1][page.evaluate("app.panels.numbers.columns.indexOf('row_spearman')")] == ""
    assert "0.50 (0.25)" in [row[column] for row in shown]


def test_the_table_names_the_model_and_whole_layers(another: tuple[embedding.Space, Path], opened: Opened) -> None:
    _, file = another
    page = opened(file, link="tab=numbers")
    names = page.evaluate("app.space.blocks.map((block) => block.model)")
    first = page.locator(".numbers tbody tr").first.locator("td").all_inner_texts()
    assert first[:3] == [names[0], "0", "0"]
    page.locator("[data-name=model]").click()
    page.locator("[data-name=model]").click()
    settled(page)
    assert page.locator(".numbers tbody tr td").first.inner_text() == sorted(names)[-1]
    page.locator(".numbers tbody tr").first.locator("td").last.click()
    settled(page)
    assert page.evaluate("app.space.blocks[app.layer.block].model") == sorted(names)[-1]


def test_all_tiles_of_a_deep_model_with_one_head_lie_in_the_picture(tmp_path: Path, opened: Opened) -> None:
    deep = embedding.gather(tiny.vit(depth=24, num_heads=1), PHOTOS[:2], points=4)
    page = opened(embedding.save_html(deep, tmp_path / "deep.html"))
    height, tiles = page.evaluate("[app.matrix.size.height, app.space.layers.map((_, row) => app.matrix.tile(row, 0))]")
    assert height <= 1000
    assert all(top + side <= height for _, top, side in tiles)
    page.locator(".spacematrix canvas").first.focus()
    for key in "++++":
        page.keyboard.press(key)
    for _ in range(12):
        page.keyboard.press("ArrowUp")
    settled(page)
    _, top, side = page.evaluate("app.matrix.tile(app.state.row, 0)")
    assert top >= 0
    assert top + side <= height


def test_keys_go_through_patches_and_images_and_the_focus_stays(saved: Callable[[int], Path], opened: Opened) -> None:
    page = opened(saved(2), link="row=0&head=0")
    page.locator("figure.image canvas").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
        settled(page)
    assert page.evaluate("app.layer.table.nameOf(app.token)") == "0,2"
    select = page.locator("figure.image select").first
    select.focus()
    select.select_option("2")
    settled(page)
    assert page.evaluate("document.activeElement.tagName") == "SELECT"
    assert page.evaluate("app.image") == 2
    page.locator("#tab-images").click()
    settled(page)
    page.locator("#panel-images canvas").focus()
    page.keyboard.press("ArrowRight")
    settled(page)
    assert page.evaluate("app.image") == 3
    page.locator("#tab-patches").click()
    settled(page)
    page.locator("#panel-patches canvas").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    settled(page)
    assert page.evaluate("app.panels.patches.tokens.indexOf(app.token)") == 1


def test_neighbors_of_a_token_are_the_nearest_points(saved: Callable[[int], Path], opened: Opened) -> None:
    page = opened(saved(2), link="row=1&head=0")
    button = page.get_by_role("button", name="Select neighbors")
    assert button.is_disabled()
    page.evaluate("app.choose(7)")
    settled(page)
    button.click()
    settled(page)
    queries, keys = (points_shown(page, 1, 0, side) for side in ("query", "key"))
    apart = (torch.cat([queries, keys]) - queries[7]).norm(dim=1)
    found = page.evaluate("['query', 'key'].flatMap((side) => Array.from(app.members(1, side)))")
    assert sum(found) == 30
    assert float(apart[torch.tensor(found).bool()].max()) <= float(apart[~torch.tensor(found).bool()].min()) + 1e-6
    assert "Selected by nearness to query" in page.locator(".left .reading").inner_text()


def test_neighbors_in_three_dimensions_do_not_depend_on_the_turn(
    space: embedding.Space, saved: Callable[[int], Path], opened: Opened
) -> None:
    page = opened(saved(3), link="row=1&head=0")
    points = embedding.lay_out(space, dimensions=3)[1]
    apart = (torch.cat([points.queries[0], points.keys[0]]) - points.queries[0, 7]).norm(dim=1)
    page.evaluate("app.choose(7)")
    settled(page)
    page.locator(".stack canvas").first.press("n")
    settled(page)
    found = torch.tensor(page.evaluate("['query', 'key'].flatMap((side) => Array.from(app.members(1, side)))")).bool()
    assert int(found.sum()) == 30
    assert float(apart[found].max()) <= float(apart[~found].min()) * 1.001


def test_a_drag_that_is_broken_off_has_no_effect(saved: Callable[[int], Path], opened: Opened) -> None:
    page = opened(saved(2), link="row=0&head=0")
    for name in (".spacematrix canvas", ".stack canvas"):
        canvas = page.locator(name).first
        box = canvas.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 4, box["y"] + 4)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] - 4, box["y"] + 4, steps=3)
        canvas.dispatch_event("pointercancel")
        view = page.evaluate("({...app.matrix.view})")
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] - 4, steps=3)
        page.mouse.up()
        settled(page)
        assert page.evaluate("({...app.matrix.view})") == view
    assert page.evaluate("[app.selected, app.picked, app.state.row, app.state.head]") == [None, None, 0, 0]


def test_the_query_itself_gets_no_arrow_and_is_called_so(
    space: embedding.Space, saved: Callable[[int], Path], opened: Opened
) -> None:
    of, some = space.layers[0].tokens, space.layers[0].some
    head, own = next(
        (head, i)
        for head, rows in enumerate(space.layers[0].rows)
        for i, row in enumerate(rows)
        if int(of.row[some[i]]) >= 0 and int(row.argmax()) == int(some[i]) % of.per_image
    )
    page = opened(saved(2), link=f"row=0&head={head}")
    page.evaluate(f"""() => {{
      const draw = CanvasRenderingContext2D.prototype.moveTo;
      window.begun = 0;
      CanvasRenderingContext2D.prototype.moveTo = function (...at) {{
        window.begun += this.canvas === app.panels.image.canvas ? 1 : 0;
        draw.apply(this, at);
      }};
      app.choose({own});
    }}""")
    settled(page)
    assert page.evaluate("begun") == 3 * 2 * 2  # three arrows to other patches, of two colors, each with a line and a tip
    assert "Strongest keys: itself" in page.locator("figure.image .reading").inner_text()


def test_many_classes_say_that_their_colors_repeat(tmp_path: Path, opened: Opened) -> None:
    many = embedding.gather(tiny.vit(), PHOTOS * 5, points=20, labels=[f"class {i}" for i in range(20)])
    page = opened(embedding.save_html(many, tmp_path / "many.html"), link="mode=label")
    assert "20 classes, whose colors repeat" in page.locator(".legend").inner_text()
    assert page.locator(".legend .entry").count() == 16


def test_words_are_shown_with_their_attention(tmp_path: Path, opened: Opened) -> None:
    texts = ["a dog", "a photo of a cat", "dog", "a cat"]
    words = embedding.gather(clip(tmp_path / "clip"), PHOTOS, texts=texts, points=40)
    page = opened(embedding.save_html(words, tmp_path / "words.html"), link="row=5&head=1&image=1")
    states = words.layers[5]
    token = page.evaluate("Array.from({length: app.layer.table.count}, (_, i) => app.layer.table.nameOf(i)).indexOf('photo')")
    page.evaluate(f"app.choose({token})")
    settled(page)
    shown = page.locator("figure.image .reading").inner_text()
    weights = states.rows[1, token].float()
    assert "query photo of" in page.locator(".left .reading").inner_text()
    most = int(weights.argmax())
    name = "itself" if most == 2 else states.tokens.words[1][most]
    assert f"Strongest keys: {name} {100 * float(weights[most]):.1f} %" in shown
    for tab in ("patches", "images", "numbers"):
        page.evaluate(f"app.set({{tab: '{tab}', patches: 'exemplars'}})")
        settled(page)
    page.evaluate("app.set({row: 0, tab: 'image'})")
    settled(page)
    assert "This layer does not have query photo" in page.locator("figure.image").inner_text()
