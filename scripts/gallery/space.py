"""Gallery pictures of the page of a space: the whole page, three heads, and a lasso with its patches, as screenshots in Chromium."""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from embedding import MODEL, REGIONS, SIDE, Region, photos
from PIL import Image
from playwright.sync_api import Page, sync_playwright
from torch import nn

import visattn
from visattn.embedding import Space, gather, lay_out, save_html

HEADS = ((6, 4, "brightness"), (10, 0, "object"), (4, 1, "row"))
_MARGIN = 0.03  # of the page's plot


def space_pictures() -> dict[str, Image.Image]:
    """Return the page, three heads side by side, and the contact sheet of a region that is drawn on half of the photos."""
    model, every = visattn.load_model(MODEL, img_size=SIDE), list(photos())
    whole = _gathered(model, every)
    made = {}
    with _opened(whole, "row=6&head=4&mode=brightness", 1480, 1130) as page:
        page.evaluate("app.choose(150)")
        page.wait_for_timeout(500)
        made["space"] = _screen(page)
        parts = []
        for layer, head, mode in HEADS:
            page.evaluate(f"app.choose(null); app.set({{row: {layer}, head: {head}, mode: '{mode}'}})")
            page.wait_for_timeout(300)
            parts.append(_screen(page, ".spacehead"))
        made["space_heads"] = _beside(parts)
    half = _gathered(model, every[::2])
    with _opened(half, "row=10&head=0&mode=object", 1480, 1000) as page:
        _lasso(page, half, REGIONS[0])
        page.wait_for_timeout(500)
        made["space_region"] = _beside([_screen(page, ".spacehead"), _screen(page, "#panel-patches")])
    return made


def _gathered(model: nn.Module, some: Sequence[tuple[Image.Image, Any]]) -> Space:
    images, masks = zip(*some, strict=True)
    return gather(model, list(images), masks=list(masks), img_size=SIDE, points=70 * len(images))


@contextmanager
def _opened(space: Space, link: str, width: int, height: int) -> Iterator[Page]:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as running:
        file = save_html(space, Path(folder) / "space.html")
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
        page.goto(f"{file.as_uri()}#{link}")
        page.wait_for_selector("html[data-ready]", state="attached")
        yield page
        browser.close()


def _lasso(page: Page, space: Space, region: Region) -> None:
    """Choose the points inside of a region, whose corners are in the plane of the principal components."""
    one = lay_out(space)[region.layer]
    cloud = torch.cat([one.queries[region.head], one.keys[region.head]])
    low, high = cloud.amin(0), cloud.amax(0)
    middle, half = (low + high) / 2, float(((high - low) / 2).max())
    side = page.evaluate("app.plot.side")

    def shown(corner: tuple[float, float]) -> list[float]:
        x, y = ((torch.tensor(corner) - middle) / half).tolist()
        return [side * (_MARGIN + (1 - 2 * _MARGIN) * (part + 1) / 2) for part in (x, -y)]

    page.evaluate("(path) => { app.sides = ['query']; app.plot.lasso(path); }", [shown(corner) for corner in region.corners])


def _screen(page: Page, part: str | None = None) -> Image.Image:
    taken = page.screenshot() if part is None else page.locator(part).first.screenshot()
    return Image.open(io.BytesIO(taken)).convert("RGB")


def _beside(parts: Sequence[Image.Image]) -> Image.Image:
    sheet = Image.new("RGB", (sum(part.width + 16 for part in parts) - 16, max(part.height for part in parts)), "white")
    left = 0
    for part in parts:
        sheet.paste(part, (left, 0))
        left += part.width + 16
    return sheet
