"""Gallery picture of the viewer: a screenshot of its page in Chromium."""

from __future__ import annotations

import io
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright
from torch import nn

import visattn

AT = 0.42, 0.52  # share of the photo's width and height where the pointer stands: the rim of the mug


def viewer_screen(model: nn.Module) -> Image.Image:
    """Return the page of a photo, with the pointer on a patch.

    Args:
        model: DINOv2 with its published weights.
    """
    study = visattn.study(model, "photo:coffee", methods=["rollout", "pca"], img_size=(224, 336))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as running:
        file = study.save_html(Path(folder) / "coffee.html")
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 760}, color_scheme="light")
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        box = page.locator("figure.image canvas").first.bounding_box()
        assert box is not None  # noqa: S101
        page.mouse.move(box["x"] + AT[0] * box["width"], box["y"] + AT[1] * box["height"])
        page.wait_for_timeout(500)
        screen = page.screenshot()
        browser.close()
    return Image.open(io.BytesIO(screen)).convert("RGB")
