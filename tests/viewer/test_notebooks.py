"""The viewer in JupyterLab and Notebook 7, driven in Chromium: `show()` and `widget()` of a study work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Frame, Page

CELLS = (
    "import visattn; study = visattn.study('scenes_vit', 'scene:7', methods=['rollout']); study.show(height=500)",
    "widget = study.widget(height=500); widget",
    "print('the link is', widget.link)",
)
_SECONDS = 120


@pytest.fixture(scope="module", params=["lab", "notebook"])
def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a server with a notebook, and return the notebook's address."""
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("jupyterlab")
    pytest.importorskip("notebook")
    folder: Path = tmp_path_factory.mktemp("notebooks")
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    nbformat.write(
        nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "P"}}),
        folder / "n.ipynb",
    )
    options = ["--no-browser", "--allow-root", "--port=0", "--IdentityProvider.token=", f"--ServerApp.root_dir={folder}"]
    home = {"HOME": str(folder), "JUPYTER_CONFIG_DIR": str(folder / "config"), "JUPYTER_DATA_DIR": str(folder / "data")}
    command = [sys.executable, "-m", "jupyterlab" if request.param == "lab" else "notebook", *options]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | home) as server:
        try:
            base = _waited(lambda: re.search(r"http://(?:localhost|127\.0\.0\.1):\d+/", (folder / "log").read_text()), server)
            yield base[0] + ("lab/tree/n.ipynb" if request.param == "lab" else "notebooks/n.ipynb")
        finally:
            server.terminate()


def _waited(found: Callable[[], re.Match[str] | None], server: subprocess.Popen[bytes]) -> re.Match[str]:
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end and server.poll() is None:
        if (match := found()) is not None:
            return match
        time.sleep(0.2)
    raise AssertionError("the notebook's server did not start")


@pytest.mark.full
def test_show_and_widget_work(address: str, browser: Browser) -> None:
    page = browser.new_context(viewport={"width": 1400, "height": 1200}).new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(address, timeout=_SECONDS * 1000)
    page.locator(".jp-CodeCell").first.wait_for(timeout=_SECONDS * 1000)
    page.get_by_text(re.compile(r"\| Idle|Python 3")).first.wait_for(timeout=_SECONDS * 1000)
    page.set_default_timeout(_SECONDS * 1000)
    for number in range(2):
        _run(page, number)
        page.locator("iframe[title='visattn viewer']").nth(number).wait_for(timeout=_SECONDS * 1000)
    shown, widget = (_frame(page, number) for number in range(2))
    for frame in (shown, widget):
        frame.wait_for_selector("html[data-ready]", state="attached", timeout=_SECONDS * 1000)
        assert frame.evaluate("viewer.page.view.attention.length") > 0
    widget.evaluate("viewer.page.state.set({ record: 0, head: 1 })")
    end, told = time.monotonic() + _SECONDS, page.get_by_text(re.compile(r"the link is .*head=1"))
    while not told.count() and time.monotonic() < end:  # the kernel hears of the link after a while
        _run(page, 2)
        page.wait_for_timeout(1000)
    assert told.count(), "the link has not reached the kernel"
    assert not [fault for fault in faults if "visattn" in fault or "viewer" in fault], faults
    page.context.close()


def _run(page: Page, number: int) -> None:
    """Run a cell; keys that come too early after the start are lost, so press until it has begun."""
    cell = page.locator(".jp-CodeCell").nth(number)
    end = time.monotonic() + _SECONDS
    before = cell.locator(".jp-InputPrompt").first.inner_text()
    while cell.locator(".jp-InputPrompt").first.inner_text() == before and time.monotonic() < end:
        cell.locator(".cm-content").first.click()
        page.keyboard.press("Shift+Enter")
        page.wait_for_timeout(1500)


def _frame(page: Page, number: int) -> Frame:
    element = page.locator("iframe[title='visattn viewer']").nth(number).element_handle()
    assert element is not None
    frame = element.content_frame()
    assert frame is not None
    return frame
