"""Gallery pictures of the viewer: a screenshot of its page in Chromium, and an animation of it."""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from PIL import Image, ImageDraw
from playwright.sync_api import FloatRect, Page, sync_playwright
from torch import nn

import visattn

AT = 0.42, 0.52  # share of the photo's width and height where the pointer stands: the rim of the mug
WALK = ((0.42, 0.52), (0.30, 0.30), (0.55, 0.22), (0.68, 0.50), (0.84, 0.80), (0.42, 0.52))  # mug, rim, saucer, spoon, table, mug
STEPS, SECONDS = 7, 0.12  # between two places
SIZE = 1280, 760


def viewer_screen(model: nn.Module) -> Image.Image:
    """Return the page of a photo, with the pointer on a patch.

    Args:
        model: DINOv2 with its published weights.
    """
    with _opened(model) as (page, box):
        page.mouse.move(box["x"] + AT[0] * box["width"], box["y"] + AT[1] * box["height"])
        page.wait_for_timeout(500)
        return _screen(page)


def viewer_film(model: nn.Module, file: Path, width: int = 880) -> None:
    """Write an animation of the page: the pointer moves over the photo, and all heads follow."""
    frames = []
    with _opened(model) as (page, box):
        for start, end in pairwise(WALK):
            for step in range(STEPS):
                share = step / STEPS
                x, y = (one + (other - one) * share for one, other in zip(start, end, strict=True))
                page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
                page.wait_for_timeout(80)
                frames.append(_with_pointer(_screen(page), box["x"] + x * box["width"], box["y"] + y * box["height"]))
    frames = [frame.resize((width, width * SIZE[1] // SIZE[0]), Image.Resampling.LANCZOS) for frame in frames]
    frames[0].save(file, save_all=True, append_images=frames[1:], duration=round(1000 * SECONDS), loop=0, quality=60, method=6)


@contextmanager
def _opened(model: nn.Module) -> Iterator[tuple[Page, FloatRect]]:
    """Open the page in Chromium; yield it and the place of its photo."""
    study = visattn.study(model, "photo:coffee", methods=["rollout", "pca"], img_size=(224, 336))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as running:
        file = study.save_html(Path(folder) / "coffee.html")
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": SIZE[0], "height": SIZE[1]}, color_scheme="light")
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        box = page.locator("figure.image canvas").first.bounding_box()
        assert box is not None  # noqa: S101
        yield page, box
        browser.close()


def _screen(page: Page) -> Image.Image:
    return Image.open(io.BytesIO(page.screenshot())).convert("RGB")


def _with_pointer(screen: Image.Image, x: float, y: float) -> Image.Image:
    """Draw the arrow of a mouse, which screenshots leave out."""
    shape = [(0, 0), (0, 20), (5, 15), (9, 23), (12, 22), (8, 14), (15, 14)]
    ImageDraw.Draw(screen).polygon([(x + across, y + down) for across, down in shape], fill="black", outline="white")
    return screen
