"""Two images beside each other: models, training steps, layers."""

from __future__ import annotations

from pathlib import Path

import timm
import torch

import visattn
from tests.viewer.conftest import Opened
from tests.viewer.driving import on_patch, row_shown, settled, state
from visattn.studies import Study


def test_two_models_are_compared_with_linked_pointers(study: Study, opened: Opened) -> None:
    torch.manual_seed(1)
    other = visattn.study(timm.create_model("vit_tiny_patch16_224", depth=2).eval(), "photo:coffee", methods=[])
    page = opened(study + other)
    page.get_by_label("compare with").select_option("1")
    settled(page)
    assert page.locator("figure.image").count() == 2
    assert page.locator("figure.image").nth(1).is_visible()
    page.mouse.move(*on_patch(page, study[0], 7, 7))
    settled(page)
    layout = "viewer.page.views[1].attention.at(-1).queryLayout"
    assert page.evaluate(f"viewer.page.token(viewer.page.views[1], {layout})") > 0
    page.get_by_label("view", exact=True).select_option("1")
    settled(page)
    assert "coffee" in page.locator("h1").inner_text()


def test_two_layers_of_one_view_are_compared(study: Study, opened: Opened) -> None:
    page, view = opened(study), study[0]
    page.mouse.click(*on_patch(page, view, 3, 9))
    page.get_by_label("layer", exact=True).select_option("1")
    page.get_by_label("head", exact=True).select_option("2")
    settled(page)
    page.get_by_label("compare with").select_option("0")
    settled(page)
    for label, option in (("layer", "2"), ("head", "0")):
        page.get_by_label(label, exact=True).select_option(option)
        settled(page)
    rows = [record.operator.rows(torch.tensor([1 + 14 * 3 + 9]))[0, :, 0] for record in view.recording]
    assert torch.allclose(row_shown(page), rows[2][0], atol=0.002)
    assert torch.allclose(row_shown(page, "second"), rows[1][2], atol=0.002)
    assert "blocks.1.attn, head 2" in page.locator(".shown").nth(1).inner_text()
    page.get_by_label("second layer").select_option("0")
    page.get_by_label("second head").select_option("max")
    settled(page)
    assert torch.allclose(row_shown(page, "second"), rows[0].amax(0), atol=0.002)
    again = opened(study, link=page.evaluate("viewer.page.state.link"))
    assert torch.equal(row_shown(again, "second"), row_shown(page, "second"))


def test_steps_of_a_training_have_names(opened: Opened, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", depth=2).eval()
    steps = visattn.study(model, "photo:chelsea", methods=[], name="step 0")
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight.mul_(3)
    steps = steps + visattn.study(model, "photo:chelsea", methods=[], name="step 1")
    loaded = visattn.load_study(steps.save(tmp_path / "steps.attn"))
    assert [view.name for view in loaded] == ["step 0", "step 1"]
    page = opened(loaded)
    page.get_by_label("compare with").select_option("1")
    page.mouse.move(*on_patch(page, loaded[0], 4, 4))
    page.get_by_label("layer", exact=True).select_option("0")
    settled(page)
    for side, view in zip(("first", "second"), steps, strict=True):
        own = view.recording[0].operator.rows(torch.tensor([1 + 14 * 4 + 4]))[0, :, 0].mean(0)
        assert torch.allclose(row_shown(page, side), own, atol=0.002)
    assert not torch.allclose(row_shown(page), row_shown(page, "second"), atol=0.002)
    assert "step 1" in page.locator(".shown").nth(1).inner_text()


def test_views_with_equal_titles_are_numbered(study: Study, opened: Opened) -> None:
    page = opened(study + study)
    names = page.get_by_label("view", exact=True).locator("option").all_inner_texts()
    assert [name[-4:] for name in names] == [" (1)", " (2)"]
    assert state(page, "compare") == -1
