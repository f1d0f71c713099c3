"""The site: built strictly, in Chromium from the disk without a request to the network, found by its search, and without faults of axe."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pages.blocks import ROOT
from visattn import data

pytestmark = pytest.mark.full

AXE = "axe-core@4.10.3"
WIDTHS = {1400: "light", 390: "dark"}
SHOWN = (  # a page of each kind
    "index",
    "gallery",
    "notebooks/my_photo",
    "coming_from/grad_cam",
    "reference/visattn.maps",
    "libraries/tasks_models_and_targets_csv",
    "methods",
)
FAULTS = """axe.run(document, {iframes: false, preload: false}).then(found => found.violations
    .filter(one => ['serious', 'critical'].includes(one.impact))
    .map(one => `${one.id}: ${one.nodes[0].html}`))"""


@pytest.fixture(scope="module")
def site() -> Path:
    data.offline_weights(), data.offline_weights("tf_efficientnet_lite0")
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "scripts/website/live.py"], cwd=ROOT, env=env, check=True)
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return ROOT / "build" / "site"


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    place = tmp_path_factory.mktemp("axe")
    done = subprocess.run([npm, "install", "--no-save", "--silent", AXE], cwd=place, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"npm could not fetch axe-core: {done.stderr[-200:]}")
    return (place / "node_modules" / "axe-core" / "axe.min.js").read_text()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("Chromium is not installed")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


def opened(browser: Any, width: int) -> tuple[Any, list[str]]:
    """Open a window; return it, and what it asks the network for and its errors, as they come."""
    page, heard = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=WIDTHS[width]), list[str]()
    page.on(
        "request", lambda asked: None if asked.url.startswith(("file:", "data:", "blob:", "about:")) else heard.append(asked.url)
    )
    page.on("pageerror", lambda error: heard.append(str(error)))
    return page, heard


@pytest.mark.parametrize("width", WIDTHS)
def test_pages_open_from_the_disk_fit_and_have_no_serious_fault(site: Path, browser: Any, axe: str, width: int) -> None:
    page, heard = opened(browser, width)
    for name in SHOWN:
        page.goto((site / f"{name}.html").as_uri())
        page.wait_for_timeout(500)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        page.evaluate(axe)
        assert page.evaluate(FAULTS) == [], name
    assert heard == []


def test_the_search_finds_pages_from_the_disk(site: Path, browser: Any) -> None:
    page, heard = opened(browser, 1400)
    page.goto((site / "index.html").as_uri())
    page.click("[data-md-component=search-query]")
    page.keyboard.type("rollout")
    page.wait_for_selector(".md-search-result__item")
    assert "Methods" in page.inner_text(".md-search-result__list")
    assert heard == []


def test_a_table_is_sorted_and_filtered(site: Path, browser: Any) -> None:
    page, _ = opened(browser, 1400)
    page.goto((site / "libraries" / "tasks_models_and_targets_csv.html").as_uri())
    rows = "table.sortable tbody tr"
    first = page.locator(f"{rows} td:first-child")
    before = first.all_inner_texts()
    page.click("table.sortable th:first-child button")
    assert first.all_inner_texts() == sorted(before, key=str.lower)
    page.fill(".table-filter", "torchvision box")
    shown = [row.inner_text() for row in page.locator(rows).all() if row.is_visible()]
    assert 0 < len(shown) < len(before)
    assert all("torchvision" in text and "box" in text for text in shown)


def test_every_public_name_has_its_place_in_the_reference(site: Path) -> None:
    import visattn

    text = (site / "reference" / "visattn.html").read_text()
    assert [name for name in visattn.__all__ if name not in text] == []
    assert 'id="visattn.explain"' in text
    assert 'id="visattn.maps.AttentionMap"' in (site / "reference" / "visattn.maps.html").read_text()
