"""A browser, and pages in it that fail on any error or request."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from playwright.sync_api import Browser, Page, sync_playwright

import visattn
from visattn.studies import Study

Opened = Callable[..., Page]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Start the system's Chromium without a window."""
    found = filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
    chromium = next(
        (path for path in found if not subprocess.run([path, "--version"], capture_output=True, check=False).returncode), None
    )
    if chromium is None:
        pytest.skip("no Chromium is installed; on Debian: apt-get install chromium")
    with sync_playwright() as running:
        started = running.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield started  # the driver ends it: `close` may wait without end for a browser that is gone


@pytest.fixture(scope="session")
def study() -> Study:
    """Study a classifier with a class token, whose grid has 14 x 14 cells."""
    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_patch16_224", depth=3).eval()
    return visattn.study(model, "photo:chelsea", methods=["rollout", "relevance"], labels="imagenet")


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Study], Path]:
    """Return a function that writes the page of a study, once for each study."""
    folder = tmp_path_factory.mktemp("pages")
    known: dict[Study, Path] = {}

    def write(study: Study) -> Path:
        if study not in known:
            known[study] = study.save_html(folder / f"{len(known)}.html")
        return known[study]

    return write


@pytest.fixture
def opened(browser: Browser, written: Callable[[Study], Path]) -> Iterator[Opened]:
    """Return a function that opens a study, or the file of a page, from the disk. At the end, no page may have complained."""
    faults: list[str] = []
    pages: list[Page] = []

    def watch(page: Page) -> None:
        page.on("console", lambda said: faults.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith(("file:", "data:", "blob:")) else faults.append(asked.url))

    def open_(study: Study | Path, *, link: str = "", width: int = 1280, height: int = 900, **context: Any) -> Page:
        file = study if isinstance(study, Path) else written(study)
        page = browser.new_context(viewport={"width": width, "height": height}, **context).new_page()
        watch(page)
        page.goto(file.as_uri() + (f"#{link}" if link else ""))
        page.wait_for_selector("html[data-ready]", state="attached")
        pages.append(page)
        return page

    yield open_
    for page in pages:
        page.context.close()
    assert faults == []
