"""Links, exports, texts that try to become markup, refusals, and the commands that write pages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import visattn
from tests.viewer.conftest import Opened
from tests.viewer.driving import on_patch, row_shown, settled, state, wait_until
from visattn.cli.commands import _run
from visattn.errors import OptionError
from visattn.studies import Study, View, html_of, load_study

PHOTO = "photo:chelsea"


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
        "colormap=pink&blend=x&ground=z&scale=y&sort=z&otherHead=q&compare=9",
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


QUICK = 3  # texts of the quick tests


@pytest.mark.parametrize(
    "text", [*HOSTILE[:QUICK], *(pytest.param(text, marks=pytest.mark.full) for text in HOSTILE[QUICK:])], ids=range(len(HOSTILE))
)
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


def test_a_link_restores_what_was_initial(study: Study, opened: Opened) -> None:
    page = opened(study)
    link = page.evaluate("viewer.page.state.link")
    page.evaluate("viewer.page.state.set({ record: 0, head: 1, tab: 'keys', opacity: 0.2, hidden: new Set(['0.0.0']) })")
    settled(page)
    page.evaluate("(link) => { location.hash = link; }", link)
    wait_until(page, f"viewer.page.state.link === {json.dumps(link)}")


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


def test_commands_say_why_they_refuse_studies(study: Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str((study + study).save(tmp_path / "two.attn"))
    for words, said in (
        (["heads", file], "the study has 2 views, and this command draws one"),
        (["overlay", file, PHOTO], "a study is drawn alone"),
        (["overlay", file, "--model", "x"], "--model has no effect with a study"),
        (["view", file, PHOTO], "studies are shown as they are"),
        (["view", PHOTO, "-o", str(tmp_path / "a.png")], "a page is .html, and a study .attn"),
        (["view", file, "-o", str(tmp_path / "b.attn"), "--layers", "x"], "--layers has no effect with -o NAME.attn"),
        (
            ["view", file, "-o", str(tmp_path / "b.html"), "--heads", "1-"],
            "--heads must be numbers and rising ranges such as 0,3-5",
        ),
        (["view", file, "-o", str(tmp_path / "b.html"), "--heads", "9"], "heads must be numbers from 0 to 2"),
    ):
        assert _run(words, debug=False) == 2
        assert said in capsys.readouterr().err
