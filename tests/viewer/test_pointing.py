"""Queries of the page, driven as a person would: pointer, touch and keyboard, patches, named tokens and words."""

from __future__ import annotations

from dataclasses import replace

import timm
import torch
from playwright.sync_api import Page

import visattn
from tests.captioning.test_captioner import photos
from tests.captioning.test_folder import tiny
from tests.viewer.conftest import Opened
from tests.viewer.driving import on_patch, row_shown, settled, state, wait_until
from visattn.core.operators import MatrixOperator
from visattn.studies import Study, caption_study

PHOTO = "photo:chelsea"


def test_pointing_at_a_patch_shows_its_row(study: Study, opened: Opened) -> None:
    page, view = opened(study), study[0]
    for row, column in ((0, 0), (3, 9), (13, 13)):
        page.mouse.move(*on_patch(page, view, row, column))
        settled(page)
        own = view.recording[-1].operator.rows(torch.tensor([1 + 14 * row + column]))[0, :, 0].mean(0)
        assert torch.allclose(row_shown(page), own, atol=0.002)
        said = page.locator(".reading").first.inner_text()
        assert said.startswith(f"patch {row},{column}: {float(own[1 + 14 * row + column]):.3f}"[:-1])


def test_a_click_holds_the_query_and_the_pointer_then_reads_keys(study: Study, opened: Opened) -> None:
    page, view = opened(study), study[0]
    page.mouse.click(*on_patch(page, view, 3, 9))
    settled(page)
    held = row_shown(page)
    page.mouse.move(*on_patch(page, view, 10, 2))
    settled(page)
    assert torch.equal(row_shown(page), held)
    value, rank = float(held[1 + 142]), 1 + int((held > held[1 + 142]).sum())
    said = page.locator(".reading").first.inner_text()
    assert said.startswith(f"patch 10,2: {value:.3f}"[:-1])
    assert said.endswith(f"rank {rank} of 197")
    page.mouse.click(*on_patch(page, view, 10, 2))
    page.mouse.move(*on_patch(page, view, 5, 5))
    settled(page)
    assert not torch.equal(row_shown(page), held)


def swept(page: Page, *places: tuple[float, float]) -> None:
    """Move the pointer over places and off the photo, without any time between."""
    page.evaluate(
        """(places) => {
            const canvas = document.querySelector("figure.image canvas");
            for (const [clientX, clientY] of places)
                canvas.dispatchEvent(new PointerEvent("pointermove", { clientX, clientY, bubbles: true }));
            canvas.dispatchEvent(new PointerEvent("pointerleave"));
        }""",
        [list(place) for place in places],
    )
    settled(page)


def test_the_patch_on_which_the_pointer_rested_stays_the_query(study: Study, opened: Opened) -> None:
    page, view = opened(study), study[0]
    first = state(page, "query")
    swept(page, on_patch(page, view, 2, 2), on_patch(page, view, 2, 12))
    assert state(page, "query") == first, "it rested nowhere"
    page.mouse.move(*on_patch(page, view, 3, 9))
    wait_until(page, "viewer.image.rested")
    swept(page, on_patch(page, view, 3, 13))
    own = view.recording[-1].operator.rows(torch.tensor([1 + 14 * 3 + 9]))[0, :, 0].mean(0)
    assert torch.allclose(row_shown(page), own, atol=0.002)


def test_escape_lets_go_wherever_the_focus_is(study: Study, opened: Opened) -> None:
    page = opened(study)
    page.mouse.click(*on_patch(page, study[0], 3, 9))
    page.locator("#panel-heads canvas").focus()
    settled(page)
    assert state(page, "pinned") is True
    page.keyboard.press("Escape")
    settled(page)
    assert state(page, "pinned") is False


def test_hiding_a_key_by_keyboard_keeps_the_focus(study: Study, opened: Opened) -> None:
    page = opened(study)
    page.locator("#tab-keys").click()
    box = page.get_by_label("hide cls", exact=True)
    for hidden in (True, False):
        box.focus()
        page.keyboard.press("Space")
        settled(page)
        assert box.is_checked() is hidden
        assert box.evaluate("(box) => box === document.activeElement")
    page.get_by_role("button", name="hide the key").first.focus()
    page.keyboard.press("Enter")  # the button goes away with the key
    settled(page)
    assert page.evaluate("viewer.panels.keys.root.contains(document.activeElement)")


def test_a_touch_selects_and_holds(study: Study, opened: Opened) -> None:
    page = opened(study, has_touch=True)
    page.touchscreen.tap(*on_patch(page, study[0], 3, 9))
    settled(page)
    assert state(page, "pinned") is True
    own = study[0].recording[-1].operator.rows(torch.tensor([1 + 14 * 3 + 9]))[0, :, 0].mean(0)
    assert torch.allclose(row_shown(page), own, atol=0.002)


def test_everything_can_be_done_with_the_keyboard(study: Study, opened: Opened) -> None:
    page = opened(study)
    canvas = page.locator("figure.image canvas").first
    canvas.focus()
    before = state(page, "query")
    for key in ("ArrowUp", "ArrowUp", "ArrowLeft"):
        page.keyboard.press(key)
    settled(page)
    after = state(page, "query")
    assert after["y"] < before["y"]
    assert after["x"] < before["x"]
    page.keyboard.press("Enter")
    settled(page)
    assert state(page, "pinned") is True
    page.keyboard.press("Escape")
    settled(page)
    assert state(page, "pinned") is False
    page.locator("#tab-heads").focus()
    for name in ("maps", "words", "keys", "lines", "matrix", "heads"):
        page.keyboard.press("ArrowRight")
        settled(page)
        assert page.locator(f"#panel-{name}").is_visible()
    page.locator("#panel-heads canvas").focus()
    page.evaluate("viewer.page.state.set({record: 0, head: 0})")
    settled(page)
    for key in ("ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
        settled(page)
    assert (state(page, "record"), state(page, "head")) == (1, 1)
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("document.activeElement.tagName + ' ' + (document.activeElement.textContent || '').slice(0, 12)")
        )
    assert {"BUTTON Save PNG", "BUTTON Copy link", "BUTTON Heads"} <= reached


def test_named_queries_are_rows_of_the_class_token(study: Study, opened: Opened) -> None:
    page = opened(study)
    page.get_by_label("query", exact=True).select_option("cls")
    settled(page)
    own = study[0].recording[-1].operator.rows(torch.tensor([0]))[0, :, 0].mean(0)
    assert torch.allclose(row_shown(page), own, atol=0.002)


def test_pooling_queries_and_clips_say_what_they_are(opened: Opened) -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", depth=2, global_pool="map", class_token=False).eval()
    made = visattn.study(model, PHOTO, methods=[])
    (pool,) = (i for i, record in enumerate(made[0].recording) if record.kind == "pool")
    page = opened(made)
    page.evaluate("(pool) => viewer.page.state.set({ record: pool })", pool)
    settled(page)
    record = made[0].recording[pool]
    page.get_by_label("query", exact=True).select_option(record.queries.prefix[0])
    settled(page)
    assert torch.allclose(row_shown(page), record.operator.rows(torch.tensor([0]))[0, :, 0].mean(0), atol=0.002)
    clip = replace(record.keys, grid=(2, 3, 4), prefix=())
    weights = torch.rand(1, 2, 24, 24).softmax(-1)
    frames = replace(record, kind="self", operator=MatrixOperator(weights), queries=clip, keys=clip, layer="frames")
    page = opened(Study((replace(made[0], recording=replace(made[0].recording, records=[frames], features=[])),)))
    box = made[0].geometry.patch_box(1, 2, (3, 4), clip.box)
    page.evaluate(
        "(query) => viewer.page.state.set({ query })", {"y": (box.top + box.bottom) / 2, "x": (box.left + box.right) / 2}
    )
    settled(page)
    assert torch.allclose(row_shown(page), weights[0, :, 6].mean(0), atol=0.002)
    assert "frame 0 of 2" in page.locator(".shown").first.inner_text()
    page.locator("#tab-keys").click()
    settled(page)
    best = int(weights[0, :, 6].mean(0).argmax())
    named = f"patch {best // 12},{best % 12 // 4},{best % 4}"
    assert page.locator(".keys li").first.inner_text().startswith(named)


def test_words_of_a_caption_are_queries(opened: Opened) -> None:
    caption = tiny("soft").score(photos(1), ["a red disc"])[0]
    page = opened(caption_study(caption))
    assert state(page, "tab") == "words"
    assert page.locator(".words button .name").all_inner_texts() == ["word0: a", "word1: red", "word2: disc"]
    page.get_by_role("radio", name="word1").click()
    settled(page)
    assert torch.allclose(row_shown(page), caption.map.values[1].flatten(), atol=0.002)
    page.locator("#tab-lines").click()
    settled(page)
    assert {query for query, *_ in page.evaluate("viewer.panels.lines.drawn")} == {1}
    page.locator("#tab-matrix").click()
    settled(page)
    assert page.evaluate("viewer.panels.matrix.weights.length") == caption.map.values.numel()
