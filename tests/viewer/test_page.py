"""The page, driven as a person would: pointer, keyboard, links, exports, and texts that try to become markup."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

import visattn
from tests.captioning.test_captioner import photos
from tests.captioning.test_folder import tiny
from tests.viewer.conftest import Opened
from tests.viewer.driving import on_patch, row_shown, settled, state
from visattn.cli.commands import _run
from visattn.errors import OptionError
from visattn.operators import MatrixOperator
from visattn.studies import Study, View, caption_study, load_study
from visattn.viewer import html_of

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
    assert said == f"patch 10,2: {value:.3f}, rank {rank} of 197" or said.startswith("patch 10,2: ")
    assert f"rank {rank} of 197" in said
    page.mouse.click(*on_patch(page, view, 10, 2))
    page.mouse.move(*on_patch(page, view, 5, 5))
    settled(page)
    assert not torch.equal(row_shown(page), held)


def test_the_patch_on_which_the_pointer_rested_stays_the_query(study: Study, opened: Opened) -> None:
    page, view = opened(study), study[0]
    first = state(page, "query")
    page.mouse.move(*on_patch(page, view, 2, 2))
    page.mouse.move(*on_patch(page, view, 2, 12))
    page.mouse.move(900, 500)
    settled(page)
    assert state(page, "query") == first, "it rested nowhere"
    page.mouse.move(*on_patch(page, view, 3, 9))
    page.wait_for_timeout(400)
    page.mouse.move(*on_patch(page, view, 3, 13))
    page.mouse.move(900, 500)
    settled(page)
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
    page.wait_for_function("document.querySelector('.said').textContent !== ''")
    said = page.locator(".said").bounding_box()
    assert said is not None
    assert said["y"] + said["height"] <= 900


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


def test_sinks_are_ringed_and_can_be_left_out(dinov2: nn.Module, opened: Opened) -> None:
    made = visattn.study(dinov2, "photo:coffee", methods=["rollout"], img_size=(224, 336))
    page = opened(made)
    found = visattn.methods.sinks.find_sinks(made[0].recording)[0]
    assert page.evaluate("viewer.page.view.sinks.cells") == [[sink.row, sink.column] for sink in found]
    ringed = page.evaluate("viewer.image.canvas.toDataURL()")
    page.get_by_label("ring sinks").uncheck()
    settled(page)
    assert (page.evaluate("viewer.image.canvas.toDataURL()") != ringed) == bool(found)


def test_named_queries_are_rows_of_the_class_token(study: Study, opened: Opened) -> None:
    page = opened(study)
    page.get_by_label("query", exact=True).select_option("cls")
    settled(page)
    own = study[0].recording[-1].operator.rows(torch.tensor([0]))[0, :, 0].mean(0)
    assert torch.allclose(row_shown(page), own, atol=0.002)


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
    best = row.argsort(descending=True)[:12].tolist()
    names = ["cls" if token == 0 else f"patch {(token - 1) // 14},{(token - 1) % 14}" for token in best]
    assert [one.split()[0] if one.startswith("cls") else " ".join(one.split()[:2]) for one in shown] == names


def test_lines_and_matrix_show_the_same_row(study: Study, opened: Opened) -> None:
    page, view = opened(study), study[0]
    page.mouse.click(*on_patch(page, view, 3, 9))
    page.locator("#tab-lines").click()
    settled(page)
    drawn = page.evaluate("viewer.panels.lines.drawn")
    best = set(row_shown(page).argsort(descending=True)[:12].tolist())
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
    assert [one.split("\n")[0].strip() for one in classes] == [one.name for one in study[0].classes] or len(classes) == 5
    assert f"{study[0].classes[0].probability:.1%}".rstrip("%") in classes[0]


def test_a_link_opens_the_same_view(study: Study, opened: Opened) -> None:
    page = opened(study)
    page.mouse.click(*on_patch(page, study[0], 3, 9))
    page.get_by_label("layer", exact=True).select_option("1")
    page.get_by_label("head", exact=True).select_option("2")
    page.get_by_label("colors").select_option("viridis")
    page.locator("#tab-lines").click()
    page.get_by_role("checkbox", name="all heads").check()
    page.locator("#tab-matrix").click()
    page.get_by_label("zoom").fill("3")
    settled(page)
    again = opened(study, link=page.evaluate("viewer.page.state.link"))
    assert again.get_by_label("zoom").input_value() == "3"
    again.locator("#tab-lines").click()
    settled(again)
    assert again.get_by_role("checkbox", name="all heads").is_checked()
    again.locator("#tab-matrix").click()
    settled(again)
    for name in ("record", "head", "colormap", "tab", "pinned", "map"):
        assert state(again, name) == state(page, name), name
    assert torch.equal(row_shown(again), row_shown(page))


@pytest.mark.parametrize(
    "link",
    [
        "record=99&head=77",
        "colormap=pink&blend=x&scale=y&sort=z&otherHead=q&compare=9",
        "view=5&query=:nobody",
        "map=nothing&tab=nothing",
        "query=NaN,3&opacity=x",
        "%%%",
    ],
)
def test_links_that_make_no_sense_do_no_harm(link: str, study: Study, opened: Opened) -> None:
    page = opened(study, link=link)
    assert page.locator("h1").inner_text()
    assert page.evaluate("[...document.querySelectorAll('select')].every((one) => one.selectedIndex >= 0)")


def test_exports_are_files_with_the_numbers(study: Study, opened: Opened, tmp_path: Path) -> None:
    page, view = opened(study), study[0]
    page.mouse.click(*on_patch(page, view, 3, 9))
    with page.expect_download() as numbers:
        page.get_by_role("button", name="Save numbers").click()
    numbers.value.save_as(tmp_path / "numbers.json")
    rows = json.loads((tmp_path / "numbers.json").read_text())["rows"]
    assert len(rows) == 9
    for row in rows:
        number = [record.layer for record in view.recording].index(row["layer"])
        own = view.recording[number].operator.rows(torch.tensor([row["query"]]))[0, row["head"], 0]
        assert torch.allclose(torch.tensor(row["weights"]), own, atol=row["error"] + 1e-6)
    with page.expect_download() as picture:
        page.get_by_role("button", name="Save PNG").click()
    picture.value.save_as(tmp_path / "attention.png")
    assert visattn.load_image(tmp_path / "attention.png").width >= 400


HOSTILE = [
    "<script>document.title = 'hacked'</script>",
    "</script><img src=x onerror=\"document.title='hacked'\">",
    "'\" onload=\"document.title='hacked'\" x='",
    "\u202egnp.tac\u2066",
    "x" * 10_000,
    "&lt;b&gt; --><!--",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_stay_text(text: str, study: Study, opened: Opened) -> None:
    view = study[0]
    records = [replace(record, layer=f"{text}{number}") for number, record in enumerate(view.recording)]
    layouts = [replace(records[0].queries, prefix=(text,))] * 2
    records = [replace(record, queries=layouts[0], keys=layouts[1]) for record in records]
    provenance = view.provenance.but(model=text, image=text, weights=text, warnings=(text,))
    recording = replace(view.recording, records=records, provenance=provenance)
    bad = View(
        view.photo,
        view.geometry,
        recording,
        {text: view.maps["rollout"]},
        tuple(replace(one, name=text) for one in view.classes),
        {text: text},
    )
    page = opened(Study((bad, view)))
    title = page.title()
    for name in ("maps", "words", "keys", "lines", "matrix", "heads"):
        page.locator(f"#tab-{name}").click()
        settled(page)
    page.get_by_label("query", exact=True).select_option(index=1)
    settled(page)
    assert page.title() == title != "hacked"
    assert page.locator("img").count() == 0
    assert page.evaluate("document.scripts.length") <= 2
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1")


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_is_cut_off(width: int, study: Study, opened: Opened) -> None:
    page = opened(study, width=width)
    for name in ("heads", "maps", "words", "keys", "lines", "matrix"):
        page.locator(f"#tab-{name}").click()
        settled(page)
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), name


def test_the_page_names_nothing_outside_of_itself(study: Study) -> None:
    page = html_of(study)
    for word in ("http://", "https://", "require(", "import("):
        assert word not in page.replace("http://www.w3.org/", "")
    assert "<link" not in page
    assert len(page) < 5e6


def test_a_page_that_is_too_large_is_refused(study: Study, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"the page takes more than .* MB up to layer blocks.*, and max_mb is 0.1"):
        study.save_html(tmp_path / "big.html", max_mb=0.1)
    assert not (tmp_path / "big.html").exists()


def test_layers_are_chosen_by_a_glob(study: Study, opened: Opened, tmp_path: Path) -> None:
    page = opened(study.save_html(tmp_path / "one.html", layers="*.1.*"))
    assert page.evaluate("viewer.page.view.attention.map((one) => one.layer)") == ["blocks.1.attn"]
    with pytest.raises(OptionError, match=r"layers must be a glob of blocks.0.attn ... blocks.2.attn"):
        study.save_html(tmp_path / "none.html", layers="stages.*")


def test_heads_are_chosen_by_their_numbers(study: Study, opened: Opened, tmp_path: Path) -> None:
    page, view = opened(study.save_html(tmp_path / "two.html", heads=[2, 0, 7])), study[0]
    assert page.get_by_label("head", exact=True).locator("option").all_inner_texts() == ["mean", "largest", "head 0", "head 2"]
    page.mouse.click(*on_patch(page, view, 3, 9))
    settled(page)
    own = view.recording[-1].operator.rows(torch.tensor([1 + 14 * 3 + 9]))[0, :, 0]
    assert torch.allclose(row_shown(page), own[[0, 2]].mean(0), atol=0.002)
    assert "mean of heads 0, 2" in page.locator(".shown").first.inner_text()
    page.get_by_label("head", exact=True).select_option(label="head 2")
    settled(page)
    assert torch.allclose(row_shown(page), own[2], atol=0.002)
    assert {row["head"] for row in page.evaluate("viewer.numbers().rows")} == {0, 2}
    with pytest.raises(OptionError, match=r"heads must be numbers from 0 to 2, got \[3\]"):
        study.save_html(tmp_path / "none.html", heads=[3])
    with pytest.raises(OptionError, match=r"heads must be a list of whole numbers"):
        study.save_html(tmp_path / "none.html", heads="0")  # type: ignore[arg-type]


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


def test_view_writes_pages_and_studies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Opened, dinov2: nn.Module
) -> None:
    del dinov2  # its weights are in the cache
    monkeypatch.chdir(tmp_path)
    assert _run(["view", PHOTO, "--img-size", "112", "--methods", "rollout,pca", "-o", "cat.attn"], debug=False) == 0
    assert list(load_study("cat.attn")[0].maps) == ["rollout", "pca"]
    assert _run(["view", "cat.attn", "--heads", "0,2-3", "-o", "heads.html"], debug=False) == 0
    assert opened(tmp_path / "heads.html").evaluate("viewer.page.record().numbers") == [0, 2, 3]
    assert _run(["view", "cat.attn", "-o", "cat.html"], debug=False) == 0
    page = opened(tmp_path / "cat.html")
    assert "chelsea" in page.locator("h1").inner_text()
    assert _run(["overlay", "cat.attn", "-o", "cat.png"], debug=False) == 0
    assert _run(["heads", "cat.attn", "-o", "heads.png"], debug=False) == 0
    for bad in (
        ["view", "cat.attn", "--methods", "rollout"],
        ["view", "cat.attn", "-o", "a.png"],
        ["view", "cat.attn", "--model", "x"],
    ):
        assert _run(bad, debug=False) == 2


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


def test_gates_of_a_cnn_are_maps(opened: Opened) -> None:
    torch.manual_seed(0)
    model = timm.create_model("resnet18")
    visattn.attach(model, "cbam", where="residual")
    made = visattn.study(model.eval(), PHOTO, img_size=96)
    assert "gates" in made[0].maps
    page = opened(made)
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


def test_a_link_restores_what_was_initial(study: Study, opened: Opened) -> None:
    page = opened(study)
    link = page.evaluate("viewer.page.state.link")
    page.evaluate("viewer.page.state.set({ record: 0, head: 1, tab: 'keys', opacity: 0.2, hidden: new Set(['0.0.0']) })")
    settled(page)
    page.evaluate("(link) => { location.hash = link; }", link)
    page.wait_for_timeout(200)
    assert page.evaluate("viewer.page.state.link") == link


def test_a_view_without_anything_to_show_says_so(study: Study, opened: Opened) -> None:
    view = study[0]
    bare = View(view.photo, view.geometry, replace(view.recording, records=[], features=[]))
    page = opened(Study((bare, view)))
    assert "no attention" in page.locator(".shown").first.inner_text()
    page.get_by_label("view", exact=True).select_option("1")
    settled(page)
    assert row_shown(page).numel() == 197
    page.get_by_label("view", exact=True).select_option("0")
    settled(page)
    assert "no attention" in page.locator(".shown").first.inner_text()


def test_small_values_keep_their_digits(opened: Opened, study: Study) -> None:
    view = study[0]
    small = replace(view.maps["rollout"], values=view.maps["rollout"].values * 1e-4)
    page = opened(Study((replace(view, maps={"small": small}),)))
    page.evaluate("viewer.page.state.set({ map: 'small' })")
    settled(page)
    low, _, high = page.locator(".scale").first.locator("xpath=./*").all_inner_texts()
    assert float(high) == pytest.approx(float(small.values.max()), rel=0.01)
    assert float(low) == pytest.approx(float(small.values.min()), abs=float(small.values.max()) / 100)


def test_commands_say_why_they_refuse_studies(study: Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str((study + study).save(tmp_path / "two.attn"))
    for words, said in (
        (["heads", file], "the study has 2 views, and this command draws one"),
        (["overlay", file, PHOTO], "a study is drawn alone"),
        (["overlay", file, "--model", "x"], "--model has no effect with a study"),
        (["view", file, PHOTO], "studies are shown as they are"),
        (["view", PHOTO, "-o", str(tmp_path / "a.png")], "a page is .html, and a study .attn"),
        (["view", file, "-o", str(tmp_path / "b.attn"), "--layers", "x"], "--layers has no effect with -o NAME.attn"),
        (["view", file, "-o", str(tmp_path / "b.html"), "--heads", "1-"], "--heads must be numbers and ranges such as 0,3-5"),
        (["view", file, "-o", str(tmp_path / "b.html"), "--heads", "9"], "heads must be numbers from 0 to 2"),
    ):
        assert _run(words, debug=False) == 2
        assert said in capsys.readouterr().err
