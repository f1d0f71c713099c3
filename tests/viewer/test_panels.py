"""Panels and display settings of the page: heads, keys, lines, matrix, maps and gates."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import timm
import torch
from numpy.typing import NDArray
from playwright.sync_api import Page
from torch import nn

import visattn
from tests.viewer.conftest import Opened
from tests.viewer.driving import on_patch, row_shown, settled, state, wait_until
from visattn._support.types import Ground
from visattn.core.drawing.style import Style
from visattn.core.operators import MatrixOperator
from visattn.studies import Study, View

PHOTO = "photo:chelsea"


def test_any_key_can_be_hidden_and_shown_again(study: Study, opened: Opened) -> None:
    page = opened(study)
    page.locator("#tab-keys").click()
    whole = row_shown(page)
    best = int(whole[1:].argmax()) + 1
    name = f"patch {(best - 1) // 14},{(best - 1) % 14}"
    page.get_by_role("button", name=f"hide the key {name}", exact=True).click()
    settled(page)
    row = row_shown(page)
    assert float(row[best]) == 0
    assert torch.allclose(row, torch.where(whole == whole[best], 0, whole) / (1 - whole[best]), atol=1e-6)
    page.get_by_label(f"hide {name}", exact=True).click()  # which takes this box away
    settled(page)
    assert torch.equal(row_shown(page), whole)


def test_panels_about_attention_bring_it_back_to_the_image(study: Study, opened: Opened) -> None:
    page = opened(study)
    page.locator("#tab-maps").click()
    page.get_by_role("radio", name="rollout").click()
    page.locator("#tab-heads").click()
    settled(page)
    assert row_shown(page).numel() == 197


def test_all_heads_of_twelve_layers_and_messages_are_in_the_window(dinov2: nn.Module, opened: Opened) -> None:
    page = opened(visattn.study(dinov2, PHOTO, methods=[], img_size=(112, 168)))
    bottom = page.evaluate("Math.max(...viewer.panels.heads.boxes.map((b) => b.y + b.tall))")
    seen = page.locator("#panel-heads canvas").bounding_box()
    assert seen is not None
    assert seen["y"] + bottom <= 900
    page.get_by_role("button", name="Copy link").click()
    wait_until(page, "document.querySelector('.said').textContent !== ''")
    said = page.locator(".said").bounding_box()
    assert said is not None
    assert said["y"] + said["height"] <= 900


def test_a_click_on_a_head_shows_it(study: Study, opened: Opened) -> None:
    page, view = opened(study), study[0]
    page.mouse.click(*on_patch(page, view, 3, 9))
    box = page.evaluate(
        "(() => { const b = viewer.panels.heads.boxes.find((t) => t.number === 1 && t.head === 2); return [b.x, b.y, b.tall]; })()"
    )
    page.locator("#panel-heads canvas").click(position={"x": box[0] + box[2] / 2, "y": box[1] + box[2] / 2})
    settled(page)
    own = view.recording[1].operator.rows(torch.tensor([1 + 14 * 3 + 9]))[0, 2, 0]
    assert torch.allclose(row_shown(page), own, atol=0.002)
    assert "head 2" in page.locator(".shown").first.inner_text()


def test_heads_are_sorted_by_python_s_statistics(study: Study, opened: Opened) -> None:
    page = opened(study)
    page.locator("#panel-heads select").select_option("entropy")
    settled(page)
    order = page.evaluate("viewer.panels.heads.order.map((t) => [t.number, t.head])")
    known = {
        (i, head): float(value)
        for i, one in enumerate(visattn.evaluation.heads.statistics(study[0].recording))
        for head, value in enumerate(one.entropy[0])
    }
    assert [tuple(one) for one in order] == sorted(known, key=lambda one: known[one])


def test_display_settings_change_the_picture_and_nothing_else(study: Study, opened: Opened) -> None:
    page = opened(study)
    row = row_shown(page)
    picture = "viewer.image.canvas.toDataURL()"
    seen = [page.evaluate(picture)]
    for label, value in (("opacity", "1"), ("outline of mass", "0.6")):
        page.get_by_label(label).fill(value)
        settled(page)
        seen.append(page.evaluate(picture))
    page.get_by_label("smooth").check()
    settled(page)
    seen.append(page.evaluate(picture))
    for label, option in (("blend", "constant"), ("colors", "viridis"), ("scale", "shared")):
        page.get_by_label(label, exact=True).select_option(option)
        settled(page)
        seen.append(page.evaluate(picture))
    assert len(set(seen)) == len(seen)
    assert torch.equal(row_shown(page), row)
    low, _, high = page.locator(".scale").first.locator("xpath=./*").all_inner_texts()
    token = page.evaluate("viewer.page.token(viewer.page.view, viewer.page.record().queryLayout)")
    every = torch.cat([record.operator.rows(torch.tensor([token])).flatten() for record in study[0].recording])
    assert float(low) == 0
    assert float(high) == pytest.approx(float(every.max()), abs=0.003)


def beside(page: Page) -> NDArray[np.uint8]:
    """Return the left tenth of the image, which this model did not receive, so that no color of a map lies on it."""
    shown = visattn.load_image(base64.b64decode(page.evaluate("viewer.image.canvas.toDataURL().split(',')[1]")))
    return np.asarray(shown.crop((0, 0, shown.width // 10, shown.height)))


def test_colors_lie_on_the_gray_photo_as_in_static_overlays(study: Study, opened: Opened) -> None:
    page, view = opened(study), study[0]
    grays = page.evaluate("viewer.page.facts.look.gray")
    for ground in get_args(Ground):
        for blend in ("value", "constant"):
            assert grays[ground][blend] == Style(ground=ground, blend=blend).is_gray
    box = page.get_by_label("gray photo")
    assert box.is_checked()
    part = view.photo.crop((0, 0, view.photo.width // 10, view.photo.height))
    shown = beside(page)
    assert int(np.ptp(shown, axis=-1).max()) == 0
    assert float(shown.mean()) == pytest.approx(float(np.asarray(part.convert("L")).mean()), abs=1)
    assert "The photo is shown in gray." in page.locator("figcaption").first.inner_text()
    page.keyboard.press("g")
    settled(page)
    assert not box.is_checked()
    assert beside(page).mean((0, 1)) == pytest.approx(np.asarray(part).mean((0, 1)), abs=1)
    assert "gray" not in page.locator("figcaption").first.inner_text()
    assert "G switches the photo" in page.locator("footer").inner_text()
    assert not opened(study, link=page.evaluate("viewer.page.state.link")).get_by_label("gray photo").is_checked()


def test_the_photo_keeps_its_colors_where_no_low_values_show_it(study: Study, opened: Opened) -> None:
    page = opened(study)
    box = page.get_by_label("gray photo")
    page.get_by_label("blend", exact=True).select_option("constant")
    settled(page)
    assert not box.is_checked()
    box.check()
    settled(page)
    assert state(page, "ground") == "gray"
    assert "gray" in page.locator("figcaption").first.inner_text()
    page.get_by_label("opacity").fill("0")
    settled(page)
    assert box.is_checked()
    assert "gray" not in page.locator("figcaption").first.inner_text()
    page.get_by_label("colors").focus()
    page.keyboard.press("g")  # letters choose an entry of a list
    settled(page)
    assert box.is_checked()


def test_sinks_are_ringed_and_can_be_left_out(dinov2: nn.Module, opened: Opened) -> None:
    made = visattn.study(dinov2, "photo:coffee", methods=["rollout"], img_size=(224, 336))
    page = opened(made)
    found = visattn.methods.sinks.find_sinks(made[0].recording)[0]
    assert found
    assert page.evaluate("viewer.page.view.sinks.cells") == [[sink.row, sink.column] for sink in found]
    ringed = page.evaluate("viewer.image.canvas.toDataURL()")
    page.get_by_label("ring sinks").uncheck()
    settled(page)
    assert page.evaluate("viewer.image.canvas.toDataURL()") != ringed


def test_hidden_keys_get_nothing_and_the_others_sum_to_one(study: Study, opened: Opened) -> None:
    page = opened(study)
    whole = row_shown(page)
    page.locator("#tab-keys").click()
    page.get_by_label("hide cls").check()
    settled(page)
    row = row_shown(page)
    assert float(row[0]) == 0
    assert float(row.sum()) == pytest.approx(1, abs=1e-5)
    assert torch.allclose(row[1:], whole[1:] / whole[1:].sum(), atol=1e-6)
    assert "would compute other things" in page.locator(".hide").inner_text()


def test_strongest_keys_are_listed_with_their_values(study: Study, opened: Opened) -> None:
    page = opened(study)
    page.locator("#tab-keys").click()
    settled(page)
    row = row_shown(page)
    shown = page.locator(".keys li").all_inner_texts()
    best = row.argsort(descending=True, stable=True)[:12].tolist()
    names = ["cls" if token == 0 else f"patch {(token - 1) // 14},{(token - 1) % 14}" for token in best]
    assert [one.split()[0] if one.startswith("cls") else " ".join(one.split()[:2]) for one in shown] == names


def test_numbers_of_nearly_even_keys_tell_them_apart(study: Study, opened: Opened) -> None:
    weights = torch.linspace(0.8, 1.2, 197).div(197).repeat(2, 197, 1)
    weights[1, 0] = 0.5 ** torch.arange(1, 198)  # a row elsewhere that eight bits keep less exactly
    record = replace(study[0].recording[0], operator=MatrixOperator(weights[None]))
    page = opened(Study((replace(study[0], recording=replace(study[0].recording, records=[record]), maps={}, importance=None),)))
    page.locator("#tab-keys").click()
    settled(page)
    shown = [float(text) for text in page.locator(".keys .value").all_inner_texts()]
    assert len(set(shown)) == 12
    assert shown == pytest.approx(weights[0, 1].sort(descending=True).values[:12].tolist(), abs=1e-5)
    assert "each of 197 keys would have 0.0051" in page.locator("#panel-keys").inner_text()
    page.get_by_label("hide cls").check()
    settled(page)
    assert "each of 196 keys would have 0.0051" in page.locator("#panel-keys").inner_text()


def test_keys_that_are_patches_show_the_photo_there(study: Study, opened: Opened) -> None:
    page, view = opened(study), study[0]
    page.locator("#tab-keys").click()
    page.get_by_label("number of keys").fill("50")
    page.evaluate("viewer.page.state.set({ query: { name: 'cls' }, record: 0, head: 0 })")
    settled(page)
    names = page.locator(".keys .key").all_inner_texts()
    shown = page.locator(".keys .patch").evaluate_all("(all) => all.map((one) => one.firstChild && one.firstChild.toDataURL())")
    assert [name == "cls" for name in names] == [one is None for one in shown]
    for name, one in zip(names, shown, strict=True):
        if one is not None:
            row, column = map(int, name.split()[1].split(","))
            seen = view.geometry.patch_box(row, column, (14, 14), view.recording[0].keys.box)
            part = view.photo.crop((round(seen.left), round(seen.top), round(seen.right), round(seen.bottom)))
            crop = visattn.load_image(base64.b64decode(one.split(",")[1]))
            assert np.asarray(crop).mean((0, 1)) == pytest.approx(np.asarray(part).mean((0, 1)), abs=8)


def test_lines_and_matrix_show_the_same_row(study: Study, opened: Opened) -> None:
    page, view = opened(study), study[0]
    page.mouse.click(*on_patch(page, view, 3, 9))
    page.locator("#tab-lines").click()
    settled(page)
    drawn = page.evaluate("viewer.panels.lines.drawn")
    best = set(row_shown(page).argsort(descending=True, stable=True)[:12].tolist())
    assert {query for query, *_ in drawn} == {1 + 14 * 3 + 9}
    assert {key for _, key, _ in drawn} == best
    page.get_by_role("checkbox", name="all heads").check()
    settled(page)
    for head, row in enumerate(view.recording[-1].operator.rows(torch.tensor([1 + 14 * 3 + 9]))[0, :, 0]):
        keys = {key for _, key, other in page.evaluate("viewer.panels.lines.drawn") if other == head}
        assert len(keys) == 12
        assert float(row[list(keys)].min()) >= float(row.sort(descending=True).values[11]) - 0.002  # rounding exchanges near ties
    page.get_by_role("checkbox", name="all queries").check()
    settled(page)
    assert len(page.evaluate("viewer.panels.lines.drawn")) == 197
    page.locator("#tab-matrix").click()
    settled(page)
    own = view.recording[-1].operator.dense()[0].mean(0)
    assert torch.allclose(torch.tensor(page.evaluate("Array.from(viewer.panels.matrix.weights)")).view(197, 197), own, atol=0.002)
    page.locator("#panel-matrix canvas").click(position={"x": 10, "y": 1})
    settled(page)
    assert state(page, "query") == {"name": "cls"}


def test_maps_are_chosen_and_classes_are_listed(study: Study, opened: Opened) -> None:
    page = opened(study)
    page.locator("#tab-maps").click()
    settled(page)
    assert page.locator("#panel-maps button .name").all_inner_texts() == ["attention", "similarity", "rollout", "relevance"]
    page.get_by_role("radio", name="rollout").click()
    settled(page)
    values = torch.tensor(page.evaluate("Array.from(viewer.page.shown().values)"))
    assert torch.allclose(values, study[0].maps["rollout"].values.flatten(), atol=1e-6)
    page.keyboard.press("ArrowRight")
    settled(page)
    assert state(page, "map") == "relevance"
    classes = page.locator(".classes li").all_inner_texts()
    assert [text.startswith(str(one.name)) for text, one in zip(classes, study[0].classes, strict=True)] == [True] * 5
    assert f"{study[0].classes[0].probability:.1%}".rstrip("%") in classes[0]


def test_heads_are_sorted_by_their_importance_for_the_score(study: Study, opened: Opened) -> None:
    importance = study[0].importance
    assert importance is not None
    page = opened(study)
    page.locator("#panel-heads select").select_option("importance")
    settled(page)
    order = page.evaluate("viewer.panels.heads.order.map((t) => [t.number, t.head])")
    known = {(i, head): number for i, heads in enumerate(importance.heads) for head, number in enumerate(heads)}
    assert [tuple(one) for one in order] == sorted(known, key=lambda one: -known[one])
    page.locator("#panel-heads canvas").hover(position={"x": 60, "y": 40})
    assert f"for {importance.target}" in page.locator("#panel-heads .reading").inner_text()


def contributing() -> Study:
    """Return a study of a ViT that sees a photo with the contributions to one class."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=3, num_classes=5).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return visattn.study(model, PHOTO, methods=["contributions"], target=2)


def number_in(text: str) -> float:
    return float(text.rsplit(" ", 1)[-1].replace("\u2212", "-"))


def test_contributions_are_python_s(opened: Opened) -> None:
    made = contributing()
    found, rows = made[0].contributions, {}
    assert found is not None
    page = opened(made)
    page.locator("#tab-contributions").click()
    settled(page)
    for label in page.locator(".terms button").evaluate_all("all => all.map((one) => one.ariaLabel)"):
        name, _, told = label.partition(": ")
        rows[name] = number_in(told.partition(",")[0])
    totals = {layer.layer: layer.values.double().sum(1) for layer in found.layers}
    for layer in found.layers:
        assert rows[layer.layer] == pytest.approx(float(totals[layer.layer].sum()) + layer.bias, abs=6e-4)
        for head, total in enumerate(totals[layer.layer].tolist()):
            assert rows[f"{layer.layer}, head {head}"] == pytest.approx(total, abs=6e-4)
    assert rows["all heads"] == pytest.approx(sum(float(total.sum()) for total in totals.values()), abs=6e-4)
    assert f"{found.target} = " in page.locator("#panel-contributions .reading").inner_text()
    others = page.locator(".terms .other").all_inner_texts()
    assert others == [name for name, _ in found.rest]
    whole = page.locator(".terms .value").all_inner_texts()[-len(others) :]
    assert [number_in(text) for text in whole] == pytest.approx([share for _, share in found.rest], abs=6e-4)
    every = sum(rows[layer.layer] for layer in found.layers) + sum(map(number_in, whole))
    assert every == pytest.approx(found.score, abs=1e-2)


def test_a_click_on_a_bar_shows_what_the_head_adds(opened: Opened) -> None:
    made = contributing()
    found = made[0].contributions
    assert found is not None
    page = opened(made)
    page.locator("#tab-contributions").click()
    settled(page)
    shown = "Array.from(viewer.page.shown().row)"
    every = torch.stack([layer.values for layer in found.layers]).sum((0, 1))
    assert torch.allclose(torch.tensor(page.evaluate(shown)), every, atol=1e-5)
    page.get_by_role("radio", name="blocks.1.attn, head 2").click()
    settled(page)
    assert torch.allclose(torch.tensor(page.evaluate(shown)), found.layers[1].values[2], atol=1e-6)
    assert "head 2" in page.locator(".shown").first.inner_text()
    page.mouse.click(*on_patch(page, made[0], 1, 2))
    told = page.locator("figure.image .reading").first.inner_text()
    assert told.startswith("patch 1,2: ")
    value = float(found.layers[1].values[2, 1 + 4 + 2])
    assert float(told.split(": ")[1].split(",")[0].replace("\u2212", "-")) == pytest.approx(value, abs=6e-4)
    page.get_by_role("radio", name="blocks.1.attn, head 2").press("ArrowLeft")
    settled(page)
    assert state(page, "part") == "1.1"
    link = page.evaluate("viewer.page.state.link")
    again = opened(made, link=link)
    assert torch.allclose(torch.tensor(again.evaluate(shown)), found.layers[1].values[1], atol=1e-6)
    page.locator("#tab-heads").click()
    settled(page)
    assert state(page, "map") == "@attention"


def test_a_study_without_contributions_has_no_panel_of_them(study: Study, opened: Opened) -> None:
    page = opened(study, link="tab=contributions&map=@contributions&part=1.2")
    assert not page.locator("#tab-contributions").is_visible()
    assert "attention" in page.locator(".shown").first.inner_text()


def test_gates_of_a_cnn_are_maps(opened: Opened) -> None:
    torch.manual_seed(0)
    model = timm.create_model("resnet18")
    visattn.attach(model, "cbam", where="residual")
    made = visattn.study(model.eval(), PHOTO, img_size=96)
    assert "gates" in made[0].maps
    page = opened(made)
    assert [tab.inner_text() for tab in page.get_by_role("tab").all() if tab.is_visible()] == [
        "Maps"
    ]  # others are about attention
    assert page.get_by_label("ring sinks").count() == 0
    assert "exact to" not in page.locator("body").inner_text()
    names = page.locator("#panel-maps button .name").all_inner_texts()
    assert names == list(made[0].maps)
    for name in names:
        page.get_by_role("radio", name=name).click()
        settled(page)
        assert torch.allclose(
            torch.tensor(page.evaluate("Array.from(viewer.page.shown().values)")), panel(made[0], name), atol=1e-6
        )


def panel(view: View, name: str) -> torch.Tensor:
    values = view.maps[name].values
    return values.flatten(0, -3).mean(0).flatten() if values.ndim > 2 else values.flatten()


def test_a_map_of_any_name_leaves_the_live_attention(opened: Opened) -> None:
    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_patch16_224", depth=2).eval()
    made = visattn.study(model, PHOTO, methods={"attention": {}, "similarity": {"query": "patch:3,4"}})
    page = opened(made)
    page.mouse.move(*on_patch(page, made[0], 3, 9))
    settled(page)
    own = made[0].recording[-1].operator.rows(torch.tensor([1 + 14 * 3 + 9]))[0, :, 0].mean(0)
    values = torch.tensor(page.evaluate("Array.from(viewer.page.shown().values)"))
    assert torch.allclose(values, own[1:], atol=0.002)
    page.evaluate("viewer.page.state.set({ map: 'attention' })")
    settled(page)
    values = torch.tensor(page.evaluate("Array.from(viewer.page.shown().values)"))
    shown = made[0].maps["attention"].values
    assert torch.allclose(values, (shown.mean(0) if shown.ndim == 3 else shown).flatten(), atol=1e-6)


def test_hidden_keys_are_those_of_their_own_layer_and_view(study: Study, opened: Opened) -> None:
    torch.manual_seed(0)
    other = visattn.study(timm.create_model("swin_tiny_patch4_window7_224").eval(), PHOTO, methods=[])
    page = opened(study + other)
    page.locator("#tab-keys").click()
    page.get_by_label("hide cls").check()
    settled(page)
    assert "1 key hidden" in page.locator(".shown").first.inner_text()
    page.evaluate("viewer.page.state.set({ view: 1, record: 0, head: 0 })")
    settled(page)
    token = page.evaluate("viewer.page.token(viewer.page.view, viewer.page.record().queryLayout)")
    own = other[0].recording[0].operator.rows(torch.tensor([token]))[0, 0, 0]
    assert torch.allclose(row_shown(page), own, atol=0.002)
    assert "hidden" not in page.locator(".shown").first.inner_text()


def test_small_values_keep_their_digits(opened: Opened, study: Study) -> None:
    view = study[0]
    small = replace(view.maps["rollout"], values=view.maps["rollout"].values * 1e-4)
    page = opened(Study((replace(view, maps={"small": small}),)))
    page.evaluate("viewer.page.state.set({ map: 'small' })")
    settled(page)
    low, _, high = page.locator(".scale").first.locator("xpath=./*").all_inner_texts()
    assert float(high) == pytest.approx(float(small.values.max()), rel=0.01)
    assert float(low) == pytest.approx(float(small.values.min()), abs=float(small.values.max()) / 100)


class Even(nn.Module):
    """CNN whose spatial gate has the given values."""

    def __init__(self, gate: torch.Tensor) -> None:
        super().__init__()
        self.down, self.head, self.gate = nn.Conv2d(3, 4, 16, 16), nn.Linear(4, 3), gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(x)
        visattn.nn.publish(self, "spatial_gate", self.gate.expand(len(x), 1, *self.gate.shape), x)
        return self.head((x * self.gate).mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("low", "high", "colored"), [(0.5052, 0.5073, False), (0.3, 0.9, True)])
def test_nearly_even_maps_leave_the_photo_alone(low: float, high: float, colored: bool, opened: Opened) -> None:
    model = Even(torch.linspace(low, high, 24).view(4, 6)).eval()
    page = opened(visattn.study(model, PHOTO, methods=["gates"], img_size=(64, 96), resize="fit"))
    picture = "viewer.image.canvas.toDataURL()"
    seen = []
    for opacity in ("0.9", "0"):
        page.get_by_label("opacity").fill(opacity)
        settled(page)
        seen.append(page.evaluate(picture))
    assert (seen[0] != seen[1]) == colored
    assert ("nearly even: no colors" in page.locator(".scale").first.inner_text()) != colored
