"""Studies opened in the page: equal numbers for every kind of operator, and hostile files refused in one line."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Page
from torch import nn

import visattn
from tests.studies.test_attn_files import EXAMPLES, MUTANTS, base, content
from tests.viewer.conftest import Opened
from tests.viewer.test_values import MODELS, differences
from visattn.studies import Study, load_study


def opened_in(page: Page, *files: Path) -> list[str]:
    """Open files one after the other, and return what the page said of each."""
    said = []
    for number, file in enumerate(files, start=1):
        page.locator("input[type=file]").set_input_files(file)
        page.wait_for_selector(f'html[data-opened="{number}"]', state="attached")
        said.append(page.locator(".said").inner_text())
    return said


@pytest.fixture
def page(study: Study, opened: Opened) -> Page:
    """Open the page of another study."""
    return opened(study)


@pytest.mark.parametrize("name", ["windows", "pooled keys", "class attention", "registers"])
def test_rows_of_an_opened_file_equal_those_of_python(name: str, page: Page, tmp_path: Path) -> None:
    study = visattn.study(MODELS[name](), "photo:coffee", methods=["attention"])
    assert opened_in(page, study.save(tmp_path / "a.attn")) == ["Opened a.attn."]
    assert "coffee" in page.locator("h1").inner_text()
    assert max(differences(page, study, 5).values()) <= 1e-6


def test_eager_attention_of_transformers_opens_in_the_page(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "eager.attn"
    runpy.run_path(str(EXAMPLES / "attn_from_transformers.py"))["main"](str(visattn.data.photo_path("coffee")), str(file))
    opened_in(page, file)
    assert max(differences(page, load_study(file), 5).values()) <= 1e-6


def test_every_kind_of_operator_is_read(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "all.attn"
    file.write_bytes(content(*base()))
    opened_in(page, file)
    assert set(differences(page, load_study(file), 6)) == {"softmax", "rows", "sampled"}


def test_maps_and_similarities_of_an_opened_file_are_right(page: Page, dinov2: nn.Module, tmp_path: Path) -> None:
    study = visattn.study(
        dinov2,
        "photo:coffee",
        methods={"rollout": {}, "pca": {}, "alike": {"method": "similarity", "query": "patch:3,4"}},
        img_size=112,
    )
    opened_in(page, study.save(tmp_path / "a.attn"))
    for name in ("rollout", "pca", "alike"):
        values = torch.tensor(page.evaluate("(name) => Array.from(viewer.page.shown(viewer.page.first, name).values)", name))
        assert torch.allclose(values, study[0].maps[name].values.flatten(), atol=1e-6)
    layout = study[0].maps["alike"].layout
    seen = study[0].geometry.patch_box(3, 4, layout.grid, layout.box)  # type: ignore[arg-type]
    middle = [(seen.top + seen.bottom) / 2, (seen.left + seen.right) / 2]
    page.evaluate("([y, x]) => viewer.page.state.set({ query: { y, x } })", middle)
    values = torch.tensor(page.evaluate("Array.from(viewer.page.shown(viewer.page.first, '@similarity').values)"))
    assert torch.allclose(values, study[0].maps["alike"].values.flatten(), atol=1e-5)


def test_mutants_are_refused_in_one_line(page: Page, tmp_path: Path) -> None:
    title = page.locator("h1").inner_text()
    files = []
    for number, made in enumerate(_bytes() for _bytes in MUTANTS.values()):
        files.append(tmp_path / f"{number}.attn")
        files[-1].write_bytes(made)
    said = opened_in(page, *files)
    accepted = [name for name, text in zip(MUTANTS, said, strict=True) if "not a study" not in text]
    assert accepted == []
    assert all("\n" not in text and len(text) <= 300 for text in said)
    assert page.locator("h1").inner_text() == title


def test_a_dropped_file_opens(page: Page) -> None:
    page.evaluate(
        """(bytes) => {
          const data = new DataTransfer();
          data.items.add(new File([new Uint8Array(bytes)], "dropped.attn"));
          window.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
        }""",
        list(content(*base())),
    )
    page.wait_for_selector('html[data-opened="1"]', state="attached")
    assert page.locator(".said").inner_text() == "Opened dropped.attn."
